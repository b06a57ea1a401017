"""What makes training fall: the single agent's steps per iteration, rows per step, learning rate and dual clip apart.

`claims.yaml` says how the arms are read; it was committed before any of their runs was read.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.paper.claims import DECLARED
from multirole.paper.results import Results, Run, outcomes
from multirole.paper.statistics import difference, over_seeds, t_interval
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
    dual_clip: bool


def arms(results: Results, study: Study) -> dict[Arm, dict[int, Run]]:
    """Arm of the factorial -> seed -> packed run; the grid's own single agent is one of the arms."""
    found: dict[Arm, dict[int, Run]] = {}
    for name, where, cell in study.runs("factorial"):
        usual = study.grid.cell(*where.split(), cell.seed)
        steps, rows = map(int, ARM.match(name).groups())
        own = Arm(steps, rows, cell.learning_rate / usual.learning_rate, cell.dual_clip is not None)
        for arm, one in ((Arm(1, usual.n_problems * usual.n_episodes, 1.0, False), usual), (own, cell)):
            if run := results.find(one):
                found.setdefault(arm, {})[one.seed] = run
    return dict(sorted(found.items(), key=lambda one: (one[0].dual_clip, one[0])))


def is_unstable(runs: dict[int, Run], seeds: int) -> bool | None:
    """Whether an arm is unstable by the rule of `claims.yaml`; None while runs that are missing could decide it."""
    falls = sum(run.falls for run in runs.values())
    if falls >= RULES["unstable"]:
        return True
    return False if falls + seeds - len(runs) < RULES["unstable"] else None


def of_arms(results: Results, study: Study) -> pd.DataFrame:
    """What becomes of the single agent in every arm."""
    rows = []
    for arm, by_seed in arms(results, study).items():
        about = arm.steps, arm.rows, f"{arm.rate:g}", "3" if arm.dual_clip else "no"
        where = dict(zip(("steps", "rows", "rate", "dual clip"), about, strict=True))
        runs, unstable = list(by_seed.values()), is_unstable(by_seed, len(study.seeds))
        steps = np.mean([len(table := run.table("ledger")) / table["iteration"].nunique() for run in runs])
        chi2 = np.median([run.table("roles")["chi2"].max() for run in runs])
        rows += [
            number("runs", len(runs), "count", **where),
            number("falls", sum(run.falls for run in runs), "count", **where),
            number("unstable", np.nan if unstable is None else float(unstable), "missing" if unstable is None else "count", **where),
            *(number(place, over_seeds(outcomes(runs, x)), "accuracy", **where) for x, place in SHOWN.items()),
            number("steps per iteration", steps, "tokens", **where),
            number("largest chi2, median", chi2, "ratio", **where),
        ]  # fmt: skip
    return pd.DataFrame(rows)


def predictors(results: Results, study: Study) -> pd.DataFrame:
    """The threshold of each declared quantity that misjudges the fewest arms."""
    judged = {arm: is_unstable(runs, len(study.seeds)) for arm, runs in arms(results, study).items()}
    known = pd.DataFrame([arm._asdict() | {"unstable": found} for arm, found in judged.items() if found is not None])
    rows = []
    for name, formula in RULES["predictors"].items() if len(known) else ():
        quantity = known.eval(formula)
        limits = [*np.unique(quantity), np.inf]
        errors = [int(((quantity >= limit) != known["unstable"]).sum()) for limit in limits]
        limit, where = limits[int(np.argmin(errors))], {"quantity": name}
        rows += [
            number("threshold", limit, "ratio" if limit < np.inf else "missing", **where),
            number("arms misjudged", min(errors), "count", **where),
            number("unstable arms", known["unstable"].sum(), "count", **where),
            number("arms", len(known), "count", **where),
        ]
    return pd.DataFrame(rows)


def contrasts(results: Results, study: Study) -> pd.DataFrame:
    """What each declared contrast of the factorial changes, over the pairs of arms that differ in nothing else."""
    found, rows = arms(results, study), []
    for name, (steps, per_step, rate) in RULES["contrasts"].items():
        is_clip, pairs = name == "dual clip", []
        for arm, usual in found.items():
            other = Arm(arm.steps * steps, arm.rows * per_step, arm.rate * rate, is_clip)
            seeds = sorted(set(usual) & set(found.get(other, {})))
            if seeds and not arm.dual_clip:
                pairs.append([[of[seed] for seed in seeds] for of in (usual, found[other])])
        rows += _contrast(name, pairs)
    placebo = [[twin.usual, twin.changed] for twin in twins(results, study, "aa")]
    return pd.DataFrame(rows + _contrast("A/A", placebo) if rows else [])


def _contrast(name: str, pairs: list[list[list[Run]]]) -> list[dict]:
    """One line; of a single pair, such as A/A, the interval is over its seeds."""
    if not pairs:
        return []
    where, falls = {"contrast": name}, [[sum(run.falls for run in runs) for runs in pair] for pair in pairs]
    rows = [number("pairs of arms", len(pairs), "count", **where)]
    rows.append(number("runs of each", sum(len(usual) for usual, _ in pairs), "count", **where))
    rows += [number(f"falls {when}", sum(one[i] for one in falls), "count", **where) for i, when in enumerate(("before", "after"))]  # fmt: skip
    rows.append(number("pairs with more falls", sum(after > before for before, after in falls), "count", **where))
    for x, place in SHOWN.items():
        apart = [difference(outcomes(changed, x), outcomes(usual, x)) for usual, changed in pairs]
        one = apart[0] if len(apart) == 1 else t_interval([each.mean for each in apart])
        rows.append(number(f"change at the {place}", one, "difference", **where))
    return rows
