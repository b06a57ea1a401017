"""Group-relative advantages against numbers worked out by hand, against plain loops, and against TRL's own."""

import pytest
import torch
from scripted_engine import ScriptedEngine
from trainers import rows_of

from multirole.credit.advantages import group_advantages, groups_of_equal_rewards
from multirole.inputs.problems import INDEX
from multirole.metrics.episodes import evaluation_advantages
from multirole.workflows import Single

REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.25]
GROUPS = ["a", "a", "a", "a", "b", "b", "c"]  # means 1/4, 3/4 and 1/4; std 1/2 and sqrt(1/8); c has one member
BY_HAND = [1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5), 0.25]  # the reward of a group of one stays unchanged


def test_groups_of_unequal_size_and_of_one():
    assert group_advantages(REWARDS, GROUPS, eps=0.0) == pytest.approx(BY_HAND, abs=1e-12)


def test_equal_rewards_teach_nothing():
    assert group_advantages([1, 1, 0.5], ["b", "b", "c"]) == pytest.approx([0, 0, 0.5])


@pytest.mark.parametrize("reward", [-0.1, 1 / 3, 0.7, 1e-5, 12345.678])
def test_equal_rewards_have_no_advantage_at_all(reward):
    assert group_advantages([reward] * 8 + [reward, 0.0], [0] * 8 + [1, 1])[:8] == [0.0] * 8


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("reward", [-0.1, 1 / 3, 0.05])
def test_equal_rewards_of_an_evaluation_have_no_advantage_at_all(reward, n):
    """The standard deviation of three times 0.05 is 8e-18 in float64."""
    assert evaluation_advantages([reward] * n + [1.0] + [0.0] * (n - 1), n)[:n] == [0.0] * n


def test_an_evaluation_compares_the_episodes_of_a_problem_that_have_a_reward():
    assert evaluation_advantages([1.0, None, 0.0, None, 0.3, None], 3) == pytest.approx(
        [0.5**0.5, 0, -(0.5**0.5), 0, 0, 0]
    )


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
    are_equal = groups_of_equal_rewards(torch.tensor(rewards + other), torch.ones(len(rewards[0])), 4, aggregation)
    assert are_equal.tolist() == [is_equal] * 4 + [False] * 4


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
    inputs = [{"prompt": f"question {i // 2}", "task": "general", INDEX: i // 2} for i in range(4)]
    episodes = trainer._generate_and_score_completions(inputs)
    assert [episode.reward.value for episode in episodes] == [1.0, 0.0] * 2
    advantages = [row.advantage for row in rows_of(trainer, episodes)]
    assert advantages == pytest.approx([IN_TRL[scale], -IN_TRL[scale]] * 2, rel=1e-6)
