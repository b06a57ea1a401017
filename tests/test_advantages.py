"""Group-relative advantages against numbers worked out by hand, and against TRL's own."""

import pytest
from conftest import make_episodes

from multirole.core.advantages import group_advantages
from multirole.experiment.cell import Cell


def test_two_groups_by_hand():
    # rewards 1, 0, 0, 0: mean 0.25, sample std 0.5; rewards 1, 1: mean 1, std 0; a group of one keeps its reward
    values = group_advantages([1, 0, 0, 0, 1, 1, 0.5], ["a"] * 4 + ["b"] * 2 + ["c"], eps=0)[:4]
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert group_advantages([1, 1, 0.5], ["b", "b", "c"]) == pytest.approx([0, 0, 0.5])


@pytest.mark.parametrize(("group", "n_values"), [("episode", 8), ("slot", 8), ("role", 8)])
def test_every_turn_of_an_episode_shares_its_advantage_when_each_speaks_once(make_trainer, group, n_values):
    cell = Cell("voting", "ip", advantage_group=group)
    rows = make_trainer(cell)._rows(make_episodes(cell, n_problems=1))
    per_episode = {(row.episode.index, round(row.advantage, 9)) for row in rows if row.turn.role == "generator"}
    assert len(per_episode) == n_values


def test_pooled_groups_weigh_long_episodes_more(make_trainer):
    """Released code: all turns of a role form one group, so an episode with two rounds counts twice in the mean."""
    cell = Cell("eval_opt", "ip", advantage_group="role")
    trainer, episodes = make_trainer(cell), make_episodes(cell, n_problems=1, rounds=2)
    for i, episode in enumerate(episodes):
        object.__setattr__(episode.reward, "value", 1.0 if i < 4 else 0.0)
        if i < 4:
            episode.turns = episode.turns[:2]
    rows = [row for row in trainer._rows(episodes) if row.turn.role == "generator"]  # 4 rows of 1, 8 rows of 0
    std = (4 * (2 / 3) ** 2 + 8 * (1 / 3) ** 2) / 11
    assert rows[0].advantage == pytest.approx((2 / 3) / std**0.5, rel=1e-4)
    assert rows[-1].advantage == pytest.approx((-1 / 3) / std**0.5, rel=1e-4)
