"""Hold the paper's qualitative claims against packed runs, in every regime and for every policy, by the rules of `claims.yaml`."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import yaml
from statsmodels.stats.proportion import proportion_confint

from multirole_study.paper.dynamics import FIRST_ITERATIONS, largest
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import MISSING, Table, formatted
from multirole_study.paper.results import Results, Run
from multirole_study.paper.statistics import ALPHA, MARGIN, RULES, seeds_needed, t_interval

DECLARED = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
REGIMES: dict[str, dict[str, object]] = DECLARED["regimes"]
"""Name -> what it changes of the grid's cells (`Results.runs_of`)."""
LEAST_CELLS = 3
GAP = "ip − sp"
AFTERWARDS = "looked at afterwards"
"""How the table `claims` calls a rule that was not declared before the runs."""


# ---- what is measured of a run


MEASURES: dict[str, Callable[[Run], float]] = {
    "base": lambda run: run.accuracy[0],
    "first": lambda run: run.accuracy.iloc[1],
    "peak": lambda run: run.at("peak"),
    "fall": lambda run: run.at("peak") - run.accuracy.iloc[-1],
    "falls": lambda run: float(run.ends_fallen),
    "grad_norm": lambda run: math.log(max(run.table("ledger")["grad_norm"].max(), 1e-6)),
    "chi2": lambda run: math.log(max(largest(run, "chi2"), 1e-6)),
}


def climb(series: pd.Series) -> float:
    """The largest 3-iteration mean over the first value; sizes, since an estimate of chi2 can be slightly negative."""
    sizes = series.abs()
    return float(sizes.rolling(3).mean().max() / max(sizes.iloc[:FIRST_ITERATIONS].median(), 1e-6))


def is_longer(run: Run, role: str) -> pd.Series:
    """Iteration -> whether a role's texts have `longer` times their first length."""
    length = run.series("length_mean", role)
    return length.rolling(FIRST_ITERATIONS).mean() / length.iloc[:FIRST_ITERATIONS].mean() >= RULES["longer"]


def grows(run: Run, role: str, flat: str) -> bool:
    """Whether a role's texts reach `longer` times their first length in an iteration in which another role's have not."""
    return bool((is_longer(run, role) & ~is_longer(run, flat)).any())


def grows_alone(run: Run, role: str, flat: str) -> bool:
    """Whether a role's texts reach `longer` times their first length, and another role's never do."""
    return bool(is_longer(run, role).any() and not is_longer(run, flat).any())


def writes_code(run: Run, role: str) -> bool:
    """Whether a role comes to write Python fences."""
    share = run.series("code_fence_rate", role)
    more = share.rolling(FIRST_ITERATIONS).mean() - share.iloc[:FIRST_ITERATIONS].mean()
    return bool((more >= RULES["more_code"]).any())


def climbs_and_falls(run: Run, role: str, metric: str, flat: str | None = None) -> bool:
    """Whether a role's metric climbs, farther than another role's, and the run falls."""
    climbs = {name: climb(run.series(metric, name)) for name in (role, flat) if name}
    is_apart = flat is None or climbs[role] >= 1.5 * climbs[flat]
    return climbs[role] >= RULES["climbs"] and is_apart and run.ends_fallen


PATTERNS: dict[str, Callable[..., bool]] = {
    "falls": lambda run: run.ends_fallen,
    "grows": grows,
    "grows_alone": grows_alone,
    "grows_and_falls": lambda run, role, flat: grows(run, role, flat) and run.ends_fallen,
    "writes_code": writes_code,
    "climbs_and_falls": climbs_and_falls,
}


# ---- verdicts


@dataclass(frozen=True)
class Falls:
    """How many runs of the workflows a regime has, how many end fallen, and whether the first evaluation is still within the warm-up."""

    runs: int
    fallen: int
    starts_in_warmup: bool

    @classmethod
    def of_regime(cls, results: Results, changed: dict[str, object]) -> "Falls":
        """Count them over every workflow, policy and task of the grid."""
        cells = product(WORKFLOWS, POLICIES, results.grid.tasks)
        runs = [run for cell in cells for run in results.runs_of(*cell, **changed).values()]
        starts_in_warmup = all(run.accuracy.index[1] <= run.cell.warmup_iterations for run in runs)
        return cls(len(runs), sum(run.ends_fallen for run in runs), starts_in_warmup)

    def vacuous(self, about: dict) -> str:
        """Say why a verdict on this claim could not have been another in this regime; "" where it could."""
        needs_falls = about.get("effect") in ("fall", "falls") or about.get("pattern", "").endswith("_falls")
        counts_falls = about.get("effect") == "falls" or about.get("pattern") == "only_ip_falls"
        if needs_falls and not self.fallen:
            return "no run ends in a fall"
        if counts_falls and self.fallen >= RULES["nearly_all"] * self.runs:
            return f"{self.fallen} of {self.runs} runs end in a fall"
        if about.get("effect") == "first" and self.starts_in_warmup:
            return "read before the warm-up is over"
        return ""


def readings() -> Iterator[tuple[dict, str]]:
    """Every declared claim with the word for its rule, each followed by the readings that were looked at afterwards."""
    for about in DECLARED["claims"]:
        yield about, "declared"
        for reading in DECLARED["looked_at_afterwards"]:
            if reading["reading_of"] == about["name"]:
                yield about | reading, AFTERWARDS


