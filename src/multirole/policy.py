"""Parse role -> adapter maps: Shared-Policy, Isolated-Policy, or any other (paper sec 3, "policy routing"), with roles that are not trained.

A parsed map has a text for each role: the name of the adapter that it trains, or a *partner*, which is played and never trained:

- `"frozen"`, the base model without an adapter;
- `"frozen:FOLDER"`, a saved adapter;
- `"past:NAME"`, earlier weights of an adapter that the map trains;
- the JSON of an [`Endpoint`], a model behind an OpenAI-compatible server.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multirole.engines.endpoint import Endpoint, parse_endpoint
from multirole.saving.layout import SAVED_PREFIX
from multirole.workflows import WORKFLOWS

SHARED = "shared"
PREFIX = "adapter_"
FROZEN, FROZEN_ADAPTER, PAST, OTHER_BASE = "frozen", "frozen:", "past:", "base:"
UNPREFIXED = {SHARED} | {role for workflow in WORKFLOWS.values() for role in workflow.structure.duties}
"""Adapters that are stored under their name: the shared one, and those named for a role of a workflow of this package. No module path of a
model contains one of these words."""


def parse_policy(policy: str | Mapping[str, Any], roles: list[str]) -> dict[str, str]:
    """Return role -> adapter or partner for a policy.

    "sp" routes all roles to one adapter, "ip" gives each role type its own, and a map such as
    "generator=a,aggregator=frozen" (or the same as a dict, or as JSON) names one for each role. Raises ValueError for anything else, and for a
    map that trains no role. Names other than the built-in roles' are stored as "adapter_<name>": PEFT finds an adapter's tensors by its name
    within dotted module paths, and silently loses those of an adapter called "a", "1", "mlp" or "default".
    """
    if policy == "sp":
        return dict.fromkeys(roles, SHARED)
    example = ",".join(f"{role}={'ab'[i % 2]}" for i, role in enumerate(roles))
    advice = f"Use 'sp', 'ip', or a map that names every role once, such as {example!r}."
    if policy == "ip":
        if FROZEN in roles:
            raise ValueError(f"`policy='ip'` would name an adapter {FROZEN!r} for the role of this name, but the name is reserved: as an entry of a "
                             f"map it means the base model, which is not trained. Write a map, such as {example!r}.")  # fmt: skip
        pairs = [(role, role) for role in roles]
    else:
        pairs = role_pairs(policy)
    if not all(role and adapter for role, adapter in pairs):
        raise ValueError(f"`policy` must be 'sp', 'ip' or a role-to-adapter map, got {policy!r}. {advice}")
    named = [role for role, _ in pairs]
    unknown, missing = [r for r in named if r not in roles], [r for r in roles if r not in named]
    if unknown or missing or len(set(named)) != len(named):
        problem = f"unknown {unknown}" if unknown else f"missing {missing}" if missing else "a role is named twice"
        raise ValueError(f"`policy={policy!r}` does not map the roles {roles}: {problem}. {advice}")
    trained = [adapter for _, adapter in pairs if not is_partner(adapter)]
    if not trained:
        raise ValueError(
            f"`policy={policy!r}` trains no role: all are played by partners. Name an adapter for at least one role, such as {pairs[0][0]}=a."
        )
    past = [adapter.removeprefix(PAST) for _, adapter in pairs if adapter.startswith(PAST)]
    for adapter in [*trained, *past]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", adapter):
            raise ValueError(
                f"`policy={policy!r}` names an adapter {adapter!r}, which cannot be part of a file or module name. "
                "Use letters, digits, '-' and '_' only."
            )
    stored = {adapter: _stored(adapter) for adapter in trained}
    if len(set(stored.values())) < len(stored):
        raise ValueError(
            f"`policy={policy!r}` names two adapters that would be stored under one name: {stored}. Rename one of them."
        )
    if untrained := [name for name in past if _stored(name) not in stored.values()]:
        raise ValueError(
            f"`policy={policy!r}` plays past selves of {untrained}, but trains {list(stored)} only. Write {PAST}NAME with an adapter that another "
            "role trains."
        )
    values = {
        adapter: PAST + _stored(adapter.removeprefix(PAST)) for _, adapter in pairs if adapter.startswith(PAST)
    } | stored
    return {role: values.get(adapter, adapter) for role in roles for name, adapter in pairs if name == role}


def role_pairs(policy: str | Mapping[str, Any], option: str = "policy") -> list[tuple[str, str]]:
    """Return the roles of a map with their adapters or partners as text; `option` is where it was given."""
    if isinstance(policy, str) and policy.lstrip().startswith("{"):
        try:
            policy = json.loads(policy)
        except ValueError as error:
            raise ValueError(f"`{option}={policy!r}` begins as JSON and is none: {error}.") from error
    if not isinstance(policy, Mapping):
        split = [item.partition("=") for item in str(policy).split(",")]
        return [(role.strip(), adapter.strip()) for role, _, adapter in split]
    if nameless := [role for role, adapter in policy.items() if adapter is None]:
        needed = (
            "an adapter. To have a role played by the base model, which is not trained,"
            if option == "policy"
            else "a value. For the base model,"
        )
        raise ValueError(
            f"`{option}={policy!r}` has None for {nameless}, but every role in it needs {needed} write {FROZEN!r}."
        )
    pairs = []
    for role, adapter in policy.items():
        is_endpoint = isinstance(adapter, Mapping) or str(adapter).startswith("{")
        pairs.append(
            (str(role), parse_endpoint(role, adapter, option).as_text() if is_endpoint else str(adapter).strip())
        )
    return pairs


def _stored(name: str) -> str:
    """Return the name under which an adapter is stored."""
    return name if name in UNPREFIXED or name.startswith(PREFIX) else PREFIX + name


def is_partner(value: str) -> bool:
    """Return whether an entry of a parsed map is a partner, which is not trained."""
    return value == FROZEN or value.startswith((FROZEN_ADAPTER, PAST, "{"))


def trained_part(policy: Mapping[str, str]) -> dict[str, str]:
    """Return the roles of a map that are trained, with their adapters."""
    return {role: value for role, value in policy.items() if not is_partner(value)}


def adapter_names(policy: Mapping[str, str]) -> list[str]:
    """Return the distinct adapters that a map trains, in the order of its roles."""
    return list(dict.fromkeys(trained_part(policy).values()))


def frozen_folders(policy: Mapping[str, str]) -> dict[str, str]:
    """Return name -> folder of the saved adapters that a map plays. The name in the model is made of the folder's."""
    return {
        frozen_name(value): value.removeprefix(FROZEN_ADAPTER)
        for value in policy.values()
        if value.startswith(FROZEN_ADAPTER)
    }


