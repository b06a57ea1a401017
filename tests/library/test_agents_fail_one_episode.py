"""However an agent ends, its episode alone fails, with a message that names the reason, and the next one is played."""

import asyncio
import functools
import sys
import threading

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from played_agents import ask, play

from multirole import from_openai
from multirole.rollout.errors import RolloutStopped, WorkflowError
from multirole.types import OVERFLOW


def exits():
    sys.exit("enough")


async def exits_in_a_task(question, client):
    async def child():
        exits()

    await asyncio.gather(ask(client, question), child())


async def awaits_nothing(question, client):
    return ask(client, question)


def stops(question, client):
    return next(iter([]))


async def stops_in_a_coroutine(question, client):
    raise StopIteration


def raising(error):
    """Return a synchronous and an asynchronous agent that raise `error`."""

    def in_a_thread(question, client):
        raise error

    async def in_the_loop(question, client):
        raise error

    return [in_a_thread, in_the_loop]


ENDS = [
    (stops, "RuntimeError: the agent raised StopIteration, as `next` does"),
    (stops_in_a_coroutine, "RuntimeError: coroutine raised StopIteration"),
    (exits_in_a_task, "SystemExit: enough"),
    (
        awaits_nothing,
        r"TypeError: the agent must return its answer as a string, got coroutine. Write `return await ...`\.",
    ),
    (lambda question, client: 42, "must return its answer as a string, got int"),
    (lambda question, client: None, "must return its answer as a string, got NoneType"),
    *[(agent, "SystemExit: 3") for agent in raising(SystemExit(3))],
    *[(agent, r"problem '1': SystemExit\n") for agent in raising(SystemExit())],
    *[(agent, "GeneratorExit") for agent in raising(GeneratorExit())],
    *[(agent, "CancelledError: me") for agent in raising(asyncio.CancelledError("me"))],
    *[(agent, "BaseExceptionGroup: two") for agent in raising(BaseExceptionGroup("two", [SystemExit(), KeyError()]))],
]


def failing_on_problem_1(agent):
    """Return an agent that answers every problem but 1, on which it does what `agent` does."""
    if asyncio.iscoroutinefunction(agent):

        async def either(question, client):
            return await agent(question, client) if question == "1+1" else await ask(client, question)
    else:

        def either(question, client):
            if question == "1+1":
                return agent(question, client)
            reply = client.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
            return reply.choices[0].message.content

    return from_openai(either, ["solver"], patience=20.0)


