"""What a run records of its workflow, and the structure that is read back from it."""

from dataclasses import asdict
from typing import Any

from multirole.core.types import Duty, Edge, Structure, Workflow, structure_of
from multirole.workflows import WORKFLOWS


def describe_workflow(workflow: Workflow) -> dict[str, Any]:
    """Roles, duties and diagram of a workflow as plain JSON data, for provenance.json. Twins are code and are left out."""
    structure = structure_of(workflow)
    return {
        "roles": dict(workflow.roles),
        "duties": {role: asdict(duty) for role, duty in structure.duties.items()},
        "edges": [asdict(edge) for edge in structure.edges],
    }


def recorded_structure(config: dict, provenance: dict) -> Structure:
    """The structure of a run's workflow, from its config.json and provenance.json.

    That of a built-in workflow is the present one; that of another workflow is the recorded one, or empty in older records.
    """
    if config["workflow"] in WORKFLOWS:
        return WORKFLOWS[config["workflow"]].structure
    recorded = provenance.get("workflow", {"duties": {}, "edges": []})
    return Structure(
        duties={role: Duty(**duty) for role, duty in recorded["duties"].items()},
        edges=tuple(Edge(**edge) for edge in recorded["edges"]),
    )
