"""Read the tool calls of a reply in the form that the model's own chat template writes, and check that the template renders tool conversations.

transformers parses a reply by a *response template*, a dictionary that describes the form. A form is taken from the tokenizer, from TRL, from those
below or from the text of two calls that the chat template renders, and it is used only if it reads back what the template writes. TRL's
`add_response_schema` is no help here: it knows a chat template by its exact text, and its patterns lose white space, quotes and the rest of a text with a quote in it.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser
from trl.chat_template_utils import gemma4_template

from multirole.chat.messages import tool_call
from multirole.chat.replies import THOUGHT_TAGS, opens_thought, text_outside_thoughts
from multirole.types import Message, Reply, Turn

ResponseTemplate = dict[str, Any]
STOPPED, CUT = "\U0010ffff", "\U0010fffe"
"""Unicode noncharacters that are put behind a reply, which ended by itself or at the token limit, so that the parser sees where it ends."""
PROMPT_TAIL = 64
"""Last tokens of a prompt that are searched for the tag that opens a thought."""
NAME = r"(?P<name>[\w.\-]+)"
EXACT_TEXT = {"name": "text", "args": {"strip": False}}


def response_template(tool_calls: dict[str, Any], **others: dict[str, Any]) -> ResponseTemplate:
    """Return a response template with these fields; text outside them is the content, unless `content` is among them."""
    calls = {"repeats": True} | tool_calls
    return {"start_anchor": STOPPED, "fields": {"tool_calls": calls, "content": {}} | others}


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN3 = response_template({"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "content": "json"})
PYTHON = response_template({"open": "<|tool_call_start|>", "close_pattern": r"<\|tool_call_end\|>\s*"})
"""LFM2: `[weather(city='Ulm', days=2)]`."""
GPTOSS = response_template(
    {
        "open_pattern": rf"(?:<\|channel\|>commentary\s*)?to=functions\.{NAME}\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
        "close_pattern": r"<\|(?:call|return)\|>\s*",
        "content": "json",
        "transform": NAMED,
    },
    reasoning_content={
        "open": "<|channel|>analysis<|message|>",
        "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
    },
    content={
        "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
        "close_pattern": r"<\|(?:end|return)\|>(?:<\|start\|>assistant)?",
    },
)
"""gpt-oss. Its template writes the channel behind the recipient; the model writes it in front, too."""
MUSE_GLIMMER = response_template(
    {
        "open_pattern": rf'to=[\w.\-]+<\|message\|><atem:function_calls>\s*<atem:invoke name="{NAME}">',
        "close_pattern": r"</atem:function_calls>(?:<\|eom\|><\|start\|>assistant)?",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>',
            "value_parser": EXACT_TEXT,
        },
        "transform": NAMED,
    },
    reasoning_content={
        "open_pattern": r"to=self<\|message\|>",
        "close_pattern": r"<\|eom\|>(?:<\|start\|>assistant)?",
    },
    content={"open_pattern": r"to=user<\|message\|>", "close_pattern": r"<\|eo[mt]\|>"},
)


GEMMA4 = gemma4_template | {
    "fields": gemma4_template["fields"]
    | {"tool_calls": gemma4_template["fields"]["tool_calls"] | {"open_pattern": rf"<\|tool_call>call:{NAME}"}}
}
"""TRL's, for names with dashes and points, too."""
KNOWN = (QWEN3, PYTHON, GPTOSS, MUSE_GLIMMER, GEMMA4)


