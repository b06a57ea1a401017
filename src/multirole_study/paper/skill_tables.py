"""Build tables of how training changes roles: skill (`diagnostics.role_skill`), the paper's phenomena, and trivial twins."""

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
import pandas as pd

from multirole.workflows import WORKFLOWS as WORKFLOW_CLASSES
from multirole_study.compare.intervals import t_interval
from multirole_study.compare.measures import SKILL_MEASURES, gain_of, start_and_change
from multirole_study.paper.claims import DECLARED, REGIMES
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import Row, number
from multirole_study.paper.results import REPORTED_STEPS, Results, Run

PHENOMENA: dict[str, dict[str, str]] = DECLARED["phenomena"]["lines"]
"""Phenomenon -> how it is measured."""


def skills(results: Results) -> Iterator[Row]:
    """Yield each judging role's gain over its trivial twin, at the start and over the last two evaluations, in every regime."""
    measured = [(workflow, measure) for workflow, measures in SKILL_MEASURES.items() for measure in measures]
    for (regime, changed), (workflow, measure), task in product(REGIMES.items(), measured, results.grid.tasks):
        by_policy = {policy: results.runs_of(workflow, policy, task, **changed) for policy in POLICIES}
        runs = {(policy, seed): run for policy, measures in by_policy.items() for seed, run in measures.items()}
        gains = pd.DataFrame({key: gain for key, run in runs.items() if len(gain := gain_of(run, measure))})
        if gains.empty:
            continue
        ends = pd.DataFrame({"start": gains.iloc[0], "end": gains.iloc[-2:].mean()}).dropna()
        is_paired = ends.groupby(level=1)["end"].transform("size") == len(POLICIES)
        by_seed = ends[is_paired].groupby(level=1).mean()  # both policies start from the same model
        keys = {"regime": regime, "workflow": workflow, "role": measure, "task": task}
        accuracy = np.mean([run.accuracy.iloc[-2:].mean() for run in runs.values()])
        yield number("runs", is_paired.sum(), "count", **keys)
        yield number("accuracy, end", accuracy, "accuracy", **keys)
        yield number("gain, start", t_interval(by_seed["start"]), "gain", **keys)
        yield number("gain, end", t_interval(by_seed["end"]), "gain", **keys)
        yield number("change", t_interval(by_seed["end"] - by_seed["start"]), "difference", **keys)


def trivial_twins(results: Results) -> Iterator[Row]:
    """Yield the accuracy of each workflow and of its trivial twins, computed from the solver's first turns, at peak and end."""
    twins = [
        (workflow, *twin)
        for workflow in WORKFLOWS
        for twin in WORKFLOW_CLASSES[workflow].structure.trivial_workflows.items()
    ]
    for (workflow, twin, is_right), task, policy in product(twins, results.grid.tasks, POLICIES):
        keys = {"task": task, "workflow": workflow, "policy": policy, "twin": twin}
        for place in REPORTED_STEPS:
            outcomes = results.own_evaluation(workflow, policy, task, place)
            if len(outcomes):  # not all may be evaluated yet
                right = outcomes["slots_correct"].map(lambda slots, f=is_right: len(slots) > 0 and bool(f(slots)))
                means = outcomes.assign(twin=right).groupby("seed")[["correct", "twin"]].mean()
                gain = t_interval(means["correct"] - means["twin"])
                yield number(place, t_interval(means["correct"]), "accuracy", **keys)
                yield number(f"{place}, twin", t_interval(means["twin"]), "accuracy", **keys)
                yield number(f"gain at the {place}", gain, "difference", **keys)


def phenomena(results: Results) -> Iterator[Row]:
    """Yield every line's start, its change under each policy, and the difference of these changes, paired by seed."""
    for task, (name, line) in product(results.grid.tasks, PHENOMENA.items()):
        numbers = changes(
            line, {policy: results.runs_of(line["workflow"], policy, task).values() for policy in POLICIES}
        )
        measured = line.get("metric", "gain over the trivial role")
        keys = {"task": task, "workflow": line["workflow"], "phenomenon": name, "measured by": measured}
        yield from phenomenon(numbers, line, keys)


def changes(line: dict[str, str], runs: dict[str, Iterable[Run]]) -> pd.DataFrame:
    """Return seed -> "start, ip", "change, ip" and the same for "sp": a line's numbers in the seeds of both policies."""
    frames, read = [], {name: line[name] for name in ("role", "metric", "gain") if name in line}
    for policy, policy_runs in runs.items():
        by_seed = {run.cell.seed: start_and_change(run, **read) for run in policy_runs}
        frames.append(pd.DataFrame.from_dict(by_seed, "index", float, [f"start, {policy}", f"change, {policy}"]))
    return pd.concat(frames, axis=1).dropna()


def phenomenon(numbers: pd.DataFrame, line: dict[str, str], keys: dict[str, str]) -> Iterator[Row]:
    """Yield the numbers of a line: start, change under each policy, and their difference; nothing if not measured."""
    if len(numbers):
        unit = "gain" if "gain" in line else "tokens" if line["metric"] == "length_mean" else "rate"
        of_change = "difference" if "gain" in line else "change"
        yield number("start", numbers[["start, ip", "start, sp"]].to_numpy().mean(), unit, **keys)
        yield number("seeds", len(numbers), "count", **keys)
        yield number("change, IP", t_interval(numbers["change, ip"]), of_change, **keys)
        yield number("change, SP", t_interval(numbers["change, sp"]), of_change, **keys)
        yield number("SP − IP", t_interval(numbers["change, sp"] - numbers["change, ip"]), of_change, **keys)
