"""A function that talks to OpenAI's API is a workflow: the model's name is the role, and nothing is lost, mixed or invented."""

import asyncio
import functools
import json
import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from played_agents import ask, play
from scripted_engine import ScriptedEngine
from trainers import build_model

from multirole import Voting, from_openai
from multirole.chat.templates import chat_template
from multirole.engines.protocol import Sampling
from multirole.openai_api.app import MAX_BODY_BYTES, Endpoint
from multirole.openai_api.serving import ModelServer, listening
from multirole.openai_api.session import Session
from multirole.rollout.errors import PromptOverflow, WorkflowError
from multirole.rollout.rollout import Rollout
from multirole.types import Problem, Turn, user
from multirole.workflows.prompts import render
from multirole.workflows.voting import list_candidates, parse_selection

ASK = {"model": "solver", "messages": [{"role": "user", "content": "1+1"}]}


async def vote(question, client):
    async def ask(role, text):
        reply = await client.chat.completions.create(model=role, messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    texts = await asyncio.gather(*(ask("generator", question) for _ in range(3)))
    candidates = render("general", "aggregator", question=question, candidates=list_candidates(texts))
    return texts[parse_selection(await ask("aggregator", candidates), 3)[0]]


def long_answers(completions, **_):
    return [float(len(str(text)) % 7) for text in completions]


def train(make_library_trainer, workflow, resumed=None, **options):
    """Train four iterations; return the flat adapter weights before and after."""
    options = {"max_steps": 4, "max_completion_length": 12, "n_prompts": 8} | options
    trainer = make_library_trainer(workflow, None, long_answers, **options)
    trainer.train(resume_from_checkpoint=resumed and f"{trainer.args.output_dir}/{resumed}")
    models = build_model(trainer._tokenizer, trainer.policy), trainer.peft_model
    return tuple(torch.cat([p.detach().flatten() for n, p in m.named_parameters() if "lora" in n]) for m in models)


@pytest.mark.parametrize("policy", ["ip", pytest.param("sp", marks=pytest.mark.slow)])
def test_voting_through_the_endpoint_trains_the_weights_of_voting_also_resumed(make_library_trainer, policy):
    agent = from_openai(vote, {"generator": 3, "aggregator": 1}, "voting")
    native, unbroken, resumed = (
        train(make_library_trainer, workflow, start, policy=policy, turn_seeds="prompt", save_steps=2)
        for workflow, start in ((Voting(prompts="general"), None), (agent, None), (agent, "checkpoint-2"))
    )
    assert not torch.equal(*native) and torch.equal(native[1], unbroken[1]) and torch.equal(native[1], resumed[1])


def shuffled_workers(seed: int):
    """Return an agent that asks three workers different questions, in random order and at random times."""

    def solve(question, client):
        rng, texts = random.Random(seed), {}

        def ask(part):
            time.sleep(rng.random() / 50)
            reply = client.chat.completions.create(model="worker", messages=[{"role": "user", "content": part}])
            texts[part] = reply.choices[0].message.content

        parts = ["7", "8", "9"]
        rng.shuffle(parts)
        threads = [threading.Thread(target=ask, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return " ".join(texts[part] for part in sorted(texts))

    return from_openai(solve, {"worker": 3}, "workers")


def test_what_is_sampled_does_not_depend_on_the_order_of_arrival(tokenizer):
    seen = []
    for seed in range(4):
        (episode,) = play(tokenizer, shuffled_workers(seed))
        seen.append((episode.answer, [(t.slot, t.round, t.prompt_ids, t.completion_ids) for t in episode.turns]))
    assert all(turns == seen[0] for turns in seen)
    assert [slot for slot, *_ in seen[0][1]] == [0, 1, 2] and len({tuple(t[3]) for t in seen[0][1]}) == 3


@pytest.mark.parametrize("use_socket", [False, True])
def test_calls_of_many_episodes_do_not_mix(tokenizer, use_socket):
    async def echo(question, client):
        own = AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key) if use_socket else client
        return "|".join(await asyncio.gather(*(ask(own, f"{question}+{i}") for i in range(10))))

    workflow = from_openai(echo, {"solver": 10}, use_socket=use_socket)
    for episode in play(tokenizer, workflow, n=20):
        texts = {tuple(turn.prompt_ids): turn.text for turn in episode.turns}
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": f"{episode.problem.question}+{i}"}], add_generation_prompt=True, return_dict=False, enable_thinking=False)
            for i in range(10)
        ]  # fmt: skip
        assert episode.answer.text == "|".join(texts[tuple(prompt)] for prompt in prompts)
        assert {(turn.slot, turn.round) for turn in episode.turns} == {(i, 0) for i in range(10)}


def test_a_client_that_disconnects_loses_no_turn(tokenizer):
    async def impatient(question, client):
        call = client.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
        task = asyncio.ensure_future(call)
        while not any(session.pending for session in workflow.endpoint._sessions.values()):
            await asyncio.sleep(0)
        task.cancel()
        return "done"

    workflow = from_openai(impatient, ["solver"])
    (episode,) = play(tokenizer, workflow)
    assert [len(turn.completion_ids) for turn in episode.turns] == [5]


def test_an_agent_that_never_answers_is_ended_and_named(tokenizer):
    async def sleeps(question, client):
        await asyncio.sleep(3600)

    with pytest.raises(WorkflowError, match=r"'sleeps' failed on problem '0': TimeoutError: the agent made no call"):
        play(tokenizer, from_openai(sleeps, ["solver"], patience=0.2))


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_agent_is_idle_only_between_its_calls(is_refused):
    async def exchange(rest):
        async def call(role, messages, **_):
            await asyncio.sleep(0.3)
            if is_refused:
                raise PromptOverflow("too long")

        async def agent():
            with suppress(PromptOverflow):
                await session.play("solver", [user("1+1")], None, None)
            await asyncio.sleep(rest)
            return "done"

        session = Session(call, ["solver"])
        return await from_openai(vote, ["solver"], patience=0.1)._finish(session, asyncio.ensure_future(agent()))

    assert asyncio.run(exchange(0)) == "done"
    with pytest.raises(TimeoutError, match=r"returned nothing for 0\.1 s"):
        asyncio.run(exchange(60))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_engines_steps_are_no_idleness_of_an_agent(tokenizer, is_async):
    """The second step is longer than `patience`. One agent rests between its calls, while the engine works for the other."""

    async def asynchronous(question, client):
        for _ in range(2):
            await ask(client, question)
            await asyncio.sleep(0.01)
        return "done"

    def synchronous(question, client):
        for _ in range(2):
            client.chat.completions.create(model="solver", messages=[user(question)])
            time.sleep(0.01)
        return "done"

    class Slow(ScriptedEngine):
        def step(self):
            time.sleep(0.8 * (self.steps == 1))
            return super().step()

    engine = Slow(lambda key, request: ([tokenizer.eos_token_id], 1 + key), tokenizer.eos_token_id)
    workflow = from_openai(asynchronous if is_async else synchronous, ["solver"], patience=0.5)
    episodes = play(tokenizer, workflow, n=2, engine=engine)
    assert [len(episode.turns) for episode in episodes] == [2, 2]


def test_an_answer_that_is_no_text_is_refused(tokenizer):
    async def forgets(question, client):
        pass

    with pytest.raises(WorkflowError, match="the agent must return its answer as a string, got NoneType"):
        play(tokenizer, from_openai(forgets, ["solver"]))


def test_a_role_that_is_no_list_and_an_agent_without_a_name_are_refused():
    with pytest.raises(TypeError, match=r"Write roles=\['judge'\]"):
        from_openai(vote, "judge")
    agent = functools.partial(vote)
    with pytest.raises(ValueError, match="Pass `name=`"):
        from_openai(agent, ["judge"])
    assert from_openai(agent, ["judge"], name="panel").name == "panel"


# ---- the protocol, without a rollout


class Open:
    """An endpoint with one open episode whose every reply is `text`; the trainer's temperature is 0.7."""

    def __init__(self, text: str = "2", finish_reason: str = "stop", **options) -> None:
        self.endpoint, self.text, self.finish_reason, self.asked = Endpoint(**options), text, finish_reason, []
        self.sampling = Sampling(10, 0.7)

    async def call(self, role, messages, slot=0, round=0, max_tokens=None, tools=None):
        self.asked.append((role, messages, max_tokens, tools))
        return Turn(role, 0, 0, [1, 2], [3, 4, 5], [-0.5, -1.0, float("nan")], self.text, self.finish_reason)

    def send(self, method: str = "POST", path: str = "/v1/chat/completions", key: str | None = None, **request):
        async def exchange():
            api_key = key or self.endpoint.open(Session(self.call, ["solver", "judge"], self.sampling))
            client = httpx.AsyncClient(transport=httpx.ASGITransport(self.endpoint.app), base_url="http://test")
            return await client.request(method, path, headers={"Authorization": f"Bearer {api_key}"}, **request)

        return asyncio.run(exchange())


def test_a_completion_has_openais_form():
    answer = Open().send(json=ASK).json()
    (choice,) = answer["choices"]
    assert (answer["object"], answer["model"], choice["finish_reason"]) == ("chat.completion", "solver", "stop")
    assert choice["message"] == {"role": "assistant", "content": "2"}
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_reply_that_the_cap_cut_off_says_so():
    (choice,) = Open(finish_reason="length").send(json=ASK).json()["choices"]
    assert choice["finish_reason"] == "length"


def chunks_of(opened: Open, **change) -> list[dict]:
    """The chunks of a streamed answer, whose end is checked."""
    *events, done, rest = opened.send(json=ASK | {"stream": True} | change).text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_stream_is_one_chunk_and_its_end():
    chunks = chunks_of(Open(), stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "2"}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop" and chunks[2]["usage"]["total_tokens"] == 5


def test_models_are_the_roles():
    models = Open().send("GET", "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["solver", "judge"]
    assert Open().send("GET", "/v1/models/judge").json() == models["data"][1]
    unknown = Open().send("GET", "/v1/models/gpt-4o")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/embeddings", 404), ("GET", "/", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405)],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_the_routes_that_are(method, path, status):
    answer = Open().send(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert error["message"] == (
        f"{method} {path} is not supported. There are POST /v1/chat/completions, POST /v1/responses, GET /v1/models and GET "
        "/v1/models/MODEL."
    )


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"model": "gpt-4o"}, 404, "model_not_found", "Models are the workflow's roles"),
        ({"n": 2}, 400, None, "a turn has one reply"),
        ({"temperature": 0.2}, 400, None, "samples every turn at its own `temperature`"),
        ({"response_format": {"type": "json_object"}}, 400, None, "a constrained sampler"),
        ({"logit_bias": {"5": 1}}, 400, None, "policy that is trained"),
        ({"top_p": 0.5}, 400, None, "`top_p=0.5` is refused"),
        ({"audio": {}}, 400, None, "`audio={}` is refused: the endpoint does not support it."),
        ({"max_tokens": 0}, 400, None, "must be a positive integer"),
        ({"messages": []}, 400, None, "at least one message"),
        ({"messages": [{"role": "robot", "content": "?"}]}, 400, None, 'a "role" among system, developer, user'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            None,
            "Images and audio are not supported",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, 400, None, "must be text, got int"),
        ({"tools": "add"}, 400, None, "must be a list of tools"),
        ({"stream": True, "stream_options": "x"}, 400, None, "`stream_options` must be an object, got 'x'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_as_openai_would(change, status, code, words):
    answer = Open().send(json=ASK | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code) and words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_neutral_values_and_ignored_fields_are_accepted():
    neutral = {"n": 1, "top_p": 1, "response_format": {"type": "text"}, "stop": None, "user": "me", "temperature": 0.7}
    assert Open().send(json=ASK | neutral).status_code == 200
    for ignored in ({"temperature": 0.2}, {"audio": {}}):
        assert Open(ignore=list(ignored)).send(json=ASK | ignored).status_code == 200
    with pytest.raises(ValueError, match=r"`ignore` names \['model'\]"):
        Endpoint(ignore=["model"])


def test_options_of_the_template_that_the_trainer_has_are_accepted(tokenizer):
    """An agent's code is the same in training and behind `multirole serve`."""

    async def agent(question, client):
        body = {"chat_template_kwargs": {"enable_thinking": True}}
        ask = client.chat.completions.create(model="solver", messages=[user(question)], extra_body=body)
        return (await ask).choices[0].message.content

    engine = ScriptedEngine(lambda key, request: ([7, tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    attempt = [(Problem("p", "", "q", None), 0)]
    for thinks in (True, False):
        renderer = functools.partial(chat_template, enable_thinking=thinks)
        rollout = Rollout(
            from_openai(agent, ["solver"]), engine, tokenizer, {"solver": None}, bool, 0, 900, render=renderer
        )
        if thinks:
            assert rollout.run(attempt, 0, Sampling(10, 1.0))[0].answer.text == tokenizer.decode([7])
        else:
            with pytest.raises(WorkflowError, match="`chat_template_kwargs=.* is refused"):
                rollout.run(attempt, 0, Sampling(10, 1.0))


def test_without_parallel_calls_the_first_one_counts():
    two = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for options, n in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        (choice,) = Open(two).send(json=ASK | {"tools": tools} | options).json()["choices"]
        assert [json.loads(c["function"]["arguments"]) for c in choice["message"]["tool_calls"]] == [
            {"a": 1},
            {"a": 2},
        ][:n]


def test_all_that_is_refused_is_said_at_once():
    wrong = {"model": "gpt-4o", "temperature": 0.2, "n": 2, "audio": {}, "max_tokens": 0, "messages": []}
    answer = Open().send(json=wrong)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    for words in (
        "does not exist", "`temperature=0.2` is refused: the trainer samples every turn at its own `temperature`, which the loss needs, 0.7.",
        "`n=2` is refused", "`audio={}` is refused", "Leave them out, or ignore them with `from_openai(..., ignore=['temperature', 'n', 'audio'])`",
        "`max_tokens` must be a positive integer", "at least one message",
    ):  # fmt: skip
        assert words in error["message"]


def test_logprobs_are_those_of_the_sampled_tokens():
    (choice,) = Open().send(json=ASK | {"logprobs": True, "top_logprobs": 0}).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in entries] == [
        ("token_id:3", -0.5),
        ("token_id:4", -1.0),
        ("token_id:5", -9999.0),
    ]
    refused = Open().send(json=ASK | {"logprobs": True, "top_logprobs": 2}).json()
    assert "only the log-probs of the sampled tokens are known" in refused["error"]["message"]
    assert chunks_of(Open(), logprobs=True)[0]["choices"][0]["logprobs"]["content"] == entries


def test_a_choice_of_no_tool_hides_the_tools():
    opened = Open('<tool_call>{"name": "add"}</tool_call>')
    (choice,) = opened.send(json=ASK | {"tools": [TOOL], "tool_choice": "none"}).json()["choices"]
    assert choice["message"]["content"] == opened.text and opened.asked[0][3] is None


def test_parts_developer_messages_and_caps_reach_the_call():
    opened = Open()
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    opened.send(json=ASK | {"messages": messages, "max_tokens": 9, "max_completion_tokens": 7})
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert opened.asked == [("solver", expected, 7, None)]


def test_earlier_tool_calls_reach_the_call_with_their_arguments_as_objects():
    opened = Open()
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "add", "arguments": arguments}}
        for i, arguments in enumerate(('{"a": 1}', {"a": 2}))
    ]
    messages = [user("1+1"), {"role": "assistant", "content": None, "tool_calls": calls}]
    opened.send(json=ASK | {"messages": [*messages, {"role": "tool", "tool_call_id": "0", "content": "2"}]})
    expected = [
        {"id": str(i), "type": "function", "function": {"name": "add", "arguments": {"a": i + 1}}} for i in range(2)
    ]
    ((_, seen, *_),) = opened.asked
    assert seen[1] == {"role": "assistant", "content": "", "tool_calls": expected}
    assert seen[2] == {"role": "tool", "tool_call_id": "0", "content": "2"}


@pytest.mark.parametrize("key", ["", "episode-of-another", "None"])
def test_another_episodes_key_is_refused(key):
    opened = Open()
    answer = opened.send(json=ASK, key=key or "x")
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key" and not opened.asked


def test_a_call_after_the_end_is_refused(tokenizer):
    clients = []

    def agent(question, client):
        clients.append((str(client.base_url), client.api_key))
        return "42"

    play(tokenizer, from_openai(agent, ["solver"], use_socket=True))
    client = OpenAI(base_url=clients[0][0], api_key=clients[0][1], max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="A key is valid while its agent function runs"):
        client.chat.completions.create(**ASK)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b" " * (MAX_BODY_BYTES + 1), 413)],
    ids=["cut off", "a list", "no utf-8", "deep", "too large"],
)
def test_a_hostile_body_is_refused(body, status):
    answer = Open().send(content=body)
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_half_a_character_is_refused():
    opened = Open()
    answer = opened.send(content=json.dumps(ASK | {"messages": [user("half \ud83d")]}))
    assert answer.status_code == 400 and "a lone surrogate" in answer.json()["error"]["message"] and not opened.asked


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tool_calls_are_answered_in_openais_form():
    opened = Open('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    (choice,) = opened.send(json=ASK | {"tools": [TOOL]}).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert opened.asked[0][3] == [TOOL]


def test_streamed_tool_calls_are_numbered():
    first, *_ = chunks_of(Open('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>'), tools=[TOOL])
    calls = first["choices"][0]["delta"]["tool_calls"]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "a"), (1, "b")]


