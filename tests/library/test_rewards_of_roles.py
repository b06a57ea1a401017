"""Rewards of single roles and turns: equal ones train as one number does, opposed ones sum to zero, and each is compared within its role."""

import math
import re

import pytest
import torch
from datasets import Dataset
from scripted_engine import ScriptedEngine
from trainers import rows_of

from multirole.credit.role_rewards import role_advantages
from multirole.inputs.problems import INDEX
from multirole.types import Answer, Reward, user

G, P = 4, 2


class Duel:
    """Two rounds: the first player answers once or twice, as its reply says, and the second player answers that."""

    name, roles = "duel", {"first": 2, "second": 1}

    async def run(self, problem, call):
        opening = await call("first", [user(problem.question)])
        if opening.text == "b":
            await call("first", [user(problem.question)], slot=1)
        return Answer((await call("second", [user(opening.text)])).text)


@pytest.fixture
def score(make_library_trainer, tokenizer):
    """score(reward functions, **config) -> the scored episodes of one iteration of two problems; half of them have a third turn."""

    def make(functions, **config):
        def reply(key, request):
            return [*tokenizer.encode("ab"[request.seed % 2]), tokenizer.eos_token_id], 1

        trainer = make_library_trainer(
            Duel(), ScriptedEngine(reply, tokenizer.eos_token_id), functions, policy="ip", generation_batch_size=G * P, num_generations=G,
            **config,
        )  # fmt: skip
        inputs = [{"prompt": f"question {i // G}", "task": "general", INDEX: i // G} for i in range(G * P)]
        make.trainer = trainer
        return trainer._generate_and_score_completions(inputs)

    return make


def number_of(episode):
    """A reward of float32 that no sum or mean of itself gives back by luck; None for one episode."""
    return (
        None
        if (episode.problem.id, episode.index) == ("1", 2)
        else math.sin(7 * episode.index + len(episode.problem.id) + 0.1)
    )


def as_number(episodes, **_):
    return [number_of(episode) for episode in episodes]


def as_dict(episodes, **_):
    return [dict.fromkeys(("first", "second"), number_of(episode)) for episode in episodes]


def as_list(episodes, **_):
    return [[number_of(episode)] * len(episode.turns) for episode in episodes]


def parity(episodes, **_):
    return [episode.index % 2 for episode in episodes]


def third(episodes, **_):
    return [1 / 3 if episode.index else None for episode in episodes]


@pytest.mark.parametrize("form", [as_dict, as_list], ids=["dict", "list"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=["group", "batch", "none", "normalize_then_sum"],
)
def test_equal_rewards_of_all_roles_are_one_reward_bit_for_bit(score, form, options):
    """Also with other functions that return one number, with weights, and where episodes are left out or have more turns than others."""
    options = options | {"reward_weights": [0.7, 0.2, 0.1]}
    one, roles = score([as_number, parity, third], **options), score([form, parity, third], **options)
    assert {len(episode.turns) for episode in one} == {2, 3}
    assert [row.advantage for row in rows_of(score.trainer, roles)] == [
        row.advantage for row in rows_of(score.trainer, one)
    ]
    assert len({row.advantage for row in rows_of(score.trainer, one)}) > 4
    assert [episode.reward.value for episode in roles] == [episode.reward.value for episode in one]
    assert [e.reward_of(turn) for e in roles for turn in e.turns] == [e.reward.value for e in one for _ in e.turns]


def test_opposed_rewards_sum_to_zero(score):
    """Within an episode over the players, and within a problem over a player's episodes."""

    def opposed(episodes, **_):
        return [{"first": value, "second": -value} for value in map(math.sin, range(1, len(episodes) + 1))]

    episodes = score(opposed, scale_rewards="group", log_completions=True)
    assert all(map(math.isnan, score.trainer._logs["advantages"]))  # the table has one per episode
    for episode in episodes:
        of_role = {turn.role: episode.advantage_of(turn) for turn in episode.turns}
        assert of_role["first"] == -of_role["second"] != 0
        assert episode.reward.value == 0 and episode.advantage == 0
    for group in (episodes[:G], episodes[G:]):
        for role in Duel.roles:
            advantages = [next(e.advantage_of(t) for t in e.turns if t.role == role) for e in group]
            assert sum(advantages) == pytest.approx(0, abs=1e-6)
    assert score.trainer._metrics["train"]["frac_reward_zero_std"] == [0.0]


def test_turns_are_compared_with_the_means_of_the_roles_episodes():
    """Episodes 0 and 1 of the role: turns (2, 0) and (3): means 1 and 3, M = 2. Mean squared distances (0 + 4) / 2 and 1: variance (2 + 1) / 2 * 2 / 1."""
    of_turns = [torch.tensor([[2.0], [0.0], [5.0]]), torch.tensor([[3.0]])]
    roles = [["worker", "worker", "judge"], ["worker"]]
    advantages, share = role_advantages(of_turns, roles, torch.ones(1), 2, "group", "sum_then_normalize")
    std = 3**0.5 + 1e-4
    assert advantages[0][:2] == pytest.approx([0.0, -2 / std]) and advantages[1] == pytest.approx([1 / std])
    assert advantages[0][2] == 0.0  # no other episode has a judge
    assert share == pytest.approx(1 / 3)  # of (episode, role) pairs, the judge's


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_turns_of_a_single_episode_are_not_compared_with_each_other(scale_rewards):
    of_turns = [torch.tensor([[2.0], [0.0]]), torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1)]
    roles = [["judge", "judge"], ["worker"], ["worker"], ["worker"]]
    advantages, _ = role_advantages(of_turns, roles, torch.ones(1), 4, scale_rewards, "sum_then_normalize")
    assert advantages[0] == [0.0, 0.0] and advantages[1][0] > 0 > advantages[2][0]


def test_a_role_without_a_reward_is_not_trained(score):
    def of_first(episodes, **_):
        return [{"first": float(episode.index), "second": None} if episode.index else {} for episode in episodes]

    episodes = score(of_first, scale_rewards="none")
    for episode in episodes:
        for turn in episode.turns:
            is_rewarded = turn.role == "first" and episode.index
            assert episode.advantage_of(turn) == (episode.index - 2 if is_rewarded else 0)
    assert [episode.reward and episode.reward.value for episode in episodes] == [None, 1.0, 2.0, 3.0] * P


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"third": 1.0}, "gave problem '0' a reward of ['third'], but the roles are ['first', 'second']"),
        ([0.0] * 7, "gave problem '0' 7 rewards, but the episode has "),
        ({"first": math.inf}, "gave problem '0' the reward inf"),
        ({"first": "much"}, "gave problem '0' the reward 'much'"),
    ],
)
def test_a_reward_of_something_else_is_refused(score, reward, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        score(lambda episodes, **_: [reward] * len(episodes))
    assert "'<lambda>'" in str(error.value)


def opposed_by_index(episodes, **_):
    return [{"first": float(episode.index), "second": -float(episode.index)} for episode in episodes]


@pytest.mark.parametrize("credit", ["joint_return", "permuted", "shapley"])
def test_estimators_of_one_reward_refuse_several(score, credit):
    with pytest.raises(
        ValueError,
        match="A reward function rewards single roles or turns, but .*Credit .* Return one number for each episode",
    ):
        score(opposed_by_index, credit=credit)


def test_estimators_read_the_rewards_of_roles(score):
    """Dr. MAS's: over the problem's turns of an agent, each once."""
    episodes = score(opposed_by_index, credit="agent")
    rows = rows_of(score.trainer, episodes)
    for callback in score.trainer.multirole_callbacks:
        rows = callback.on_rows(score.trainer, rows)
    group = [row for row in rows if row.episode.problem.id == "0" and row.turn.role == "second"]
    values = torch.tensor([-0.0, -1, -2, -3], dtype=torch.float64)
    assert [row.advantage for row in group] == pytest.approx(
        ((values - values.mean()) / (values.std() + 1e-6)).tolist()
    )


def test_an_evaluation_logs_the_rewards_of_roles(score):
    """And accuracy is what the function says is right, whatever the roles get."""

    def reward(episodes, **_):
        for episode in episodes:
            episode.reward = Reward(0.0, "", is_correct=episode.problem.id == "0")
        return opposed_by_index(episodes)

    score(reward, num_generations_eval=2)
    metrics = score.trainer.evaluate(Dataset.from_dict({"prompt": ["a", "b"], "task": ["general"] * 2}))
    assert (metrics["eval_first/reward"], metrics["eval_second/reward"]) != (0, 0)
    assert metrics["eval_second/reward"] == -0.5 and metrics["eval_reward"] == 0.0 and metrics["eval_accuracy"] == 0.5


def test_opposed_rewards_train_and_resume(make_library_trainer, tokenizer, tmp_path):
    """Each player's adapter moves, the log has each player's reward, and a resumed run ends with the weights of an unbroken one."""

    def trained(resume=None):
        def reply(key, request):
            return [*tokenizer.encode("ab"[request.seed % 2]), tokenizer.eos_token_id], 1

        trainer = make_library_trainer(
            Duel(), ScriptedEngine(reply, tokenizer.eos_token_id), opposed_by_index, policy="ip", generation_batch_size=G * P, num_generations=G,
            max_steps=2, save_steps=1, logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora" in name}
        trainer.train(resume_from_checkpoint=resume)
        return trainer, start

    whole, start = trained()
    folder = f"{whole.args.output_dir}/checkpoint-1"
    resumed, _ = trained(folder)
    after = dict(resumed.model.named_parameters())
    for name, p in whole.model.named_parameters():
        if name in start:
            assert torch.equal(after[name], p)
    for role in Duel.roles:
        assert any(f"adapter_{role}" in name and not torch.equal(start[name], after[name]) for name in start)
    line = whole.state.log_history[0]
    assert line["first/reward"] > 0 > line["second/reward"] and line["reward"] == 0.0
