"""The rules that decide a claim, by hand; the mechanisms' tables against plain pandas."""

import pandas as pd
import pytest
from paper_results import make_results

from multirole.paper import mechanisms
from multirole.paper.claims import every, most
from multirole.paper.results import Key, Results
from multirole.paper.statistics import Interval, first_fall


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(make_results(tmp_path_factory.mktemp("results")))


def cell(low: float, high: float, seeds: int = 3) -> Interval:
    return Interval((low + high) / 2, low, high, seeds, 512)


def test_most_cells_by_hand():
    above, below, open_ = cell(0.01, 0.1), cell(-0.1, -0.01), cell(-0.1, 0.1)
    assert most([above, above, open_]) == "holds"
    assert most([below, below, above]) == "fails"
    assert most([above, open_, open_]) == "undecided" and most([open_, open_, below]) == "undecided"
    assert most([open_, open_, below], is_open_for=True) == "holds"
    assert most([cell(0.01, 0.1, seeds=1)] * 3) == "undecided" and most([]) == "undecided"


def test_every_seed_by_hand():
    assert [every(seeds) for seeds in ([True] * 3, [False] * 3, [True, False, True], [True, True])] == [
        "holds", "fails", "undecided", "undecided",
    ]  # fmt: skip


def test_a_fall_is_five_points_below_the_best_before_it_recovered_or_not():
    steps = [0, 10, 20, 30]
    assert first_fall(pd.Series([0.4, 0.9, 0.84, 0.95], steps)) == (10, 20)
    assert first_fall(pd.Series([0.4, 0.9, 0.86, 0.95], steps)) is None
    assert first_fall(pd.Series([0.4, 0.3, 0.9, 0.9], steps)) == (0, 10)


def test_tables_agree_with_plain_pandas(results):
    key = Key("voting", "sp", "math", 0)
    roles = pd.read_parquet(results.runs[key] / "roles.parquet")
    generator = roles[roles["role"] == "generator"]
    found = mechanisms.coherence(results).set_index([*Key._fields, "role"]).loc[(*key, "generator")]
    assert found["all"] == pytest.approx(generator["coherence"].mean())
    owned = mechanisms.ownership(results).set_index([*Key._fields, "role"]).loc[(*key, "generator")]
    assert owned["tokens"] == pytest.approx(generator["token_mass"].mean())
    assert not (mechanisms.ownership(results)["workflow"] == "single").any()
    ledger = pd.read_parquet(results.runs[key] / "ledger.parquet")
    steps = mechanisms.steps_and_falls(results).set_index(list(Key._fields)).loc[tuple(key)]
    per_iteration = ledger.groupby(["adapter", "iteration"]).size().groupby("adapter").mean().max()
    assert steps["steps_per_iteration"] == pytest.approx(per_iteration)
    accuracy = results.correct(key).mean().iloc[1:]
    assert steps["fall"] == pytest.approx(accuracy.iloc[-1] - accuracy.max())