def test_a_reply_without_tools_is_text():
    text = 'x <tool_call>{"name": "add"}</tool_call>'
    (choice,) = Open(text).send(json=ASK).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"


def test_tools_need_a_chat_template_that_knows_them(tokenizer):
    async def uses_tools(question, client):
        await client.chat.completions.create(**ASK, tools=[TOOL])

    with pytest.raises(WorkflowError, match="does not know `tools`"):
        play(tokenizer, from_openai(uses_tools, ["solver"]))


# ---- serving trained adapters


def make_server(tokenizer, temperature: float = 1.0, **options) -> ModelServer:
    """A server whose adapters "a" and "b" answer with the tokens 7 and 8."""

    def reply(key, request):
        return [7 if request.adapter == "a" else 8, tokenizer.eos_token_id], 2

    engine = ScriptedEngine(reply, tokenizer.eos_token_id)
    return ModelServer(
        engine, tokenizer, {"solver": "a", "judge": "b"}, Sampling(10, temperature), max_prompt_tokens=100, **options
    )


def client_of(server: ModelServer) -> OpenAI:
    """Serve until the tests end, and return a client."""
    urls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=server.run, args=("127.0.0.1", 0, urls.put), daemon=True).start()
    return OpenAI(base_url=urls.get(timeout=30), api_key="any", max_retries=0)


