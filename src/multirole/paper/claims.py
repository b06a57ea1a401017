"""Hold the paper's qualitative claims against packed runs, in every regime and for every policy, by the rules of `claims.yaml`."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import yaml
from statsmodels.stats.proportion import proportion_confint

from multirole.diagnostics.falls import first_fall
from multirole.experiment.cell import Cell
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.results import Results, Run
from multirole.paper.statistics import ALPHA, MARGIN, RULES, seeds_needed, t_interval
from multirole.paper.write import MISSING, Table, formatted

DECLARED = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
LEAST_CELLS = 3
FIRST = 5  # iterations whose median is the "first logged value" of a noisy metric
GAP = "ip − sp"


class Regime:
    """The packed runs of a regime."""

    def __init__(self, results: Results, parameters: dict[str, object]) -> None:
        self.results = results
        self.parameters = {k: v for k, v in (results.grid.parameters | parameters).items() if v is not None}

    @cache  # noqa: B019  (a handful of instances)
    def runs(self, workflow: str, policy: str, task: str) -> dict[int, Run]:
        """Seed -> run; a single agent takes one step per iteration anyway."""
        own = {name: v for name, v in self.parameters.items() if (workflow, name) != ("single", "updates")}
        cells = [Cell(workflow, policy, task, self.results.grid.scale, seed, **own) for seed in self.results.grid.seeds]
        found = {cell.seed: self.results.find(cell) for cell in cells}
        return {seed: run for seed, run in found.items() if run}


# ---- what is measured of a run


def falls(run: Run) -> bool:
    """Whether a run ends in a terminal fall."""
    fall = first_fall(run.accuracy)
    return fall is not None and fall.is_terminal


def metric_of(run: Run, role: str, metric: str) -> pd.Series:
    """iteration -> value of one role."""
    rows = run.table("roles")
    return rows[rows["role"] == role].set_index("iteration")[metric]


def largest(run: Run, table: str, metric: str) -> float:
    """The log of a metric's maximum over a run."""
    return math.log(max(run.table(table)[metric].max(), 1e-6))


MEASURES: dict[str, Callable[[Run], float]] = {
    "base": lambda run: run.accuracy[0],
    "first": lambda run: run.accuracy.iloc[1],
    "peak": lambda run: run.accuracy[run.steps["best"]],
    "fall": lambda run: run.accuracy[run.steps["best"]] - run.accuracy.iloc[-1],
    "falls": falls,
    "grad_norm": lambda run: largest(run, "ledger", "grad_norm"),
    "chi2": lambda run: largest(run, "roles", "chi2"),
}


def climb(series: pd.Series) -> float:
    """The largest 3-iteration mean over the first value; sizes, since an estimate of chi2 can be slightly negative."""
    sizes = series.abs()
    return float(sizes.rolling(3).mean().max() / max(sizes.iloc[:FIRST].median(), 1e-6))


def grows(run: Run, role: str, flat: str) -> bool:
    """Whether a role's texts reach `longer` times their first length in an iteration in which another role's have not."""
    ratios = []
    for name in (role, flat):
        length = metric_of(run, name, "length_mean")
        ratios.append(length.rolling(FIRST).mean() / length.iloc[:FIRST].mean())
    return bool(((ratios[0] >= RULES["longer"]) & (ratios[1] < RULES["longer"])).any())


def writes_code(run: Run, role: str) -> bool:
    """Whether a role comes to write Python fences."""
    share = metric_of(run, role, "code_fence_rate")
    return bool((share.rolling(FIRST).mean() - share.iloc[:FIRST].mean() >= RULES["more_code"]).any())


def climbs_and_falls(run: Run, role: str, metric: str, flat: str | None = None) -> bool:
    """Whether a role's metric climbs, farther than another role's, and the run falls."""
    climbs = {name: climb(metric_of(run, name, metric)) for name in (role, flat) if name}
    is_apart = flat is None or climbs[role] >= 1.5 * climbs[flat]
    return climbs[role] >= RULES["climbs"] and is_apart and falls(run)


PATTERNS = {"falls": falls, "grows": grows, "writes_code": writes_code, "climbs_and_falls": climbs_and_falls}


# ---- verdicts


def verdict(low: float, high: float, at: float, enough: float | None = None) -> str:
    """Where an interval lies; above `enough` is enough to hold."""
    if low > (at if enough is None else enough):
        return "holds"
    return "fails" if high < at else "undecided"


def tasks_of(regime: Regime, about: dict) -> list[str]:
    """The grid's tasks that a claim is about."""
    return [task for task in regime.results.grid.tasks if task == about.get("task", task)]


