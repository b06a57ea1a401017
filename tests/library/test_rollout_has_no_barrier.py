"""An episode continues as soon as its own calls are done, and sampling does not depend on scheduling."""

import asyncio
import re
import sys
import threading
import time
from contextlib import suppress

import pytest
from chat_tokenizers import FAMILIES
from scripted_engine import ScriptedEngine

from multirole import watched_thread
from multirole.engines.protocol import RequestRefused, Sampling
from multirole.rollout import event_loop, rollout
from multirole.rollout.errors import WorkflowError
from multirole.rollout.rollout import Rollout
from multirole.rollout.seeds import turn_seed
from multirole.types import Answer, Problem, user

PROBLEMS = [(Problem(str(i), "general", f"q{i}", None), 0) for i in range(4)]


class Relay:
    """Two stages: three parallel first calls, then one last call."""

    name, roles = "relay", {"first": 3, "last": 1}

    async def run(self, problem, call):
        await asyncio.gather(*(call("first", [user(problem.question)], slot=s) for s in range(3)))
        return Answer((await call("last", [user("end")])).text)


def play(engine, tokenizer, workflow=None, **limits):
    roll = Rollout(
        workflow or Relay(), engine, tokenizer, {"first": "a", "last": "b"}, lambda text: True, 0,
        **{"max_prompt_tokens": 100} | limits,
    )  # fmt: skip
    return roll.run(PROBLEMS, 0, Sampling(10, 1.0))


def test_short_episodes_do_not_wait_for_long_ones(tokenizer):
    """Stage one takes 1, 1, 1 and 50 steps: three episodes finish their second stage while one is in its first."""
    slow = tokenizer.apply_chat_template(
        [user("q3")], add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    starts = {}

    def reply(key, request):
        starts[key] = (request.adapter, engine.steps)
        return [tokenizer.eos_token_id], 50 if request.prompt_ids == slow else 1

    engine = ScriptedEngine(reply, tokenizer.eos_token_id)
    play(engine, tokenizer)
    last_stage = sorted(step for adapter, step in starts.values() if adapter == "b")
    assert last_stage == [1, 1, 1, 50]
    assert engine.steps == 51  # lockstep stages would take 50 + 1 too, but start every last stage at 50


def test_an_episode_is_reported_when_it_ends_and_not_with_the_last_one(tokenizer):
    slow = tokenizer.apply_chat_template(
        [user("q3")], add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    engine = ScriptedEngine(
        lambda key, request: ([tokenizer.eos_token_id], 50 if request.prompt_ids == slow else 1), tokenizer.eos_token_id
    )
    ended = []
    episodes = play(
        engine,
        tokenizer,
        on_episode_end=lambda episode: ended.append((episode.problem.id, episode.answer, engine.steps)),
    )
    assert [step for _, _, step in ended] == [2, 2, 2, 51] and ended[-1][0] == "3"
    assert {name: answer for name, answer, _ in ended} == {one.problem.id: one.answer for one in episodes}


def test_every_call_of_a_stage_is_queued_before_the_engine_moves(tokenizer):
    queued = []

    class Counting(ScriptedEngine):
        def step(self):
            queued.append(len(self.running))
            return super().step()

    play(Counting(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id), tokenizer)
    assert queued == [12, 4]


def test_turn_seeds_are_all_different_and_independent_of_scheduling(tokenizer):
    def seeds(steps):
        engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], steps(key)), tokenizer.eos_token_id)
        play(engine, tokenizer)
        return sorted(request.seed for request in engine.requests)

    assert len(set(seeds(lambda key: 1))) == 16
    assert seeds(lambda key: 1) == seeds(lambda key: 1 + key * 7 % 5)
    assert turn_seed(0, 1, "p", 0, "first", 1, 0) != turn_seed(0, 1, "p", 0, "first", 0, 1)


