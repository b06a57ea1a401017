"""Test the paper's qualitative claims on packed runs, in every regime and for every policy, by the rules of `claims.yaml`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import yaml
from statsmodels.stats.proportion import proportion_confint

from multirole_study.paper.claim_comparisons import COMPARISONS
from multirole_study.paper.claim_measures import MEASURES, PAIRED_PATTERNS, PATTERNS, ROLE_MEASURES, warns
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import MISSING, Table, formatted
from multirole_study.paper.results import Results, Run
from multirole_study.paper.statistics import ALPHA, MARGIN, RULES, seeds_needed, t_interval

DECLARED = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
REGIMES: dict[str, dict[str, object]] = DECLARED["regimes"]
"""Name -> the settings that it changes in the grid's cells (`Results.runs_of`)."""
MIN_CELLS = 3
IP_MINUS_SP = "ip − sp"
BOTH = "ip, sp"
CHOSEN_AFTERWARDS = "looked at afterwards"
"""Word in the table `claims` for a rule that was not declared before the runs."""


# ---- verdicts


@dataclass(frozen=True)
class Falls:
    """Counts of a regime: its runs of workflows and those that end fallen; and what its settings decide beforehand.

    `starts_in_warmup`: the first evaluation is still within the warm-up. `is_one_step`: adapters take one step per iteration, so that the policy
    that is updated is the one that sampled, and χ² and KL during the update are zero.
    """

    runs: int
    fallen: int
    starts_in_warmup: bool
    is_one_step: bool = False

    @classmethod
    def of_regime(cls, results: Results, changed: dict[str, object]) -> "Falls":
        """Count over every workflow, policy and task of the grid."""
        cells = product(WORKFLOWS, POLICIES, results.grid.tasks)
        runs = [run for cell in cells for run in results.runs_of(*cell, **changed).values()]
        starts_in_warmup = all(run.accuracy.index[1] <= run.cell.warmup_iterations for run in runs)
        return cls(len(runs), sum(run.ends_fallen for run in runs), starts_in_warmup, changed.get("updates") == "one")

    def vacuous(self, about: dict) -> str:
        """Explain why this claim could only have one verdict in this regime; "" if others were possible."""
        read = about.get("effect", about.get("of"))
        needs_falls = read in ("fall", "falls", "falls_with_grown_judge") or about.get("pattern", "").endswith("_falls")
        needs_falls |= about.get("pattern") == "stays"
        counts_falls = read == "falls" or about.get("pattern") in ("only_ip_falls", "stays")
        if needs_falls and not self.fallen:
            return "no run ends in a fall"
        if counts_falls and self.fallen >= RULES["nearly_all"] * self.runs:
            return f"{self.fallen} of {self.runs} runs end in a fall"
        if about.get("effect") == "first" and self.starts_in_warmup:
            return "read before the warm-up is over"
        reads_chi2 = about.get("comparison") == "effect_sizes" or about.get("metric") in ("chi2", "k3_kl")
        return "one step leaves χ² and KL at zero" if reads_chi2 and self.is_one_step else ""


def section_order(section: str) -> tuple[int, ...]:
    """Return the sort key of the first section that a claim names, such as "abstract", "5.1" or "A.6.2"."""
    first = section.split(",")[0].strip()
    return (0,) if first == "abstract" else tuple(100 if part == "A" else int(part) for part in first.split("."))


def readings() -> Iterator[tuple[dict, str]]:
    """Yield every claim in the paper's order with the word for its rule; declared ones are followed by the readings chosen after the runs."""
    ordered = []
    for about in DECLARED["claims"]:
        ordered.append((about | {"read": "no"}, "declared"))
        for reading in DECLARED["looked_at_afterwards"]:
            if reading["reading_of"] == about["name"]:
                ordered.append((about | reading | {"read": "yes"}, CHOSEN_AFTERWARDS))
    ordered += [(about, CHOSEN_AFTERWARDS) for about in DECLARED["added"]]
    yield from sorted(ordered, key=lambda reading: section_order(reading[0]["section"]))


def verdict(low: float, high: float, at: float, enough: float | None = None) -> str:
    """Decide a claim by an interval; one that lies above `enough` holds."""
    if low > (at if enough is None else enough):
        return "holds"
    return "fails" if high < at else "undecided"


def verdict_within(low: float, high: float, limit: float) -> str:
    """Decide a claim of equality by whether an interval lies inside ± `limit`; one that lies outside on one side fails."""
    if -limit < low and high < limit:
        return "holds"
    return "fails" if low > limit or high < -limit else "undecided"


# ---- the numbers of a claim


