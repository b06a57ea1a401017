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
    """How many runs of workflows a regime has, how many of them end fallen, and what its settings decide beforehand.

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
        starts_in_warmup = all(run.accuracy.index[1] <= run.cell.warmup_steps for run in runs)
        return cls(len(runs), sum(run.ends_fallen for run in runs), starts_in_warmup, changed.get("updates") == "one")

    def vacuous(self, claim: dict) -> str:
        """Say which property of the regime this claim's verdict follows from, so that it says nothing beyond that; "" if there is none."""
        measured_by = claim.get("effect", claim.get("of"))
        needs_falls = measured_by in ("fall", "falls", "falls_with_grown_judge") or claim.get("pattern", "").endswith(
            "_falls"
        )
        needs_falls |= claim.get("pattern") == "stays"
        counts_falls = measured_by == "falls" or claim.get("pattern") in ("only_ip_falls", "stays")
        if needs_falls and not self.fallen:
            return "no run ends in a fall"
        if counts_falls and self.fallen >= RULES["nearly_all"] * self.runs:
            return f"{self.fallen} of {self.runs} runs end in a fall"
        if claim.get("effect") == "first" and self.starts_in_warmup:
            return "read by the end of the warm-up"
        reads_chi2 = claim.get("comparison") == "effect_sizes" or claim.get("metric") in ("chi2", "k3_kl")
        reads_chi2 |= claim.get("pattern") in ("unseen_falls", "unseen_drift")
        return "one step leaves χ² and KL at zero" if reads_chi2 and self.is_one_step else ""


def section_order(section: str) -> tuple[int, ...]:
    """Return the sort key of the first section that a claim names, such as "abstract", "5.1" or "A.6.2"."""
    first = section.split(",")[0].strip()
    return (0,) if first == "abstract" else tuple(100 if part == "A" else int(part) for part in first.split("."))


def readings() -> Iterator[tuple[dict, str]]:
    """Yield every claim, in the paper's order, with the word for its rule. A declared claim is followed by its readings that were chosen after the runs."""
    ordered = []
    for claim in DECLARED["claims"]:
        ordered.append((claim | {"read": "no"}, "declared"))
        for reading in DECLARED["looked_at_afterwards"]:
            if reading["reading_of"] == claim["name"]:
                ordered.append((claim | reading | {"read": "yes"}, CHOSEN_AFTERWARDS))
    ordered += [(claim, CHOSEN_AFTERWARDS) for claim in DECLARED["added"]]
    yield from sorted(ordered, key=lambda reading: section_order(reading[0]["section"]))


def verdict(low: float, high: float, at: float, enough: float | None = None) -> str:
    """Decide a claim by an interval: it holds above `enough` (by default `at`) and fails below `at`."""
    if low > (at if enough is None else enough):
        return "holds"
    return "fails" if high < at else "undecided"


def verdict_within(low: float, high: float, limit: float) -> str:
    """Decide a claim of equality by an interval: it holds inside ± `limit` and fails entirely outside of it."""
    if -limit < low and high < limit:
        return "holds"
    return "fails" if low > limit or high < -limit else "undecided"


# ---- the numbers of a claim


def cells_of(results: Results, claim: dict) -> Iterator[tuple[str, str]]:
    """Yield the (workflow, task) pairs that a claim is about."""
    workflows = [claim["workflow"]] if "workflow" in claim else list(claim.get("roles", WORKFLOWS))
    yield from product(workflows, [task for task in results.grid.tasks if task == claim.get("task", task)])


def value_of(run: Run, name: str, role: str | None) -> float:
    """Return a measure of a run, or of one of its roles; a single agent has only one."""
    if name in MEASURES:
        return MEASURES[name](run)
    roles = list(run.cell.policy)
    return ROLE_MEASURES[name](run, roles[0] if len(roles) == 1 else str(role))