@dataclass(frozen=True)
class ToolForm:
    """How a chat template writes tool calls.

    `template` is None if no known form reads the template's calls. `loses_tools` tells whether descriptions of tools do not reach the prompt;
    `lost_of_calls` and `lost_of_results` name what else does not.
    `end` is what ends a reply, `wrapper` what stands before its first call, and `rest` what remains of a call without its arguments.
    """

    template: ResponseTemplate | None = None
    loses_tools: bool = False
    lost_of_calls: str = ""
    lost_of_results: str = ""
    takes_several: bool = True
    takes_objects: bool = True
    takes_text: bool = True
    reasoning_field: str = "reasoning_content"
    takes_text_and_thought: bool = True
    name_key: str = "name"
    arguments_key: str = "arguments"
    end: str = ""
    wrapper: str = ""
    rest: str | None = None

    def adapted(self, messages: list[Message]) -> list[Message]:
        """Return the messages as the template reads them: thoughts under its name for them, and arguments as JSON text if it joins them to text."""
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: Message) -> Message:
        adapted = dict(message)
        if self.reasoning_field not in adapted and "reasoning_content" in adapted:
            adapted[self.reasoning_field] = adapted.pop("reasoning_content")
        if adapted.get("tool_calls") and not self.takes_text_and_thought and adapted.get(self.reasoning_field):
            thought, text = adapted[self.reasoning_field], adapted["content"]
            adapted |= {self.reasoning_field: f"{thought}\n\n{text}".strip(), "content": ""}
        if adapted.get("tool_calls"):
            adapted["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": self._arguments(call["function"]["arguments"])}}
                for call in adapted["tool_calls"]
            ]
        return adapted

    def _arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, str):
            return arguments if self.takes_text else json.loads(arguments)
        return arguments if self.takes_objects else json.dumps(arguments, ensure_ascii=False)

    @property
    def has_channels(self) -> bool:
        """Return whether a reply without calls, too, is in parts of which only some are its text."""
        return self.template is not None and "open_pattern" in self.template["fields"]["content"]

    def text_in_channels(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str | None:
        """Return what a reply says outside its thoughts. None for a form without channels, and for a reply that is in none.

        A reply with a call, also a malformed one, keeps the text of the call.
        """
        if not self.has_channels or self.template is None:
            return None
        added = tokenizer.added_tokens_decoder
        if not any(i in added for i in ids[:-1]):  # the last one ends the reply
            return None
        text = tokenizer.decode(ids, skip_special_tokens=False)
        for name, region in self.template["fields"].items():
            if name not in ("tool_calls", "content"):
                opened, closed = (region.get(f"{at}_pattern") or re.escape(region[at]) for at in ("open", "close"))
                text = re.sub(f"(?s:(?:{opened}).*?(?:{closed}|$))", "", text)
        reply = self.parse(text, None, is_whole=False)
        if reply is None or reply.calls:
            return _without(text, (token.content for token in added.values() if token.special)).strip()
        return reply.text

    def check(self, name: str, messages: list[Message]) -> None:
        """Raise ValueError if the template, of the tokenizer `name`, leaves out a part of these messages."""
        for message in messages:
            calls = message.get("tool_calls") or []
            lost = self.lost_of_calls if calls else self.lost_of_results if message.get("role") == "tool" else ""
            if len(calls) > 1 and not self.takes_several:
                lost = lost or "tool calls after the first of a message"
            if lost:
                raise ValueError(
                    f"The chat template of the tokenizer {name} leaves {lost} out of the prompt. Write it in a message's text, or use a "
                    "model whose template renders tool calls and their results, such as Qwen3."
                )

    def parse(self, text: str, tools: list[dict] | None, is_whole: bool) -> Reply | None:
        """Return the parts of a reply without its leading thought; None if a call in it is malformed or cut off."""
        if self.template is None:
            return None
        parser = ResponseParser(self.template, prefix="", tools=tools)
        calls: list[tuple[str, dict[str, Any]]] = []
        before: list[str] = []  # the content before the first call
        thoughts: list[str] = []
        kind = field = body = ""
        if is_whole:
            text += self.end * (not text.rstrip().endswith(self.end)) + STOPPED
        try:
            for event in parser.feed(text if is_whole else text + CUT):
                kind, field = event["type"], event["field"]
                if kind == "region_open":
                    body = ""
                elif kind == "region_chunk":
                    body += event["text"]
                    if field == "content" and not calls:
                        before.append(event["text"])
                elif field == "tool_calls":
                    self._check_rest(body)
                    calls += self._calls_in(event["value"])
                elif field != "content":
                    thoughts.append(event["value"])
        except (ValueError, KeyError, TypeError, RecursionError):  # TypeError: of a tool whose schema is none
            return None
        if kind != "region_close" and field == "tool_calls":
            return None
        content = "".join(before).replace(STOPPED, "").replace(CUT, "").strip()
        if calls:
            content = content.removesuffix(self.wrapper).strip()
        return Reply(content, "\n".join(thoughts), calls)

    def _check_rest(self, body: str) -> None:
        """Raise ValueError for a call of tags that holds something besides its arguments, such as an argument without its end."""
        if self.rest is not None and self.template is not None:
            pattern = self.template["fields"]["tool_calls"]["content_args"]["tag_pattern"]
            if _squeezed(re.sub(pattern, "", body, flags=re.DOTALL)) != self.rest:
                raise ValueError

    def _calls_in(self, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and arguments of the calls in one parsed region; ValueError for what is none."""
        if isinstance(value, str):
            yield from _python_calls(value)
        elif isinstance(value, list):
            for part in value:
                yield from self._calls_in(part)
        else:
            function = value.get("function", value) if isinstance(value, dict) else None
            if isinstance(function, dict):
                keys = {self.name_key: "name", self.arguments_key: "arguments"}
                function = {keys[key]: part for key, part in function.items() if key in keys}
            function = tool_call({"function": function}, "a reply")["function"]
            yield function["name"], function["arguments"]


def _python_calls(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the calls of a Python list such as `[weather(city='Ulm'), now()]`; ValueError for other text."""
    dash = "\u30fc"  # a letter to Python, which allows no dashes in names
    text = re.sub(r"((?:^\s*\[?|\),)\s*)([\w.\-]+)(?=\()", lambda match: match[1] + match[2].replace("-", dash), text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError(str(error)) from error
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError(f"{text!r} is no list of calls with named arguments.")
        yield (
            ast.unparse(call.func).replace(dash, "-"),
            {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords},
        )


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, whose constants may be spelled as in JSON; ValueError for other expressions."""
    if isinstance(node, ast.Name) and node.id in (constants := {"true": True, "false": False, "null": None}):
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(part) for key, part in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


# ---- replies


def parse_reply(
    tokenizer: PreTrainedTokenizerBase | None, turn: Turn, tools: list[dict] | None, form: ToolForm | None = None
) -> Reply:
    """Return the text, the thought and the tool calls of a turn's reply.

    `form` says how calls are written, by default the form of the tokenizer's chat template, and every known form is tried if it does not; without a
    tokenizer it is Qwen3's, JSON in `<tool_call>` tags. `tools` tell 7 from "7" where a template writes both alike. A reply with a call that is malformed, or cut off,
    has no calls: all of it is text.
    """
    ids, special = list(turn.completion_ids), {}
    if tokenizer is None:
        forms, text, is_thinking = [ToolForm(QWEN3)], turn.text, False
    else:
        form = form or tool_form(tokenizer)
        forms = [form] if form.template else [replace(form, template=template) for template in KNOWN]
        special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if turn.finish_reason != "length" and ids and ids[-1] in special:  # models have several tokens that end a reply
            ids.pop()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        is_thinking = opens_thought(tokenizer.decode(turn.prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False))
    thought, rest = _leading_thought(text, is_thinking)
    replies = [form.parse(rest, tools, turn.finish_reason != "length") for form in forms if rest]
    parsed = next((reply for reply in replies if reply is not None and reply.calls), replies[0] if replies else None)
    reasoning = thought or (parsed.reasoning if parsed else "")
    if parsed is None or not parsed.calls and not (forms[0].has_channels and parsed.text):
        is_kept = reasoning in turn.text  # by `strip_thoughts=False`
        return Reply(turn.text, "" if is_kept else reasoning)
    said = _without(text_outside_thoughts(parsed.text), special.values())
    return Reply(said.strip(), reasoning, parsed.calls)


def _without(text: str, tokens: Iterable[str]) -> str:
    for token in tokens:
        text = text.replace(token, "")
    return text


def _leading_thought(text: str, is_thinking: bool) -> tuple[str, str]:
    """Return the thought that a reply begins with, and what follows it. A tag in a call's argument is no thought."""
    begun = next((opening for opening, _ in THOUGHT_TAGS if text.lstrip().startswith(opening)), "")
    if not begun and not is_thinking:
        return "", text
    body = text.lstrip().removeprefix(begun)
    ends = [(body.index(closing), closing) for _, closing in THOUGHT_TAGS if closing in body]
    if not ends:
        return body.strip(), ""
    thought, _, rest = body.partition(min(ends)[1])
    return thought.strip(), rest


# ---- the form of a template

NAMES = "find_f7Qa", "look_g4Rb"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Find.", "parameters": {"type": "object", "properties": {
        "k3Wx": {"type": "string", "description": "A."}, "k8Hm": {"type": "string", "description": "B."}, "size": {"type": "integer", "description": "C."},
        "deep": {"type": "object", "description": "D.", "properties": {}}, "parts": {"type": "array", "description": "E.", "items": {"type": "string"}}, "is_on": {"type": "boolean", "description": "F."},
    }}}}
    for name in NAMES
]  # fmt: skip
ARGUMENTS = {"k3Wx": "v5Zp", "k8Hm": "v2Yt"}, {"k3Wx": "v9Lc", "k8Hm": "v6Nd"}
HARD_ARGUMENTS = {
    "k3Wx": "zwölf <b> & ",
    "size": -7,
    "deep": {"x": [1, {"y": "z"}]},
    "parts": ["p", "q"],
    "is_on": True,
}
RESULT, WORDS, THOUGHT = "result_c5Ke", "words_w2Pj", "thought_t8Xs"
SETTINGS = {"enable_thinking": False}


