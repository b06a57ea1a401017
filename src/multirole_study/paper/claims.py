"""Test the paper's qualitative claims on packed runs, in every regime and for every policy, by the rules of `claims.yaml`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import yaml

from multirole_study.compare import answers as engine
from multirole_study.compare import arms
from multirole_study.compare.intervals import seeds_needed
from multirole_study.compare.measures import MEASURES
from multirole_study.compare.rules import MARGIN, RULES
from multirole_study.compare.verdicts import NO_NUMBERS, UNDECIDED, VERDICT_OF, Rule
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import MISSING, Table, formatted
from multirole_study.paper.results import Results

DECLARED = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
REGIMES: dict[str, dict[str, object]] = DECLARED["regimes"]
"""Name -> the settings that it changes in the grid's cells (`Results.runs_of`)."""
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
        starts_in_warmup = all(step <= run.cell.warmup_steps for run in runs for step in run.accuracy.index[1:2])
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


# ---- the question of a claim

NAMES = {"fall": "peak_to_end"}
"""Word of claims.yaml -> measure, where they differ."""
READ_BY = {
    "spread": {"effect": "peak", "minus": "single"},
    "gain_and_slip": {"effect": "peak", "minus": "single"},
    "ranking": {"effect": "peak", "minus": "none"},
    "effect_sizes": {"minus": "sp"},
    "variance": {"minus": "none"},
    "monitor": {"effect": "alarm", "minus": "none"},
}
"""Comparison of all cells -> what it reads of each run, and of which other run that is subtracted."""
STANDARDISED = ("chi2", "grad_norm", "entropy")
"""The measures of `effect_sizes`."""
PAIRED_WITH = {"only_ip_falls": "sp", "slips_below_single": "single"}
"""Pattern of a pair of runs -> the other run."""


def question_of(claim: dict) -> engine.Question:
    """Return the question that a claim's rule asks of the numbers of a regime."""
    options = {name: claim[name] for name in ("metric", "flat", "role", "roles") if name in claim}
    if "pattern" in claim:
        at_most = RULES[claim["at_most"]] if "at_most" in claim else None
        rule = Rule(RULES[claim.get("share", "usually")], at_most=at_most)
        return engine.Question(MEASURES[claim["pattern"]], options, estimate="share", rule=rule)
    if "comparison" in claim:
        kind = claim["comparison"]
        name = claim.get("of", READ_BY[kind].get("effect", STANDARDISED[0]))
        estimated_by = {"within": claim["within"]} if kind == "spread" else {}
        return engine.Question(MEASURES[NAMES.get(name, name)], options, estimate=kind, estimated_by=estimated_by)
    measure = MEASURES[NAMES.get(claim["effect"], claim["effect"])]
    rule = Rule(
        at=RULES[claim["at"]] if "at" in claim else 0.0,
        enough=-MARGIN if claim.get("is_match_enough") else None,
        within=math.log(RULES[claim["within"]]) if "within" in claim else None,
        sign=claim.get("sign", 1),
        has_margin=measure.has_margin,
    )
    minus_measure = MEASURES["base"] if claim.get("minus") == "base" else None
    return engine.Question(measure, options, minus_measure, "mean_over_cells", rule=rule)


def cells_of(results: Results, claim: dict) -> Iterator[tuple[str, str]]:
    """Yield the (workflow, task) pairs that a claim is about."""
    workflows = [claim["workflow"]] if "workflow" in claim else list(claim.get("roles", WORKFLOWS))
    yield from product(workflows, [task for task in results.grid.tasks if task == claim.get("task", task)])


def numbers_of(
    results: Results, claim: dict, policies: tuple[str, ...], changed: dict[str, object], question: engine.Question
) -> pd.DataFrame:
    """Return one number per run of a claim's cells in a regime. A comparison of all cells has its policy as `arm`.

    `effect_sizes` reads three numbers of each run, in the column `metric`; `monitor` also reads whether a run ends fallen.
    """
    kind = claim.get("comparison", "")
    minus = (claim | READ_BY.get(kind, {})).get("minus", PAIRED_WITH.get(claim.get("pattern", ""), "none"))
    parts = []
    for place, policy in product(cells_of(results, claim), policies):
        workflow, task = place
        arm = {place: results.runs_of(workflow, policy, task, **changed)}
        partner = {"single": "single", "sp": workflow}.get(minus)
        others = (
            {place: results.runs_of(partner, "sp", task, **changed)} if partner else arm if minus == "base" else None
        )
        if kind == "effect_sizes":
            read = [
                arms.numbers_of(MEASURES[name], arm, others).assign(arm=policy, metric=name) for name in STANDARDISED
            ]
            parts.append(pd.concat(read).sort_index(kind="stable"))  # the numbers of one run stand together
            continue
        numbers = question.numbers(arm, others)
        if kind == "monitor":
            numbers["fallen"] = arms.numbers_of(MEASURES["falls"], arm)["value"].astype(bool)
        parts.append(numbers.assign(arm=policy) if kind else numbers)
    return pd.concat(parts, ignore_index=True) if parts else question.numbers({}, None)


# ---- its verdict


def judged(
    results: Results, claim: dict, policies: tuple[str, ...], changed: dict[str, object]
) -> tuple[str, str, list[dict]]:
    """Return a claim's verdict in a regime, its numbers as text, and the number of every run."""
    if "verdict" in claim:
        return VERDICT_OF.get(claim["verdict"], claim["verdict"]), claim["because"], [{}]
    question = question_of(claim)
    numbers = numbers_of(results, claim, policies, changed, question)
    (answer,) = engine.judged(question, [numbers])
    if "minus" in numbers:
        numbers = numbers.assign(value=numbers["value"] - numbers["minus"]).drop(columns="minus")
    return *in_words(answer, question), numbers.to_dict("records")


def in_words(answer: engine.Answer, question: engine.Question) -> tuple[str, str]:
    """Return the verdict and its numbers as text; dashes where there are no runs, or too few."""
    if answer.verdict in (*NO_NUMBERS, MISSING) and not answer.text:
        return MISSING, MISSING
    if answer.text:
        return answer.verdict, answer.text
    mean, low, high, *_, n = answer.interval
    if question.estimate == "share":
        return answer.verdict, f"{round(mean * n)} of {n} runs [{100 * low:.0f}, {100 * high:.0f}] %"
    mean_text, low_text, high_text = (formatted(value, question.measure.unit) for value in (mean, low, high))
    text = f"{mean_text}{'' if math.isnan(low) else f' [{low_text}, {high_text}]'}, {n} {answer.unit}"
    if answer.verdict == UNDECIDED and question.measure.has_margin and answer.unit == "seeds" and answer.interval.sd:
        text += f", {seeds_needed(answer.interval.sd, RULES['effects'][0])} for 5 points"
    return answer.verdict, text


def arms_of(claim: dict) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the label in the table and the policies whose runs are read, for each verdict on a claim."""
    if claim.get("minus") == "sp" or claim.get("comparison") == "effect_sizes":
        yield IP_MINUS_SP, ("ip",)
    elif claim.get("comparison") == "variance" or "verdict" in claim:
        yield BOTH, POLICIES
    else:
        yield from ((policy, (policy,)) for policy in claim.get("policies", POLICIES))


CAPTION = " In the table, a claim that holds has the verdict yes, and one that fails no."


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
    caption = DECLARED["caption"].format(**facts) + CAPTION
    return Table("claims", "The paper's claims against these runs", caption, pd.DataFrame(shown), pd.DataFrame(values))
