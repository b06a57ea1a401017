"""The rules that decide a claim, by hand; the mechanisms' tables against plain pandas; one-step twins are found and paired."""

import shutil
from dataclasses import replace

import pandas as pd
import pytest
from paper_results import make_results

from multirole.paper import mechanisms
from multirole.paper.claims import every, most
from multirole.paper.matched import matched_updates
from multirole.paper.results import Key, Results
from multirole.paper.statistics import Interval, first_fall
from multirole.record import folder_of, write_done


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


def test_twins_are_paired_by_seed_and_problem(tmp_path):
    folder = make_results(tmp_path)
    results = Results(folder)
    assert matched_updates(results).shown.empty
    for one in results.grid.cells():
        if one.workflow == "voting" and one.task == "math" and one.policy_name == "sp" and one.seed < 2:
            twin = folder_of(replace(one, updates="one"), folder.parent)
            shutil.copytree(folder_of(one, folder.parent), twin)
            table = pd.read_parquet(twin / "eval.parquet")
            table.loc[table["step"] == table["step"].max(), "correct"] = True
            table.to_parquet(twin / "eval.parquet")
            write_done(twin)
    values = matched_updates(results).values.set_index("measure")["mean"]
    ends = [results.correct(Key("voting", "sp", "math", seed)).iloc[:, -1].mean() for seed in (0, 1)]
    assert values["end, one step"] == 1.0
    assert values["gain at the end"] == pytest.approx(1 - sum(ends) / 2)
