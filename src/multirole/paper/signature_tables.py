"""What the texts of each role look like at a run's checkpoints (Tables 4 to 6, and the same for any other cell)."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from multirole.diagnostics.signatures import signatures_of_frame
from multirole.paper.results import Results
from multirole.paper.write import Row, spread


def measured(turns: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Map (role, signature) to its value over the turns of one checkpoint, and ("", "iteration") to its step.

    `first_*` is over turns of round 0; `slots_*` are quantiles of each problem's mean length over the slots of a role (Panel
    A3); `answered_rate` is the share of turns that the workflow or the task could parse.
    """
    values = {("", "iteration"): turns["step"].iloc[0]}
    for prefix, part in (("", turns), ("first_", turns[turns["round"] == 0])):
        of_roles = signatures_of_frame(part).set_index("role").drop(columns="step")
        of_roles["no_verdict_rate"] = 1 - of_roles["verdict_rate"]
        values |= {(role, prefix + name): value for (role, name), value in of_roles.stack().items()}
    for role, said in turns.groupby("role"):
        lengths = said.groupby("problem")["completion_tokens"].mean()
        values[role, "slots_p50"], values[role, "slots_p95"] = np.quantile(lengths, [0.5, 0.95])
        values[role, "answered_rate"] = (said["outcome"] != "unparsed").mean()
    return values


def readings(results: Results, workflow: str, policy: str, task: str) -> dict[str, list[dict[tuple[str, str], float]]]:
    """Map each checkpoint to one measurement per seed that has it."""
    said = {"base": results.evaluated("base", "turns", workflow=workflow, task=task)}
    for name in ("early", "best", "terminal"):
        said[name] = results.played(workflow, policy, task, name, "turns")
    return {name: [measured(turns) for _, turns in of.groupby("seed")] for name, of in said.items()}


def panel_values(results: Results, panels: dict[str, dict], labels: dict[str, tuple[str, str]]) -> Iterator[Row]:
    """The mean and the range over seeds of the signatures of these panels at each checkpoint.

    A panel is its "cell" and, per role, the names of its signatures; `labels` maps such a name to its unit and label.
    """
    for panel, asked in panels.items():
        found = readings(results, *asked["cell"].split())
        named = [("", "iteration"), *((role, name) for role in asked if role != "cell" for name in asked[role])]
        for role, name in named:
            unit, label = labels[name]
            where = {"panel": panel, "role": role, "signature": label}
            for checkpoint, seeds in found.items():
                if known := [seed[role, name] for seed in seeds if (role, name) in seed]:
                    yield where | {"number": checkpoint, "unit": unit} | spread(known)
