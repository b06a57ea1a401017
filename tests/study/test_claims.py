"""Verdicts by the rules of `claims.yaml`, by hand and from the made-up grid; falls; role skill by hand."""

import math

import pandas as pd
import pytest

from multirole.roles.skill import role_skills
from multirole.workflows import EvalOpt, OrchWorkers, Voting
from multirole_study.compare.answers import judged
from multirole_study.compare.estimates import ESTIMATES
from multirole_study.compare.measures import MEASURES, climb
from multirole_study.falls import first_fall
from multirole_study.paper.captions import sentences
from multirole_study.paper.claims import DECLARED, Falls, claims, in_words, question_of, readings, section_order
from multirole_study.paper.results import Results


@pytest.fixture(scope="module")
def results(grid_results):
    return Results(grid_results)


@pytest.fixture(scope="module")
def table(results):
    return claims(results, sentences(results))


def numbers(*cells):
    """The numbers of claims: for each cell, a value per seed."""
    rows = [
        {"workflow": f"w{i}", "task": "math", "seed": seed, "value": value}
        for i, values in enumerate(cells)
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=["workflow", "task", "seed", "value"])


def judged_effect(values, claim):
    """The verdict and the text of a claim of differences."""
    question = question_of(claim)
    return in_words(*judged(question, [values]), question)


def judged_pattern(shown, runs, claim):
    """The verdict and the text of a claim of single runs, of which some show the pattern."""
    question = question_of({"pattern": "falls"} | claim)
    return in_words(*judged(question, [numbers([1.0] * shown + [0.0] * (runs - shown))]), question)


def test_effects_have_the_cell_as_unit_where_seeds_are_few():
    about = {"effect": "peak", "minus": "base"}
    assert judged_effect(numbers([0.1], [0.2], [0.3]), about) == ("undecided", "+20.0 [−4.8, +44.8], 3 cells")
    assert judged_effect(numbers([0.1, 0.3], [0.21], [0.19]), about)[0] == "yes"
    assert judged_effect(numbers([0.001], [0.002], [0.003]), about)[0] == "equivalent"
    assert judged_effect(numbers([0.1], [0.2]), about) == ("–", "–")


def test_effects_have_the_seed_as_unit_where_five_have_every_cell():
    about = {"effect": "peak", "minus": "sp"}
    values = [0.1, 0.0, 0.2, -0.1, 0.05]  # mean .05, standard deviation .1118, t interval +- .1388
    decision, text = judged_effect(numbers(values, values), about)
    assert (decision, text) == ("undecided", "+5.0 [−8.9, +18.9], 5 seeds, 42 for 5 points")
    assert judged_effect(numbers(values, values[:4]), about) == ("–", "–")  # four whole seeds, two cells
    assert judged_effect(numbers([0.11, 0.1, 0.12, 0.1, 0.11]), about)[0] == "yes"


def test_none_of_three_runs_does_not_decide():
    assert judged_pattern(0, 3, {}) == ("undecided", "0 of 3 runs [0, 71] %")
    assert judged_pattern(3, 3, {})[0] == "undecided"  # 29 to 100 %
    assert judged_pattern(6, 6, {})[0] == "yes" and judged_pattern(0, 6, {})[0] == "no"
    assert judged_pattern(2, 6, {"share": "exists"})[0] == "undecided"
    assert judged_pattern(3, 6, {"share": "exists"})[0] == "yes"


def test_a_fall_is_five_points_below_the_best_before_it_recovered_or_not():
    steps = [0, 10, 20, 30]
    assert first_fall(pd.Series([0.4, 0.9, 0.84, 0.95], steps)) == (10, 20, False)
    assert first_fall(pd.Series([0.4, 0.9, 0.84, 0.85], steps)) == (10, 20, True)
    assert first_fall(pd.Series([0.4, 0.9, 0.86, 0.95], steps)) is None
    assert first_fall(pd.Series([0.4, 0.3, 0.9, 0.9], steps)) == (0, 10, False)
    exactly = pd.Series([0.4, 0.9, 0.95, 0.9], steps)  # five points, in binary a little less
    assert first_fall(exactly) == (20, 30, True)
    assert first_fall(pd.Series([0.4], [0])) is None


def test_every_claim_has_a_verdict_in_every_regime_and_policy(table):
    every = [*DECLARED["claims"], *DECLARED["added"]]
    assert set(table.shown["the paper's claim"]) == {about["claim"] for about in every}
    assert set(table.values["claim"]) == {about["name"] for about in [*every, *DECLARED["looked_at_afterwards"]]}
    assert set(table.shown["rule"]) == {"declared", "looked at afterwards"}
    assert {section_order(section) for section in table.shown["sec"]} >= {
        (0,),
        (4, 1),
        (5,),
        (5, 2),
        (100, 6, 2),
        (100, 8),
    }
    assert set(DECLARED["regimes"]) <= set(table.shown)
    is_judged = ~table.shown["stress, one step"].str.startswith(
        ("**not measured**", "**yes** (vacuous: by construction)")
    )
    assert (table.shown.loc[is_judged, "stress, one step"] == "–").all()  # the fixture holds none


