"""The released code's order of rows and its cuts into steps: none drops or repeats a row."""

from trainers import episodes_of

from multirole.update.rows import Row, micro_batches
from multirole.workflows import Voting
from multirole_study.experiment.released_code import mountain, sequential


def make_rows(n_problems: int = 2) -> list[Row]:
    episodes = episodes_of(Voting().roles, n_problems=n_problems)
    return [Row(episode, turn, "shared") for episode in episodes for turn in episode.turns]


def test_batching_neither_drops_nor_repeats_a_row():
    rows = make_rows(5)
    for ordered in (rows, mountain(rows)):
        batches = [micro for batch, _ in sequential(ordered, 48) for micro in micro_batches(batch, 200)]
        assert sorted(id(row) for batch in batches for row in batch) == sorted(id(row) for row in rows)


def test_mini_batch_sizes_by_hand():
    rows = list(range(20))  # any objects
    assert [(len(b), d) for b, d in sequential(rows, 8)] == [(8, 8), (8, 8), (4, 8)]
    assert sequential([], 8) == []


def test_the_mountain_runs_short_long_short():
    lengths = [row.length for row in mountain(make_rows())]
    top = lengths.index(max(lengths))
    assert lengths[: top + 1] == sorted(lengths[: top + 1]) and lengths[top:] == sorted(lengths[top:], reverse=True)
