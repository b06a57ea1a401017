"""Reward functions with TRL's signature: their arguments, the weights of several functions, and the error when one fails."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from datasets import Dataset
from scripted_engine import ScriptedEngine
from trainers import rows_of

from multirole.inputs.problems import INDEX
from multirole.metrics.episodes import accuracy, mean_reward, overflow_rate, text_metrics
from multirole.rollout.replies import answer_ids
from multirole.types import Answer, Episode, Reward, user
from multirole.workflows import Single, Voting


@pytest.fixture
def score(make_library_trainer, tokenizer):
    """score(reward functions, **config) -> the scored episodes of one iteration of two problems, three episodes each."""

    def make(functions, workflow=None, **config) -> list[Episode]:
        reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
        sizes = {"generation_batch_size": 6, "num_generations": 3}
        engine = ScriptedEngine(lambda key, request: (reply, 1), tokenizer.eos_token_id)
        trainer = make_library_trainer(workflow or Single(), engine, functions, **sizes | config)
        make.trainer = trainer
        inputs = [{"prompt": f"question {i // 3}", "task": "general", INDEX: i // 3} for i in range(6)]
        return trainer._generate_and_score_completions(inputs)

    return make


def by_index(episodes, **_):
    return [float(episode.index) for episode in episodes]


def test_a_function_is_called_as_trl_calls_it_and_sees_whole_episodes(score):
    seen = {}

    def reward(prompts, completions, completion_ids, task, episodes, trainer_state, **others):
        seen.update(locals())
        return [0.5] * len(prompts)

    episodes = score(reward, Voting())
    assert seen["prompts"] == ["question 0"] * 3 + ["question 1"] * 3 and seen["task"] == ["general"] * 6
    assert seen["completions"] == [episode.answer.text for episode in episodes] == ["hm"] * 6
    assert [id(episode) for episode in seen["episodes"]] == [id(episode) for episode in episodes]
    assert [len(episode.turns) for episode in seen["episodes"]] == [4] * 6  # three voters and the aggregator
    assert INDEX not in seen["others"]
    assert [episode.reward for episode in episodes] == [Reward(0.5)] * 6
    assert [episode.advantage for episode in episodes] == [0.0] * 6


def test_a_function_may_set_the_reward_with_its_reason(score):
    def reward(episodes, **_):
        for episode in episodes:
            episode.reward = Reward(float(episode.index), "by index", episode.index == 2)
        return [episode.reward.value for episode in episodes]

    assert [episode.reward for episode in score(reward)] == 2 * [
        Reward(0.0, "by index", False),
        Reward(1.0, "by index", False),
        Reward(2.0, "by index", True),
    ]


def test_several_functions_are_added_with_their_weights(score):
    def constant(completions, **_):
        return [10.0] * len(completions)

    episodes = score([by_index, constant], reward_weights=[2.0, 0.5])
    assert [episode.reward.value for episode in episodes] == [5.0, 7.0, 9.0] * 2
    expected = 2.0 / (2.0 + 1e-4)  # 9 against a mean of 7 and a standard deviation of 2
    assert [episode.advantage for episode in episodes] == pytest.approx([-expected, 0.0, expected] * 2, rel=1e-5)


def test_a_reward_that_one_function_sets_has_the_value_of_all(score):
    def judged(episodes, **_):
        for episode in episodes:
            episode.reward = Reward(float(episode.index), "judged", True)
        return [episode.reward.value for episode in episodes]

    def penalty(completions, **_):
        return [-4.0] * len(completions)

    episodes = score([judged, penalty], reward_weights=[1.0, 0.5])
    assert [episode.reward for episode in episodes] == [Reward(i - 2.0, "judged", True) for i in range(3)] * 2
    assert mean_reward(episodes) == -1.0


def test_what_is_trained_is_what_a_function_returns(score):
    """The returned value counts, not the one that the function sets on the episode. An episode that it leaves out counts nowhere."""

    def contradicts_itself(episodes, **_):
        for episode in episodes:
            episode.reward = Reward(10.0 - episode.index, "mine", True)
        return [float(episode.index) or None for episode in episodes]

    episodes = score(contradicts_itself)
    assert [episode.reward for episode in episodes] == 2 * [None, Reward(1.0, "mine", True), Reward(2.0, "mine", True)]
    assert [row.advantage > 0 for row in rows_of(score.trainer, episodes)] == 2 * [False, False, True]


def test_completion_ids_are_those_of_the_answer(score, tokenizer):
    """Voting answers with a voter's reply. An answer that is no turn's reply is encoded."""
    seen = []

    def reward(completion_ids, completions, **_):
        seen.extend(zip(completion_ids, completions, strict=True))
        return [0.0] * len(completions)

    episodes = score(reward, Voting())
    for (ids, text), episode in zip(seen, episodes, strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=True) == text == episode.answer.text
    episodes[0].answer = Answer("= 7")
    assert answer_ids(tokenizer, episodes[0]) == tokenizer.encode("= 7")


def test_tokens_and_transcripts_are_of_all_turns(score):
    episodes = score(by_index, Voting(), log_completions=True)
    turns = [turn for episode in episodes for turn in episode.turns]
    n_tokens = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    trainer = score.trainer
    assert trainer.state.num_input_tokens_seen == trainer._metrics["train"]["num_tokens"][-1] == n_tokens
    shown = list(trainer._logs["completion"])[-6:]
    assert shown[0] == "[generator 0.0] hm\n[generator 1.0] hm\n[generator 2.0] hm\n[aggregator 0.0] hm"


def test_none_leaves_an_episode_to_the_other_functions(score):
    def some(episodes, **_):
        return [1.0 if episode.index else None for episode in episodes]

    assert [episode.reward.value for episode in score([by_index, some])] == [0.0, 2.0, 3.0] * 2


def test_none_from_every_function_leaves_an_episode_out(score):
    def some(episodes, **_):
        return [float(episode.index) if episode.index else None for episode in episodes]

    size = 0.5**0.5  # of 1 and 2, over their standard deviation
    episodes = score(some, Voting())
    assert [episode.reward for episode in episodes] == [None, Reward(1.0), Reward(2.0)] * 2
    rows = rows_of(score.trainer, episodes)
    for row in rows:  # the other two are compared with each other
        assert row.advantage == pytest.approx([0.0, -size, size][row.episode.index], rel=1e-3)
    assert mean_reward(episodes) == 1.5 and accuracy(episodes) is None
    assert text_metrics(rows)["reward"] == 1.5


def test_an_iteration_without_any_reward_goes_on_with_advantages_of_zero(score):
    """As in TRL, which warns."""
    episodes = score(lambda completions, **_: [None] * len(completions))
    assert [episode.reward for episode in episodes] == [None] * 6
    assert [row.advantage for row in score.trainer.prepare_rows(episodes)] == [0.0] * 6


@pytest.mark.parametrize(
    "kind",
    [np.float32, np.float64, torch.tensor, lambda x: torch.tensor([x]), Fraction, int, bool],
    ids=["float32", "float64", "scalar tensor", "tensor of one", "Fraction", "int", "bool"],
)
def test_rewards_may_be_any_kind_of_number(score, kind):
    def by_parity(episodes, **_):
        return [kind(episode.index % 2) for episode in episodes]

    assert [episode.reward.value for episode in score(by_parity)] == [0.0, 1.0, 0.0] * 2


@pytest.mark.parametrize("whole", [np.array, torch.tensor, tuple, iter])
def test_rewards_may_be_in_any_kind_of_sequence(score, whole):
    assert [e.reward.value for e in score(lambda episodes, **_: whole([1.0 * e.index for e in episodes]))] == [
        0.0,
        1.0,
        2.0,
    ] * 2


@pytest.mark.parametrize("nan", [math.nan, np.float32("nan"), torch.tensor(math.nan)], ids=["float", "numpy", "torch"])
def test_nan_leaves_an_episode_out_as_none_does_and_is_warned_of_once(score, caplog, nan):
    def ranked(nothing):
        return lambda episodes, **_: [nothing if e.index == 1 else float(e.index) for e in episodes]

    with_none, with_nan = score(ranked(None)), score(ranked(nan))
    assert [e.reward for e in with_nan] == [e.reward for e in with_none]
    assert [e.advantage for e in with_nan] == [e.advantage for e in with_none] and any(e.advantage for e in with_nan)
    assert caplog.text.count("the reward NaN") == 1 and "gave problem '0'" in caplog.text


def test_a_function_with_trls_arguments_alone_is_called_with_those(make_library_trainer, tokenizer):
    """A function with TRL's argument names and no `**kwargs` is not given `episodes`."""
    seen = []

    def exact(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, task):
        seen.append(len(completions))
        return [0.0] * len(completions)

    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    trainer = make_library_trainer(Single(), engine, exact)
    trainer._generate_and_score_completions([dict(trainer.train_rows[0]) for _ in range(16)])
    assert seen == [16]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, completions, solution, **_: [], "missing a required argument: 'solution'"),
        (lambda prompts, completions, task: [], "got an unexpected keyword argument 'completion_ids'"),
    ],
    ids=["a column that is not there", "no **kwargs"],
)
def test_a_function_that_cannot_be_called_is_refused_at_once(make_library_trainer, tokenizer, function, message):
    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_library_trainer(Single(), engine, function)
    assert "does not fit `train_dataset`" in str(error.value) and "end its parameters with `**kwargs`" in str(
        error.value
    )