def numbers_of(results: Results, claim: dict, policy: str, changed: dict[str, object]) -> list[dict]:
    """Return one number per run of a claim's cells in a regime: whether it shows the claim's pattern, or the claimed effect.

    An effect is a measure, or a measure minus that of the base, the single agent or SP, in the seeds that have both.
    """
    pattern, rows = claim.get("pattern"), []
    default = {"only_ip_falls": "sp", "slips_below_single": "single"}.get(str(pattern), "base")
    minus = claim.get("minus", default)
    for workflow, task in cells_of(results, claim):
        runs = results.runs_of(workflow, policy, task, **changed)
        others = runs
        if minus in ("single", "sp"):
            others = results.runs_of("single" if minus == "single" else workflow, "sp", task, **changed)
        role = claim.get("role", claim.get("roles", {}).get(workflow))
        options = {name: claim[name] for name in ("metric", "flat") if name in claim} | ({"role": role} if role else {})
        for seed in [seed for seed in runs if seed in others]:
            run, other = runs[seed], others[seed]
            if "effect" in claim:
                value = value_of(run, claim["effect"], role)
                if minus != "none":
                    value -= value_of(other, "base" if minus == "base" else claim["effect"], role)
            elif pattern in PAIRED_PATTERNS:
                value = PAIRED_PATTERNS[pattern](run, other)
            else:
                value = PATTERNS[str(pattern)](run, **options)
            rows.append({"workflow": workflow, "task": task, "seed": seed, "value": float(value)})
    return rows


def numbers_of_comparison(results: Results, claim: dict, policies: tuple[str, ...], changed: dict) -> list[dict]:
    """Return one number per run that a comparison reads, with its policy as `arm`.

    `effect_sizes` reads three numbers per pair of runs; `monitor` also reads whether a run ends fallen.
    """
    rows, kind = [], claim["comparison"]
    for (workflow, task), policy in product(cells_of(results, claim), policies):
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
                roles = [claim["roles"][workflow]] if "roles" in claim else list(run.cell.policy)
                alarm = warns(run, claim["metric"], roles)
                rows.append(row | {"value": float(alarm), "fallen": run.ends_fallen})
            elif kind == "variance":
                rows.append(row | {"value": MEASURES[claim["of"]](run)})
            else:
                rows.append(row | {"value": run.at("peak") - (0.0 if kind == "ranking" else other.at("peak"))})
    return rows


# ---- their verdicts


def units_of(numbers: pd.DataFrame) -> tuple[pd.Series, str]:
    """Return one number per seed that has every cell, or per cell if such seeds are few; and which of the two it is, "seeds" or "cells"."""
    table = numbers.pivot_table("value", "seed", ["workflow", "task"])
    by_seed = table.dropna().mean(axis=1)
    return (by_seed, "seeds") if len(by_seed) >= RULES["least_seeds"] else (table.mean(), "cells")


RATIOS = ("grad_norm", "chi2", "chi2_after", "cpu", "coherence")
"""Effects that are shown with significant digits: differences of logarithms, and a cosine."""
EFFECT_UNITS = dict.fromkeys(RATIOS, "ratio") | {"plateau": "tokens", "optimizer_steps": "tokens", "grad_share": "rate"}


def judged_effect(numbers: list[dict], claim: dict) -> tuple[str, str]:
    """Return the verdict over seeds that have every cell, or over cells if these are few, and its numbers as text."""
    units, kind = units_of(pd.DataFrame(numbers, columns=["workflow", "task", "seed", "value"]))
    if kind == "cells" and len(units) < MIN_CELLS or not units.any():
        return MISSING, MISSING
    interval = t_interval(units)
    low, high = sorted(claim.get("sign", 1) * limit for limit in (interval.low, interval.high))
    if "within" in claim:
        decision = verdict_within(low, high, math.log(RULES[claim["within"]]))
    else:
        at = RULES[claim["at"]] if "at" in claim else 0.0
        decision = verdict(low, high, at, -MARGIN if claim.get("is_match_enough") else None)
    unit = EFFECT_UNITS.get(claim["effect"], "difference")
    mean, low_text, high_text = (formatted(value, unit) for value in interval[:3])
    text = f"{mean}{'' if math.isnan(low) else f' [{low_text}, {high_text}]'}, {len(units)} {kind}"
    if decision == "undecided" and claim["effect"] in ("first", "peak", "end", "fall"):  # of accuracies
        if interval.p_match < ALPHA:
            decision = "equivalent"
        elif kind == "seeds" and interval.sd:
            text += f", {seeds_needed(interval.sd, RULES['effects'][0])} for 5 points"
    return decision, text