def test_a_prompt_over_the_cap_ends_the_episode_and_is_recorded(tokenizer):
    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    episodes = play(engine, tokenizer, max_prompt_tokens=3)
    assert {episode.answer.reason for episode in episodes} == {"prompt_overflow"}
    assert all(not episode.turns for episode in episodes)


def test_a_workflow_that_waits_forever_is_an_error_and_does_not_hang(tokenizer, monkeypatch):
    class Stuck(Relay):
        async def run(self, problem, call):
            await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(event_loop, "ALONE", 0.1)
    with pytest.raises(RuntimeError, match="other than a model call.*set `waits_outside = True`"):
        play(ScriptedEngine(lambda key, r: ([0], 1), 0), tokenizer, Stuck())


def test_tools_in_threads_and_processes_may_be_slower_than_all_model_calls(tokenizer):
    """Every episode waits for its tool at once, so that the engine has nothing to do."""

    class Tools(Relay):
        async def run(self, problem, call):
            await call("first", [user(problem.question)])
            found = await asyncio.to_thread(lambda: time.sleep(0.1) or "found")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "print(7)", stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await process.communicate()
            return Answer(f"{found} {printed.decode().strip()}")

    episodes = play(
        ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id), tokenizer, Tools()
    )
    assert {episode.answer.text for episode in episodes} == {"found 7"}


def test_a_cancelled_call_leaves_the_engine_idle(tokenizer):
    """One workflow takes the first reply and cancels the others; one gives up a call after a while. The engine finishes all calls."""

    class TheFirstWins(Relay):
        async def run(self, problem, call):
            calls = [asyncio.ensure_future(call("first", [user("go")], slot=slot)) for slot in range(3)]
            done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
            return Answer(done.pop().result().text)

    class GivesUp(Relay):
        async def run(self, problem, call):
            await call("first", [user("go")])
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await call("last", [user("end")])
            return Answer("in time")

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1 + key % 3), tokenizer.eos_token_id)
    for workflow in (TheFirstWins(), GivesUp()):
        for _ in range(2):
            episodes = play(engine, tokenizer, workflow)
            assert [len(episode.turns) for episode in episodes] == [1] * 4
            assert not engine.running


def test_a_task_group_reports_a_prompt_that_is_too_long(tokenizer):
    class Grouped(Relay):
        async def run(self, problem, call):
            async with asyncio.TaskGroup() as group:
                group.create_task(call("first", [user("short")]))
                group.create_task(call("first", [user("far too long " * 20)], slot=1))
            return Answer("never")

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 2), tokenizer.eos_token_id)
    episodes = play(engine, tokenizer, Grouped(), max_prompt_tokens=40)
    assert {episode.answer.reason for episode in episodes} == {"prompt_overflow"} and not engine.running