@pytest.mark.filterwarnings(
    "ignore:coroutine 'ask' was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(("agent", "message"), ENDS)
def test_an_agent_fails_its_own_episode(tokenizer, agent, message):
    workflow = failing_on_problem_1(agent)
    with pytest.raises(WorkflowError, match=message):
        play(tokenizer, workflow, n=3)
    for episodes in (play(tokenizer, workflow, n=3, max_failed_episodes=1) for _ in range(2)):
        assert [episode.failure is None for episode in episodes] == [True, False, True]
        assert [len(episode.turns) for episode in episodes] == [1, 0, 1]


@pytest.mark.parametrize(
    "agent", [*raising(KeyboardInterrupt()), *raising(BaseExceptionGroup("", [KeyboardInterrupt()]))]
)
def test_ctrl_c_in_an_agent_ends_the_run(tokenizer, agent):
    with pytest.raises(KeyboardInterrupt):
        play(tokenizer, from_openai(agent, ["solver"], "agent"), n=3, max_failed_episodes=3)


async def answer(question, client):
    assert isinstance(client, AsyncOpenAI)
    return await ask(client, question)


@functools.wraps(answer)
def logged(*args):
    return answer(*args)


class Team:
    async def __call__(self, question, client):
        return await answer(question, client)


@pytest.mark.parametrize("agent", [lambda q, c: answer(q, c), logged, functools.partial(answer), Team()])
def test_a_wrapper_of_a_coroutine_function_is_awaited(tokenizer, agent):
    episodes = play(tokenizer, from_openai(agent, ["solver"], "agent"), n=3)
    assert [len(episode.turns) for episode in episodes] == [1, 1, 1] and all(e.answer.text for e in episodes)


def test_what_an_agent_leaves_behind_is_in_no_later_episode(tokenizer):
    """Its tasks and threads may go on, but their calls are refused, and the end of one of them ends nothing else."""
    refused, go_on = [], threading.Event()

    async def late(client):
        await asyncio.to_thread(go_on.wait)
        try:
            await ask(client, "late")
        except openai.OpenAIError as error:
            refused.append(type(error).__name__)
        sys.exit("late")

    async def leaves(question, client):
        tasks.append(asyncio.ensure_future(late(client)))
        if len(tasks) == 2:
            go_on.set()
            await asyncio.sleep(0.2)
        return await ask(client, question)

    tasks: list[asyncio.Future] = []
    workflow = from_openai(leaves, ["solver"])
    for _ in range(2):
        (episode,) = play(tokenizer, workflow)
        assert len(episode.turns) == 1 or tasks[1].done()
    assert refused.count("AuthenticationError") == 1
    assert all(isinstance(task.exception(), SystemExit) for task in tasks if task.done())


# ---- prompts that are too long


@pytest.mark.parametrize("use_socket", [False, True])
def test_an_agent_that_can_shorten_its_prompt_goes_on(tokenizer, use_socket):
    def compacts(question, client):
        own = OpenAI(base_url=str(client.base_url), api_key=client.api_key) if use_socket else client
        messages = [{"role": "user", "content": "1" * 600}]
        try:
            own.chat.completions.create(model="solver", messages=messages)
        except openai.BadRequestError as error:
            assert (error.code, error.status_code, error.param) == ("context_length_exceeded", 400, "messages")
            assert "This model's maximum context length is 100 tokens. However, your messages resulted in" in str(error)
            messages[0]["content"] = "1"
        return own.chat.completions.create(model="solver", messages=messages).choices[0].message.content

    (episode,) = play(tokenizer, from_openai(compacts, ["solver"], use_socket=use_socket), max_prompt_tokens=100)
    assert episode.answer.reason is None and [turn.text for turn in episode.turns] == [episode.answer.text]


async def lets_it_escape(question, client):
    await ask(client, "1" * 600)


async def lets_it_escape_from_a_group(question, client):
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(ask(client, "1" * 600))


async def wraps_it(question, client):
    try:
        await ask(client, "1" * 600)
    except openai.OpenAIError as error:
        raise RuntimeError("the framework failed") from error


async def answers_without_a_reply(question, client):
    try:
        await ask(client, "1" * 600)
    except openai.OpenAIError:
        return "42"


@pytest.mark.parametrize(
    ("agent", "reason"),
    [(lets_it_escape, OVERFLOW), (lets_it_escape_from_a_group, OVERFLOW), (wraps_it, OVERFLOW), (answers_without_a_reply, None)],
)  # fmt: skip
def test_an_overflow_ends_the_episode_only_if_it_escapes(tokenizer, agent, reason):
    (episode,) = play(tokenizer, from_openai(agent, ["solver"]), max_prompt_tokens=100)
    assert episode.answer.reason == reason and not episode.turns


def test_an_overflow_that_was_handled_hides_no_later_error(tokenizer):
    async def fails_to_shorten(question, client):
        try:
            await ask(client, "1" * 600)
        except openai.OpenAIError:
            return {}["shorter"]

    with pytest.raises(WorkflowError, match="KeyError: 'shorter'"):
        play(tokenizer, from_openai(fails_to_shorten, ["solver"]), max_prompt_tokens=100)


# ---- faults that are not the agent's


def test_a_fault_of_the_engine_is_not_hidden_by_an_agent_that_handles_it(tokenizer, monkeypatch):
    async def careless(question, client):
        try:
            return await ask(client, question)
        except openai.OpenAIError:
            return "42"

    def refuse(self, key, request):
        raise ValueError("the adapter was never published")

    monkeypatch.setattr("scripted_engine.ScriptedEngine.add", refuse)
    with pytest.raises(Exception, match="the adapter was never published") as raised:
        play(tokenizer, from_openai(careless, ["solver"]), max_failed_episodes=1)
    assert type(raised.value).__name__ == "RequestRefused" and not isinstance(raised.value, RolloutStopped)