def cells_of(results: Results, about: dict) -> Iterator[tuple[str, str]]:
    """Yield the (workflow, task) pairs that a claim is about."""
    workflows = [about["workflow"]] if "workflow" in about else list(about.get("roles", WORKFLOWS))
    yield from product(workflows, [task for task in results.grid.tasks if task == about.get("task", task)])


def value_of(run: Run, name: str, role: str | None) -> float:
    """Return a measure of a run, or of one of its roles; a single agent has only one."""
    if name in MEASURES:
        return MEASURES[name](run)
    roles = list(run.cell.policy)
    return ROLE_MEASURES[name](run, roles[0] if len(roles) == 1 else str(role))


def numbers_of(results: Results, about: dict, policy: str, changed: dict[str, object]) -> list[dict]:
    """Return one number per run of a claim's cells in a regime: whether it shows the claim's pattern, or the claimed effect.

    An effect is a measure, or a measure minus that of the base, the single agent or SP, in the seeds that have both.
    """
    pattern, rows = about.get("pattern"), []
    default = {"only_ip_falls": "sp", "slips_below_single": "single"}.get(str(pattern), "base")
    minus = about.get("minus", default)
    for workflow, task in cells_of(results, about):
        runs = results.runs_of(workflow, policy, task, **changed)
        others = runs
        if minus in ("single", "sp"):
            others = results.runs_of("single" if minus == "single" else workflow, "sp", task, **changed)
        role = about.get("role", about.get("roles", {}).get(workflow))
        options = {name: about[name] for name in ("metric", "flat") if name in about} | ({"role": role} if role else {})
        for seed in [seed for seed in runs if seed in others]:
            run, other = runs[seed], others[seed]
            if "effect" in about:
                value = value_of(run, about["effect"], role)
                if minus != "none":
                    value -= value_of(other, "base" if minus == "base" else about["effect"], role)
            elif pattern in PAIRED_PATTERNS:
                value = PAIRED_PATTERNS[pattern](run, other)
            else:
                value = PATTERNS[str(pattern)](run, **options)
            rows.append({"workflow": workflow, "task": task, "seed": seed, "value": float(value)})
    return rows


def numbers_of_comparison(results: Results, about: dict, policies: tuple[str, ...], changed: dict) -> list[dict]:
    """Return one number per run that a comparison reads, with its policy as `arm`.

    `effect_sizes` reads three numbers per pair of runs; `monitor` also reads whether a run ends fallen.
    """
    rows, kind = [], about["comparison"]
    for (workflow, task), policy in product(cells_of(results, about), policies):
        runs = results.runs_of(workflow, policy, task, **changed)
        others = results.runs_of("single", "sp", task, **changed) if kind in ("spread", "gain_and_slip") else runs
        others = results.runs_of(workflow, "sp", task, **changed) if kind == "effect_sizes" else others
        for seed in [seed for seed in runs if seed in others]:
            run, other = runs[seed], others[seed]
            row = {"workflow": workflow, "task": task, "arm": policy, "seed": seed}
            if kind == "effect_sizes":
                names = ("chi2", "grad_norm", "entropy")
                gaps = {name: MEASURES[name](run) - MEASURES[name](other) for name in names}
                rows += [row | {"metric": name, "value": gap} for name, gap in gaps.items()]
            elif kind == "monitor":
                roles = [about["roles"][workflow]] if "roles" in about else list(run.cell.policy)
                alarm = warns(run, about["metric"], roles)
                rows.append(row | {"value": float(alarm), "fallen": run.ends_fallen})
            elif kind == "variance":
                rows.append(row | {"value": MEASURES[about["of"]](run)})
            else:
                rows.append(row | {"value": run.at("peak") - (0.0 if kind == "ranking" else other.at("peak"))})
    return rows


# ---- their verdicts


def units_of(numbers: pd.DataFrame) -> tuple[pd.Series, str]:
    """Return one number per seed that has every cell, or per cell if such seeds are few; and which of both, "seeds" or "cells"."""
    table = numbers.pivot_table("value", "seed", ["workflow", "task"])
    by_seed = table.dropna().mean(axis=1)
    return (by_seed, "seeds") if len(by_seed) >= RULES["least_seeds"] else (table.mean(), "cells")


RATIOS = ("grad_norm", "chi2", "chi2_after", "cpu", "coherence")
"""Effects that are shown with significant digits: differences of logarithms, and a cosine."""
EFFECT_UNITS = dict.fromkeys(RATIOS, "ratio") | {"plateau": "tokens", "optimizer_steps": "tokens", "grad_share": "rate"}


