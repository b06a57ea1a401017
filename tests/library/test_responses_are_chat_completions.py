"""A request to `/v1/responses` is the model call that the same conversation makes as a chat completion, in memory and over sockets."""

import asyncio
import json

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseCompletedEvent
from played_agents import play

from multirole import from_openai
from multirole.openai_api.app import Endpoint
from multirole.openai_api.session import Session
from multirole.types import Turn, user

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
AS_CHAT = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def exchange(talk, text="2", finish_reason="stop", **options):
    """Run `talk(client)` with an endpoint whose every reply is `text`; return its result and the calls that were made."""
    asked = []

    async def call(role, messages, slot=0, round=0, max_tokens=None, tools=None):
        asked.append((role, messages, max_tokens, tools))
        return Turn(role, 0, 0, [1, 2], [3, 4, 5], [-0.5, -1.0, -2.0], text, finish_reason)

    async def run():
        endpoint = Endpoint(**options)
        key = endpoint.open(Session(call, ["solver"]))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(endpoint.app))
        return await talk(AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=http, max_retries=0))

    return asyncio.run(run()), asked


def create(reply="2", finish_reason="stop", ignore=(), **request):
    async def talk(client):
        return await client.responses.create(**{"model": "solver", "input": "1+1"} | request)

    return exchange(talk, reply, finish_reason, ignore=ignore)


def test_a_text_is_answered_in_openais_form():
    response, asked = create(instructions="Be brief.", max_output_tokens=7)
    assert asked == [("solver", [{"role": "system", "content": "Be brief."}, user("1+1")], 7, None)]
    assert (response.output_text, response.status, response.model, response.object) == (
        "2",
        "completed",
        "solver",
        "response",
    )
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (2, 3, 5)


def test_a_reply_that_the_cap_cut_off_says_so():
    response, _ = create(finish_reason="length")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_items_become_the_messages_of_a_chat():
    _, asked = create(
        tools=[TOOL],
        input=[
            {"role": "developer", "content": "You add."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "+1"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I ask.", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "2"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "0"}]},
        ],
    )  # fmt: skip
    ((_, (system, question, reply, one, other), _, tools),) = asked
    assert (system, question) == ({"role": "system", "content": "You add."}, user("1+1"))
    assert (reply["role"], reply["content"], reply["reasoning_content"]) == ("assistant", "I ask.", "Hm.")
    assert [call["function"]["arguments"] for call in reply["tool_calls"]] == [{"a": 1}, {}]
    assert [(m["role"], m["content"]) for m in (one, other)] == [("tool", "2"), ("tool", "0")]
    assert tools == [AS_CHAT]


def test_tool_calls_are_items_and_answer_each_other():
    async def talk(client):
        first = await client.responses.create(model="solver", input="1+1", tools=[TOOL], instructions="Be brief.")
        (call,) = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        await client.responses.create(model="solver", input=[output], previous_response_id=first.id)
        await client.responses.create(model="solver", input=[user("1+1"), call.to_dict(), output])
        await client.responses.create(
            model="solver", input=[user("1+1"), {"type": "item_reference", "id": call.id}, output]
        )
        return call

    call, asked = exchange(talk, CALL)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
    assert asked[1] == asked[2] == asked[3]
    assert [message["role"] for message in asked[1][1]] == [
        "user",
        "assistant",
        "tool",
    ]  # instructions are not carried over


def test_a_stream_is_the_response():
    async def talk(client):
        async with client.responses.stream(model="solver", input="1+1", tools=[TOOL]) as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    for text in ("2", "so " + CALL, CALL):
        (events, response), _ = exchange(talk, text)
        whole, _ = create(text, tools=[TOOL])
        assert response.output_text == whole.output_text and [item.type for item in response.output] == [
            item.type for item in whole.output
        ]
        assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
        assert isinstance(events[-1], ResponseCompletedEvent) and events[-1].response.usage.total_tokens == 5
        assert [event.sequence_number for event in events] == list(range(len(events)))
        added, done = (
            [e.item.type for e in events if e.type == f"response.output_item.{end}"] for end in ("added", "done")
        )
        assert added == done == [item.type for item in whole.output]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text


def test_logprobs_are_those_of_the_sampled_tokens():
    response, _ = create(include=["message.output_text.logprobs"])
    assert [entry.logprob for entry in response.output[0].content[0].logprobs] == [-0.5, -1.0, -2.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.2}, "samples every turn at its own `temperature`"),
        ({"text": {"format": {"type": "json_object"}}}, "a constrained sampler"),
        ({"reasoning": {"effort": "low"}}, "ignore=['reasoning']"),
        ({"previous_response_id": "resp_9"}, "Previous response with id 'resp_9' not found"),
        ({"tools": [{"type": "web_search"}]}, "must be a list of tools of the type 'function'"),
        ({"input": [{"type": "computer_call"}]}, "is of the type 'computer_call', which is not supported"),
        ({"input": []}, "`input` must be a text or a list of at least one item"),
        ({"max_output_tokens": 0}, "`max_output_tokens` must be a positive integer"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "`input[0]` is reasoning, whose content and summary must be lists of parts"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "`input[0]` is reasoning"),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "`input[0]` is reasoning"),
        ({"previous_response_id": ["x"]}, "Previous response with id ['x'] not found"),
        ({"input": [{"type": "item_reference", "id": ["x"]}]}, "is of the type 'item_reference', which is not supported"),
        ({"include": 5}, "`include` must be a list, got 5"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(change, words):
    with pytest.raises(openai.BadRequestError) as error:
        create(**change)
    assert words in str(error.value) and error.value.body["param"]


def test_neutral_and_ignored_fields_are_accepted():
    create(
        text={"format": {"type": "text"}}, truncation="disabled", store=False, top_p=1, tool_choice="auto", include=[]
    )
    create(ignore=["reasoning", "temperature"], reasoning={"effort": "low"}, temperature=0.2)
    response, asked = create(CALL, tools=[TOOL], tool_choice="none")
    assert response.output_text == CALL and asked[0][3] is None


@pytest.mark.parametrize("use_socket", [False, True])
def test_responses_are_turns_of_the_episode(tokenizer, use_socket):
    async def converse(question, client):
        own = AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key) if use_socket else client
        first = await own.responses.create(model="solver", input=question)
        second = await own.responses.create(model="solver", input="Again.", previous_response_id=first.id)
        return f"{first.output_text}|{second.output_text}"

    async def chat(question, client):
        messages = [user(question)]
        for _ in range(2):
            reply = (await client.chat.completions.create(model="solver", messages=messages)).choices[0].message.content
            messages += [{"role": "assistant", "content": reply}, user("Again.")]
        return f"{messages[1]['content']}|{messages[3]['content']}"

    def seen(agent):
        episodes = play(tokenizer, from_openai(agent, ["solver"], use_socket=use_socket), n=3)
        return [(e.answer.text, [(t.prompt_ids, t.completion_ids, t.round) for t in e.turns]) for e in episodes]

    assert seen(converse) == seen(chat)
