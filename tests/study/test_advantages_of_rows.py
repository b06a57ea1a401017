"""Advantages of the released code, which compares rows of a role or slot, against the definition and numbers worked out by hand."""

import statistics
from types import SimpleNamespace

import pytest
from cells import make_episodes
from trainers import episodes_of, rows_of

from multirole.credit.estimators.agent import AgentCredit
from multirole.types import Episode, Reward, Workflow
from multirole.update.rows import Row
from multirole.workflows import EvalOpt, Voting
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.released_code import SlotCredit


def compared(workflow: Workflow, episodes: list[Episode], n_episodes: int, by_slot: bool = False) -> list[Row]:
    """The rows of the episodes with the advantages among the rows of their role, or of their role and slot."""
    run = SimpleNamespace(
        policy=dict.fromkeys(workflow.roles, "shared"), args=SimpleNamespace(num_generations=n_episodes)
    )
    rows = rows_of(run, episodes)
    return (SlotCredit if by_slot else AgentCredit)().on_rows(run, rows)


def uneven(roles: dict[str, int], n_episodes: int = 5) -> list[Episode]:
    """Return episodes of one or two rounds, so that groups differ in size; in problem 1 only one episode has a second round."""
    episodes = episodes_of(roles, n_episodes, rounds=2)
    for i, episode in enumerate(episodes):
        if i % 3 == 0 or (i >= n_episodes and i != len(episodes) - 1):
            episode.turns = [turn for turn in episode.turns if turn.round == 0]
    return episodes


def by_definition(row: Row, rows: list[Row], by_slot: bool) -> float:
    """One row's advantage, from the definition; a group of one keeps its reward."""
    group = [
        other.episode.reward.value for other in rows
        if other.episode.problem.id == row.episode.problem.id and other.turn.role == row.turn.role
        and (not by_slot or other.turn.slot == row.turn.slot)
    ]  # fmt: skip
    if len(group) == 1:
        return row.episode.reward.value
    return (row.episode.reward.value - sum(group) / len(group)) / (statistics.stdev(group) + 1e-6)


@pytest.mark.parametrize("by_slot", [True, False])
@pytest.mark.parametrize("workflow", [Voting(), EvalOpt()], ids=lambda workflow: workflow.name)
def test_every_grouping(workflow, by_slot):
    rows = compared(workflow, uneven(workflow.roles), 5, by_slot)
    advantages = [row.advantage for row in rows]
    assert advantages == pytest.approx([by_definition(row, rows, by_slot) for row in rows], abs=1e-9)
    assert len(set(advantages)) > 1


@pytest.mark.parametrize("by_slot", [True, False])
def test_turns_of_an_episode_share_an_advantage_when_each_speaks_once(by_slot):
    workflow = Voting()
    episodes = episodes_of(workflow.roles, n_problems=1)
    for i, episode in enumerate(episodes):
        episode.reward = Reward(float(i))
    rows = compared(workflow, episodes, 8, by_slot)
    per_episode = {(row.episode.index, round(row.advantage, 9)) for row in rows if row.turn.role == "generator"}
    assert len(per_episode) == len({advantage for _, advantage in per_episode}) == 8


def test_pooled_groups_weigh_long_episodes_more():
    """All turns of a role form one group, so an episode with two rounds counts twice in the mean."""
    workflow = EvalOpt()
    episodes = episodes_of(workflow.roles, n_problems=1, rounds=2)
    for i, episode in enumerate(episodes):
        episode.reward = Reward(1.0 if i < 4 else 0.0)
        if i < 4:
            episode.turns = episode.turns[:2]
    rows = [row for row in compared(workflow, episodes, 8) if row.turn.role == "generator"]  # 4 rows of 1, 8 rows of 0
    std = (4 * (2 / 3) ** 2 + 8 * (1 / 3) ** 2) / 11
    assert rows[0].advantage == pytest.approx((2 / 3) / std**0.5, rel=1e-4)
    assert rows[-1].advantage == pytest.approx((-1 / 3) / std**0.5, rel=1e-4)


def test_an_episode_that_was_left_out_counts_nowhere():
    """Rewards 1 and 2 of three voters each have the standard deviation sqrt(0.3), of one aggregator each sqrt(0.5)."""
    workflow = Voting()
    episodes = episodes_of(workflow.roles, 3, n_problems=1)
    for episode, reward in zip(episodes, (None, Reward(1.0), Reward(2.0)), strict=True):
        episode.reward = reward
    for row in compared(workflow, episodes, 3):
        size = 0.5 / (0.3 if row.turn.role == "generator" else 0.5) ** 0.5
        assert row.advantage == pytest.approx([0.0, -size, size][row.episode.index], rel=1e-3)


@pytest.mark.parametrize(("group", "by_slot"), [("role", False), ("slot", True)])
def test_a_cell_trains_on_them(make_trainer, group, by_slot):
    cell = Cell("voting", "ip", advantage_group=group)
    rows = make_trainer(cell).prepare_rows(make_episodes(cell))
    assert [row.advantage for row in rows] == pytest.approx([by_definition(row, rows, by_slot) for row in rows])
    assert len({row.advantage for row in rows}) > 2
