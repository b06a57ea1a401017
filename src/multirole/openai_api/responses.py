"""OpenAI's responses (`POST /v1/responses`) as a thin layer over chat completions: each response is one model call.

A request becomes the body of a chat completion and is parsed as such. Earlier responses are known by their ids while their episode runs.
Only function tools exist; a request for anything else is refused.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseUsage,
)
from openai.types.responses.response_reasoning_item import Content
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from multirole.openai_api.dialect import BadRequest, ClientReply, Dialect
from multirole.openai_api.session import Session

READ = frozenset({
    "model", "input", "instructions", "stream", "stream_options", "tools", "max_output_tokens", "previous_response_id",
    "include",
})  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "tool_choice": ("auto", "none"), "truncation": ("disabled",), "background": (False,), "top_p": (1,),
    "top_logprobs": (0,), "reasoning": ({},),
}  # fmt: skip
"""Fields of responses that are accepted with these values, or null, only."""


def as_chat(body: dict, session: Session) -> dict:
    """Return the messages and tools of a request as those of a chat completion. BadRequest for an item that has no such form."""
    asked = body.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise BadRequest("`input` must be a text or a list of at least one item.", param="input")
    if not isinstance(include := body.get("include"), list | None):
        raise BadRequest(f"`include` must be a list, got {include!r}.", param="include")
    earlier = []
    if (previous := body.get("previous_response_id")) is not None:
        if not isinstance(previous, str) or previous not in session.conversations:
            raise BadRequest(
                f"Previous response with id {previous!r} not found. A response is known while its episode runs.",
                400, "previous_response_not_found", "previous_response_id",
            )  # fmt: skip
        earlier = session.conversations[previous]
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return {"messages": [*system, *_messages([*earlier, *items], session)], "tools": _tools(body.get("tools"))}


def _messages(items: list[dict], session: Session) -> list[dict]:
    """Convert items to messages. A reply's thoughts, its text and its calls, which are items of their own, are one message."""
    messages: list[dict[str, Any]] = []
    new: dict[str, Any]
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "item_reference" and isinstance(id := item.get("id"), str) and id in session.conversations:
            (item,) = session.conversations[id]
            kind = item["type"]
        if kind == "message":
            content = item.get("content")
            parts = [_part(part) for part in content] if isinstance(content, list) else content
            new = {"role": item.get("role"), "content": parts}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            new = {
                "role": "assistant",
                "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}],
            }
        elif kind == "function_call_output":
            output = item.get("output")
            parts = [_part(part) for part in output] if isinstance(output, list) else output
            new = {"role": "tool", "tool_call_id": item.get("call_id"), "content": parts}
        elif kind == "reasoning":
            thought = _text_of(item.get("content") or item.get("summary") or [], f"input[{i}]")
            new = {"role": "assistant", "reasoning_content": thought}
        else:
            raise BadRequest(
                f"`input[{i}]` is of the type {kind!r}, which is not supported. There are messages, reasoning, function_call and "
                "function_call_output.", param=f"input[{i}]",
            )  # fmt: skip
        if messages and new["role"] == "assistant" and _continues(messages[-1], new):
            last = messages[-1]
            messages[-1] = last | new | {"tool_calls": [*last.get("tool_calls", []), *new.get("tool_calls", [])]}
        else:
            messages.append(new)
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("content", "")
            if not message.get("tool_calls"):
                message.pop("tool_calls", None)
    return messages


def _continues(message: dict, part: dict) -> bool:
    """Return whether a part of a reply belongs to the message before it: thoughts begin a reply, and calls end it."""
    if message["role"] != "assistant" or "reasoning_content" in part:
        return False
    return "tool_calls" in part or not {"content", "tool_calls"} & set(message)


