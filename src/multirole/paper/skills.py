"""What training does to the roles: their skill (`diagnostics.skills`), the paper's phenomena, workflows beside trivial twins."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd

from multirole.paper.claims import DECLARED, REGIMES
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.results import PLACES, Results, Run
from multirole.paper.statistics import t_interval, untested
from multirole.paper.study import Study
from multirole.paper.write import Row, number

MEASURES = {"eval_opt": ("judges", "repairs"), "voting": ("selects",), "orch_workers": ("merges", "plans")}
"""workflow -> the measures of `diagnostics.skills` of its roles, that of its judging role first."""
JUDGES = {"eval_opt": "evaluator", "voting": "aggregator", "orch_workers": "synthesizer"}
TWINS: dict[str, dict[str, Callable[[Sequence[bool]], bool]]] = {
    "eval_opt": {"first draft": lambda slots: slots[0]},
    "voting": {
        "candidate 1": lambda slots: slots[0],
        "most candidates right": lambda slots: 2 * sum(slots) > len(slots),
    },
    "orch_workers": {"worker 1": lambda slots: slots[0]},
}
"""workflow -> name of a twin -> whether it is right, by whether each slot of the solver's first turn is."""
LINES: dict[str, dict[str, str]] = DECLARED["phenomena"]["lines"]
"""A phenomenon -> what is measured for it."""


def gain_of(run: Run, measure: str) -> pd.Series:
    """Evaluated step -> what a role's skill is above its trivial twin's; empty where it was not measured."""
    rows = run.table("skills").reindex(columns=["measure", "step", "skill", "trivial"])
    rows = rows[rows["measure"] == measure].set_index("step")
    return rows["skill"] - rows["trivial"]


def skills(results: Results) -> Iterator[Row]:
    """What each judging role adds over its trivial twin, at the start and over the last two evaluations, in every regime."""
    measured = [(workflow, measure) for workflow, of in MEASURES.items() for measure in of]
    for (regime, changed), (workflow, measure), task in product(REGIMES.items(), measured, results.grid.tasks):
        by_policy = {policy: results.runs_of(workflow, policy, task, **changed) for policy in POLICIES}
        runs = {(policy, seed): run for policy, of in by_policy.items() for seed, run in of.items()}
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
    own = results.evaluated("own")
    twins = [(workflow, *twin) for workflow in WORKFLOWS for twin in TWINS[workflow].items()]
    for (workflow, twin, is_right), task, policy in product(twins, results.grid.tasks if len(own) else (), POLICIES):
        mine = own[(own[["workflow", "policy", "task"]] == [workflow, policy, task]).all(axis=1)]
        mine = mine.assign(twin=mine["slots_correct"].map(lambda slots, f=is_right: len(slots) > 0 and bool(f(slots))))
        means = mine.groupby(["seed", "step"])[["correct", "twin"]].mean()
        for place in PLACES:
            at = [(seed, run.steps[place]) for seed, run in results.runs_of(workflow, policy, task).items()]
            found = means.loc[[row for row in at if row in means.index]]  # not all may be evaluated yet
            if len(found):
                where = {"task": task, "workflow": workflow, "policy": policy, "twin": twin}
                gain = t_interval(found["correct"] - found["twin"])
                yield number(place, t_interval(found["correct"]), "accuracy", **where)
                yield number(f"{place}, twin", t_interval(found["twin"]), "accuracy", **where)
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
        found = changes(about, {policy: results.runs_of(about["workflow"], policy, task) for policy in POLICIES})
        where = {"task": task, "workflow": about["workflow"], "phenomenon": name, "measured by": measure_of(about)}
        yield from phenomenon(found, about, where)


def phenomena_elsewhere(results: Results, study: Study) -> Iterator[Row]:
    """The same lines in each variant of a study that has a cell under both policies, and SP − IP of the same seeds in the grid."""
    for (variant, of), task, (name, about) in product(study.variants.items(), results.grid.tasks, LINES.items()):
        places = {policy: f"{about['workflow']} {policy} {task}" for policy in POLICIES}
        if not set(places.values()) <= set(of.cells):
            continue
        runs, grid = ({policy: {} for policy in POLICIES} for _ in range(2))
        for (policy, place), seed in product(places.items(), of.seeds or study.seeds):
            run = results.find(study.cell(variant, place, seed))
            usual = results.find(study.grid.cell(*place.split(), seed))
            if run and usual:
                runs[policy][seed], grid[policy][seed] = run, usual
        found, twins = changes(about, runs), changes(about, grid)
        where = {"variant": variant, "task": task, "workflow": about["workflow"], "phenomenon": name}
        if mine := phenomenon(found, about, where):
            gap = (twins["sp"]["change"] - twins["ip"]["change"]).reindex(found["sp"].index).dropna()
            yield from mine
            yield number("SP − IP, twin", untested(t_interval(gap)), mine[-1]["unit"], **where)  # tested in `phenomena`


def changes(about: dict[str, str], runs: dict[str, dict[int, Run]]) -> dict[str, pd.DataFrame]:
    """Policy -> a line's start and change by seed, of the seeds that both policies have, or of one where the other has none."""
    found = {}
    for policy, of in runs.items():
        read = [start_and_change(run, about) for run in of.values()]
        found[policy] = pd.DataFrame(read, list(of), ["start", "change"], dtype=float).dropna()
    if both := [seed for seed in found["sp"].index if seed in found["ip"].index]:
        found = {policy: of.loc[both] for policy, of in found.items()}
    return found


def measure_of(about: dict[str, str]) -> str:
    """What a line measures, for a table."""
    return about.get("metric", "gain over the trivial role")


def phenomenon(found: dict[str, pd.DataFrame], about: dict[str, str], where: dict[str, str]) -> list[Row]:
    """The numbers of a line: its start, its change under each policy, and their difference; none where nothing was measured."""
    if not any(map(len, found.values())):
        return []
    unit = {"length_mean": "tokens"}.get(measure_of(about), "gain" if "gain" in about else "rate")
    by_policy = {f"change, {policy.upper()}": of["change"] for policy, of in found.items()}
    by_policy["SP − IP"] = (found["sp"]["change"] - found["ip"]["change"]).dropna()
    of_change = "difference" if "gain" in about else "change"
    return [
        number("start", float(pd.concat(found.values())["start"].mean()), unit, **where),
        number("seeds", max(map(len, found.values())), "count", **where),
        *(number(label, t_interval(of), of_change, **where) for label, of in by_policy.items() if len(of)),
    ]
