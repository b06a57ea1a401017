"""What makes training fall: the single agent's steps per iteration, rows per step and learning rate apart.

`claims.yaml` says how the arms are read; it was committed before any of their runs was made.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.paper.claims import DECLARED
from multirole.paper.results import Results, Run, accuracies
from multirole.paper.statistics import t_interval
from multirole.paper.study import Study
from multirole.paper.study_tables import SHOWN
from multirole.paper.write import number

RULES = DECLARED["factorial"]
ARM = re.compile(r"(\d+) steps? of (\d+) rows")
"""The names of the factorial's variants."""


class Arm(NamedTuple):
    """What the factorial varies; `rate` is a multiple of the grid's."""

    steps: int
    rows: int
    rate: float


def arms(results: Results, study: Study) -> dict[Arm, list[Run]]:
    """The arms of the factorial whose runs are all packed; the grid's own single agent is one of them, if there is another."""
    found: dict[Arm, dict[int, Run | None]] = {}
    for name, where, cell in study.runs("factorial"):
        usual = study.grid.cell(*where.split(), cell.seed)
        steps, rows = map(int, ARM.match(name).groups())
        own = Arm(steps, rows, cell.learning_rate / usual.learning_rate)
        for arm, one in ((Arm(1, usual.n_problems * usual.n_episodes, 1.0), usual), (own, cell)):
            found.setdefault(arm, {})[one.seed] = results.find(one)
    whole = {arm: list(found[arm].values()) for arm in sorted(found) if all(found[arm].values())}
    return whole if len(whole) > 1 else {}


def is_unstable(runs: list[Run], counted: str = "falls") -> bool:
    """Whether an arm is unstable by the rule of `claims.yaml`, which counts all falls; or by terminal ones, `ends_fallen`."""
    return sum(getattr(run, counted) for run in runs) >= RULES["unstable"]


def of_arms(results: Results, study: Study) -> pd.DataFrame:
    """What becomes of the single agent in every arm."""
    rows = []
    for arm, runs in arms(results, study).items():
        where = arm._asdict() | {"rate": f"{arm.rate:g}"}
        steps = np.mean([len(table := run.table("ledger")) / table["iteration"].nunique() for run in runs])
        chi2 = np.median([run.table("roles")["chi2"].max() for run in runs])
        rows += [
            number("runs", len(runs), "count", **where),
            number("falls", sum(run.falls for run in runs), "count", **where),
            number("ending fallen", sum(run.ends_fallen for run in runs), "count", **where),
            number("unstable", float(is_unstable(runs)), "count", **where),
            *(number(place, t_interval(accuracies(runs, x)), "accuracy", **where) for x, place in SHOWN.items()),
            number("steps per iteration", steps, "tokens", **where),
            number("largest chi2, median", chi2, "ratio", **where),
        ]
    return pd.DataFrame(rows)


def predictors(results: Results, study: Study) -> pd.DataFrame:
    """The threshold of each declared quantity that misjudges the fewest arms, and how many with terminal falls alone."""
    known = pd.DataFrame([
        arm._asdict() | {"unstable": is_unstable(runs), "fallen": is_unstable(runs, "ends_fallen")}
        for arm, runs in arms(results, study).items()
    ])  # fmt: skip
    rows = []
    for name, formula in RULES["predictors"].items() if len(known) else ():
        quantity, where = known.eval(formula), {"quantity": name}
        limit, errors = _best_threshold(quantity, known["unstable"])
        rows += [
            number("threshold", limit if limit < np.inf else np.nan, "ratio", **where),
            number("arms misjudged", errors, "count", **where),
            number("unstable arms", known["unstable"].sum(), "count", **where),
            number("arms misjudged, terminal falls", _best_threshold(quantity, known["fallen"])[1], "count", **where),
            number("unstable arms, terminal falls", known["fallen"].sum(), "count", **where),
            number("arms", len(known), "count", **where),
        ]
    return pd.DataFrame(rows)


def _best_threshold(quantity: pd.Series, unstable: pd.Series) -> tuple[float, int]:
    """From which value on arms are best called unstable (inf: none), and how many that misjudges."""
    limits = [*np.unique(quantity), np.inf]
    errors = [int(((quantity >= limit) != unstable).sum()) for limit in limits]
    return limits[int(np.argmin(errors))], min(errors)
