"""What training does to the roles: their skill (`diagnostics.role_skill`), the paper's phenomena, workflows beside trivial twins."""

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
import pandas as pd

from multirole.workflows import WORKFLOWS as WORKFLOW_CLASSES
from multirole_study.paper.claims import DECLARED, REGIMES
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import Row, number
from multirole_study.paper.results import PLACES, Results, Run
from multirole_study.paper.statistics import t_interval

MEASURES = {"eval_opt": ("judges", "repairs"), "voting": ("selects",), "orch_workers": ("merges", "plans")}
"""workflow -> the measures of `diagnostics.role_skill` of its roles, that of its judging role first."""
LINES: dict[str, dict[str, str]] = DECLARED["phenomena"]["lines"]
"""A phenomenon -> what is measured for it."""


def gain_of(run: Run, measure: str) -> pd.Series:
    """Evaluated step -> what a role's skill is above its trivial twin's; empty where it was not measured."""
    rows = run.table("skills").reindex(columns=["measure", "step", "skill", "trivial"])
    rows = rows[rows["measure"] == measure].set_index("step")
    return rows["skill"] - rows["trivial"]


def skills(results: Results) -> Iterator[Row]:
    """What each judging role adds over its trivial twin, at the start and over the last two evaluations, in every regime."""
    measured = [(workflow, measure) for workflow, measures in MEASURES.items() for measure in measures]
    for (regime, changed), (workflow, measure), task in product(REGIMES.items(), measured, results.grid.tasks):
        by_policy = {policy: results.runs_of(workflow, policy, task, **changed) for policy in POLICIES}
        runs = {(policy, seed): run for policy, measures in by_policy.items() for seed, run in measures.items()}
        gains = pd.DataFrame({key: gain for key, run in runs.items() if len(gain := gain_of(run, measure))})
        if gains.empty:
            continue
        known = pd.DataFrame({"start": gains.iloc[0], "end": gains.iloc[-2:].mean()}).dropna()
        by_seed = known.groupby(level=1).mean()  # whose policies share the start
        where = {"regime": regime, "workflow": workflow, "role": measure, "task": task}
        accuracy = np.mean([run.accuracy.iloc[-2:].mean() for run in runs.values()])
        yield number("runs", len(known), "count", **where)
        yield number("accuracy, end", accuracy, "accuracy", **where)
        yield number("gain, start", t_interval(by_seed["start"]), "gain", **where)
        yield number("gain, end", t_interval(by_seed["end"]), "gain", **where)
        yield number("change", t_interval(by_seed["end"] - by_seed["start"]), "difference", **where)


def trivial_twins(results: Results) -> Iterator[Row]:
    """Each workflow beside its trivial twins, made of the solver's first turn alone, at the peak and the end of the grid's runs."""
    twins = [(workflow, *twin) for workflow in WORKFLOWS for twin in WORKFLOW_CLASSES[workflow].structure.twins.items()]
    for (workflow, twin, is_right), task, policy in product(twins, results.grid.tasks, POLICIES):
        where = {"task": task, "workflow": workflow, "policy": policy, "twin": twin}
        for place in PLACES:
            outcomes = results.played(workflow, policy, task, place)
            if len(outcomes):  # not all may be evaluated yet
                right = outcomes["slots_correct"].map(lambda slots, f=is_right: len(slots) > 0 and bool(f(slots)))
                means = outcomes.assign(twin=right).groupby("seed")[["correct", "twin"]].mean()
                gain = t_interval(means["correct"] - means["twin"])
                yield number(place, t_interval(means["correct"]), "accuracy", **where)
                yield number(f"{place}, twin", t_interval(means["twin"]), "accuracy", **where)
                yield number(f"gain at the {place}", gain, "difference", **where)


def start_and_change(run: Run, about: dict[str, str]) -> tuple[float, float]:
    """A line's number at the start of a run, and how far it is from there at the end; NaN where it was not measured."""
    if "gain" in about:
        gain = gain_of(run, about["gain"])
        return (gain.iloc[0], gain.iloc[-2:].mean() - gain.iloc[0]) if len(gain) else (np.nan, np.nan)
    series, window = run.series(about["metric"], about["role"]), DECLARED["phenomena"]["window"]
    start, end = series.iloc[:window].mean(), series.iloc[-window:].mean()
    return start, end / start - 1 if about["metric"] == "length_mean" else end - start


def phenomena(results: Results) -> Iterator[Row]:
    """Every line's start, its change under each policy, and the difference of these changes, paired by seed."""
    for task, (name, about) in product(results.grid.tasks, LINES.items()):
        numbers = changes(
            about, {policy: results.runs_of(about["workflow"], policy, task).values() for policy in POLICIES}
        )
        measured = about.get("metric", "gain over the trivial role")
        where = {"task": task, "workflow": about["workflow"], "phenomenon": name, "measured by": measured}
        yield from phenomenon(numbers, about, where)


def changes(about: dict[str, str], runs: dict[str, Iterable[Run]]) -> pd.DataFrame:
    """Seed -> "start, ip", "change, ip" and the same of "sp": a line's numbers in the seeds that both policies have."""
    frames = []
    for policy, policy_runs in runs.items():
        read = {run.cell.seed: start_and_change(run, about) for run in policy_runs}
        frames.append(pd.DataFrame.from_dict(read, "index", float, [f"start, {policy}", f"change, {policy}"]))
    return pd.concat(frames, axis=1).dropna()


def phenomenon(numbers: pd.DataFrame, about: dict[str, str], where: dict[str, str]) -> Iterator[Row]:
    """The numbers of a line: its start, its change under each policy, and their difference; none where nothing was measured."""
    if len(numbers):
        unit = "gain" if "gain" in about else "tokens" if about["metric"] == "length_mean" else "rate"
        of_change = "difference" if "gain" in about else "change"
        yield number("start", numbers[["start, ip", "start, sp"]].to_numpy().mean(), unit, **where)
        yield number("seeds", len(numbers), "count", **where)
        yield number("change, IP", t_interval(numbers["change, ip"]), of_change, **where)
        yield number("change, SP", t_interval(numbers["change, sp"]), of_change, **where)
        yield number("SP − IP", t_interval(numbers["change, sp"] - numbers["change, ip"]), of_change, **where)