def _part(part: Any) -> Any:
    """Return a part of text in the form of chat completions; other parts stay as they are, and are refused with the message."""
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _text_of(parts: Any, name: str) -> str:
    """Return the text of the parts of reasoning."""
    texts = [part.get("text", "") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if not isinstance(parts, list) or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadRequest(
            f"`{name}` is reasoning, whose content and summary must be lists of parts with a text.", param=name
        )
    return "".join(texts)


def _tools(tools: Any) -> Any:
    """Return function tools in the form of chat completions; others are refused there."""
    if not isinstance(tools, list):
        return tools
    return [
        {
            "type": "function",
            "function": {key: value for key, value in tool.items() if key != "type" and value is not None},
        }
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


def write(body: dict, session: Session, reply: ClientReply) -> dict:
    """Return the body of a response, and keep its items for later requests of the episode."""
    turn = reply.turn
    status: Any = "completed" if turn.finish_reason == "stop" else "incomplete"
    output: list[Any] = []
    if reply.thoughts:
        content = [Content(type="reasoning_text", text=reply.thoughts)]
        output.append(ResponseReasoningItem(id=f"rs_{reply.id}", type="reasoning", summary=[], content=content))
    if reply.text or not reply.calls:
        logprobs: Any = reply.logprobs
        text = ResponseOutputText(type="output_text", text=reply.text, annotations=[], logprobs=logprobs)
        output.append(
            ResponseOutputMessage(id=f"msg_{reply.id}", type="message", role="assistant", status=status, content=[text])
        )
    for i, (call_id, name, arguments) in enumerate(reply.calls):
        output.append(
            ResponseFunctionToolCall(
                id=f"fc_{reply.id}_{i}", type="function_call", call_id=call_id, name=name, arguments=arguments,
                status="completed",
            )
        )  # fmt: skip
    n_prompt, n_completion = len(turn.prompt_ids), len(turn.completion_ids)
    usage = ResponseUsage(
        input_tokens=n_prompt, output_tokens=n_completion, total_tokens=n_prompt + n_completion,
        input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    )  # fmt: skip
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    previous = body.get("previous_response_id")
    written = [item.model_dump(exclude_none=True) for item in output]
    response: dict[str, Any] = {
        "id": f"resp_{reply.id}", "object": "response", "created_at": time.time(), "model": reply.role, "status": status,
        "output": written, "usage": usage.model_dump(exclude_none=True), "tools": body.get("tools") or [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False, "tool_choice": body.get("tool_choice") or "auto",
        "previous_response_id": previous, "error": None, "instructions": body.get("instructions"), "metadata": body.get("metadata"),
        "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
    }  # fmt: skip
    session.remember(response["id"], [*session.conversations.get(previous or "", []), *items, *written])
    for item in written:
        session.remember(item["id"], [item])
    return response


async def stream(body: dict, response: dict) -> AsyncIterator[str]:
    """Format a response as server-sent events: each of its items in one piece."""
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        line = json.dumps({"type": kind, "sequence_number": number, **fields})
        number += 1
        return f"event: {kind}\ndata: {line}\n\n"

    unfinished = {key: value for key, value in response.items() if key not in ("usage", "incomplete_details")}
    unfinished |= {"status": "in_progress", "output": []}
    yield event("response.created", response=unfinished)
    yield event("response.in_progress", response=unfinished)
    for i, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": i}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        yield event("response.output_item.added", output_index=i, item=item | empty | {"status": "in_progress"})
        if is_call:
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        for j, part in enumerate(item.get("content", [])):
            place["content_index"] = j
            kind = f"response.{part['type']}"
            logprobs = {"logprobs": part.get("logprobs", [])} if part["type"] == "output_text" else {}
            yield event("response.content_part.added", **place, part=part | {"text": ""})
            yield event(f"{kind}.delta", **place, delta=part["text"], **logprobs)
            yield event(f"{kind}.done", **place, text=part["text"], **logprobs)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=i, item=item)
    yield event(f"response.{response['status']}", response=response)


RESPONSES = Dialect(READ, frozenset({"temperature", "top_p"}), NEUTRAL, as_chat, write, stream)
