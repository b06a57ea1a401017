"""Role skill (`diagnostics.skills`) over training, and every workflow beside its trivial twin."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pandas as pd

from multirole.paper.claims import Regime, regimes_of
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.results import Results, Run
from multirole.paper.statistics import t_interval
from multirole.paper.write import number

MEASURES = {"eval_opt": ("judges", "repairs"), "voting": ("selects",), "orch_workers": ("merges", "plans")}
JUDGES = {
    "eval_opt": ("evaluator", "judges"),
    "voting": ("aggregator", "selects"),
    "orch_workers": ("synthesizer", "merges"),
}
"""A workflow's judging role, and the measure of `diagnostics.skills` that says what it adds."""
TWINS: dict[str, dict[str, Callable[[Sequence[bool]], bool]]] = {
    "eval_opt": {"first draft": lambda slots: slots[0]},
    "voting": {
        "candidate 1": lambda slots: slots[0],
        "most candidates right": lambda slots: 2 * sum(slots) > len(slots),
    },
    "orch_workers": {"worker 1": lambda slots: slots[0]},
}
"""workflow -> name of a twin -> whether it is right, by whether each slot of the solver's first turn is."""


def gain_of(run: Run, measure: str) -> pd.Series:
    """Evaluated step -> what a role's skill is above its trivial twin's; empty where it was not measured."""
    rows = run.table("skills")
    rows = (
        rows[rows["measure"] == measure].set_index("step") if len(rows) else pd.DataFrame(columns=["skill", "trivial"])
    )
    return rows["skill"] - rows["trivial"]


def over_training(regime: Regime, workflow: str, task: str, measure: str) -> pd.DataFrame:
    """Evaluated step x run of both policies: what a role's skill is above its trivial twin's."""
    curves = {}
    for policy in POLICIES:
        for seed, run in regime.runs(workflow, policy, task).items():
            if len(gain := gain_of(run, measure)):
                curves[policy, seed] = gain
    return pd.DataFrame(curves)


def skills(results: Results) -> pd.DataFrame:
    """What each judging role adds over its trivial twin, at the start and over the last two evaluations, in every regime."""
    rows = []
    for name, regime in regimes_of(results).items():
        for workflow, measure in [(workflow, measure) for workflow, of in MEASURES.items() for measure in of]:
            for task in results.grid.tasks:
                curves = over_training(regime, workflow, task, measure)
                accuracy = [run.accuracy for policy in POLICIES for run in regime.runs(workflow, policy, task).values()]
                if not curves.size:
                    continue
                known = pd.DataFrame({"start": curves.iloc[0], "end": curves.iloc[-2:].mean()}).dropna()
                start, end = known.groupby(level=1).mean().to_numpy().T  # by seed: its policies share the start
                where = {"regime": name, "workflow": workflow, "role": measure, "task": task}
                rows.append(number("runs", len(known), "count", **where))
                rows.append(
                    number("accuracy, end", np.mean([run.iloc[-2:].mean() for run in accuracy]), "accuracy", **where)
                )
                gains = {
                    "gain, start": (start, "gain"),
                    "gain, end": (end, "gain"),
                    "change": (end - start, "difference"),
                }
                rows += [number(label, t_interval(of), unit, **where) for label, (of, unit) in gains.items()]
    return pd.DataFrame(rows)


def trivial_twins(results: Results) -> pd.DataFrame:
    """Each workflow beside its trivial twins, made of the solver's first turn alone, at the peak and the end of the grid's runs."""
    own, rows = results.evaluated("own"), []
    if own.empty:
        return pd.DataFrame()
    for workflow, twin, is_right in [(name, *one) for name in WORKFLOWS for one in TWINS[name].items()]:
        mine = own[own["workflow"] == workflow]
        mine = mine.assign(twin=mine["slots_correct"].map(lambda slots, f=is_right: len(slots) > 0 and bool(f(slots))))
        means = mine.groupby(["task", "workflow", "policy", "seed", "step"])[["correct", "twin"]].mean()
        for task, policy in product(results.grid.tasks, POLICIES):
            runs = results.runs_of(workflow, policy, task)
            for place, at in (("peak", "best"), ("end", "terminal")):
                rows_at = [(task, workflow, policy, seed, run.steps[at]) for seed, run in runs.items()]
                found = means.loc[[row for row in rows_at if row in means.index]]  # not all may be evaluated yet
                if found.empty:
                    continue
                where = {"task": task, "workflow": workflow, "policy": policy, "twin": twin}
                rows += [
                    number(f"{place}", t_interval(found["correct"]), "accuracy", **where),
                    number(f"{place}, twin", t_interval(found["twin"]), "accuracy", **where),
                    number(f"gain at the {place}", t_interval(found["correct"] - found["twin"]), "difference", **where),
                ]
    return pd.DataFrame(rows)