def test_trained_adapters_are_served_by_the_same_api(tokenizer):
    client = client_of(make_server(tokenizer, ignore=("temperature",)))
    ask = {"messages": ASK["messages"], "temperature": 0.1}
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda role: client.chat.completions.create(model=role, **ask), ["solver", "judge"] * 8))
    expected = {"solver": tokenizer.decode([7]), "judge": tokenizer.decode([8])}
    assert all(text.choices[0].message.content == expected[text.model] for text in texts)
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.chat.completions.create(model="solver", messages=[{"role": "user", "content": "what? " * 200}])


def test_a_served_template_that_does_not_know_tools_refuses_them(tokenizer):
    with pytest.raises(openai.BadRequestError, match="does not know `tools`"):
        client_of(make_server(tokenizer)).chat.completions.create(**ASK, tools=[TOOL])


def test_served_calls_have_their_own_seeds_and_the_servers_sampling(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}")
    rendered = []

    def note(tokenizer, messages, tools=None):
        rendered.append((messages, tools))
        return [5, 6]

    async def exchange():
        caps = (3, 3, 99, None)
        calls = [asyncio.ensure_future(server._call("solver", [user("q")], max_tokens=n, tools=[TOOL])) for n in caps]
        await asyncio.sleep(0)
        while server._advance():
            await asyncio.sleep(0)
        return await asyncio.gather(*calls)

    server = make_server(tokenizer, temperature=0.7, render=note)
    turns = asyncio.run(exchange())
    requests = server.engine.requests
    assert [turn.completion_ids for turn in turns] == [[7, tokenizer.eos_token_id]] * 4
    assert rendered == [([user("q")], [TOOL])] * 4
    assert len({request.seed for request in requests}) == 4
    assert [request.max_tokens for request in requests] == [3, 3, 10, 10]
    assert {request.temperature for request in requests} == {0.7}


def test_an_address_that_cannot_be_served_is_refused():
    with listening("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"Nothing can be served at 127\.0\.0\.1:{port}: .*in use.*Port 0 takes a free one"
        ):
            listening("127.0.0.1", port)
    with pytest.raises(ValueError, match="The port must be from 0 to 65535, got 70000. Port 0 takes a free one."):
        listening("127.0.0.1", 70000)