def judged_pattern(runs: list[dict], claim: dict) -> tuple[str, str]:
    """Return the verdict over runs, and its numbers as text."""
    if not runs:
        return MISSING, MISSING
    count = int(sum(run["value"] for run in runs))
    low, high = proportion_confint(count, len(runs), ALPHA, "beta")
    text = f"{count} of {len(runs)} runs [{100 * low:.0f}, {100 * high:.0f}] %"
    decision = verdict(low, high, RULES[claim.get("share", "usually")])
    if "at_most" in claim and decision != "fails":
        above = verdict(low, high, RULES[claim["at_most"]])
        decision = "fails" if above == "holds" else decision if above == "fails" else "undecided"
    return decision, text


def judged_comparison(rows: list[dict], claim: dict) -> tuple[str, str]:
    """Return the verdict of a test over all cells, and its numbers as text."""
    return COMPARISONS[claim["comparison"]](pd.DataFrame(rows), claim) if rows else (MISSING, MISSING)


def arms_of(claim: dict) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the label in the table and the policies whose runs are read, for each verdict on a claim."""
    if claim.get("minus") == "sp" or claim.get("comparison") == "effect_sizes":
        yield IP_MINUS_SP, ("ip",)
    elif claim.get("comparison") == "variance" or "verdict" in claim:
        yield BOTH, POLICIES
    else:
        yield from ((policy, (policy,)) for policy in claim.get("policies", POLICIES))


def judged(
    results: Results, claim: dict, policies: tuple[str, ...], changed: dict[str, object]
) -> tuple[str, str, list[dict]]:
    """Return a claim's verdict in a regime, its numbers as text, and the number of every run."""
    if "verdict" in claim:
        return claim["verdict"], claim["because"], [{}]
    if "comparison" in claim:
        numbers = numbers_of_comparison(results, claim, policies, changed)
        return *judged_comparison(numbers, claim), numbers
    numbers = numbers_of(results, claim, policies[0], changed)
    return *(judged_effect if "effect" in claim else judged_pattern)(numbers, claim), numbers


def claims(results: Results, facts: dict[str, object]) -> Table:
    """Build the table of every claim's verdicts; its values are the numbers of every run."""
    shown, values = [], []
    falls = {name: Falls.of_regime(results, changed) for name, changed in REGIMES.items()}
    for claim, rule in readings():
        for side, policies in arms_of(claim):
            row = {"the paper's claim": claim["claim"], "sec": claim["section"], "rule": rule, "read before": claim["read"],
                   "tested by": claim["test"], "policy": side.upper()}  # fmt: skip
            for name, changed in REGIMES.items():
                decision, text, numbers = judged(results, claim, policies, changed)
                vacuous = falls[name].vacuous(claim) if text != MISSING else ""
                if claim.get("verdict") == "holds":
                    vacuous = "by construction"
                mark = f" (vacuous: {vacuous})" if vacuous else ""
                row[name] = text if text == MISSING else f"**{decision}**{mark}: {text}"
                named = {"claim": claim["name"], "rule": rule, "regime": name, "policy": side, "verdict": decision,
                         "vacuous": vacuous}  # fmt: skip
                values += [named | number for number in numbers]
            shown.append(row)
    caption = DECLARED["caption"].format(**facts)
    return Table("claims", "The paper's claims against these runs", caption, pd.DataFrame(shown), pd.DataFrame(values))
