"""The rules that decide a claim, by hand; falls; the mechanisms' tables against plain pandas."""

import pandas as pd
import pytest
from paper_results import make_results

from multirole.diagnostics.falls import first_fall
from multirole.experiment.folders import folder_of
from multirole.paper import mechanisms
from multirole.paper.claims import CLIMBS, DECLARED, RULES, Case, claims, climb, every, most, of_cell
from multirole.paper.results import Key, Results
from multirole.paper.statistics import Interval


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(make_results(tmp_path_factory.mktemp("results")))


def cell(low: float, high: float, seeds: int = 3) -> Case:
    return of_cell(Interval((low + high) / 2, low, high, seeds, 512), "voting", "ip", "math")


def test_most_cells_by_hand():
    above, below, open_ = cell(0.01, 0.1), cell(-0.1, -0.01), cell(-0.1, 0.1)
    assert [case.stands for case in (above, below, open_)] == [1, -1, 0]
    assert most([above, above, open_]) == "holds"
    assert most([below, below, above]) == "fails"
    assert most([above, open_, open_]) == "undecided" and most([open_, open_, below]) == "undecided"
    assert most([open_, open_, below], is_open_for=True) == "holds"
    assert most([cell(0.01, 0.1, seeds=1)] * 3) == "undecided" and most([]) == "undecided"


def test_every_seed_by_hand():
    def runs(*seen: bool) -> list[Case]:
        return [Case(1 if one else -1, Key("voting", "ip", "math", seed), {}) for seed, one in enumerate(seen)]

    assert [every(runs(*seen)) for seen in ([True] * 3, [False] * 3, [True, False, True], [True, True])] == [
        "holds", "fails", "undecided", "undecided",
    ]  # fmt: skip


def test_a_fall_is_five_points_below_the_best_before_it_recovered_or_not():
    steps = [0, 10, 20, 30]
    assert first_fall(pd.Series([0.4, 0.9, 0.84, 0.95], steps)) == (10, 20, False)
    assert first_fall(pd.Series([0.4, 0.9, 0.84, 0.85], steps)) == (10, 20, True)
    assert first_fall(pd.Series([0.4, 0.9, 0.86, 0.95], steps)) is None
    assert first_fall(pd.Series([0.4, 0.3, 0.9, 0.9], steps)) == (0, 10, False)
    assert first_fall(pd.Series([0.4, 0.9, 0.95, 0.9], steps)) == (
        20,
        30,
        True,
    )  # exactly five, in binary a little less
    assert first_fall(pd.Series([0.4], [0])) is None


def test_every_claim_has_a_rule_and_its_cases(results):
    table = claims(results)
    assert table.shown["the paper's claim"].tolist() == [about["claim"] for about in DECLARED["claims"]]
    assert {about["rule"] for about in DECLARED["claims"]} == set(RULES)
    verdicts = table.values.groupby("claim", sort=False)["verdict"].first()
    assert [f"**{verdict}**" for verdict in verdicts] == table.shown["here"].tolist()
    stands = table.values.drop_duplicates(["claim", *Key._fields]).groupby("claim", sort=False)["stands"]
    for name, sign in (("for", 1), ("open", 0), ("against", -1)):
        assert stands.apply(lambda of, sign=sign: (of == sign).sum()).tolist() == table.shown[name].tolist()


def test_the_collapsing_cell_is_found(results):
    """The fixture's Voting-IP collapses on math: its generator's chi2 climbs a little."""
    table = claims(results)
    values = table.values.set_index(["claim", "seed", "number"])["value"]
    roles = pd.read_parquet(
        folder_of(results.grid.cell("voting", "ip", "math", 0), results.folder.parent) / "roles.parquet"
    )
    series = roles[roles["role"] == "generator"].set_index("iteration")["chi2_after"]
    assert values["voting_ip_generator_climbs", 0, "generator"] == pytest.approx(climb(series), rel=1e-5)
    assert (
        climb(series) < CLIMBS and values["voting_ip_generator_climbs", 0, "falls"] == 1
    )  # falls, but does not climb enough
    verdicts = table.values.groupby("claim")["verdict"].first()
    assert verdicts["voting_ip_generator_climbs"] == "fails"


def test_falls_are_counted_by_the_one_definition(results):
    rows = claims(results).values.query("claim == 'sp_fails_too'")
    falls = [first_fall(results.correct(Key(*row[list(Key._fields)])).mean()) for _, row in rows.iterrows()]
    assert rows["value"].tolist() == [fall is not None and fall.is_terminal for fall in falls]
    assert len(rows) == 18


def test_tables_agree_with_plain_pandas(results):
    key = Key("voting", "sp", "math", 0)
    folder = folder_of(results.grid.cell(*key), results.folder.parent)
    roles = pd.read_parquet(folder / "roles.parquet")
    generator = roles[roles["role"] == "generator"]
    found = mechanisms.coherence(results).set_index([*Key._fields, "role"]).loc[(*key, "generator")]
    assert found["all"] == pytest.approx(generator["coherence"].mean())
    owned = mechanisms.ownership(results).set_index([*Key._fields, "role"]).loc[(*key, "generator")]
    assert owned["tokens"] == pytest.approx(generator["token_mass"].mean())
    assert not (mechanisms.ownership(results)["workflow"] == "single").any()
    ledger = pd.read_parquet(folder / "ledger.parquet")
    steps = mechanisms.steps_and_falls(results).set_index(list(Key._fields)).loc[tuple(key)]
    per_iteration = ledger.groupby(["adapter", "iteration"]).size().groupby("adapter").mean().max()
    assert steps["steps_per_iteration"] == pytest.approx(per_iteration)
    accuracy = results.correct(key).mean().iloc[1:]
    assert steps["end"] == pytest.approx(accuracy.iloc[-1] - accuracy.max())


def test_the_mechanisms_are_drawn(results):
    for draw in (
        mechanisms.plot_coherence, mechanisms.plot_ownership, mechanisms.plot_steps_and_falls, mechanisms.plot_before_the_fall,
    ):  # fmt: skip
        assert draw(results).axes
    before = mechanisms.before_the_fall(results, ["grad_norm"])
    key = Key("voting", "ip", "math", 0)
    mine = before[(before[list(Key._fields)] == list(key)).all(axis=1) & (before["role"] == "generator")].set_index(
        "at"
    )
    fall = first_fall(results.correct(key).mean())
    rows = results.of_run("roles", key).query("role == 'generator'").set_index("iteration")
    assert mine.loc[2, "grad_norm"] == rows.loc[fall.before + 2, "grad_norm"]
    assert before["at"].between(-30, 30).all()
