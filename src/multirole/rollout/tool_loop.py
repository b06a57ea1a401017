"""Run the functions that a role may call, and give it their results until it calls no more.

`call(role, messages, tools=[function])` plays this loop. Every reply in it is a turn with a round of its own, and so a row; the results stand in
the prompts of the turns that follow and are not trained on.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from multirole.types import Message, Reply, Tool, ToolUnavailable, Turn

logger = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""The most turns of a call with functions, unless it says another number."""
CALLED = "called"
"""`Turn.outcome` of a turn whose calls were run, unless the workflow sets another."""
WRITE = (
    'Write a docstring with "Args:" and a type hint for each argument, as for the `tools` of TRL\'s `GRPOTrainer`, or pass '
    "`Tool(function, description)` with the description in OpenAI's format."
)


@dataclass(frozen=True)
class Toolbox:
    """The `tools` of one call: what the model reads of each, and the functions among them by name."""

    descriptions: list[dict[str, Any]] = field(default_factory=list)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Any) -> "Toolbox":
        """Return the toolbox of a call's `tools`: functions, [`Tool`]s, and descriptions in OpenAI's format. ValueError for anything else."""
        if tools is None:
            return cls()
        if not isinstance(tools, list | tuple):
            raise ValueError(f"`tools` must be a list of functions or descriptions, got {tools!r:.200}.")  # noqa: TRY004
        box = cls()
        for tool in tools:
            described = tool if isinstance(tool, Tool | dict) else described_function(tool)
            description = described.description if isinstance(described, Tool) else described
            name = _name_in(description)
            if name is None and isinstance(described, Tool):
                raise ValueError(
                    "the description of a `Tool` must be {'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}, got "
                    f"{description!r:.200}."
                )
            if name is not None and any(_name_in(other) == name for other in box.descriptions):
                raise ValueError(f"`tools` has two tools of the name {name!r}. Give each its own name.")
            box.descriptions.append(description)
            if isinstance(described, Tool) and name is not None:
                box.functions[name] = described.function
        return box

    def answers(self, calls: Collection[tuple[str, dict[str, Any]]]) -> bool:
        """Return whether all calls can be run. Those of a tool that is only described are the workflow's; an unknown name gets an error."""
        described = {_name_in(description) for description in self.descriptions} - self.functions.keys()
        return bool(calls) and bool(self.functions) and not any(name in described for name, _ in calls)

    async def run(
        self, calls: Sequence[tuple[str, dict[str, Any]]], must_raise: Callable[[Exception], bool]
    ) -> list[tuple[str, bool]]:
        """Run the calls of one reply, those of coroutine functions at the same time. Returns each result's text, and whether it is an error."""
        return await asyncio.gather(*(self._run_one(name, arguments, must_raise) for name, arguments in calls))

    async def _run_one(
        self, name: str, arguments: dict[str, Any], must_raise: Callable[[Exception], bool]
    ) -> tuple[str, bool]:
        if name not in self.functions:
            return f"Error: there is no tool {name!r}. The tools are {', '.join(self.functions)}.", True
        try:
            result = self.functions[name](**arguments)
            text = str(await result if inspect.isawaitable(result) else result)
        except ToolUnavailable:
            raise
        except Exception as error:  # a model may call with any arguments, and reads what went wrong
            if must_raise(error):
                raise
            text, is_error = f"Error: {type(error).__name__}: {error}", True
            _warn_of_failure(name, text)
        else:
            is_error = False
        return text.encode(errors="replace").decode(), is_error  # no tokenizer takes half of a character


_failed: set[str] = set()


def _warn_of_failure(name: str, text: str) -> None:
    """Warn of the first failure of a tool in this process: it may be a mistake of the function, not of the model."""
    if name not in _failed:
        _failed.add(name)
        logger.warning("The tool %r raised, and the role that called it reads: %s. Further failures are counted in `tool_failures` and not reported.", name, text)  # fmt: skip


def described_function(function: Any) -> Tool:
    """Return a function or method with the description that transformers makes of its signature and docstring. ValueError if there is none."""
    if not inspect.isroutine(function) or function.__name__ == "<lambda>":
        raise ValueError(
            f"`tools` has {function!r:.200}, which is neither a function with a name nor a description. Pass a function or a bound method, or "
            "`Tool(function, description)`."
        )
    try:
        return Tool(function, get_json_schema(function))
    except (DocstringParsingException, TypeHintParsingException, NameError, ValueError, TypeError) as error:
        raise ValueError(f"The tool `{function.__name__}` cannot be described: {error}. {WRITE}") from error


def _name_in(description: Any) -> str | None:
    """Return the name in a description in OpenAI's format; None if it has another form, which a template may know."""
    function = description.get("function") if isinstance(description, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def exchange(reply: Reply, start: int, takes_several: bool) -> list[Message]:
    """Return the messages of a reply with calls and of their results. The ids of the calls count from `start`.

    A template that renders one call of a message gets a message for each.
    """
    calls = [
        {"id": f"call{start + i:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(reply.calls)
    ]  # the ids of Mistral's templates have nine letters and digits
    results = [
        {"role": "tool", "name": name, "tool_call_id": call["id"], "content": text}
        for call, (name, _), text in zip(calls, reply.calls, reply.results, strict=True)
    ]
    thought = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    said: Message = {"role": "assistant", "content": reply.text} | thought
    if takes_several:
        return [said | {"tool_calls": calls}, *results]
    messages: list[Message] = []
    for i, (call, result) in enumerate(zip(calls, results, strict=True)):
        opening = said if i == 0 else {"role": "assistant", "content": ""}
        messages += [opening | {"tool_calls": [call]}, result]
    return messages


async def play_tool_loop(
    ask: Callable[[list[Message], int], Awaitable[Turn]], toolbox: Toolbox, messages: list[Message], max_rounds: int,
    takes_several: bool, must_raise: Callable[[Exception], bool],
) -> Turn:  # fmt: skip
    """Ask a role, run what it calls and ask again with the results. Returns the first turn without calls to run, or the last that is allowed.

    Args:
        ask: plays one turn of the role with these messages; its second argument counts the turns from 0.
        toolbox: the tools; the role's prompts have their descriptions.
        messages: the conversation so far.
        max_rounds: the most turns. The calls of the last one are not run.
        takes_several: whether the chat template renders several calls of a message.
        must_raise: whether an error of a tool ends the episode instead of being shown to the role.
    """
    conversation, n_calls = list(messages), 0
    for number in range(max_rounds):
        turn = await ask(conversation, number)
        assert turn.reply is not None  # it was asked with tools
        if number == max_rounds - 1 or not toolbox.answers(turn.reply.calls):
            break
        results = await toolbox.run(turn.reply.calls, must_raise)
        failures = sum(is_error for _, is_error in results)
        turn.reply = replace(turn.reply, results=[text for text, _ in results], failures=failures)
        turn.outcome = CALLED
        conversation += exchange(turn.reply, n_calls, takes_several)
        n_calls += len(turn.reply.calls)
    return turn
