"""Parse role -> adapter maps: Shared-Policy, Isolated-Policy, or any other (paper sec 3, "policy routing")."""

import re

from multirole.workflows import WORKFLOWS

SHARED = "shared"
PREFIX = "adapter_"
UNPREFIXED = {SHARED} | {role for workflow in WORKFLOWS.values() for role in workflow.structure.duties}
"""Adapters that are stored under their name: the shared one, and those named for a role of a workflow of this package. No module path of a
model contains one of these words."""


def parse_policy(policy: str | dict[str, str], roles: list[str]) -> dict[str, str]:
    """Return role -> adapter for a policy.

    "sp" routes all roles to one adapter, "ip" gives each role type its own, and a map such as
    "generator=a,aggregator=b" (or the same as a dict) names one for each role. Raises ValueError for anything else.
    Names other than the built-in roles' are stored as "adapter_<name>": PEFT finds an adapter's tensors by its name within dotted
    module paths, and silently loses those of an adapter called "a", "1", "mlp" or "default".
    """
    if policy == "sp":
        return dict.fromkeys(roles, SHARED)
    example = ",".join(f"{role}={'ab'[i % 2]}" for i, role in enumerate(roles))
    advice = f"Use 'sp', 'ip', or a map that names every role once, such as {example!r}."
    if policy == "ip":
        pairs = [(role, role) for role in roles]
    elif isinstance(policy, dict):
        if nameless := [role for role, adapter in policy.items() if adapter is None]:
            raise ValueError(
                f"`policy={policy!r}` names no adapter for {nameless}, but every role needs one. To keep a role from being trained, give it its "
                "own adapter and leave its rows out in `MultiRoleCallback.on_rows`."
            )
        pairs = [(str(role), str(adapter)) for role, adapter in policy.items()]
    else:
        split = [item.partition("=") for item in str(policy).split(",")]
        pairs = [(role.strip(), adapter.strip()) for role, _, adapter in split]
    if not all(role and adapter for role, adapter in pairs):
        raise ValueError(f"`policy` must be 'sp', 'ip' or a role-to-adapter map, got {policy!r}. {advice}")
    named = [role for role, _ in pairs]
    unknown, missing = [r for r in named if r not in roles], [r for r in roles if r not in named]
    if unknown or missing or len(set(named)) != len(named):
        problem = f"unknown {unknown}" if unknown else f"missing {missing}" if missing else "a role is named twice"
        raise ValueError(f"`policy={policy!r}` does not map the roles {roles}: {problem}. {advice}")
    for _, adapter in pairs:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", adapter):
            raise ValueError(
                f"`policy={policy!r}` names an adapter {adapter!r}, which cannot be part of a file or module name. "
                "Use letters, digits, '-' and '_' only."
            )
    stored = {adapter: _stored(adapter) for _, adapter in pairs}
    if len(set(stored.values())) < len(stored):
        raise ValueError(
            f"`policy={policy!r}` names two adapters that would be stored under one name: {stored}. Rename one of them."
        )
    return {role: stored[dict(pairs)[role]] for role in roles}


def _stored(name: str) -> str:
    """Return the name under which an adapter is stored."""
    return name if name in UNPREFIXED or name.startswith(PREFIX) else PREFIX + name


def adapter_names(policy: dict[str, str]) -> list[str]:
    """Return the distinct adapters of a map, in the order of its roles."""
    return list(dict.fromkeys(policy.values()))
