"""Every call that an agent makes is one turn of the episode that made it, and what cannot be told is said."""

import asyncio
import logging
import os
import threading
import time

import httpx
import openai
import pytest
from openai import OpenAI
from played_agents import ask, play
from scripted_engine import ScriptedEngine

from multirole import from_openai
from multirole.rollout.errors import WorkflowError


def turns_of(episodes):
    return [len(episode.turns) for episode in episodes]


# ---- whose call it is


async def keeps_the_client(question, client):
    return await ask(kept.setdefault("client", client), question)


def keeps_the_client_in_a_thread(question, client):
    own = kept.setdefault("client", client)
    time.sleep(0.02)
    return (
        own.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
        .choices[0]
        .message.content
    )


async def sets_a_default(question, client):
    """As `agents.set_default_openai_client`: the last episode's client is everybody's."""
    kept["client"] = client
    await asyncio.sleep(0.02)
    return await ask(kept["client"], question)


kept: dict = {}


@pytest.mark.parametrize("agent", [keeps_the_client, keeps_the_client_in_a_thread, sets_a_default])
def test_a_kept_client_calls_for_the_episode_that_uses_it(tokenizer, agent, caplog):
    kept.clear()
    workflow = from_openai(agent, ["solver"])
    for _ in range(2):  # and in a later rollout
        episodes = play(tokenizer, workflow, n=4)
        assert turns_of(episodes) == [1] * 4
        assert [episode.turns[0].text for episode in episodes] == [episode.answer.text for episode in episodes]
    assert caplog.text.count("has the key of another episode") == 1


def test_episodes_whose_calls_count_for_others_are_warned_of(tokenizer, monkeypatch, caplog):
    """Keys in the environment, over sockets: nothing but the key tells whose call it is."""
    monkeypatch.setenv("OPENAI_API_KEY", "")
    everybody = threading.Barrier(4)

    def reads_the_environment(question, client):
        os.environ["OPENAI_API_KEY"] = client.api_key
        everybody.wait()
        own = OpenAI(base_url=str(client.base_url))
        own.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
        everybody.wait()
        return ""

    episodes = play(tokenizer, from_openai(reads_the_environment, ["solver"], use_socket=True), n=4)
    assert sorted(turns_of(episodes)) == [0, 0, 0, 4]
    assert caplog.text.count("3 of 4 episodes of the workflow 'reads_the_environment' have no turn") == 1
    assert "reads its key from the environment" in caplog.text


def test_a_client_that_cannot_reach_the_endpoint_says_what_to_write(tokenizer):
    def connects(question, client):
        own = OpenAI(base_url=str(client.base_url), api_key=client.api_key, max_retries=0)
        return own.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])

    def connects_by_itself(question, client):
        return httpx.post(f"{client.base_url}chat/completions", json={}).text

    def wraps(question, client):
        raise RuntimeError("InternalServerError: Connection error.")  # as LiteLLM, which drops the cause

    for agent in (connects, connects_by_itself, wraps):
        with pytest.raises(
            WorkflowError, match=r"endpoint is in memory only\. Write `from_openai\(\.\.\., use_socket=True\)`"
        ):
            play(tokenizer, from_openai(agent, ["solver"]))


# ---- retries


@pytest.fixture
def slow_first_step(monkeypatch):
    """The engine takes half a second for its first step."""
    step, is_first = ScriptedEngine.step, [True]

    def slow(self):
        if is_first.pop() if is_first else False:
            time.sleep(0.5)
        return step(self)

    monkeypatch.setattr(ScriptedEngine, "step", slow)


def retries_by_default(question, client):
    own = OpenAI(base_url=str(client.base_url), api_key=client.api_key, timeout=0.2)
    return (
        own.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
        .choices[0]
        .message.content
    )


def sends_it_again(question, client):
    def send():
        body = {"model": "solver", "messages": [{"role": "user", "content": question}]}
        headers = {"Authorization": f"Bearer {client.api_key}"}
        return httpx.post(f"{client.base_url}chat/completions", json=body, headers=headers, timeout=0.2)

    for _ in range(5):
        try:
            return send().json()["choices"][0]["message"]["content"]
        except httpx.ReadTimeout:
            time.sleep(0.1)


async def loses_patience(question, client):
    try:
        return await asyncio.wait_for(ask(client, question), 0.001)
    except TimeoutError:
        return await ask(client, question)


@pytest.mark.parametrize("agent", [retries_by_default, sends_it_again, loses_patience])
def test_a_retried_call_is_one_turn(tokenizer, slow_first_step, agent):
    """verifiers tells retries by the header `x-stainless-retry-count`; other clients send the body again after they have gone."""
    (episode,) = play(tokenizer, from_openai(agent, ["solver"], use_socket=agent is not loses_patience))
    assert [turn.text for turn in episode.turns] == [episode.answer.text]


def test_equal_calls_at_the_same_time_are_no_retries(tokenizer):
    async def thrice(question, client):
        return "|".join(await asyncio.gather(*(ask(client, question) for _ in range(3))))

    (episode,) = play(tokenizer, from_openai(thrice, {"solver": 3}))
    assert len({tuple(turn.completion_ids) for turn in episode.turns}) == 3
    assert sorted(turn.text for turn in episode.turns) == sorted(episode.answer.text.split("|"))


# ---- refusals that an agent handles without a word


async def handles_everything(question, client):
    try:
        return await ask(client, question, seed=1, n=2)
    except openai.OpenAIError:
        return "no idea"


async def asks_a_path_that_does_not_exist(question, client):
    try:
        return (await client.embeddings.create(model="solver", input=question)).object
    except openai.OpenAIError:
        return "no idea"


@pytest.mark.parametrize(
    ("agent", "refusal"),
    [(handles_everything, r"`n=2` is refused: .* `seed=1` is refused: .*ignore=\['n', 'seed'\]"),
     (asks_a_path_that_does_not_exist, "POST /v1/embeddings is not supported")],
)  # fmt: skip
def test_the_last_refusal_is_quoted_if_no_request_was_answered(tokenizer, agent, refusal):
    with pytest.raises(WorkflowError, match=f"no request of the agent was answered, .* The last refusal: {refusal}"):
        play(tokenizer, from_openai(agent, ["solver"]))


def test_a_refusal_beside_answers_is_warned_of_once(tokenizer, caplog):
    caplog.set_level(logging.WARNING)

    async def tries_twice(question, client):
        await handles_everything(question, client)
        return await ask(client, question)

    assert turns_of(play(tokenizer, from_openai(tries_twice, ["solver"]), n=3)) == [1, 1, 1]
    assert caplog.text.count("`seed=1` is refused") == 1
