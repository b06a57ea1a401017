"""Read the texts of a cell at its checkpoints, for the panels of Tables 4 to 6."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from multirole_study.paper.results import Results
from multirole_study.signatures import signatures_of_frame

Reading = dict[tuple[str, str], float]
"""(role, signature) -> its value over the turns of one checkpoint; ("", "iteration") -> the checkpoint's step."""


def signatures_of(turns: pd.DataFrame) -> Reading:
    """Return the signatures of the turns of one checkpoint.

    `first_*` is over turns of round 0; `slots_*` are quantiles of each problem's mean length over the slots of a role (Panel A3).
    """
    values = {("", "iteration"): turns["step"].iloc[0]}
    for prefix, part in (("", turns), ("first_", turns[turns["round"] == 0])):
        of_roles = signatures_of_frame(part).set_index("role").drop(columns="step")
        of_roles["no_verdict_rate"] = 1 - of_roles["verdict_rate"]
        values |= {(role, prefix + name): value for (role, name), value in of_roles.stack().items()}
    for role, role_turns in turns.groupby("role"):
        lengths = role_turns.groupby("problem")["completion_tokens"].mean()
        values[role, "slots_p50"], values[role, "slots_p95"] = np.quantile(lengths, [0.5, 0.95])
    return values


def readings(packed: Results, workflow: str, policy: str, task: str) -> dict[str, list[Reading]]:
    """Return checkpoint ("base", "early", "best", "terminal") -> one reading per seed that has it."""
    turns_at = {"base": packed.evaluated("base", "turns", workflow=workflow, task=task)}
    for name in ("early", "best", "terminal"):
        turns_at[name] = packed.own_evaluation(workflow, policy, task, name, "turns")
    return {
        name: [signatures_of(turns) for _, turns in checkpoint_turns.groupby("seed")]
        for name, checkpoint_turns in turns_at.items()
    }


def over_seeds(
    read: dict[str, list[Reading]], asked: dict[str, list[str]]
) -> Iterator[tuple[str, str, str, list[float]]]:
    """Yield (role, signature, checkpoint, one value per seed that has it): the iteration, then what is asked of each role."""
    for role, name in [("", "iteration"), *((role, name) for role, names in asked.items() for name in names)]:
        for checkpoint, seeds in read.items():
            if values := [reading[role, name] for reading in seeds if (role, name) in reading]:
                yield role, name, checkpoint, values