def test_replies_of_one_step_are_all_recorded_before_the_episode_ends(tokenizer):
    """The workflow ends with the first of two replies that arrive together."""

    class Ends(Relay):
        async def run(self, problem, call):
            aside = asyncio.ensure_future(call("first", [user("aside")], slot=1))
            await asyncio.sleep(0)
            turn = await call("first", [user("go")])
            assert not aside.cancelled()
            return Answer(turn.text)

    class Reversed(ScriptedEngine):
        def step(self):
            return super().step()[::-1]

    for kind in (ScriptedEngine, Reversed):
        engine = kind(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
        turns = [episode.turns for episode in play(engine, tokenizer, Ends())]
        assert [[turn.outcome for turn in some] for some in turns] == [["answered"] * 2] * 4


def test_a_call_after_the_end_of_its_episode_is_not_made(tokenizer):
    """A task that the workflow did not await wakes up while another episode continues."""

    class LeavesABranch(Relay):
        async def run(self, problem, call):
            async def later():
                await asyncio.sleep(0.02)
                await call("last", [user("too late")])

            branch = asyncio.ensure_future(later())
            turn = await call("first", [user(problem.question)])
            if problem.id == "3":
                await asyncio.wait([branch])
            return Answer(turn.text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    episodes = play(engine, tokenizer, LeavesABranch())
    assert [[turn.role for turn in episode.turns] for episode in episodes] == [["first"]] * 3 + [["first", "last"]]
    assert len(engine.requests) == 5 and not engine.running


def test_a_tool_that_hangs_ends_the_rollout_without_waiting_for_it(tokenizer, monkeypatch):
    released = threading.Event()

    class Hangs(Relay):
        async def run(self, problem, call):
            await asyncio.to_thread(released.wait)

    monkeypatch.setattr(event_loop, "ALONE", 0.1)
    try:
        with pytest.raises(RuntimeError, match="every episode has waited for something other than a model call"):
            play(ScriptedEngine(lambda key, r: ([0], 1), 0), tokenizer, Hangs())
    finally:
        released.set()


def test_after_a_rollout_that_hung_the_next_one_has_another_event_loop(tokenizer, monkeypatch):
    class Waits(Relay):
        waits_outside, hangs = True, True

        async def run(self, problem, call):
            turn = await call("first", [user(problem.question)])
            if self.hangs:
                await asyncio.get_running_loop().create_future()
            return Answer(turn.text)

    monkeypatch.setattr(rollout, "PATIENCE", 0.6)
    monkeypatch.setattr(Rollout, "_lasting", None)
    engine, workflow = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id), Waits()
    with pytest.raises(WorkflowError, match="hangs on problem"):
        play(engine, tokenizer, workflow)
    workflow.hangs = False
    assert [len(episode.turns) for episode in play(engine, tokenizer, workflow)] == [1] * 4


def test_errors_without_lines_of_a_users_file_are_located(tokenizer):
    """The errors are in code that a tool executes, and in a call that the workflow cancelled itself."""

    class Executes(Relay):
        async def run(self, problem, call):
            exec("1 / 0", {})  # noqa: S102

    class AwaitsCancelled(Relay):
        async def run(self, problem, call):
            calls = asyncio.ensure_future(call("first", [user("go")]))
            await asyncio.sleep(0)
            calls.cancel()
            await calls

    for workflow, said in ((Executes(), "ZeroDivisionError: division by zero"), (AwaitsCancelled(), "CancelledError")):
        engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
        with pytest.raises(WorkflowError, match=f"failed on problem '0': {said}") as error:
            play(engine, tokenizer, workflow)
        assert "line " in str(error.value) and not engine.running


def test_a_refused_call_counts_as_awaited(tokenizer):
    class Careless(Relay):
        async def run(self, problem, call):
            with suppress(ValueError):
                await call("first", [user("go")], slot=7)
            return Answer((await call("first", [user("go")])).text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    assert [len(episode.turns) for episode in play(engine, tokenizer, Careless())] == [1] * 4


@pytest.mark.parametrize("others_are_slow", [True, False])
def test_siblings_of_an_overlong_prompt_are_kept_whatever_runs_concurrently(tokenizer, others_are_slow):
    class Ragged(Relay):
        async def run(self, problem, call):
            prompts = ["short", "far too long " * 20, "brief"]
            await asyncio.gather(*(call("first", [user(text)], slot=s) for s, text in enumerate(prompts)))

    steps = 5 if others_are_slow else 1
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], steps), tokenizer.eos_token_id)
    for episode in play(engine, tokenizer, Ragged(), max_prompt_tokens=40):
        assert [(turn.slot, turn.outcome) for turn in episode.turns] == [(0, "answered"), (2, "answered")]
        assert episode.answer.reason == "prompt_overflow"
    assert not engine.running


