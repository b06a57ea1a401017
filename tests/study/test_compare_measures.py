"""Measures of runs, against numbers worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from paper_results import without_iterations

from multirole_study.compare import measures
from multirole_study.compare.measures import MEASURES
from multirole_study.experiment.cell import Cell

ITERATIONS = range(1, 21)


class Made:
    """A run with these series by (metric, role), a constant 1 for all others, and these accuracies by evaluated step."""

    def __init__(self, accuracy=(0.4, 0.5, 0.5), policy=("judge", "voter"), **series):
        self.accuracy = pd.Series(accuracy, index=[0, 10, 20][: len(accuracy)], dtype=float)
        self.made, self.cell = series, SimpleNamespace(policy={role: role for role in policy})
        self.ends_fallen = self.accuracy.iloc[-1] <= self.accuracy.max() - 0.05 + 1e-9

    def series(self, metric, role=None):
        return pd.Series(self.made.get(f"{metric}_{role}", [1.0] * 20), ITERATIONS, dtype=float)

    def at(self, name):
        return self.accuracy.max() if name == "peak" else self.accuracy.iloc[-1]

    def table(self, name):
        if name == "ledger":
            return pd.DataFrame({"grad_norm": [1.0, 8.0, 2.0]})
        rows = [
            pd.DataFrame({"iteration": ITERATIONS, "role": role, "tokens": self.series("tokens", role).to_numpy(),
                          "entropy": self.series("entropy", role).to_numpy()})
            for role in self.cell.policy
        ]  # fmt: skip
        return pd.concat(rows)


def steps(*levels):
    """Return a series of twenty iterations with one equal part per level."""
    return list(np.repeat(levels, 20 // len(levels)))


def test_agreement_counts_pairs_of_wrong_answers_to_one_problem():
    rows = [("a", "5", False), ("a", "5", False), ("a", "6", False),  # one pair of three agrees
            ("b", "7", True), ("b", "8", False), ("b", "8", False),  # one of one
            ("c", "1", True), ("c", "1", True), ("c", "2", False)]  # fmt: skip  # no pair
    answers = pd.DataFrame(rows, columns=["problem", "answer", "is_right"])
    assert measures.wrong_agreement(answers) == 2 / 4
    assert math.isnan(measures.wrong_agreement(answers[answers["problem"] == "c"]))
    assert math.isnan(measures.wrong_agreement(answers.iloc[:0]))


def test_the_answers_of_slots_are_graded_by_the_task():
    cell = Cell("voting", "ip", task="math", scale="tiny-r", n_validation=4)
    problem, other = cell.make_task().problems("validation", 2)
    said = [f"=1\n\\boxed{{{problem.reference}}}", "\\boxed{999}", "\\boxed{999}", "no box"]
    turns = pd.DataFrame({"step": 0, "problem": [problem.id] * 2 + [other.id] * 2, "role": "generator", "slot": [0, 1, 0, 1],
                          "text": said})  # fmt: skip
    run = SimpleNamespace(cell=cell, table=lambda name, *columns: turns)
    answers = measures.slot_answers(run, "generator", 0)
    assert answers["is_right"].tolist() == [True, False, False]  # a reply without a box has no answer
    assert measures.slot_answers(run, "generator", 5).empty and measures.slot_answers(run, "aggregator", 0).empty


def test_a_plateau_begins_within_three_points_of_the_peak():
    assert measures.plateau(Made((0.4, 0.68, 0.7))) == 10
    assert measures.plateau(Made((0.4, 0.66, 0.7))) == 20
    assert measures.plateau(Made((0.9, 0.5, 0.7))) == 20  # the untrained model does not count


def test_entropy_is_weighted_by_tokens_and_kept_if_half_is_left():
    run = Made(entropy_judge=steps(1.0, 0.2), entropy_voter=steps(1.0, 0.7), tokens_voter=[3.0] * 20)
    assert measures.entropy_series(run).iloc[-1] == pytest.approx((0.2 + 3 * 0.7) / 4)
    assert measures.keeps_entropy(run)
    assert not measures.keeps_entropy(Made(entropy_judge=steps(1.0, 0.2), entropy_voter=steps(1.0, 0.6)))
    assert MEASURES["entropy"].of(run) == pytest.approx(1 - (0.2 + 3 * 0.7) / 4)


def test_a_role_that_is_not_trained_in_an_iteration_has_no_weight_in_a_mean():
    """The two roles take turns, and each has the entropy 1 where it is trained."""
    judge, voter = ([1.0, math.nan] * 10, [math.nan, 1.0] * 10)
    run = Made(entropy_judge=judge, entropy_voter=voter, tokens_voter=[9.0] * 20)
    assert measures.entropy_series(run).tolist() == [1.0] * 20 and measures.keeps_entropy(run)
    partner = measures.entropy_series(Made(entropy_voter=[math.nan] * 20, tokens_voter=[9.0] * 20))
    assert partner.tolist() == [1.0] * 20


def test_a_run_that_diverged_before_its_first_evaluation_has_no_peak():
    run = Made((0.4,))
    assert math.isnan(measures.first(run)) and math.isnan(measures.plateau(run))
    run.correct = pd.DataFrame({0: [1.0, 0.0]})
    assert math.isnan(measures.split_half_peak(run))


@pytest.mark.parametrize("name", MEASURES)
def test_a_run_that_diverged_in_its_first_iteration_has_its_validation_alone(name, grid_results, tmp_path):
    """The last of these seeds; the other runs give the tables their columns."""
    run = without_iterations(grid_results, tmp_path, "voting", "ip", "math", 2)
    options = {"role": "aggregator", "metric": "length_mean", "flat": "generator", "other": run}
    value = MEASURES[name].of(run, **options)
    assert MEASURES[name].of_validation or math.isnan(value)
    if name in ("base", "end"):
        assert value == run.accuracy[0]


def test_a_measure_that_returns_a_bool_is_a_pattern():
    patterns = {name for name, measure in MEASURES.items() if measure.is_pattern}
    assert {"falls", "late", "grows", "only_ip_falls"} < patterns and not {"peak", "chi2", "change"} & patterns


def test_other_roles_may_change_after_a_role_has_grown_but_not_before():
    longer = steps(10, 10, 20, 20)
    quiet = Made(length_mean_judge=longer, jaccard_voter=steps(0.4, 0.4, 0.4, 0.9))
    assert measures.grows_unseen(quiet, "judge", "voter")
    assert not measures.grows_unseen(Made(length_mean_judge=longer, jaccard_voter=steps(0.4, 0.9)), "judge", "voter")
    assert not measures.grows_unseen(Made(), "judge", "voter")  # never longer


def test_shapes_of_lengths_and_shares():
    near = Made(length_mean_judge=steps(10, 10, 40, 40), length_mean_voter=[40] * 20)
    assert measures.approaches(near, "judge", "voter")
    assert not measures.approaches(
        Made(length_mean_judge=steps(10, 10, 19, 19), length_mean_voter=[40] * 20), "judge", "voter"
    )
    assert measures.approaches(
        Made(length_mean_judge=steps(10, 10, 20, 20), length_mean_voter=[40] * 20), "judge", "voter"
    )  # ln 2 of ln 4
    assert measures.even_lengths(Made(length_mean_judge=[10] * 20, length_mean_voter=[15] * 20), "judge")
    assert not measures.even_lengths(Made(length_mean_judge=[10] * 20, length_mean_voter=[16] * 20), "judge")
    assert measures.drops(Made(terse_rate_judge=steps(0.9, 0.6)), "judge", "terse_rate")
    assert not measures.drops(Made(terse_rate_judge=steps(0.9, 0.7)), "judge", "terse_rate")


def test_a_fall_soon_after_a_peak_and_a_fall_that_no_metric_shows():
    fallen = (0.4, 0.7, 0.6)  # it falls at 20
    at_12 = [1.0] * 11 + [9.0] + [1.0] * 8
    assert measures.soon_falls(Made(fallen, chi2_after_voter=at_12), "voter", "chi2_after")
    assert not measures.soon_falls(
        Made(fallen, chi2_after_voter=at_12[3:] + [1.0] * 3), "voter", "chi2_after"
    )  # peaks at 9
    assert not measures.soon_falls(Made(chi2_after_voter=at_12), "voter", "chi2_after")
    assert measures.unseen_falls(Made(fallen)) and not measures.unseen_falls(Made())
    assert not measures.unseen_falls(Made(fallen, perplexity_judge=steps(1, 1, 4, 4)))
    late = Made(fallen, perplexity_judge=[1.0] * 19 + [99.0])
    assert measures.unseen_falls(late)  # rises at 20, with the fall
    assert measures.unseen_drift(Made(chi2_voter=steps(1, 4))) and not measures.unseen_drift(Made())
    assert not measures.unseen_drift(Made(fallen, chi2_voter=steps(1, 4)))


def test_a_rise_beyond_the_norm_is_of_both_metrics():
    both = {"chi2_after_voter": steps(1, 3), "perplexity_voter": steps(1, 3)}
    assert measures.rises_beyond_norm(Made(**both, grad_norm_voter=steps(1, 2)), "voter")
    assert not measures.rises_beyond_norm(Made(**both, grad_norm_voter=steps(1, 4)), "voter")
    assert not measures.rises_beyond_norm(Made(chi2_after_voter=steps(1, 3), grad_norm_voter=steps(1, 2)), "voter")


def test_an_alarm_counts_before_a_fall_or_at_any_time_without_one():
    length = Made((0.4, 0.7, 0.6), length_mean_judge=steps(10, 16))
    assert next(iter(measures.alarms(length.series("length_mean", "judge"), "length_mean"))) == 13  # 3 iterations of 16
    assert measures.alarm(length, "length_mean", "judge") and not measures.alarm(length, "length_mean", "voter")
    late = Made((0.4, 0.7, 0.6), k3_kl_judge=[1.0] * 17 + [9.0] * 3)  # the mean of 18 to 20 is the first above 3 at 18
    assert measures.alarm(late, "k3_kl", "judge")
    later = Made((0.4, 0.7, 0.6), k3_kl_judge=[1.0] * 19 + [9.0])
    assert not measures.alarm(later, "k3_kl", "judge")  # at 20, with the fall
    assert measures.alarm(Made(k3_kl_judge=[1.0] * 19 + [9.0]), "k3_kl", "judge")
    assert measures.alarm(Made(terse_rate_judge=steps(0.9, 0.6)), "terse_rate", "judge")


def test_measures_of_a_run():
    run = Made((0.4, 0.7, 0.6))
    values = {
        name: MEASURES[name].of(run)
        for name in ("base", "first", "peak", "end", "gain", "fall", "peak_to_end", "falls")
    }
    assert values == pytest.approx(
        {"base": 0.4, "first": 0.7, "peak": 0.7, "end": 0.6, "gain": 0.3, "fall": 0.1, "peak_to_end": 0.1, "falls": 1.0}
    )
    assert MEASURES["grad_norm"].of(run) == pytest.approx(math.log(8))
    assert MEASURES["cpu"].of(Made(cpu_seconds_None=[2.0] * 20)) == pytest.approx(math.log(40))


def test_measures_of_a_role():
    series = {"coherence_judge": [0.05] * 19 + [0.9], "grad_share_judge": [0.7] * 19 + [0.1], "token_mass_judge": [0.2] * 20,
              "chi2_after_judge": steps(1, 4), "chi2_judge": steps(1, 9)}  # fmt: skip
    run = Made(**series)
    values = {name: MEASURES[name].of(run, role="judge") for name in ("coherence", "grad_share", "chi2_after")}
    assert values == pytest.approx({"coherence": 0.05, "grad_share": 0.7, "chi2_after": math.log(4)})
    grown = {"length_mean_judge": steps(10, 20)}
    with_fall = measures.falls_with_grown_judge
    assert with_fall(Made((0.4, 0.7, 0.6), **grown), "judge") == 1.0
    assert with_fall(Made(**grown), "judge") == 0.0 == with_fall(Made((0.4, 0.7, 0.6)), "judge")


def test_agreement_on_wrong_answers_is_the_end_minus_the_start(monkeypatch):
    agreement = {0: 0.25, 20: 1.0}
    monkeypatch.setattr(measures, "slot_answers", lambda run, role, step: step)
    monkeypatch.setattr(measures, "wrong_agreement", agreement.__getitem__)
    assert measures.wrong_agreement_gain(SimpleNamespace(steps={"end": 20}), "voter") == 0.75


def test_a_climb_is_of_sizes_over_the_median_of_the_first_iterations():
    assert measures.climb(pd.Series([-1.0] * 5 + [-4.0] * 3)) == 4
    assert measures.climb(pd.Series([1.0] * 5 + [9.0] + [1.0] * 5)) == pytest.approx(11 / 3)
    assert measures.climb(pd.Series([0.1, 1, 1, 1, 1, 2, 2, 2])) == 2
    assert measures.is_near(0.7, 1.0) and not measures.is_near(0.5, 1.0) and not measures.is_near(1.6, 1.0)


def test_a_role_begins_to_write_code_if_its_share_of_fences_rises():
    assert measures.writes_code(Made(code_fence_rate_judge=steps(0, 0.3)), "judge")
    assert not measures.writes_code(Made(code_fence_rate_judge=steps(0.3, 0)), "judge")


def test_a_climb_counts_with_a_fall_and_beyond_the_other_role():
    fallen, high = (0.4, 0.7, 0.6), steps(1, 4)
    climbs = measures.climbs_and_falls
    assert climbs(Made(fallen, chi2_judge=high), "judge", "chi2")
    assert climbs(Made(fallen, chi2_judge=high), "judge", "chi2", "voter")
    assert not climbs(Made(fallen, chi2_judge=high, chi2_voter=high), "judge", "chi2", "voter")
    assert not climbs(Made(chi2_judge=high), "judge", "chi2") and not climbs(Made(fallen), "judge", "chi2")


def test_patterns_of_falls_that_are_not_there():
    fallen, recovered = (0.4, 0.7, 0.6), (0.4, 0.7, 0.6, 0.7)
    later = Made(fallen, chi2_judge=[1.0] * 19 + [9.0])
    later.accuracy.index = [0, 5, 10]  # the peak of chi2 comes after the fall
    assert not measures.soon_falls(later, "judge", "chi2")
    one = Made(recovered[:3])
    one.accuracy = pd.Series(recovered, index=[0, 5, 10, 20])
    assert not measures.unseen_falls(one)
    assert measures.unseen_drift(Made(length_mean_judge=steps(10, 20)))
    only_ip = measures.only_ip_falls
    answers = [only_ip(Made(a), Made(b)) for a in (fallen, (0.4, 0.7)) for b in (fallen, (0.4, 0.7))]
    assert answers == [False, True, False, False]


def test_a_slip_is_three_points():
    single = SimpleNamespace(at=lambda name: 0.70)
    slips = measures.slips_below_single
    assert slips(SimpleNamespace(at=lambda name: 0.67), single)
    assert not slips(SimpleNamespace(at=lambda name: 0.68), single)