def adapters_served(policy: Mapping[str, str], past_selves: int) -> list[str]:
    """Return the distinct adapters that the model has and an engine serves for a map: those that it trains, its saved ones, and the copies for past selves."""
    copies = [name for names in past_copies(policy, past_selves).values() for name in names]
    return [*adapter_names(policy), *frozen_folders(policy), *copies]


def frozen_name(value: str) -> str:
    """Return the name in the model of the adapter `"frozen:FOLDER"`."""
    return f"{SAVED_PREFIX}{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def past_copies(policy: Mapping[str, str], past_selves: int) -> dict[str, list[str]]:
    """Return adapter -> the names in the model of its copies, for the adapters whose past selves a map plays."""
    adapters = [value.removeprefix(PAST) for value in policy.values() if value.startswith(PAST)]
    return {adapter: [f"{adapter}_past_{place}" for place in range(past_selves)] for adapter in adapters}


def player_of(value: str | None, past: Mapping[str, tuple[str, ...]]) -> str | tuple[str, ...] | Endpoint | None:
    """Return what answers the calls of a role: the name of an adapter in the model, several to draw from, an endpoint, or None for the base.

    Args:
        value: the role's entry of a parsed map; None is the base, too.
        past: adapter -> the names of its past selves in the model.
    """
    if value is None or value == FROZEN:
        return None
    if value.startswith(FROZEN_ADAPTER):
        return frozen_name(value)
    if value.startswith(PAST):
        return past[value.removeprefix(PAST)]
    return Endpoint.from_text(value) if value.startswith("{") else value


def served_part(policy: Mapping[str, str]) -> dict[str, str | None]:
    """Return the roles that can be served when training has ended, with the adapter that plays each, or None for the base."""
    local = {role: value for role, value in policy.items() if not value.startswith((PAST, "{"))}
    return {
        role: None if value == FROZEN else frozen_name(value) if is_partner(value) else value
        for role, value in local.items()
    }


def shown(value: str) -> str:
    """Return an entry of a map for a reader, without the path of this machine or the address of a server."""
    if value == FROZEN:
        return "the base, frozen"
    if value.startswith(FROZEN_ADAPTER):
        return f"the adapter {Path(value.removeprefix(FROZEN_ADAPTER)).name}, frozen"
    if value.startswith(PAST):
        return f"past selves of {value.removeprefix(PAST)}"
    return f"the model {Endpoint.from_text(value).model} of an endpoint" if value.startswith("{") else value


def partner_facts(policy: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the facts of `multirole.option_rules` about the roles that a parsed map does not train."""

    partners = {role: value for role, value in policy.items() if is_partner(value)}

    def played_by(prefix: str) -> list[str]:
        return [role for role, value in partners.items() if value.startswith(prefix)]

    endpoint_roles = played_by("{")
    return {
        "partner_roles": list(partners),
        "local_partners": [role for role in partners if role not in endpoint_roles],
        "frozen_adapter_roles": played_by(FROZEN_ADAPTER),
        "past_roles": played_by(PAST),
        "endpoint_roles": endpoint_roles,
    }
