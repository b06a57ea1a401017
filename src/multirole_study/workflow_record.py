"""Record a run's workflow as JSON, and restore its structure from the record."""

from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Any

import pandas as pd

from multirole.types import Duty, Edge, Structure, Workflow, structure_of
from multirole.workflows import WORKFLOWS


def describe_workflow(workflow: Workflow) -> dict[str, Any]:
    """Return a workflow's roles, duties and diagram as JSON data, for provenance.json. Twins are code and are left out."""
    structure = structure_of(workflow)
    return {
        "roles": dict(workflow.roles),
        "duties": {role: {"kind": duty.kind, "of": duty.of} for role, duty in structure.duties.items()},
        "edges": [asdict(edge) for edge in structure.edges],
    }


def observed_edges(turns: pd.DataFrame) -> list[Edge]:
    """Return an edge for each pair of roles whose turns follow each other in `turns`; an edge to an earlier role is a loop.

    Turns are recorded by round, then by role and slot, which is the order of the calls unless roles of one round call in another order.
    """
    if not len(turns):
        return []
    order = {role: i for i, role in enumerate(dict.fromkeys(turns["role"]))}
    edges: dict[Edge, None] = {}
    for _, rows in turns.groupby(["step", "problem"], sort=False):
        roles = [role for role, _ in groupby(rows["role"])]
        edges[Edge("question", roles[0])] = edges[Edge(roles[-1], "answer")] = None
        edges |= {Edge(a, b, is_loop=order[b] < order[a]): None for a, b in pairwise(roles)}
    return list(edges)


def recorded_structure(config: dict, provenance: dict) -> Structure:
    """Return the structure of a run's workflow, from its config.json and provenance.json.

    A built-in workflow has its present structure; any other has the recorded one, or an empty one in older records.
    """
    if config["workflow"] in WORKFLOWS:
        return WORKFLOWS[config["workflow"]].structure
    recorded = provenance.get("workflow", {"duties": {}, "edges": []})
    return Structure(
        duties={role: Duty(**duty) for role, duty in recorded["duties"].items()},
        edges=tuple(Edge(**edge) for edge in recorded["edges"]),
    )
