"""Tables of a study (`study.json`): what the number of updates, the schedule and the order of rows do to the comparison of
policies, and what each remedy does. None is in the paper.

Every run of a study differs from a run of the grid in one thing and shares its seed and problems, so that all differences are
paired by both.
"""

import numpy as np
import pandas as pd

from multirole.paper.budget_tables import controls, inference
from multirole.paper.ledger_table import ledger
from multirole.paper.numbers import MISSING, percent, points
from multirole.paper.results import Results
from multirole.paper.statistics import Interval, bootstrap, difference, method
from multirole.paper.study import Study
from multirole.paper.twins import SHOWN, Twins, at, twins
from multirole.paper.write import Table

COMPARISONS = ("updates", "setup")
"""Questions whose variants are tried on both policies."""


def _values(twin: Twins, numbers: dict[str, Interval]) -> list[dict[str, object]]:
    cell = {"workflow": twin.workflow, "policy": twin.policy, "task": twin.task, "variant": twin.variant}
    return [cell | {"measure": name, **number._asdict()} for name, number in numbers.items()]


def verdict(interval: Interval) -> str:
    """What an interval of a difference says."""
    return ("more" if interval.low > 0 else "less") if interval.excludes_zero else "undecided"


def _paired(n: int) -> str:
    return (
        "The same seeds, problems, learning rate and all else as the grid's runs. Validation accuracy in percent, differences in "
        f"percentage points, variant minus grid, paired by seed and problem; {method(n)}. Peaks are chosen on the problems they are read "
        "on; the end is the last checkpoint. Falls are the runs, the grid's and the variant's, where an evaluation lies 5 points below "
        "the best one before it. More, less and undecided are what the intervals of the differences say. Not in the paper."
    )


def _changes(found: list[Twins], **counts: str) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """One row per cell and variant: counts of runs, peak, end, and what changed against the grid's runs.

    `counts` are columns and the properties of `Run` that they count. Returns what is shown, the values, how they were made.
    """
    shown, values = [], []
    for twin in found:
        n = len(twin.usual)
        counted = {
            name: [sum(getattr(run, what) for run in runs) for runs in (twin.usual, twin.changed)]
            for name, what in counts.items()
        }
        own = {SHOWN[x]: bootstrap(at(twin.changed, x)) for x in SHOWN}
        gains = {f"change at the {SHOWN[x]}": difference(at(twin.changed, x), at(twin.usual, x)) for x in SHOWN}
        shown.append(
            {"cell": twin.label, "variant": twin.variant, "seeds": n}
            | {name: f"{before} → {after}" for name, (before, after) in counted.items()}
            | {name: percent(number) for name, number in own.items()}
            | {name: points(number) for name, number in gains.items()}
            | {f"the {SHOWN[x]} is": verdict(gains[f"change at the {SHOWN[x]}"]) for x in SHOWN}
        )
        usual = {f"{SHOWN[x]}, grid": bootstrap(at(twin.usual, x)) for x in SHOWN}
        for name, (before, after) in counted.items():
            usual |= {f"{name}, grid": _plain(before, n), name: _plain(after, n)}
        values += _values(twin, own | gains | usual)
    return pd.DataFrame(shown), pd.DataFrame(values), _paired(max((len(twin.usual) for twin in found), default=1))


def _plain(count: int, n_seeds: int) -> Interval:
    """A count of runs, which has no interval."""
    return Interval(count, np.nan, np.nan, n_seeds, 0)


def matched_updates(results: Results, study: Study) -> Table:
    """Peak and end under a step per batch and under one step per iteration."""
    found = list(twins(results, study, "updates"))
    shown, values, method_of = _changes(found, falls="falls")
    singles = {task: results.outcomes("single", "sp", task, "best") for task in {twin.task for twin in found}}
    shown["peak − SA-RL's"] = [
        MISSING if singles[twin.task] is None else points(difference(at(twin.changed, "best"), singles[twin.task]))
        for twin in found
    ]
    caption = (
        "Only the number of optimizer steps differs: one per adapter and iteration instead of one per batch of rows, which is one per slot "
        f"and role. {method_of}"
    )
    title = "One optimizer step per iteration against one per batch of rows"
    return Table("matched_updates", title, caption, shown, values)