def effect(regime: Regime, about: dict, policy: str) -> list[dict]:
    """One number per cell and seed: a measure, minus the same of the base, the single agent or SP."""
    measure, other, rows = MEASURES[about["effect"]], about["minus"], []
    for workflow, task in product(WORKFLOWS, tasks_of(regime, about)):
        after = {seed: float(measure(run)) for seed, run in regime.runs(workflow, policy, task).items()}
        if other == "base":
            before = {seed: MEASURES["base"](run) for seed, run in regime.runs(workflow, policy, task).items()}
        else:
            twin = ("single", "sp", task) if other == "single" else (workflow, "sp", task)
            before = {seed: float(measure(run)) for seed, run in regime.runs(*twin).items()}
        gaps = {seed: after[seed] - before[seed] for seed in after if seed in before}
        rows += [{"workflow": workflow, "task": task, "seed": seed, "value": float(gap)} for seed, gap in gaps.items()]
    return rows


def judged_effect(numbers: list[dict], about: dict) -> tuple[str, str]:
    """The verdict over seeds that have every cell, or over cells where these are few, and the numbers behind it as text."""
    columns = ["workflow", "task", "seed", "value"]
    table = pd.DataFrame(numbers, columns=columns).pivot_table("value", "seed", ["workflow", "task"])
    whole, n_cells = table.dropna(), table.shape[1]
    has_seeds = len(whole) >= RULES["least_seeds"]
    units = whole.mean(axis=1) if has_seeds else table.mean()
    if not has_seeds and n_cells < LEAST_CELLS or not units.any():
        return MISSING, MISSING
    found = t_interval(units)
    is_accuracy = about["effect"] in ("first", "peak", "fall")
    decision = verdict(found.low, found.high, 0.0, -MARGIN if about.get("is_match_enough") else None)
    unit = "ratio" if about["effect"] in ("grad_norm", "chi2") else "difference"
    mean, low, high = (formatted(value, unit) for value in found[:3])
    text = f"{mean} [{low}, {high}], " + (f"{len(whole)} seeds" if has_seeds else f"{n_cells} cells")
    if decision == "undecided" and is_accuracy:
        if found.p_match < ALPHA:
            decision = "equivalent"
        elif has_seeds:
            text += f", {seeds_needed(found.sd, RULES['effects'][0])} for 5 points"
    return decision, text


def pattern(regime: Regime, about: dict, policy: str) -> list[dict]:
    """One number per run: whether it shows the pattern."""
    options = {name: about[name] for name in ("role", "metric", "flat") if name in about}
    workflows = [about["workflow"]] if "workflow" in about else WORKFLOWS
    rows = []
    for workflow, task in product(workflows, tasks_of(regime, about)):
        runs = regime.runs(workflow, policy, task)
        if about["pattern"] == "only_ip_falls":
            twins = regime.runs(workflow, "sp", task)
            seen = {seed: falls(run) and not falls(twins[seed]) for seed, run in runs.items() if seed in twins}
        else:
            seen = {seed: PATTERNS[about["pattern"]](run, **options) for seed, run in runs.items()}
        rows += [
            {"workflow": workflow, "task": task, "seed": seed, "value": float(is_seen)}
            for seed, is_seen in seen.items()
        ]
    return rows


def judged_pattern(runs: list[dict], about: dict) -> tuple[str, str]:
    """The verdict over runs, and the numbers behind it as text."""
    if not runs:
        return MISSING, MISSING
    count = int(sum(run["value"] for run in runs))
    low, high = proportion_confint(count, len(runs), ALPHA, "beta")
    text = f"{count} of {len(runs)} runs [{100 * low:.0f}, {100 * high:.0f}] %"
    return verdict(low, high, RULES[about.get("share", "usually")]), text


def regimes_of(results: Results) -> dict[str, Regime]:
    """Every regime by its name."""
    return {name: Regime(results, given) for name, given in DECLARED["regimes"].items()}


def claims(results: Results, facts: dict[str, object]) -> Table:
    """Make the table of every claim's verdicts; its values are the numbers of every run."""
    regimes, shown, values = regimes_of(results), [], []
    for about in DECLARED["claims"]:
        measured, judged = (effect, judged_effect) if "effect" in about else (pattern, judged_pattern)
        is_gap = about.get("minus") == "sp"
        for policy in ("ip",) if is_gap else about.get("policies", POLICIES):
            where = GAP if is_gap else policy
            row = {"the paper's claim": about["claim"], "sec": about["section"], "tested by": about["test"],
                   "policy": where.upper()}  # fmt: skip
            for name, regime in regimes.items():
                numbers = measured(regime, about, policy)
                decision, text = judged(numbers, about)
                row[name] = text if text == MISSING else f"**{decision}**: {text}"
                named = {"claim": about["name"], "regime": name, "policy": where, "verdict": decision}
                values += [named | number for number in numbers]
            shown.append(row)
    caption = DECLARED["caption"].format(**(RULES | facts))
    return Table("claims", "The paper's claims against these runs", caption, pd.DataFrame(shown), pd.DataFrame(values))