def test_episodes_that_a_long_prompt_ends_are_counted(score):
    class Long(Single):
        async def run(self, problem, call):
            return Answer("", reason="prompt_overflow") if problem.id == "0" else await super().run(problem, call)

    assert overflow_rate(score(by_index, Long())) == 0.5


def test_the_overflow_rate_of_all_episodes_is_logged(make_library_trainer, tokenizer):
    class Long(Single):
        async def run(self, problem, call):
            if problem.id == "1":
                await call("generator", [user("far too long " * 200)])
            return await super().run(problem, call)

    engine = ScriptedEngine(lambda key, request: ([5, tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    sizes = {"n_prompts": 2, "generation_batch_size": 4, "num_generations": 2, "max_steps": 1, "logging_steps": 1}
    trainer = make_library_trainer(
        Long(), engine, by_index, max_prompt_tokens=200, save_strategy="no", disable_tqdm=True, **sizes
    )
    trainer.train()
    assert trainer.state.log_history[0]["prompt_overflow_rate"] == 0.5
    assert trainer.evaluate(trainer.train_dataset)["eval_prompt_overflow_rate"] == 0.5


def test_an_async_function_is_awaited(score):
    async def reward(episodes, **_):
        return [float(episode.index) for episode in episodes]

    assert [episode.reward.value for episode in score(reward)] == [0.0, 1.0, 2.0] * 2


def broken(kind):
    def my_reward(episodes, **_):
        if kind == "raises":
            raise KeyError("solution")
        if kind == "is not a list":
            return None
        if kind == "is a dict":
            return {float(episode.index): 1.0 for episode in episodes}
        values = [float(episode.index) for episode in episodes]
        values[4] = {"is infinite": float("inf"), "is huge": 1e30}.get(kind, values[4])
        return values[:5] if kind == "is short" else values + [0.0] if kind == "is long" else values

    async def my_async_reward(episodes, **_):
        return my_reward(episodes)

    return my_reward, my_async_reward


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", "KeyError: 'solution'"),
        ("is not a list", "must return a list with one number per completion, got None"),
        ("is a dict", "must return a list with one number per completion, got {0.0: 1.0"),
        ("is infinite", "gave problem '1' the reward inf"),
        ("is huge", r"gave problem '1' the reward 1e\+30. A reward must be a number between -1e\+06 and 1e\+06"),
        ("is short", "5 rewards"),
        ("is long", "7 rewards"),
    ],
)
def test_a_function_that_fails_is_named(score, kind, message, is_async):
    function = broken(kind)[is_async]
    with pytest.raises((ValueError, RuntimeError), match=message) as error:
        score(function)
    assert repr(function.__name__) in str(error.value)


def test_evaluation_scores_every_episode_of_every_dataset(make_library_trainer, tokenizer):
    """`num_generations_eval` episodes per problem; accuracy where the function says what is right; two datasets by name."""

    def reward(prompts, completions, episodes, answer=(), **_):  # the training rows have no answer
        for episode, right in zip(episodes, answer, strict=True):
            episode.reward = Reward(float(right + episode.index), "", right == 1)
        return [episode.reward.value for episode in episodes]

    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda key, request: (reply, 1), tokenizer.eos_token_id)
    trainer = make_library_trainer(Single(), engine, reward, num_generations_eval=2)
    rows = {"prompt": ["a", "b", "c"], "task": ["general"] * 3, "answer": [1, 0, 0]}
    one, two = Dataset.from_dict(rows), Dataset.from_dict({name: values[:1] for name, values in rows.items()})
    metrics = trainer.evaluate(one)
    assert (metrics["eval_reward"], metrics["eval_accuracy"]) == (pytest.approx(5 / 6), pytest.approx(1 / 3))
    assert len(engine.requests) == 6 and len({request.seed for request in engine.requests}) == 6
    metrics_by_set = trainer.evaluate({"all": one, "first": two})
    assert metrics_by_set["eval_all_reward"] == pytest.approx(5 / 6) and metrics_by_set["eval_first_reward"] == 1.5
    assert metrics_by_set["eval_first_accuracy"] == 1.0
    logged = [row for row in trainer.state.log_history if "eval_first_reward" in row]
    assert len(logged) == 1
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        trainer.evaluate()