def setup(results: Results, study: Study) -> Table:
    """What the learning-rate schedule, its clock and the order of rows change."""
    found = [twin for twin in twins(results, study, "setup") if twin.usual[0].folder != twin.changed[0].folder]
    shown, values, method_of = _changes(found, falls="falls")
    caption = (
        "The grid's schedule is constant after its warm-up and ticks once per iteration; its rows are shuffled. The released code ticks "
        f"once per update call, and orders rows by length. {method_of}"
    )
    return Table("setup", "The schedule, its clock and the order of rows", caption, shown, values)


def remedies(results: Results, study: Study) -> Table:
    """What each remedy does to the peak and to the end of a cell that falls."""
    tried = list(twins(results, study, "remedies"))
    steps = [twin for twin in twins(results, study, "updates") if twin.label in {one.label for one in tried}]
    cells = list(dict.fromkeys(twin.label for twin in tried))
    found = sorted([*tried, *steps], key=lambda twin: cells.index(twin.label))
    shown, values, method_of = _changes(found, falls="falls", alarms="is_announced")
    caption = (
        f"Each remedy is one field of Cell. {method_of} Alarms are the runs in which the present thresholds announce gradient amplification "
        "or capture of a shared adapter. The cells were chosen because their runs fall, so that part of any gain is chance: a run that "
        "differs in anything may fall elsewhere or not at all. A remedy with which no run falls says more than a higher end."
    )
    return Table(
        "remedies", "Remedies on cells that fall", caption, shown.rename(columns={"variant": "remedy"}), values
    )


def policies(results: Results, study: Study) -> Table:
    """IP minus SP in the grid and under each variant: how much of the difference is the setup's."""
    found = list(twins(results, study, *COMPARISONS))
    by_cell = {(twin.workflow, twin.task, twin.variant, twin.policy): twin for twin in found}
    shown, values, n = [], [], 1
    for ip in sorted(found, key=lambda twin: (twin.workflow, twin.task)):
        sp = by_cell.get((ip.workflow, ip.task, ip.variant, "sp"))
        if ip.policy != "ip" or sp is None or len(sp.usual) != len(ip.usual):
            continue
        for x in SHOWN:
            usual, changed = (at(i, x) - at(s, x) for i, s in zip(ip[-2:], sp[-2:], strict=True))  # (S, P) each
            numbers = {"grid": bootstrap(usual), "variant": bootstrap(changed), "change": bootstrap(changed - usual)}
            shown.append(
                {"cell": f"{ip.workflow}, {ip.task}", "at": SHOWN[x], "variant": ip.variant, "seeds": len(ip.usual)}
                | {f"IP − SP, {k}" if k != "change" else k: points(v) for k, v in numbers.items()}
                | {"IP − SP is": verdict(numbers["variant"]), "the change is": verdict(numbers["change"])}
            )
            about = {"workflow": ip.workflow, "task": ip.task, "variant": ip.variant, "at": SHOWN[x]}
            values += [about | {"measure": k, **v._asdict()} for k, v in numbers.items()]
        n = max(n, len(ip.usual))
    caption = (
        "The difference between the policies in the grid, whose schedule is clocked per iteration and whose steps are one per batch of rows, "
        f"and where one of these differs. Percentage points, paired by seed and problem; {method(n)}. Not in the paper."
    )
    return Table("policies", "IP against SP under other setups", caption, pd.DataFrame(shown), pd.DataFrame(values))


def study_tables(results: Results, study: Study) -> list[Table]:
    """Every table of the study that has a finished run."""
    made = [f(results, study) for f in (ledger, matched_updates, setup, policies, remedies, controls, inference)]
    return [table for table in made if len(table.shown)]
