"""Every grouping with every normalisation, against numbers worked out by hand and against plain loops."""

import statistics

import pytest
from conftest import make_episodes

from multirole.core.advantages import group_advantages, row_advantages
from multirole.experiment.cell import Cell

REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.25]
GROUPS = ["a", "a", "a", "a", "b", "b", "c"]  # means 1/4, 3/4 and 1/4; std 1/2 and sqrt(1/8); c has one member
BY_HAND = {
    "group": [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5), 0.25],  # alone, a reward stays what it is
    "agent": [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5), 0.0],
    "none": [0.75, -0.25, -0.25, -0.25, 0.25, -0.25, 0.0],
    "leave_one_out": [1.0, -1 / 3, -1 / 3, -1 / 3, 0.5, -0.5, 0.0],
}
NORMS, KINDS = list(BY_HAND), ["episode", "role", "slot", "role_round"]


@pytest.mark.parametrize("norm", NORMS)
def test_groups_of_unequal_size_and_of_one(norm):
    assert group_advantages(REWARDS, GROUPS, eps=0.0, norm=norm) == pytest.approx(BY_HAND[norm], abs=1e-12)


def uneven(cell: Cell) -> list:
    """Episodes of one or two rounds, so that groups differ in size; one episode alone has a second round in problem 1."""
    episodes = make_episodes(cell, n_problems=2, rounds=2)
    for i, episode in enumerate(episodes):
        if i % 3 == 0 or (i >= cell.n_episodes and i != len(episodes) - 1):
            episode.turns = [turn for turn in episode.turns if turn.round == 0]
    return episodes


def expected(row, rows, episodes, cell: Cell) -> float:
    """One row's advantage, from the definition."""
    turn, problem, mine = row.turn, row.episode.problem.id, row.episode.reward.value
    if cell.advantage_norm == "agent":
        group = [r.episode.reward.value for r in rows if r.turn.role == turn.role]
    elif cell.advantage_group == "episode":
        group = [e.reward.value for e in episodes if e.problem.id == problem]
    else:
        keys = {"role": ("role",), "slot": ("role", "slot"), "role_round": ("role", "round")}[cell.advantage_group]
        group = [
            r.episode.reward.value for r in rows
            if r.episode.problem.id == problem and all(getattr(r.turn, k) == getattr(turn, k) for k in keys)
        ]  # fmt: skip
    mean = sum(group) / len(group)
    if len(group) == 1:
        return mine if cell.advantage_norm == "group" else 0.0
    if cell.advantage_norm == "none":
        return mine - mean
    if cell.advantage_norm == "leave_one_out":
        return mine - (sum(group) - mine) / (len(group) - 1)
    return (mine - mean) / (statistics.stdev(group) + 1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workflow", ["voting", "eval_opt"])
def test_every_grouping_with_every_norm(make_trainer, workflow, kind, norm):
    cell = Cell(workflow, "ip", n_episodes=5, advantage_group=kind, advantage_norm=norm)
    episodes = uneven(cell)
    rows = make_trainer(cell)._rows(episodes)
    found = [row.advantage for row in rows]
    if (kind, norm) == ("episode", "group"):  # TRL's number, untouched
        assert all(value is row.episode.advantage for row, value in zip(rows, found, strict=True))
    else:
        assert found == pytest.approx([expected(row, rows, episodes, cell) for row in rows], abs=1e-9)
    assert len(set(found)) > 1


def test_an_episode_without_turns_is_compared_too():
    cell = Cell("voting", "ip", n_episodes=2, advantage_norm="none")
    one, silent = make_episodes(cell, n_problems=1)
    object.__setattr__(one.reward, "value", 1.0)
    object.__setattr__(silent.reward, "value", 0.0)
    silent.turns = []
    from multirole.core.rows import Row

    rows = [Row(one, turn, cell.policy[turn.role], 0.0) for turn in one.turns]
    assert row_advantages(rows, [one, silent], cell) == [0.5] * 4


def test_a_real_iteration_trains_on_what_was_chosen(make_trainer, tokenizer):
    """Through TRL's scoring: rewards 1 and 0 of two episodes are +-1/sqrt(2) in TRL's group, +-1 when each leaves itself out."""
    from multirole.core.engine import ScriptedEngine
    from multirole.core.types import Reward

    found = {}
    for norm in ("group", "leave_one_out"):
        cell = Cell("single", "sp", n_problems=2, n_episodes=2, advantage_norm=norm)
        reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
        trainer = make_trainer(cell, ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id))  # noqa: B023
        given = trainer.play

        def play(attempts, *rest, given=given):
            episodes = given(attempts, *rest)
            for episode in episodes:
                episode.reward = Reward(1.0 - episode.index, "", episode.index == 0)
            return episodes

        trainer.play = play
        episodes = trainer._generate_and_score_completions([{"prompt": "", "index": i // 2} for i in range(4)])
        found[norm] = [row.advantage for row in trainer._rows(episodes)]
    assert found["group"] == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)] * 2, rel=1e-6)
    assert found["leave_one_out"] == [1.0, -1.0] * 2
