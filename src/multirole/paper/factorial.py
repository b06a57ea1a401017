"""What makes training fall: the single agent's steps per iteration, rows per step and learning rate apart.

`claims.yaml` says how the arms are read; it was committed before any of their runs was made.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.paper.claims import DECLARED
from multirole.paper.results import Results, Run, accuracies
from multirole.paper.statistics import difference, t_interval, untested
from multirole.paper.study import Study
from multirole.paper.study_tables import SHOWN, twins
from multirole.paper.write import number

RULES = DECLARED["factorial"]
ARM = re.compile(r"(\d+) steps? of (\d+) rows")
"""The names of the factorial's variants."""


class Arm(NamedTuple):
    """What the factorial varies; `rate` is a multiple of the grid's."""

    steps: int
    rows: int
    rate: float


Seeds = dict[int, Run | None]
"""Declared seed -> its run; None until it is packed."""


def arms(results: Results, study: Study) -> dict[Arm, Seeds]:
    """The arms of the factorial that have a run; the grid's own single agent is one of them, if there is another."""
    found: dict[Arm, Seeds] = {}
    for name, where, cell in study.runs("factorial"):
        usual = study.grid.cell(*where.split(), cell.seed)
        steps, rows = map(int, ARM.match(name).groups())
        own = Arm(steps, rows, cell.learning_rate / usual.learning_rate)
        for arm, one in ((Arm(1, usual.n_problems * usual.n_episodes, 1.0), usual), (own, cell)):
            found.setdefault(arm, {})[one.seed] = results.find(one)
    there = sorted((arm, seeds) for arm, seeds in found.items() if runs_of(seeds))
    return dict(there) if len(there) > 1 else {}


def runs_of(seeds: Seeds) -> list[Run]:
    """The runs that are packed."""
    return [run for run in seeds.values() if run]


def is_unstable(seeds: Seeds, counted: str = "falls") -> bool | None:
    """Whether an arm is unstable by the rule of `claims.yaml`; None while runs that are missing could decide it.

    The rule counts all falls; with `counted="ends_fallen"`, terminal ones alone.
    """
    falls = sum(getattr(run, counted) for run in runs_of(seeds))
    if falls >= RULES["unstable"]:
        return True
    return False if falls + len(seeds) - len(runs_of(seeds)) < RULES["unstable"] else None


def of_arms(results: Results, study: Study) -> pd.DataFrame:
    """What becomes of the single agent in every arm."""
    rows = []
    for arm, by_seed in arms(results, study).items():
        where = arm._asdict() | {"rate": f"{arm.rate:g}"}
        runs, unstable = runs_of(by_seed), is_unstable(by_seed)
        steps = np.mean([len(table := run.table("ledger")) / table["iteration"].nunique() for run in runs])
        chi2 = np.median([run.table("roles")["chi2"].max() for run in runs])
        rows += [
            number("runs", len(runs), "count", **where),
            number("falls", sum(run.falls for run in runs), "count", **where),
            number("ending fallen", sum(run.ends_fallen for run in runs), "count", **where),
            number("unstable", np.nan if unstable is None else float(unstable), "count", **where),
            *(number(place, t_interval(accuracies(runs, x)), "accuracy", **where) for x, place in SHOWN.items()),
            number("steps per iteration", steps, "tokens", **where),
            number("largest chi2, median", chi2, "ratio", **where),
        ]  # fmt: skip
    return pd.DataFrame(rows)


def predictors(results: Results, study: Study) -> pd.DataFrame:
    """The threshold of each declared quantity that misjudges the fewest arms, and how many with terminal falls alone."""
    lines = []
    for arm, seeds in arms(results, study).items():
        if (unstable := is_unstable(seeds)) is not None:
            lines.append(arm._asdict() | {"unstable": unstable, "fallen": bool(is_unstable(seeds, "ends_fallen"))})
    known, rows = pd.DataFrame(lines), []
    for name, formula in RULES["predictors"].items() if lines else ():
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


def contrasts(results: Results, study: Study) -> pd.DataFrame:
    """What each declared contrast of the factorial changes, over the pairs of arms that differ in nothing else."""
    found, rows = arms(results, study), []
    for name, (steps, per_step, rate) in RULES["contrasts"].items():
        pairs = []
        for arm, usual in found.items():
            changed = found.get(Arm(arm.steps * steps, arm.rows * per_step, arm.rate * rate), {})
            both = [(run, changed[seed]) for seed, run in usual.items() if run and changed.get(seed)]
            pairs += [[list(runs) for runs in zip(*both, strict=True)]] if both else []
        rows += _contrast(name, pairs)
    placebo = [[twin.usual, twin.changed] for twin in twins(results, study, "aa")]
    return pd.DataFrame(rows + _contrast("A/A", placebo) if rows else [])


def _contrast(name: str, pairs: list[list[list[Run]]]) -> list[dict]:
    """One line; of a single pair, such as A/A, the interval is over its seeds. Several share arms, so that they are not tested."""
    if not pairs:
        return []
    where, falls = {"contrast": name}, [[sum(run.falls for run in runs) for runs in pair] for pair in pairs]
    rows = [number("pairs of arms", len(pairs), "count", **where)]
    rows.append(number("runs of each", sum(len(usual) for usual, _ in pairs), "count", **where))
    rows += [number(f"falls {when}", sum(one[i] for one in falls), "count", **where) for i, when in enumerate(("before", "after"))]  # fmt: skip
    rows.append(number("pairs with more falls", sum(after > before for before, after in falls), "count", **where))
    for x, place in SHOWN.items():
        apart = [difference(accuracies(changed, x), accuracies(usual, x)) for usual, changed in pairs]
        one = apart[0] if len(apart) == 1 else untested(t_interval([each.mean for each in apart]))
        rows.append(number(f"change at the {place}", one, "difference", **where))
    return rows