def verdict(low: float, high: float, at: float, enough: float | None = None) -> str:
    """Where an interval lies; above `enough` is enough to hold."""
    if low > (at if enough is None else enough):
        return "holds"
    return "fails" if high < at else "undecided"


def numbers_of(results: Results, about: dict, policy: str, changed: dict[str, object]) -> list[dict]:
    """One number per run of a claim's cells in a regime: whether it shows the claim's pattern, or the effect that is claimed.

    An effect is a measure minus the same of the base, of the single agent or of SP, in the seeds that have both.
    """
    options, rows = {name: about[name] for name in ("role", "metric", "flat") if name in about}, []
    tasks = [task for task in results.grid.tasks if task == about.get("task", task)]
    minus = about.get("minus", "sp" if about.get("pattern") == "only_ip_falls" else "base")
    for workflow, task in product([about["workflow"]] if "workflow" in about else WORKFLOWS, tasks):
        runs = results.runs_of(workflow, policy, task, **changed)
        cell = {"single": ("single", "sp"), "sp": (workflow, "sp"), "base": (workflow, policy)}[minus]
        others = results.runs_of(*cell, task, **changed)
        for seed, run in runs.items():
            if seed not in others:
                continue
            other = others[seed]
            if "effect" in about:
                before = MEASURES["base" if minus == "base" else about["effect"]]
                value = MEASURES[about["effect"]](run) - before(other)
            elif about["pattern"] == "only_ip_falls":
                value = run.ends_fallen and not other.ends_fallen
            else:
                value = PATTERNS[about["pattern"]](run, **options)
            rows.append({"workflow": workflow, "task": task, "seed": seed, "value": float(value)})
    return rows


def units_of(numbers: pd.DataFrame) -> tuple[pd.Series, str]:
    """One number per seed that has every cell, or per cell where such seeds are few; and which of them, "seeds" or "cells"."""
    table = numbers.pivot_table("value", "seed", ["workflow", "task"])
    by_seed = table.dropna().mean(axis=1)
    return (by_seed, "seeds") if len(by_seed) >= RULES["least_seeds"] else (table.mean(), "cells")


def judged_effect(numbers: list[dict], about: dict) -> tuple[str, str]:
    """The verdict over seeds that have every cell, or over cells where these are few, and the numbers behind it as text."""
    units, kind = units_of(pd.DataFrame(numbers, columns=["workflow", "task", "seed", "value"]))
    if kind == "cells" and len(units) < LEAST_CELLS or not units.any():
        return MISSING, MISSING
    interval = t_interval(units)
    decision = verdict(interval.low, interval.high, 0.0, -MARGIN if about.get("is_match_enough") else None)
    unit = "ratio" if about["effect"] in ("grad_norm", "chi2") else "difference"
    mean, low, high = (formatted(value, unit) for value in interval[:3])
    text = f"{mean} [{low}, {high}], {len(units)} {kind}"
    if decision == "undecided" and about["effect"] in ("first", "peak", "fall"):  # of accuracies
        if interval.p_match < ALPHA:
            decision = "equivalent"
        elif kind == "seeds":
            text += f", {seeds_needed(interval.sd, RULES['effects'][0])} for 5 points"
    return decision, text


def judged_pattern(runs: list[dict], about: dict) -> tuple[str, str]:
    """The verdict over runs, and the numbers behind it as text."""
    if not runs:
        return MISSING, MISSING
    count = int(sum(run["value"] for run in runs))
    low, high = proportion_confint(count, len(runs), ALPHA, "beta")
    text = f"{count} of {len(runs)} runs [{100 * low:.0f}, {100 * high:.0f}] %"
    return verdict(low, high, RULES[about.get("share", "usually")]), text


def claims(results: Results, facts: dict[str, object]) -> Table:
    """Make the table of every claim's verdicts; its values are the numbers of every run."""
    shown, values = [], []
    falls = {name: Falls.of_regime(results, changed) for name, changed in REGIMES.items()}
    for about, rule in readings():
        judged = judged_effect if "effect" in about else judged_pattern
        is_gap = about.get("minus") == "sp"
        for policy in ("ip",) if is_gap else about.get("policies", POLICIES):
            where = GAP if is_gap else policy
            row = {"the paper's claim": about["claim"], "sec": about["section"], "rule": rule,
                   "tested by": about["test"], "policy": where.upper()}  # fmt: skip
            for name, changed in REGIMES.items():
                numbers = numbers_of(results, about, policy, changed)
                decision, text = judged(numbers, about)
                vacuous = falls[name].vacuous(about) if text != MISSING else ""
                row[name] = (
                    text if text == MISSING else f"**{decision}**{f' (vacuous: {vacuous})' if vacuous else ''}: {text}"
                )
                named = {"claim": about["name"], "rule": rule, "regime": name, "policy": where, "verdict": decision,
                         "vacuous": vacuous}  # fmt: skip
                values += [named | number for number in numbers]
            shown.append(row)
    caption = DECLARED["caption"].format(**facts)
    return Table("claims", "The paper's claims against these runs", caption, pd.DataFrame(shown), pd.DataFrame(values))