def _call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_form(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> ToolForm:
    """Return how the tokenizer's chat template, or another one, writes tool calls, found by rendering some."""
    return _tool_form(tokenizer, tokenizer.get_chat_template(chat_template, TOOLS))


@lru_cache(maxsize=64)
def _tool_form(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> ToolForm:
    def render(form: ToolForm, *messages: Message, **options: Any) -> str:
        """Return the rendered conversation; "" if the template refuses it."""
        conversation = form.adapted([{"role": "user", "content": "Ask."}, *messages])
        try:
            return tokenizer.apply_chat_template(
                conversation, chat_template=chat_template, tools=TOOLS, tokenize=False, **SETTINGS, **options
            )
        except (jinja2.TemplateError, TypeError, ValueError):
            return ""

    one, two = ([_call(NAMES[i], ARGUMENTS[i], i) for i in range(n)] for n in (1, 2))
    form = _reading_form(render, one)
    asked = render(form)
    talk = render(
        form, _assistant(one), {"role": "tool", "name": NAMES[0], "tool_call_id": "call00000", "content": RESULT}
    )
    without = render(form, {"role": "assistant", "content": WORDS})
    called = _after(without, render(form, _assistant(one)))
    form = replace(
        form,
        loses_tools=bool(asked) and NAMES[0] not in asked,
        lost_of_calls="" if NAMES[0] in called and ARGUMENTS[0]["k3Wx"] in called else "tool calls",
        lost_of_results="" if RESULT in talk else "the results of tools",
        takes_several=all(arguments["k3Wx"] in render(form, _assistant(two)) for arguments in ARGUMENTS),
        end=without.rpartition(WORDS)[2].strip(),
    )
    if form.lost_of_calls:
        return form
    head = render(form, add_generation_prompt=True)

    def reply(calls: list[dict[str, Any]]) -> str:
        """Return what the model has to write to make these calls."""
        return _after(head, render(form, _assistant(calls)))

    trials = [one, [_call(NAMES[0], {})], [_call(NAMES[1], HARD_ARGUMENTS)], *([two] if form.takes_several else [])]
    candidates = _candidates(tokenizer, reply, one, two if form.takes_several else None, form)
    for candidate in candidates:
        if all(_reads(candidate, reply(trial), trial) for trial in trials):
            return candidate
    return form


def _reading_form(render: Callable[..., str], calls: list[dict[str, Any]]) -> ToolForm:
    """Return the form of messages that a template reads: arguments as objects or as text, and its name for thoughts."""

    def takes(arguments: Any) -> bool:
        text = render(ToolForm(), _assistant([_call(NAMES[0], arguments)]))
        return ARGUMENTS[0]["k3Wx"] in text and repr(ARGUMENTS[0]) not in text

    takes_text = takes(json.dumps(ARGUMENTS[0]))
    form = ToolForm(takes_objects=takes(ARGUMENTS[0]) or not takes_text, takes_text=takes_text)
    for field in ("reasoning_content", "thinking", "reasoning"):
        thinking = replace(form, reasoning_field=field)
        message = _assistant(calls) | {"reasoning_content": THOUGHT}
        if THOUGHT in render(thinking, message):
            return replace(thinking, takes_text_and_thought=bool(render(thinking, message | {"content": WORDS})))
    return form


def _assistant(calls: list[dict[str, Any]]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _after(head: str, whole: str) -> str:
    """Return what follows the generation prompt in a rendered conversation, from the beginning of a tag."""
    start = len(os.path.commonprefix([head, whole]))
    tag = whole.rfind("<", 0, start)
    return whole[tag:] if tag > whole.rfind(">", 0, start) else whole[start:]


def _reads(form: ToolForm, reply: str, calls: list[dict[str, Any]]) -> bool:
    parsed = form.parse(reply, TOOLS, is_whole=True)
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return parsed is not None and (parsed.text, parsed.calls) == ("", expected)


def _candidates(
    tokenizer: PreTrainedTokenizerBase, reply: Callable[..., str], one: list[dict[str, Any]],
    two: list[dict[str, Any]] | None, form: ToolForm,
) -> Iterator[ToolForm]:  # fmt: skip
    """Yield forms that may read the template's calls: the tokenizer's own, those with a grammar of their own, and those found in the text of two calls."""
    declared = tokenizer.response_template
    for template in [*([declared] if declared else []), *KNOWN[1:]]:
        yield replace(form, template=template)
    text = reply(two or one)
    for find in (_object_form, _json_form, _tag_form):
        if candidate := find(form, text, len(two or one)):
            wrapper = candidate.parse(reply(one), TOOLS, is_whole=True)
            yield replace(candidate, wrapper=wrapper.text if wrapper else "")


def _pieces(text: str, spans: list[tuple[int, int]], end: str) -> tuple[str, str]:
    """Return what opens and what closes each call, given where the calls stand."""
    first, last = spans[0], spans[-1]
    before, after = text[: first[0]], text[last[1] :].rstrip().removesuffix(end)
    if len(spans) == 1:
        return before.strip(), after.strip()
    between = text[first[1] : last[0]]
    if between.strip() == ",":  # a list
        return before.strip().removesuffix("["), after.strip().removeprefix("]")
    opened = os.path.commonprefix([before[::-1], between[::-1]])[::-1]
    closed = os.path.commonprefix([between, after])
    return re.sub(r"^[^<\[{]*", "", opened), re.sub(r"[^>\]}]*$", "", closed)


def _region(form: ToolForm, opened: str, closed: str, **field: Any) -> ResponseTemplate:
    return response_template(
        {"open_pattern": opened, "close_pattern": _loose(closed.lstrip() or form.end or STOPPED) + r"\s*"} | field
    )


def _object_form(form: ToolForm, text: str, n: int) -> ToolForm | None:
    """Find calls that are JSON objects with the name and the arguments: `{"name": "add", "parameters": {"a": 1}}`."""
    spans, keys = [], ("", "")
    for name, arguments in zip(NAMES[:n], ARGUMENTS, strict=False):
        for start, end, value in _json_objects(text):
            by_value = {repr(part): key for key, part in value.items()}
            if repr(name) in by_value and repr(arguments) in by_value:
                keys = by_value[repr(name)], by_value[repr(arguments)]
                spans.append((start, end))
                break
    if len(spans) < n:
        return None
    opened, closed = _pieces(text, spans, form.end)
    pattern = _loose(opened) or rf'(?=\{{\s*"{keys[0]}"\s*:)'
    template = _region(form, pattern, closed, content="json")
    return replace(form, template=template, name_key=keys[0], arguments_key=keys[1])


def _json_form(form: ToolForm, text: str, n: int) -> ToolForm | None:
    """Find calls that are a name and a JSON object of arguments with fixed text around them."""
    spans, middle = [], ""
    for name, arguments in zip(NAMES[:n], ARGUMENTS, strict=False):
        for start, end, value in _json_objects(text):
            if value == arguments and (at := text.rfind(name, 0, start)) >= 0:
                middle = text[at + len(name) : start]
                spans.append((at, end))
    if len(spans) < n:
        return None
    opened, closed = _pieces(text, spans, form.end)
    return replace(
        form, template=_region(form, _loose(opened) + NAME + _loose(middle), closed, content="json", transform=NAMED)
    )


def _tag_form(form: ToolForm, text: str, n: int) -> ToolForm | None:
    """Find calls whose arguments are tags, such as `<parameter=a>1</parameter>`, or pairs of tags, `<key>a</key><value>1</value>`."""
    spans, at = [], 0
    for name, arguments in zip(NAMES[:n], ARGUMENTS, strict=False):
        places = []
        for word in (word for pair in arguments.items() for word in pair):
            at = text.find(word, at)
            if at < 0:
                return None
            places.append((at, at + len(word)))
        key, value = places[-2:]
        close = text.find(">", value[1]) + 1
        spans.append((text.rfind(name, 0, places[0][0]), close))
        before_key, middle, after = (
            text[text.rfind("<", 0, key[0]) : key[0]],
            text[key[1] : value[0]],
            text[value[1] : close],
        )
    opened, closed = _pieces(text, spans, form.end)
    named = text[spans[0][0] + len(NAMES[0]) :]
    after_name = named[: len(named) - len(re.sub(r"^[\"']?>?", "", named))]
    tag = rf"{_loose(before_key)}(?P<key>[^<>\"]+?){_loose(middle, '?')}(?P<value>.*?){_loose(after, '?')}"
    parser = {"tag_pattern": tag, "value_parser": EXACT_TEXT}
    template = _region(
        form,
        _loose(opened) + NAME + _loose(after_name),
        closed,
        content="xml-inline",
        content_args=parser,
        transform=NAMED,
    )
    return replace(form, template=template, rest="")


def _json_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield start, end and value of the JSON objects in a text, outer ones first."""
    for brace in re.finditer(r"\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        yield brace.start(), end, value


def _loose(literal: str, space: str = "*") -> str:
    r"""Return a pattern for a text, with as much white space as there is; `space="?"` allows only the white space that the text has, or none."""
    return "".join(
        (r"\s*" if space == "*" else f"(?:{re.escape(part)})?") if part.isspace() else re.escape(part)
        for part in re.findall(r"\s+|\S+", literal)
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())
