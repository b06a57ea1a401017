"""Estimates over all cells, against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from multirole_study.compare.estimates import (
    ESTIMATES,
    complete,
    levels_of,
    shares_of_variance,
)
from multirole_study.compare.verdicts import Rule, decide


def judge(kind, numbers, **options):
    """The verdict on an estimate and its text."""
    estimate = ESTIMATES[kind](numbers, **options)
    return estimate.verdict or decide(estimate.interval, Rule()), estimate.text


def table(function, seeds=6, workflows="abc", tasks=("math", "code"), policies=("ip", "sp")):
    """One number per run: `function(workflow, task, policy, seed)`."""
    rows = [
        (w, t, p, s, function(w, t, p, s)) for w in workflows for t in tasks for p in policies for s in range(seeds)
    ]
    return pd.DataFrame(rows, columns=["workflow", "task", "arm", "seed", "value"])


def test_shares_of_variance_by_hand():
    """Means .1 apart by task, .02 by policy, without noise: sums of squares 24 * .05^2 and 24 * .01^2 of 24 * .0026."""
    made = complete(table(lambda w, t, p, s: 0.1 * (t == "math") + 0.02 * (p == "ip"), seeds=2))
    ours, policy = shares_of_variance(made.to_numpy(), levels_of(made.columns))
    assert ours == pytest.approx(0.0025 / 0.0026) and policy == pytest.approx(0.0001 / 0.0026)


def test_a_factor_without_effect_has_no_share_on_average():
    rng = np.random.default_rng(0)
    factors = levels_of(complete(table(lambda *_: 0.0, seeds=2)).columns)
    shares = np.mean([shares_of_variance(rng.normal(size=(10, 12)), factors) for _ in range(300)], axis=0)
    assert abs(shares).max() < 0.005  # the uncorrected share of five degrees of freedom is 0.042


def test_variance_is_judged_over_seeds():
    noise = np.random.default_rng(1).normal(0, 0.01, 100)
    by_task = judge("variance", table(lambda w, t, p, s: 0.2 * (t == "math") + noise[s + 7 * (w == "a")]))
    assert by_task[0] == "yes" and by_task[1].startswith("workflow and task 1.00, policy −0.00")
    by_policy = judge("variance", table(lambda w, t, p, s: 0.2 * (p == "ip") + noise[s + 7 * (w == "a")]))
    assert by_policy[0] == "no"
    assert judge("variance", table(lambda *_: 0.1, seeds=4))[0] == "–"  # too few seeds


def test_spread_is_the_f_test_of_a_table_with_blocks():
    """Three cells, five seeds; scipy's ANOVA of the residuals of seeds, with the degrees of freedom of a two-way table."""
    values = np.array([[1, 2, 4], [2, 3, 4], [1, 3, 5], [0, 2, 4], [2, 2, 5]], float)
    made = table(lambda w, t, p, s: values[s, "abc".index(w)], seeds=5, tasks=("math",), policies=("ip",))
    means, seeds = values.mean(0), values.mean(1, keepdims=True)
    error = ((values - means - seeds + values.mean()) ** 2).sum() / 8
    ratio = 5 * ((means - values.mean()) ** 2).sum() / 2 / error
    verdict, text = judge("spread", made, within=["task"])
    assert text.startswith(f"F(2, 8) = {ratio:.1f}, p = ") and verdict == "yes"
    only_tasks = table(lambda w, t, p, s: values[s, 0] * (t == "math") + 0.1 * values[s, "abc".index(w)] * 0 + 0.01 * ((s * 7 + ord(w)) % 5), seeds=5,
                       policies=("ip",))  # fmt: skip
    verdict, text = judge("spread", only_tasks, within=["task"])
    assert text.startswith("F(4, 16)") and verdict == "undecided"


def test_a_ranking_changes_if_a_pair_is_decided_both_ways():
    wobble = [0.0, 0.01, -0.01, 0.005, -0.005, 0.0]

    def rank(math_gap, code_gap):
        gaps = {"math": math_gap, "code": code_gap}
        numbers = table(
            lambda w, t, p, s: gaps[t] * (w == "b") + wobble[s] * (w == "b"), workflows="ab", policies=("ip",)
        )
        return judge("ranking", numbers)

    assert rank(0.1, -0.1)[0] == "yes" and rank(0.1, 0.1)[0] == "no"
    assert rank(0.1, 0.001)[0] == "undecided"
    assert "math −10.0*, code +10.0*" in rank(0.1, -0.1)[1]
    assert judge("ranking", table(lambda *_: 0.1, tasks=("math",), policies=("ip",)))[0] == "–"


def test_gain_and_slip_reads_one_workflow_at_a_time():
    wobble = [0.0, 0.01, -0.01, 0.005, -0.005, 0.0]
    slips = table(
        lambda w, t, p, s: (0.1 if t == "math" else -0.1 * (w == "a")) + wobble[s], workflows="ab", policies=("ip",)
    )
    assert judge("gain_and_slip", slips)[0] == "yes"
    assert judge("gain_and_slip", slips.assign(value=slips["value"].abs() + 0.1))[0] == "no"


def test_effect_sizes_compare_standardised_differences():
    rng = np.random.default_rng(2)
    seeds, rows = 10, []
    for name, mean in (("chi2", 5.0), ("grad_norm", 4.0), ("entropy", 0.5)):
        draws = rng.normal(size=seeds)
        draws = mean + (draws - draws.mean()) / draws.std(ddof=1)
        rows += [("a", "math", name, seed, value) for seed, value in enumerate(draws)]
    made = pd.DataFrame(rows, columns=["workflow", "task", "metric", "seed", "value"])
    verdict, text = judge("effect_sizes", made)
    assert verdict == "yes" and text.startswith("χ² 5.00, gradient norm 4.00, entropy 0.50; lead 3.50")
    swapped = made.replace({"metric": {"entropy": "chi2", "chi2": "entropy"}})
    assert judge("effect_sizes", swapped)[0] == "no"


def test_a_monitor_is_judged_against_its_false_alarms():
    def warns(ahead, missed, false, quiet):
        rows = [(1.0, True)] * ahead + [(0.0, True)] * missed + [(1.0, False)] * false + [(0.0, False)] * quiet
        return judge("monitor", pd.DataFrame(rows, columns=["value", "fallen"]))

    verdict, text = warns(9, 1, 1, 9)
    assert verdict == "yes"
    assert text.startswith("ahead of 9 of 10 falls, and in 1 of 10 runs that do not end fallen: +80.0 [")
    assert warns(1, 9, 9, 1)[0] == "no" and warns(5, 5, 5, 5)[0] == "undecided"
    assert warns(5, 5, 0, 0)[0] == "not measured" == warns(0, 0, 5, 5)[0]