def judged_effect(numbers: list[dict], about: dict) -> tuple[str, str]:
    """Return the verdict over seeds that have every cell, or over cells if these are few, and its numbers as text."""
    units, kind = units_of(pd.DataFrame(numbers, columns=["workflow", "task", "seed", "value"]))
    if kind == "cells" and len(units) < MIN_CELLS or not units.any():
        return MISSING, MISSING
    interval = t_interval(units)
    low, high = sorted(about.get("sign", 1) * limit for limit in (interval.low, interval.high))
    if "within" in about:
        decision = verdict_within(low, high, math.log(RULES[about["within"]]))
    else:
        at = RULES[about["at"]] if "at" in about else 0.0
        decision = verdict(low, high, at, -MARGIN if about.get("is_match_enough") else None)
    unit = EFFECT_UNITS.get(about["effect"], "difference")
    mean, low_text, high_text = (formatted(value, unit) for value in interval[:3])
    text = f"{mean} [{low_text}, {high_text}], {len(units)} {kind}"
    if decision == "undecided" and about["effect"] in ("first", "peak", "end", "fall"):  # of accuracies
        if interval.p_match < ALPHA:
            decision = "equivalent"
        elif kind == "seeds":
            text += f", {seeds_needed(interval.sd, RULES['effects'][0])} for 5 points"
    return decision, text


def judged_pattern(runs: list[dict], about: dict) -> tuple[str, str]:
    """Return the verdict over runs, and its numbers as text."""
    if not runs:
        return MISSING, MISSING
    count = int(sum(run["value"] for run in runs))
    low, high = proportion_confint(count, len(runs), ALPHA, "beta")
    text = f"{count} of {len(runs)} runs [{100 * low:.0f}, {100 * high:.0f}] %"
    decision = verdict(low, high, RULES[about.get("share", "usually")])
    if "at_most" in about and decision != "fails":
        above = verdict(low, high, RULES[about["at_most"]])
        decision = "fails" if above == "holds" else decision if above == "fails" else "undecided"
    return decision, text


def judged_comparison(rows: list[dict], about: dict) -> tuple[str, str]:
    """Return the verdict of a test over all cells, and its numbers as text."""
    return COMPARISONS[about["comparison"]](pd.DataFrame(rows), about) if rows else (MISSING, MISSING)


def arms_of(about: dict) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the label in the table and the policies whose runs are read, for each verdict on a claim."""
    if about.get("minus") == "sp" or about.get("comparison") == "effect_sizes":
        yield IP_MINUS_SP, ("ip",)
    elif about.get("comparison") == "variance" or "verdict" in about:
        yield BOTH, POLICIES
    else:
        yield from ((policy, (policy,)) for policy in about.get("policies", POLICIES))


def judged(
    results: Results, about: dict, policies: tuple[str, ...], changed: dict[str, object]
) -> tuple[str, str, list[dict]]:
    """Return a claim's verdict in a regime, its numbers as text, and the number of every run."""
    if "verdict" in about:
        return about["verdict"], about["because"], [{}]
    if "comparison" in about:
        numbers = numbers_of_comparison(results, about, policies, changed)
        return *judged_comparison(numbers, about), numbers
    numbers = numbers_of(results, about, policies[0], changed)
    return *(judged_effect if "effect" in about else judged_pattern)(numbers, about), numbers


def claims(results: Results, facts: dict[str, object]) -> Table:
    """Build the table of every claim's verdicts; its values are the numbers of every run."""
    shown, values = [], []
    falls = {name: Falls.of_regime(results, changed) for name, changed in REGIMES.items()}
    for about, rule in readings():
        for side, policies in arms_of(about):
            row = {"the paper's claim": about["claim"], "sec": about["section"], "rule": rule, "read before": about["read"],
                   "tested by": about["test"], "policy": side.upper()}  # fmt: skip
            for name, changed in REGIMES.items():
                decision, text, numbers = judged(results, about, policies, changed)
                vacuous = falls[name].vacuous(about) if text != MISSING else ""
                if about.get("verdict") == "holds":
                    vacuous = "by construction"
                mark = f" (vacuous: {vacuous})" if vacuous else ""
                row[name] = text if text == MISSING else f"**{decision}**{mark}: {text}"
                named = {"claim": about["name"], "rule": rule, "regime": name, "policy": side, "verdict": decision,
                         "vacuous": vacuous}  # fmt: skip
                values += [named | number for number in numbers]
            shown.append(row)
    caption = DECLARED["caption"].format(**facts)
    return Table("claims", "The paper's claims against these runs", caption, pd.DataFrame(shown), pd.DataFrame(values))