def test_a_rule_names_one_test_and_whether_it_was_written_after_reading_results():
    ways = {"effect", "pattern", "comparison", "verdict"}
    for about, rule in readings():
        assert len(ways & set(about)) == 1, about["name"]
        assert rule == "declared" or about["read"] in (
            "no",
            "in part",
            "yes",
            "at the preset's rate",
            "under stress",
            "other alarms",
        )
    for about, _ in readings():
        if "comparison" in about:
            assert about["comparison"] in ESTIMATES
        elif "verdict" not in about:
            given = set(about) | ({"role"} if "roles" in about else set())
            assert set(question_of(about).measure.required) <= given, about["name"]


def test_sections_follow_the_paper():
    sections = ["A.8", "5", "abstract, 4.2", "5.2, A.4", "A.6.2", "4.1"]
    assert sorted(sections, key=section_order) == ["abstract, 4.2", "4.1", "5", "5.2, A.4", "A.6.2", "A.8"]


def test_a_rule_may_turn_a_difference_around_raise_its_bound_or_ask_for_equality():
    half = [0.4, 0.5, 0.6, 0.5, 0.5]  # mean .5, standard deviation .0707, t interval +- .0878
    about = {"effect": "peak", "minus": "sp"}
    assert judged_effect(numbers(half), about | {"sign": -1}) == ("no", "+50.0 [+41.2, +58.8], 5 seeds")
    assert judged_effect(numbers(half), {"effect": "grad_share", "at": "dominant"})[0] == "undecided"  # .5 lies within
    assert judged_effect(numbers([x + 0.1 for x in half]), {"effect": "grad_share", "at": "dominant"})[0] == "yes"


def test_a_cost_is_compared_in_logarithms_and_a_match_may_lie_three_points_below():
    """The bound of costs is ln 1.1 = .0953."""
    costs = {"effect": "cpu", "within": "costs"}
    assert judged_effect(numbers([0.11, 0.12, 0.13, 0.12, 0.12]), costs)[0] == "no"
    assert judged_effect(numbers([0.07, 0.08, 0.09, 0.08, 0.08]), costs)[0] == "yes"
    matched = {"effect": "peak", "is_match_enough": True}
    assert judged_effect(numbers([-0.01, 0.0, 0.01, 0.0, -0.005]), matched)[0] == "yes"


def test_a_claim_about_a_minority_has_two_bounds():
    about = {"share": "exists", "at_most": "usually"}

    def of(shown, count):
        return judged_pattern(shown, count, about)[0]

    assert of(20, 100) == "yes"  # 13 to 29 %
    assert of(80, 100) == "no" and of(0, 100) == "no"  # most runs, and none
    assert of(50, 100) == "undecided" and of(2, 10) == "undecided"


def test_claims_are_made_of_the_runs(results, table):
    """The fixture's Voting-IP falls on math, in every seed."""
    values = table.values.query("regime == 'paper'")
    by_cell = ["workflow", "task"]
    falls = values[values["claim"] == "ip_falls_more_often"].groupby(by_cell)["value"].mean()
    ends = {policy: [first_fall(results.runs_of("voting", policy, "math")[seed].accuracy) for seed in (0, 1, 2)]
            for policy in ("ip", "sp")}  # fmt: skip
    share = {policy: sum(fall is not None and fall.is_terminal for fall in of) / 3 for policy, of in ends.items()}
    assert falls["voting", "math"] == pytest.approx(share["ip"] - share["sp"]) and share["ip"] == 1.0
    gain = values.query("claim == 'improves_over_base' and policy == 'sp' and workflow == 'voting' and task == 'code'")[
        "value"
    ]
    curves = [results.runs_of("voting", "sp", "code")[seed].accuracy for seed in (0, 1, 2)]
    assert gain.mean() == pytest.approx(sum(curve.iloc[1:].max() - curve[0] for curve in curves) / 3)
    climbs = values[values["claim"] == "voting_ip_generator_climbs"]
    roles = (
        results.runs_of("voting", "ip", "math")[0].table("roles").query("role == 'generator'").set_index("iteration")
    )
    assert climb(roles["chi2_after"]) < 3 and climbs["value"].sum() == 0  # falls, but does not climb enough


class Lengths:
    """A run with these mean lengths of two roles by iteration."""

    def __init__(self, ends_fallen=False, **lengths):
        self.lengths, self.ends_fallen = lengths, ends_fallen

    def series(self, metric, role):
        return pd.Series([10.0] * 5 + [self.lengths[role]] * 5 + [self.lengths["later"]] * 5, dtype=float)