def test_calls_that_a_workflow_did_not_wait_for_are_answered_and_recorded(tokenizer):
    """One task continues after its sibling's prompt was too long; other calls are still running when the workflow ends."""

    class Branches(Relay):
        async def run(self, problem, call):
            async def branch(slot):
                for round in range(4):
                    await call(
                        "first", [user("far too long " * 20 * (slot == 0 and round == 1))], slot=slot, round=round
                    )

            await asyncio.gather(branch(0), branch(1))

    class TheFirstWins(Relay):
        async def run(self, problem, call):
            calls = [asyncio.ensure_future(call("first", [user("go")], slot=slot)) for slot in range(3)]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            return Answer(done.pop().result().text)

    for workflow, n_turns in ((Branches(), 5), (TheFirstWins(), 3)):
        engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1 + key % 3), tokenizer.eos_token_id)
        for episode in play(engine, tokenizer, workflow, max_prompt_tokens=40):
            assert [turn.outcome for turn in episode.turns] == ["answered"] * n_turns
            assert episode.turns == sorted(episode.turns, key=lambda turn: (turn.round, turn.slot))
        assert not engine.running, "they would be answered by the next version of the weights"


def test_a_call_that_starts_as_the_workflow_returns_is_recorded(tokenizer):
    class StartsAndEnds(Relay):
        async def run(self, problem, call):
            turn = await call("first", [user("go")])
            self.task = asyncio.create_task(call("last", [user("end")]))
            return Answer(turn.text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    episodes = play(engine, tokenizer, StartsAndEnds())
    assert [[turn.role for turn in episode.turns] for episode in episodes] == [["first", "last"]] * 4


def test_a_template_sees_all_fields_of_a_message(tokenizer):
    """Equal prompts are encoded once; a `name` field makes two prompts different."""

    class Named(Relay):
        async def run(self, problem, call):
            names = ["alice", "bob", "alice"]
            messages = [[user("hi") | {"name": name}] for name in names]
            turns = await asyncio.gather(*(call("first", message, slot=s) for s, message in enumerate(messages)))
            return Answer(turns[0].text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    rendered = []

    def render(tokenizer, messages):
        rendered.append(messages[0]["name"])
        return tokenizer.encode(messages[0]["name"])

    for episode in play(engine, tokenizer, Named(), render=render):
        first, second, third = (turn.prompt_ids for turn in episode.turns)
        assert first == third != second
    assert rendered == ["alice", "bob"]


class Raises(Relay):
    async def run(self, problem, call):
        await call("first", [user("a")])
        raise KeyError("strategy")


class NoAnswer(Relay):
    async def run(self, problem, call):
        return (await call("first", [user("a")])).text


class Unknown(Relay):
    async def run(self, problem, call):
        await call("judge", [user("a")])


class Twice(Relay):
    async def run(self, problem, call):
        await asyncio.gather(call("first", [user("a")]), call("first", [user("b")]))


class TurnAsContent(Relay):
    async def run(self, problem, call):
        await call("last", [user(await call("first", [user("a")]))])


class SpentBudget(Relay):
    async def run(self, problem, call):
        await call("first", [user("a")], max_tokens=0)


class OneSlotNamed(Relay):
    async def run(self, problem, call):
        await call("first", [user("a")], slot=None)
        await call("first", [user("b")], slot=0)


class Endless(Relay):
    async def run(self, problem, call):
        for round in range(1000):
            await call("first", [user("again")], round=round)


@pytest.mark.parametrize(
    ("workflow", "message", "cause"),
    [
        (Raises(), "KeyError: 'strategy'", KeyError),
        (NoAnswer(), r"returned a str.*return Answer\(text\)", None),
        (
            Unknown(),
            r"`call\('judge', slot=0\)`: unknown role. The roles and their numbers of slots are {'first': 3, 'last': 1}",
            ValueError,
        ),
        (Twice(), r"`call\('first', slot=0, round=0\)` was made twice", ValueError),
        (TurnAsContent(), "content of a message must be text, got Turn. Write `turn.text`", ValueError),
        (SpentBudget(), r"max_tokens=0\)`: a reply has at least one token", ValueError),
        (OneSlotNamed(), "with a slot and without one. Name the slot of all its calls, or of none", ValueError),
        (Endless(), r"at most `max_turns` \(6\) calls", ValueError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Relay) else "",
)
def test_a_workflow_that_fails_is_named_with_its_problem(tokenizer, workflow, message, cause):
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    with pytest.raises(WorkflowError, match=message) as error:
        play(engine, tokenizer, workflow, max_turns=6)
    assert "'relay'" in str(error.value) and "problem '0'" in str(error.value)
    assert cause is None or isinstance(error.value.__cause__, cause)


@pytest.mark.parametrize("ids", ["the text", {"input_ids": [1]}, [1.0]])
def test_a_renderer_must_return_token_ids(tokenizer, ids):
    """`apply_chat_template` returns text with `tokenize=False`, and a mapping without `return_dict=False`."""
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    with pytest.raises(WorkflowError, match="`render` must return the prompt's token ids as a list of integers"):
        play(engine, tokenizer, render=lambda tokenizer, messages: ids)


def test_a_request_that_the_engine_refuses_is_not_the_workflows_fault(tokenizer):
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)

    def refuse(key, request):
        raise ValueError("The adapter 'a' has not been published.")

    engine.add = refuse
    with pytest.raises(RequestRefused, match="has not been published"):
        play(engine, tokenizer, max_failed_episodes=100)


def test_ctrl_c_leaves_no_rollout_behind(tokenizer, monkeypatch):
    """A notebook goes on after Ctrl-C. The interrupted rollout has ended, and its requests are out of the engine, so that the next one is whole."""
    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 20), tokenizer.eos_token_id)
    quick = engine.step
    engine.step = lambda: (time.sleep(0.005), quick())[1]
    roll = Rollout(Relay(), engine, tokenizer, {"first": "a", "last": "b"}, lambda text: True, 0, max_prompt_tokens=100)
    n_threads = threading.active_count()

    def ctrl_c(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(watched_thread, "POLL", 0.02)
        patch.setattr(roll, "_check_progress", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            roll.run(PROBLEMS, 0, Sampling(10, 1.0))
    assert not engine.running and threading.active_count() == n_threads
    assert all(len(episode.turns) == 4 for episode in roll.run(PROBLEMS, 0, Sampling(10, 1.0)))


RELEASED = threading.Event()
"""Ends the threads that a rollout has abandoned, so that they do not run beside later tests."""


class Spins(Relay):
    async def run(self, problem, call):
        await call("first", [user("a")])
        while not RELEASED.is_set():  # the thread is abandoned
            pass


class Sleeps(Relay):
    async def run(self, problem, call):
        await call("first", [user("a")])
        await asyncio.sleep(1e9)


class Polls(Relay):
    async def run(self, problem, call):
        asyncio.ensure_future(call("first", [user("a")]))
        while not RELEASED.is_set():
            await asyncio.sleep(0)  # so the engine never moves


class Blocks(Relay):
    async def run(self, problem, call):
        await call("first", [user("a")])
        RELEASED.wait()


@pytest.mark.parametrize(("workflow", "line"), [
    (Spins(), "in run"), (Sleeps(), r"await asyncio.sleep\(1e9\)"), (Polls(), ""),
    (Blocks(), r"RELEASED.wait\(\)"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_a_workflow_that_hangs_on_a_real_reply_is_named_with_its_line(tokenizer, monkeypatch, workflow, line):
    monkeypatch.setattr("multirole.rollout.rollout.PATIENCE", 0.3)
    monkeypatch.setattr("multirole.watched_thread.POLL", 0.1)
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    RELEASED.clear()
    try:
        with pytest.raises(
            WorkflowError, match=r"'relay' hangs on problem '\d': for 0.3 s no episode has made a call"
        ) as error:
            play(engine, tokenizer, workflow)
    finally:
        RELEASED.set()
    assert re.search(line, str(error.value).partition("here:")[2]) and "asyncio/" not in str(error.value)


def test_a_rollout_that_hung_leaves_the_engine_to_the_next_one(tokenizer, monkeypatch):
    """One episode blocks the thread while the engine has requests of the others; in the end it goes on, during another rollout."""
    monkeypatch.setattr("multirole.rollout.rollout.PATIENCE", 0.3)
    monkeypatch.setattr("multirole.watched_thread.POLL", 0.1)
    released, ended = threading.Event(), threading.Event()

    class BlocksOnce(Relay):
        blocks = True

        async def run(self, problem, call):
            await call("first", [user("a")])
            if self.blocks:
                self.blocks = False
                released.wait()
                try:
                    await call("last", [user("late")])
                finally:
                    ended.set()
            return Answer("")

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1 if key == 0 else 3), tokenizer.eos_token_id)
    workflow = BlocksOnce()
    roll = Rollout(
        workflow, engine, tokenizer, {"first": "a", "last": "b"}, lambda text: True, 0, max_prompt_tokens=100
    )
    with pytest.raises(WorkflowError, match="hangs on problem '0'"):
        roll.run(PROBLEMS, 0, Sampling(10, 1.0))
    assert not engine.running
    quick = engine.step
    engine.step = lambda: (released.set(), ended.wait(), quick())[2]
    assert [len(episode.turns) for episode in roll.run(PROBLEMS, 0, Sampling(10, 1.0))] == [1] * 4
    assert len(engine.requests) == 8 and not engine.running


def test_a_slow_engine_and_slow_episodes_are_not_taken_for_hanging_ones(tokenizer, monkeypatch):
    monkeypatch.setattr("multirole.rollout.rollout.PATIENCE", 0.4)
    monkeypatch.setattr("multirole.watched_thread.POLL", 0.1)

    class Slow(Relay):
        async def run(self, problem, call):
            await call("first", [user("a")])
            time.sleep(0.2)  # noqa: ASYNC251 (0.8 s of all four episodes)
            return Answer("")

    class SlowEngine(ScriptedEngine):
        def step(self):
            time.sleep(0.6)
            return super().step()

    engine = SlowEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    assert len(play(engine, tokenizer, Slow())) == 4


def test_max_turns_calls_are_allowed(tokenizer):
    class Six(Relay):
        async def run(self, problem, call):
            for round in range(6):
                turn = await call("first", [user("again")], round=round)
            return Answer(turn.text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    assert [len(episode.turns) for episode in play(engine, tokenizer, Six(), max_turns=6)] == [6] * 4


def test_a_calls_own_cap_is_never_above_the_runs(tokenizer):
    class Capped(Relay):
        async def run(self, problem, call):
            for slot, cap in enumerate((3, 10**6, None)):
                turn = await call("first", [user(problem.question)], slot, max_tokens=cap)
            return Answer(turn.text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    play(engine, tokenizer, Capped())
    assert [request.max_tokens for request in engine.requests].count(3) == len(PROBLEMS)
    assert {request.max_tokens for request in engine.requests} == {3, 10}


def test_tools_are_part_of_the_prompt():
    """Two calls with equal messages and different tools have different prompts, which name their tool."""
    tokenizer = FAMILIES["qwen3"]()

    class WithTools(Relay):
        async def run(self, problem, call):
            for slot, name in enumerate(("add", "subtract")):
                tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
                turn = await call("first", [user(problem.question)], slot, tools=[tool])
            return Answer(turn.text)

    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    play(engine, tokenizer, WithTools(), max_prompt_tokens=5000)
    prompts = [tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert len(prompts) == 2 * len(PROBLEMS)
    assert [('"add"' in prompt, '"subtract"' in prompt) for prompt in prompts].count((True, False)) == len(PROBLEMS)
    assert [('"add"' in prompt, '"subtract"' in prompt) for prompt in prompts].count((False, True)) == len(PROBLEMS)
