"""Group-relative advantages against numbers worked out by hand, against plain loops, and against TRL's own."""

import statistics

import pytest
import torch
from scripted_engine import ScriptedEngine
from trainers import episodes_of, rows_of

from multirole.core.advantages import group_advantages, groups_of_equal_rewards
from multirole.core.types import Reward
from multirole.core.validation import INDEX
from multirole.workflows import EvalOpt, Single, Voting

REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.25]
GROUPS = ["a", "a", "a", "a", "b", "b", "c"]  # means 1/4, 3/4 and 1/4; std 1/2 and sqrt(1/8); c has one member
BY_HAND = {  # alone, a reward stays what it is
    True: [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5), 0.25],
    False: [0.75, -0.25, -0.25, -0.25, 0.25, -0.25, 0.25],
}


@pytest.mark.parametrize("scale", BY_HAND)
def test_groups_of_unequal_size_and_of_one(scale):
    assert group_advantages(REWARDS, GROUPS, eps=0.0, scale=scale) == pytest.approx(BY_HAND[scale], abs=1e-12)


def test_equal_rewards_teach_nothing():
    assert group_advantages([1, 1, 0.5], ["b", "b", "c"]) == pytest.approx([0, 0, 0.5])


@pytest.mark.parametrize("reward", [-0.1, 1 / 3, 0.7, 1e-5, 12345.678])
def test_equal_rewards_have_no_advantage_at_all(reward):
    assert group_advantages([reward] * 8 + [reward, 0.0], [0] * 8 + [1, 1])[:8] == [0.0] * 8


NAN = float("nan")
TWO = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [NAN, 0.3]]  # rows of one group: sums are equal but for rounding


@pytest.mark.parametrize(
    ("rewards", "aggregation", "is_equal"),
    [
        ([[-0.1]] * 4, "sum_then_normalize", True),
        ([[1 / 3]] * 3 + [[0.5]], "sum_then_normalize", False),
        ([[0.7], [NAN], [0.7], [NAN]], "sum_then_normalize", True),  # two were left out
        ([[NAN]] * 4, "sum_then_normalize", True),
        (TWO, "sum_then_normalize", True),
        (TWO, "normalize_then_sum", False),
        ([[0.1, 5.0], [0.1, NAN], [NAN, 5.0], [0.1, 5.0]], "normalize_then_sum", True),
        ([[0.1, 5.0], [0.1, NAN], [NAN, 5.0], [0.1, 5.0]], "sum_then_normalize", False),
        ([[1e6], [1e6], [1e6], [1e6 + 1]], "sum_then_normalize", False),
    ],
)
def test_groups_of_equal_rewards(rewards, aggregation, is_equal):
    other = [[0.0] * len(rewards[0])] * 3 + [[1.0] * len(rewards[0])]
    found = groups_of_equal_rewards(torch.tensor(rewards + other), torch.ones(len(rewards[0])), 4, aggregation)
    assert found.tolist() == [is_equal] * 4 + [False] * 4


def uneven(roles: dict[str, int], n_episodes: int = 5) -> list:
    """Episodes of one or two rounds, so that groups differ in size; one episode alone has a second round in problem 1."""
    episodes = episodes_of(roles, n_episodes, rounds=2)
    for i, episode in enumerate(episodes):
        if i % 3 == 0 or (i >= n_episodes and i != len(episodes) - 1):
            episode.turns = [turn for turn in episode.turns if turn.round == 0]
    return episodes


def expected(row, rows, keys: tuple[str, ...], scale: str) -> float:
    """One row's advantage, from the definition."""
    problem, mine = row.episode.problem.id, row.episode.reward.value
    group = [
        r.episode.reward.value for r in rows
        if r.episode.problem.id == problem and all(getattr(r.turn, k) == getattr(row.turn, k) for k in keys)
    ]  # fmt: skip
    if len(group) == 1:
        return mine
    deviation = mine - sum(group) / len(group)
    return deviation / (statistics.stdev(group) + 1e-6) if scale == "group" else deviation


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("workflow", [Voting(), EvalOpt()], ids=lambda workflow: workflow.name)
def test_every_grouping_with_and_without_scaling(make_library_trainer, workflow, scale):
    episodes = uneven(workflow.roles)
    sizes = {"generation_batch_size": 10, "num_generations": 5, "scale_rewards": scale}
    for group, keys in (("episode", None), ("role", ("role",)), ("slot", ("role", "slot"))):
        trainer = make_library_trainer(workflow, policy="ip", advantage_group=group, **sizes)
        rows = rows_of(trainer, episodes)
        found = [row.advantage for row in rows]
        if keys is None:  # TRL's number, untouched
            assert found == [row.episode.advantage for row in rows]
        else:
            assert found == pytest.approx([expected(row, rows, keys, scale) for row in rows], abs=1e-9)
        assert len(set(found)) > 1


@pytest.mark.parametrize("group", ["episode", "slot", "role"])
def test_every_turn_of_an_episode_shares_its_advantage_when_each_speaks_once(make_library_trainer, group):
    trainer = make_library_trainer(Voting(), policy="ip", advantage_group=group)
    episodes = episodes_of(trainer.workflow.roles, n_problems=1)
    for i, episode in enumerate(episodes):
        episode.reward = Reward(float(i))
    rows = rows_of(trainer, episodes)
    per_episode = {(row.episode.index, round(row.advantage, 9)) for row in rows if row.turn.role == "generator"}
    assert len(per_episode) == len({advantage for _, advantage in per_episode}) == 8


def test_pooled_groups_weigh_long_episodes_more(make_library_trainer):
    """Released code: all turns of a role form one group, so an episode with two rounds counts twice in the mean."""
    trainer = make_library_trainer(EvalOpt(), policy="ip", advantage_group="role")
    episodes = episodes_of(trainer.workflow.roles, n_problems=1, rounds=2)
    for i, episode in enumerate(episodes):
        episode.reward = Reward(1.0 if i < 4 else 0.0)
        if i < 4:
            episode.turns = episode.turns[:2]
    rows = [row for row in rows_of(trainer, episodes) if row.turn.role == "generator"]  # 4 rows of 1, 8 rows of 0
    std = (4 * (2 / 3) ** 2 + 8 * (1 / 3) ** 2) / 11
    assert rows[0].advantage == pytest.approx((2 / 3) / std**0.5, rel=1e-4)
    assert rows[-1].advantage == pytest.approx((-1 / 3) / std**0.5, rel=1e-4)


IN_TRL = {  # rewards 1 and 0 of each problem's two episodes: mean 1/2, std sqrt(1/2); of all four, std sqrt(1/3)
    "group": 0.5 / (0.5**0.5 + 1e-4),
    "batch": 0.5 / ((1 / 3) ** 0.5 + 1e-4),
    "none": 0.5,
}


@pytest.mark.parametrize("scale", IN_TRL)
def test_a_real_iteration_trains_on_what_trl_computes(make_library_trainer, tokenizer, scale):
    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    trainer = make_library_trainer(
        Single(), ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id),
        lambda episodes, **_: [1.0 - episode.index for episode in episodes],
        generation_batch_size=4, num_generations=2, scale_rewards=scale,
    )  # fmt: skip
    inputs = [{"prompt": f"question {i // 2}", "task": "tiny_chain", INDEX: i // 2} for i in range(4)]
    episodes = trainer._generate_and_score_completions(inputs)
    assert [episode.reward.value for episode in episodes] == [1.0, 0.0] * 2
    found = [row.advantage for row in rows_of(trainer, episodes)]
    assert found == pytest.approx([IN_TRL[scale], -IN_TRL[scale]] * 2, rel=1e-6)