def test_the_declared_rule_lets_the_voters_follow_and_the_stricter_readings_do_not():
    def read(run):
        return [MEASURES[name].compute(run, "judge", "voter") for name in ("grows", "grows_alone", "grows_and_falls")]

    assert read(Lengths(judge=20, voter=10, later=20)) == [True, False, False]  # the voters follow
    assert read(Lengths(judge=20, voter=10, later=10)) == [True, True, False]
    assert read(Lengths(judge=20, voter=10, later=20, ends_fallen=True)) == [True, False, True]
    assert read(Lengths(judge=20, voter=20, later=20)) == [False, False, False]


def test_a_verdict_that_could_not_have_been_another_is_vacuous():
    claim = {about["name"]: about for about in DECLARED["claims"]}
    none, nearly_all, some = Falls(60, 0, True), Falls(60, 58, False), Falls(60, 47, False)
    assert none.vacuous(claim["ip_falls_back"]) == none.vacuous(claim["orch_sp_escalates"]) == "no run ends in a fall"
    assert nearly_all.vacuous(claim["ip_falls_more_often"]) == "58 of 60 runs end in a fall"
    assert nearly_all.vacuous(claim["orch_ip_descends_sp_plateaus"]) and not nearly_all.vacuous(claim["ip_falls_back"])
    assert none.vacuous(claim["ip_rises_faster"]) == "read by the end of the warm-up"
    assert not any(some.vacuous(about) for about in claim.values())
    added = {about["name"]: about for about in DECLARED["added"]}
    assert none.vacuous(added["sp_plateaus"]) and nearly_all.vacuous(added["sp_plateaus"])
    one_step = Falls(60, 47, False, is_one_step=True)
    assert (
        one_step.vacuous(added["kl_warns"])
        == one_step.vacuous(claim["orch_sp_escalates"])
        == "one step leaves χ² and KL at zero"
    )
    assert not one_step.vacuous(added["chi2_warns"])  # read after the update
    assert not none.vacuous(claim["sp_fails_too"]) and not none.vacuous(claim["voting_sp_aggregator_grows"])


def test_role_skill_by_hand():
    def turn(problem, role, slot, round, outcome, is_right, correct):
        return {"problem": problem, "correct": correct, "role": role, "slot": slot, "round": round, "outcome": outcome,
                "completion_tokens": 10, "turn_correct": is_right}  # fmt: skip

    voting = pd.DataFrame([
        *(turn("a", "generator", slot, 0, "answered", slot == 2, True) for slot in range(3)),  # one of three is right
        turn("a", "aggregator", 0, 0, "3", False, True),
        *(turn("b", "generator", slot, 0, "answered", slot != 0, False) for slot in range(3)),  # two of three are
        turn("b", "aggregator", 0, 0, "unparsed", False, False),
        *(turn("c", "generator", slot, 0, "answered", True, True) for slot in range(3)),  # nothing to select
        turn("c", "aggregator", 0, 0, "1", False, True),
    ])  # fmt: skip
    skills = {row["measure"]: row for row in role_skills(voting, Voting.structure)}
    assert (skills["selects"]["skill"], skills["selects"]["trivial"], skills["selects"]["cases"]) == (0.5, 0.5, 2)
    assert skills["selects"]["valid"] == pytest.approx(2 / 3)
    assert skills["solves"]["skill"] == pytest.approx(6 / 9)
    assert (skills["workflow"]["skill"], skills["workflow"]["trivial"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))

    loop = pd.DataFrame([
        turn("a", "generator", 0, 0, "answered", False, True), turn("a", "evaluator", 0, 0, "incorrect", None, True),
        turn("a", "generator", 0, 1, "answered", True, True), turn("a", "evaluator", 0, 1, "incorrect", None, True),
        turn("b", "generator", 0, 0, "answered", False, False), turn("b", "evaluator", 0, 0, "correct", None, False),
        turn("c", "generator", 0, 0, "answered", True, True), turn("c", "evaluator", 0, 0, "correct", None, True),
    ])  # fmt: skip
    skills = {row["measure"]: row for row in role_skills(loop, EvalOpt.structure)}
    assert (skills["judges"]["skill"], skills["judges"]["cases"]) == (0.5, 4)  # 1 of 2 right drafts, 1 of 2 wrong ones
    assert (
        skills["repairs"]["skill"] == 1.0
        and skills["repairs"]["cases"] == 1
        and math.isnan(skills["repairs"]["trivial"])
    )

    plan = pd.DataFrame([
        turn("a", "orchestrator", 0, 0, "strategies", None, True),
        *(turn("a", "worker", slot, 0, "answered", slot == 0, True) for slot in range(2)),
        turn("a", "synthesizer", 0, 0, "answered", True, True),
    ])  # fmt: skip
    skills = {row["measure"]: (row["skill"], row["trivial"]) for row in role_skills(plan, OrchWorkers.structure)}
    assert skills["plans"] == (1.0, 0.5) and skills["merges"] == (1.0, 0.5) and skills["workflow"] == (1.0, 1.0)
