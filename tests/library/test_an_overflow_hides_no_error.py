"""A prompt that is too long ends its episode; an error beside it in a task group still ends the rollout."""

import asyncio

import pytest
from scripted_engine import ScriptedEngine

from multirole.engines.protocol import Sampling
from multirole.rollout.errors import PromptOverflow, WorkflowError, is_overflow
from multirole.rollout.rollout import Rollout, warn_of_silent_roles
from multirole.types import Answer, Problem, user


class Grouped:
    """Makes a call that is too long, and fails in another task of the same group."""

    name, roles = "grouped", {"solver": 1}

    async def run(self, problem, call):
        async def fail():
            raise KeyError("no such column")

        async with asyncio.TaskGroup() as group:
            group.create_task(call("solver", [user("far too long " * 20)]))
            group.create_task(fail())


def test_an_error_beside_an_overflow_is_raised(tokenizer):
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    rollout = Rollout(Grouped(), engine, tokenizer, {"solver": "a"}, bool, 0, max_prompt_tokens=40)
    with pytest.raises(WorkflowError, match="failed on problem '0': ExceptionGroup.*2 sub-exceptions") as error:
        rollout.run([(Problem("0", "", "", None), 0)], 0, Sampling(10, 1.0))
    assert {type(one) for one in error.value.__cause__.exceptions} == {PromptOverflow, KeyError}


def test_a_group_is_an_overflow_if_all_its_errors_are():
    overflow, failure = PromptOverflow("solver: 99 prompt tokens"), KeyError("no such column")
    assert is_overflow(ExceptionGroup("", [overflow, ExceptionGroup("", [overflow])]))
    assert not is_overflow(ExceptionGroup("", [overflow, ExceptionGroup("", [overflow, failure])]))


class Wordy:
    """Its second role gets a long prompt."""

    name, roles = "wordy", {"solver": 1, "judge": 1}

    async def run(self, problem, call):
        turn = await call("solver", [user("short")])
        await call("judge", [user("far too long " * 20)])
        return Answer(turn.text)


def test_the_first_overflow_is_warned_of(tokenizer, caplog):
    engine = ScriptedEngine(lambda key, r: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    rollout = Rollout(Wordy(), engine, tokenizer, {"solver": "a", "judge": "a"}, bool, 0, max_prompt_tokens=40)
    for _ in range(2):
        rollout.run([(Problem("0", "", "", None), i) for i in range(2)], 0, Sampling(10, 1.0))
    (record,) = caplog.records
    assert "A prompt of the role 'judge' on problem '0' has" in record.message
    assert "more than `max_prompt_tokens` (40)" in record.message


def test_a_role_that_gets_long_prompts_only_is_not_said_to_be_never_called(caplog):
    warn_of_silent_roles(Wordy(), {"solver"}, "in the first iteration", 4)
    assert caplog.messages == [
        "The workflow 'wordy' got no reply from judge in the first iteration: prompts longer than `max_prompt_tokens` ended 4 episodes."
    ]
