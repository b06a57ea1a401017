"""With `max_failed_episodes`, an episode whose workflow raises is recorded, counted and left out of its group; without, it ends the run."""

import asyncio
import logging

import pytest
import torch
from scripted_engine import ScriptedEngine

from multirole.engines.protocol import Sampling
from multirole.rollout.errors import WorkflowError
from multirole.rollout.rollout import Rollout, check_failures
from multirole.types import FAILED, Answer, Episode, Problem, user

PROBLEMS = [(Problem(str(i // 4), "general", f"q{i // 4}", None), i % 4) for i in range(8)]


class Fragile:
    """Two parallel first calls, then a last one. It raises after the first stage where `fails(problem id, attempt)` says so."""

    name, roles = "fragile", {"first": 2, "last": 1}

    def __init__(self, fails=lambda problem, attempt: False):
        self.fails, self.seen = fails, {}

    async def run(self, problem, call):
        attempt = self.seen[problem.id] = self.seen.get(problem.id, -1) + 1  # episodes start in their order
        first = await asyncio.gather(*(call("first", [user(problem.question)], slot=s) for s in (0, 1)))
        if self.fails(problem.id, attempt):
            raise KeyError(f"lost {first[0].text}")
        return Answer((await call("last", [user("end")])).text)


def second_of_problem_1(problem, attempt):
    return (problem, attempt) == ("1", 2)


def play(tokenizer, workflow, engine=None, **limits):
    engine = engine or ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1 + key % 3), tokenizer.eos_token_id)
    policy = {"first": "a", "last": "b"}
    rollout = Rollout(workflow, engine, tokenizer, policy, lambda text: True, 0, max_prompt_tokens=100, **limits)
    return rollout.run(PROBLEMS, 0, Sampling(10, 1.0)), engine


def test_the_other_episodes_are_played_to_their_end(tokenizer, caplog):
    (episodes, engine), (whole, _) = (
        play(tokenizer, Fragile(second_of_problem_1), max_failed_episodes=1), play(tokenizer, Fragile()),
    )  # fmt: skip
    failed = episodes[6]
    assert [e.failure is None for e in episodes] == [i != 6 for i in range(8)] and not engine.running
    assert failed.turns == [] and failed.answer == Answer("", FAILED)
    assert "KeyError" in failed.failure and "raise KeyError" in failed.failure and "in run" in failed.failure
    assert [[t.completion_ids for t in e.turns] for e in episodes if e is not failed] == [
        [t.completion_ids for t in e.turns] for i, e in enumerate(whole) if i != 6
    ]
    assert "Left out episode 2 of problem '1'" in caplog.text


def test_one_more_than_allowed_ends_the_rollout(tokenizer):
    always = Fragile(lambda problem, attempt: True)
    with pytest.raises(WorkflowError, match="To leave such episodes out instead, set `max_failed_episodes`") as error:
        play(tokenizer, always)
    assert isinstance(error.value.__cause__, KeyError) and "raise KeyError" in str(error.value)
    assert len(str(error.value).splitlines()) <= 4
    with pytest.raises(WorkflowError, match="4 episodes of one rollout failed, and `max_failed_episodes` is 3"):
        play(tokenizer, always, max_failed_episodes=3)
    for _ in range(2):  # counted per rollout
        play(tokenizer, Fragile(second_of_problem_1), max_failed_episodes=1)


def test_calls_concurrent_with_a_failed_one_are_cancelled(tokenizer):
    class Siblings(Fragile):
        async def run(self, problem, call):
            async def talk():
                for round in range(5):
                    await call("first", [user("a")], slot=1, round=round)

            async def fail():
                await call("first", [user("a")], slot=0)
                raise ValueError("no")

            await asyncio.gather(talk(), fail())

    episodes, engine = play(tokenizer, Siblings(), max_failed_episodes=8)
    assert all(e.failure for e in episodes) and not engine.running
    assert len(engine.requests) <= 8 * 4  # five rounds each without the stop


# ---- in training


def reward(completions, episodes, **_):
    return [float(e.index % 3) for e in episodes]


@pytest.fixture
def trained(make_library_trainer, tokenizer):
    """trained(workflow, **options) -> a trainer after one rollout of two problems x four episodes, and its episodes."""

    def run(workflow, **options):
        engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
        trainer = make_library_trainer(
            workflow, engine, reward, 2, **{"generation_batch_size": 8, "num_generations": 4} | options
        )
        rows = [dict(trainer.train_rows[i // 4]) for i in range(8)]
        trainer._metrics["train"].clear()
        return trainer, trainer._generate_and_score_completions(rows)

    return run


def test_a_failed_episode_is_left_out_of_its_group(trained):
    trainer, episodes = trained(Fragile(second_of_problem_1), max_failed_episodes=1)
    assert episodes[6].reward is None and episodes[6].advantage == 0.0
    values = torch.tensor([0.0, 1.0, 0.0])  # of indices 0, 1 and 3; index 2 failed
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert [e.advantage for e in (*episodes[4:6], episodes[7])] == pytest.approx(expected.tolist(), abs=1e-6)
    values = torch.tensor([0.0, 1.0, 2.0, 0.0])
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert [e.advantage for e in episodes[:4]] == pytest.approx(expected.tolist(), abs=1e-6)
    rows = trainer.prepare_rows(episodes)
    assert len(rows) == 7 * 3 and all(row.episode is not episodes[6] for row in rows)


def test_failed_episodes_are_counted_in_training_and_in_evaluation(make_library_trainer, tokenizer):
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    workflow = Fragile(lambda problem, attempt: problem == "1" and attempt % 4 == 2)
    sizes = {
        "generation_batch_size": 8,
        "num_generations": 4,
        "num_generations_eval": 4,
        "max_steps": 2,
        "logging_steps": 1,
    }
    trainer = make_library_trainer(
        workflow, engine, reward, 2, max_failed_episodes=1, save_strategy="no", disable_tqdm=True, **sizes
    )
    trainer.train()
    logged = [row["failed_episodes"] for row in trainer.state.log_history if "failed_episodes" in row]
    assert logged[:2] == [1.0, 1.0]
    metrics = trainer.evaluate(trainer.train_dataset)
    assert metrics["eval_failed_episodes"] == 1
    assert metrics["eval_reward"] == pytest.approx((0 + 1 + 2 + 0 + 0 + 1 + 0) / 7)


def test_by_default_the_first_failure_ends_the_run_with_a_short_message(make_library_trainer, tokenizer):
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    trainer = make_library_trainer(
        Fragile(second_of_problem_1), engine, reward, 2, generation_batch_size=8, num_generations=4
    )
    with pytest.raises(WorkflowError, match="failed on problem '1': KeyError") as error:
        trainer.train()
    frames = [entry.path.name for entry in error.traceback]
    assert frames == ["test_failing_episodes.py", "trl_parts.py"]
    where = error.value.__cause__.__traceback__
    assert where.tb_frame.f_code.co_filename == __file__ and where.tb_next is None  # where a debugger begins


def test_ten_iterations_without_reward_are_warned_of_once(make_library_trainer, tokenizer, caplog):
    values = {"now": 0.0}

    def nothing(completions, **_):
        return [values["now"]] * len(completions)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    trainer = make_library_trainer(Fragile(), engine, nothing, 2, generation_batch_size=8, num_generations=4)
    caplog.set_level(logging.WARNING, logger="multirole.metrics.episodes")

    def play_an_iteration():
        rows = [dict(trainer.train_rows[0]) for _ in range(8)]
        trainer._zero_reward.count(trainer._generate_and_score_completions(rows), is_main_process=True)

    for now, n in ((0.0, 9), (1.0, 1), (0.0, 9)):
        values["now"] = now
        for _ in range(n):
            play_an_iteration()
    assert "reward 0" not in caplog.text
    values["now"] = 0.0
    for _ in range(12):
        play_an_iteration()
    assert caplog.text.count("Every episode of 10 iterations in a row has the reward 0") == 1


def test_failures_are_counted_over_all_processes():
    """Each process has counted its own share only."""
    failed = [Episode(Problem(str(i), "", "", None), 0, failure=f"reason {i}") for i in range(3)]
    played = [Episode(Problem("9", "", "", None), 0, answer=Answer("")), *failed]
    check_failures(played, 3)
    with pytest.raises(
        WorkflowError, match="3 episodes of one rollout failed, and `max_failed_episodes` is 2. The last: reason 2"
    ):
        check_failures(played, 2)
