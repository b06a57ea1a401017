"""Calls without a slot are ordered by arrival if each follows the one before it, and otherwise by prompt: never by the load of the machine."""

import asyncio
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import AsyncOpenAI, OpenAI
from played_agents import ask, play

from multirole import from_openai
from multirole.types import Answer, user

PROMPTS = ["a long first prompt", "a second one", "third"]


def slots_of(episode, tokenizer):
    """The prompts' indices in the order of slots and rounds; the prompts have different lengths."""
    by_length = sorted({len(turn.prompt_ids) for turn in episode.turns}, reverse=True)
    placed = sorted(episode.turns, key=lambda turn: (turn.round, turn.slot))
    return [by_length.index(len(turn.prompt_ids)) for turn in placed]


class Native:
    """The same calls as a native workflow."""

    name, roles = "native", {"solver": 1}

    def __init__(self, is_gathered):
        self.is_gathered = is_gathered

    async def run(self, problem, call):
        calls = [call("solver", [user(text)], slot=None) for text in PROMPTS]
        if self.is_gathered:
            await asyncio.gather(*calls)
        else:
            for one in calls:
                await one
        return Answer("")


# ---- agents whose every call follows the one before it


async def in_a_loop(question, client):
    for text in PROMPTS:
        await ask(client, text)
    return ""


async def in_a_task_each(question, client):
    for text in PROMPTS:
        await asyncio.wait_for(asyncio.ensure_future(ask(client, text)), 10)
    return ""


async def after_a_join(question, client):
    await asyncio.gather(ask(client, PROMPTS[0]))
    await ask(client, PROMPTS[1])
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(client, PROMPTS[2]))
    return ""


async def through_a_scheduler(question, client):
    """As AutoGen's runtime: a background task takes messages from a queue and handles each in a task of its own."""
    queue: asyncio.Queue = asyncio.Queue()

    async def handle(i):
        await ask(client, PROMPTS[i])
        await queue.put(i + 1)

    async def schedule():
        while (i := await queue.get()) < 3:
            handling.append(asyncio.ensure_future(handle(i)))

    handling: list[asyncio.Future] = []
    await queue.put(0)
    await asyncio.ensure_future(schedule())
    return ""


def send(client, text):
    client.chat.completions.create(model="solver", messages=[{"role": "user", "content": text}])


def in_one_thread(question, client):
    for text in PROMPTS:
        send(client, text)
    return ""


def in_a_thread_each(question, client):
    for text in PROMPTS:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(send, client, text).result()
    return ""


def over_a_socket(question, client):
    own = OpenAI(base_url=str(client.base_url), api_key=client.api_key)
    return in_one_thread(question, own)


SEQUENTIAL = [
    in_a_loop,
    in_a_task_each,
    after_a_join,
    through_a_scheduler,
    in_one_thread,
    in_a_thread_each,
    over_a_socket,
]


@pytest.mark.parametrize("agent", SEQUENTIAL)
def test_sequential_calls_are_in_the_order_of_their_arrival(tokenizer, agent, caplog):
    for episode in play(tokenizer, from_openai(agent, ["solver"], use_socket=agent is over_a_socket), n=3):
        assert slots_of(episode, tokenizer) == [0, 1, 2]
    assert "at the same time" not in caplog.text


# ---- agents with calls at the same time, some of which end before others begin


async def gathered(question, client):
    async def late(text):
        await asyncio.sleep(random.random() / 50)
        return await asyncio.wait_for(ask(client, text), 10)

    await asyncio.gather(*map(late, PROMPTS))
    return ""


async def from_a_queue(question, client):
    parts = list(PROMPTS)

    async def work():
        while parts:
            await asyncio.sleep(random.random() / 50)
            if parts:
                await ask(client, parts.pop(0))

    await asyncio.gather(work(), work())
    return ""


def in_threads(question, client):
    def late(text):
        time.sleep(random.random() / 50)
        send(client, text)

    threads = [threading.Thread(target=late, args=(text,)) for text in random.sample(PROMPTS, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ""


async def gathered_over_a_socket(question, client):
    own = AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key)
    await asyncio.gather(*(ask(own, text) for text in PROMPTS))
    return ""


@pytest.mark.parametrize("agent", [gathered, from_a_queue, in_threads, gathered_over_a_socket])
def test_concurrent_calls_are_ordered_by_prompt_and_warned_of_once(tokenizer, agent, caplog):
    for _ in range(3):
        caplog.clear()
        workflow = from_openai(agent, ["solver"], use_socket=agent is gathered_over_a_socket)
        for episode in play(tokenizer, workflow, n=6):
            assert slots_of(episode, tokenizer) == [2, 1, 0]
        assert (
            caplog.text.count(
                "makes up to 3 calls of the role 'solver' in an episode, which has 1 slots, some of them at the same time"
            )
            == 1
        )


def test_calls_of_one_round_are_not_warned_of(tokenizer, caplog):
    caplog.set_level(logging.WARNING)
    (episode,) = play(tokenizer, from_openai(gathered, {"solver": 3}))
    assert [(turn.round, turn.slot) for turn in episode.turns] == [(0, 0), (0, 1), (0, 2)] and not caplog.text


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_native_workflow_is_ordered_alike(tokenizer, is_gathered):
    (episode,) = play(tokenizer, Native(is_gathered))
    assert slots_of(episode, tokenizer) == ([2, 1, 0] if is_gathered else [0, 1, 2])
