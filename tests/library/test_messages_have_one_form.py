"""Messages have one form, whether a dataset's row, a workflow's call or the endpoint brings them; what no template can render is refused with its place."""

import asyncio
import json

import httpx
import pytest
from chat_tokenizers import FAMILIES, template
from datasets import Dataset
from scripted_engine import ScriptedEngine

from multirole.chat.messages import normalised
from multirole.chat.templates import chat_template
from multirole.engines.protocol import Sampling
from multirole.inputs.problems import to_problems
from multirole.openai_api.app import Endpoint
from multirole.openai_api.session import Session
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Problem, Turn, user


def history(arguments, **fields):
    call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]} | fields
    return [user("Weather?"), said, {"role": "tool", "tool_call_id": "abc123def", "content": "sun"}, user("Thanks.")]


def by_row(messages, others=()):
    return to_problems(Dataset.from_list([{"prompt": messages}, *({"prompt": other} for other in others)]))[0].messages


def by_call(messages):
    """The messages that a renderer gets for a workflow's call."""
    got = []

    class Chat:
        name, roles = "chat", {"solver": 1}

        async def run(self, problem, call):
            return Answer((await call("solver", messages)).text)

    def render(tokenizer, messages):
        got.append(messages)
        return [5, 6]

    tokenizer = FAMILIES["smollm2"]()
    engine = ScriptedEngine(lambda key, request: ([tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    Rollout(Chat(), engine, tokenizer, {"solver": None}, bool, 0, 99, render).run(
        [(Problem("0", "", "q", None), 0)], 0, Sampling(4, 1.0)
    )
    return got[0]


def by_wire(messages, status=200):
    got = []

    async def call(role, messages, slot=0, round=0, max_tokens=None, tools=None):
        got.append(messages)
        return Turn(role, 0, 0, [1], [2], [0.0], "ok", "stop")

    async def exchange():
        app = Endpoint((), Session(call, ["solver"])).app
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m/v1")
        return await client.post("/chat/completions", content=json.dumps({"model": "solver", "messages": messages}))

    answer = asyncio.run(exchange())
    assert answer.status_code == status, answer.text
    return got[0] if got else answer.json()["error"]["message"]


def test_the_three_doors_agree():
    messages = history({"city": "Ulm", "deep": {"days": [1, {"x": "y"}]}}, reasoning="Hm.", name="ann", refusal=None)
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *messages,
    ]
    call = {
        "id": "abc123def",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Ulm", "deep": {"days": [1, {"x": "y"}]}}},
    }
    expected = [
        {"role": "system", "content": "Be brief."},
        user("Weather?"),
        {"role": "assistant", "content": "", "name": "ann", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "sun"},
        user("Thanks."),
    ]
    assert by_call(messages) == by_wire(messages) == expected == normalised(expected)
    texts = [message | {"content": "Be brief."} if i == 0 else message for i, message in enumerate(messages)]
    texts[2]["tool_calls"][0]["function"]["arguments"]["deep"]["days"] = [1]  # a column has one type
    expected[2]["tool_calls"][0]["function"]["arguments"]["deep"]["days"] = [1]
    assert by_row(texts) == expected


def test_only_the_empty_fields_that_arrow_adds_are_left_out():
    """huggingface/trl#5376, hiyouga/LlamaFactory#10455: rows give each other `"zip": null`."""
    others = [history({"zip": "89073", "deep": {"x": 1, "parts": [{"p": 1, "q": 2}]}}), [user("Hi.")]]
    assert by_row(history({"city": "Ulm", "deep": {"parts": [{"p": 3}]}}), others) == normalised(
        history({"city": "Ulm", "deep": {"parts": [{"p": 3}]}})
    )
    null = {"city": None, "deep": {"x": None}, "parts": [None]}
    for messages in (by_call(history(null)), by_wire(history(null)), by_wire(history(json.dumps(null)))):
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == null


@pytest.mark.parametrize("arguments", ["", " ", "null", None, "{}", {}])
def test_no_arguments_are_an_empty_object(arguments):
    for messages in (
        by_call(history(arguments)),
        by_wire(history(arguments)),
        normalised(history(arguments), from_rows=True),
    ):
        assert messages[1]["tool_calls"][0]["function"]["arguments"] in ({}, "{}")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe", "lfm2_v2", "deepseekv3"])
def test_arguments_in_text_and_as_objects_give_one_prompt(name):
    """Some templates fail on a text, and DeepSeek's on an object."""
    tokenizer = FAMILIES["qwen3"]()
    arguments = {"city": "Ulm", "days": 2}
    options = {"chat_template": template(name)}
    ids = chat_template(tokenizer, normalised(history(arguments)), **options)
    assert ids == chat_template(tokenizer, normalised(history(json.dumps(arguments)), from_rows=True), **options)
    assert "Ulm" in tokenizer.decode(ids)


BAD_CALLS = {
    "a number": 3, "a list": ["Ulm"], "a text": '"Ulm"', "a number in text": "3", "no JSON": "{bad", "an object in a text in a text": json.dumps('{"city": "Ulm"}'),
    "true": True,
}  # fmt: skip


@pytest.mark.parametrize("arguments", BAD_CALLS.values(), ids=BAD_CALLS)
def test_other_arguments_are_refused_with_their_place(arguments):
    """sgl-project/sglang#28035: such a call crashed the server."""
    place = r"messages[1].tool_calls[0].function.arguments"
    assert place in by_wire(history(arguments), 400)
    with pytest.raises(ValueError, match="`messages.1..tool_calls.0..function.arguments` of the call of 'weather'"):
        normalised(history(arguments))
    with pytest.raises(ValueError, match="`prompt.1..tool_calls.0..function.arguments` of the call of 'weather'"):
        by_row(history(arguments))


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "`messages[0].tool_calls[0]` must have `function`"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "`messages[0].tool_calls[0]` must have `function`"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}, "`messages[0].tool_calls[0]` must have `function`"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "of the type 'function'"),
        ({"role": "assistant", "tool_calls": {"id": "c"}}, "`messages[0].tool_calls` must be a list"),
        ({"role": "assistant", "content": "", "reasoning_content": ["x"]}, "`messages[0].reasoning_content` must be text"),
        ({"role": "tool", "content": {"a": 1}}, "must be text, got dict"),
        ({"role": "tool", "content": "1", "tool_call_id": 5}, "`messages[0].tool_call_id` must be text"),
        ({"role": "user", "content": None}, "must be text, got NoneType"),
        ({"role": ["user"], "content": "x"}, '"role" among system'),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_with_their_place(message, place):
    assert place in by_wire([message], 400)


def test_arguments_that_are_too_deep_are_refused():
    deep = {}
    for _ in range(300):
        deep = {"x": deep}
    assert "levels" in by_wire(history(deep), 400)
