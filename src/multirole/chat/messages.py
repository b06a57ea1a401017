"""Bring chat messages into the one form that chat templates read, whichever way they came: a dataset's row, a workflow's call or the endpoint."""

import json
from typing import Any

from multirole.types import CHAT_ROLES, Message, Turn, user

TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Optional fields of a message that must be text. Templates that know them render them."""


MAX_DEPTH = 100
"""Most levels of lists and objects in a call's arguments."""


def normalised(
    messages: Any, place: str = "messages", from_rows: bool = False, from_wire: bool = False, any_role: bool = False
) -> list[Message]:
    """Return the messages with their contents as text, their tool calls in one form, and without empty fields.

    Parts of text are joined, "developer" becomes "system", and `reasoning` becomes `reasoning_content`. Other fields stay as they are. So do
    arguments that are given as JSON text, which `chat_template` parses where the template does not take text, except from the wire.

    Args:
        messages: a list of messages in OpenAI's form.
        place: what error messages call the list.
        from_rows: leave out None inside tool calls, too: Arrow gives every call the argument names of the others. In other messages, and in
            arguments that are given as JSON text, null is a value.
        from_wire: parse the arguments of tool calls: OpenAI's protocol sends every object as text.
        any_role: accept chat roles that are not among `CHAT_ROLES`.

    Raises:
        ValueError: for a message or a tool call that no template can render; it names the place.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'`{place}` must be a list of at least one message such as {{"role": "user", "content": "Hello."}}, got {_shown(messages)}.'
        )
    if from_rows:
        messages = _without_none(messages)
    return [_message(message, f"{place}[{i}]", from_wire, any_role) for i, message in enumerate(messages)]


def conversation_of(prompt: Any) -> list[Message]:
    """Return a row's prompt as messages; ValueError unless the last one, the question, is a user message."""
    if isinstance(prompt, str):
        return [user(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f'a "prompt" must be text or a list of messages, got {_shown(prompt)}.')
    messages = normalised(prompt, "prompt", from_rows=True)
    if messages[-1]["role"] != "user":
        raise ValueError(
            f"a conversation must end with a user message, which the roles answer, and this one ends with {_shown(prompt[-1])}. Move a reply "
            "that is to be learnt into another column."
        )
    return messages


def text_of_parts(content: Any) -> str | None:
    """Return the joined text of a list of text parts, as OpenAI's messages may have them; None for any other content."""
    if not isinstance(content, list):
        return None
    is_text = (isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content)
    return "".join(part["text"] for part in content) if all(is_text) else None


def _message(message: Any, place: str, from_wire: bool, any_role: bool) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in CHAT_ROLES and not any_role:
        raise ValueError(
            f'`{place}`: a message must be a dictionary with "content" and a "role" among {", ".join(CHAT_ROLES)}, got {_shown(message)}.'
        )
    fields = {key: value for key, value in message.items() if value is not None}
    if fields.get("function_call"):
        raise ValueError(f"`{place}.function_call` is OpenAI's older form. Send `tool_calls`.")
    if "reasoning" in fields:
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    for name in TEXT_FIELDS:
        if not isinstance(fields.get(name, ""), str):
            raise ValueError(f"`{place}.{name}` must be text, got {_shown(fields[name])}.")  # noqa: TRY004 (as for all bad input)
    calls = fields.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"`{place}.tool_calls` must be a list of tool calls, got {_shown(calls)}.")  # noqa: TRY004
    fields |= {"role": "system" if role == "developer" else role, "content": _text(fields.get("content"), role, place)}
    if calls:
        fields["tool_calls"] = [tool_call(call, f"{place}.tool_calls[{i}]", from_wire) for i, call in enumerate(calls)]
    return fields


def _text(content: Any, role: str, place: str) -> str:
    """Return the content of a message as text; only an assistant may say nothing, for example beside its tool calls."""
    text = content if isinstance(content, str) else text_of_parts(content)
    if content is None and role == "assistant":
        return ""
    if text is None:
        raise ValueError(
            f"`{place}`: the content of a message must be text, got {type(content).__name__}."
            + (" Write `turn.text`." if isinstance(content, Turn) else f" It may be a list of parts of the type 'text'; got {_shown(content)}. "
               "Images and audio are not supported.")
        )  # fmt: skip
    return text


def tool_call(call: Any, place: str, is_parsed: bool = True) -> dict[str, Any]:
    """Return a tool call as `{"type": "function", "function": {"name", "arguments"}}`, with its other fields.

    `is_parsed` makes arguments that are JSON text an object. ValueError for other values than an object or its text.
    """
    if not isinstance(call, dict) or call.get("type") not in ("function", None):
        raise ValueError(f"`{place}` must be a tool call of the type 'function', got {_shown(call)}.")
    rest = {key: value for key, value in call.items() if value is not None}
    function = rest.pop("function", None)
    if function is None:  # datasets may have `{"name", "arguments"}` alone
        function = {key: rest.pop(key) for key in ("name", "arguments") if key in rest}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"`{place}` must have `function` with a `name` and `arguments`, got {_shown(call)}.")
    parsed: Any = _arguments(function.get("arguments"), name, f"{place}.function.arguments")
    if not is_parsed and parsed and isinstance(function["arguments"], str):
        parsed = function["arguments"]
    return rest | {"type": "function", "function": function | {"arguments": parsed}}


def _arguments(arguments: Any, name: str, place: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object. None, "" and the text "null" mean that there are none."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"`{place}` of the call of {name!r} is not valid JSON: {error}. It is {_shown(arguments)}."
            ) from error
    if not isinstance(parsed, dict | None):
        raise ValueError(  # noqa: TRY004 (bad input of any kind is a ValueError here)
            f'`{place}` of the call of {name!r} must be a JSON object such as {{"city": "Ulm"}}, got {_shown(arguments)}.'
        )
    if _depth(parsed) > MAX_DEPTH:
        raise ValueError(
            f"`{place}` of the call of {name!r} is nested in more than {MAX_DEPTH} levels, which templates cannot render."
        )
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # a set, NaN, half of a character
        raise ValueError(f"`{place}` of the call of {name!r} cannot be sent as JSON: {error}.") from error
    return parsed or {}


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested, counted to a little more than `MAX_DEPTH`."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        containers = [part for part in level if isinstance(part, dict | list)]
        level = [child for part in containers for child in (part.values() if isinstance(part, dict) else part)]
        depth += bool(containers)
    return depth


def _without_none(value: Any) -> Any:
    """Leave None out of dictionaries at every depth. In a list it is a value: Arrow adds none to lists."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return f"{value!r:.200}"
