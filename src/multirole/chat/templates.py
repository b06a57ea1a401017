"""Encode chat messages as the token ids of a prompt, by the tokenizer's chat template, and keep control tokens in messages plain text.

A question or a reply may spell a control token in ordinary letters: `<|im_end|>\n<|im_start|>system`. A tokenizer reads that
as the end of a turn and the beginning of another role's (huggingface/transformers#29279, vllm-project/vllm#31735). Here such
letters become the tokens of ordinary text, while the control tokens that the template writes stay control tokens. Prompts that
spell none have exactly the ids of `apply_chat_template`.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from multirole.chat.messages import text_of_parts
from multirole.chat.tool_calls import TOOLS, ToolForm, tool_form
from multirole.types import Message, Problem, Workflow, accepts, structure_of

logger = logging.getLogger(__name__)
DEFAULT_OPTIONS = {"enable_thinking": False}
"""Options of chat templates unless others are given."""

Renderer = Callable[..., list[int]]
"""`render(tokenizer, messages)` returns the token ids of the prompt."""
MARK, KEPT_MARK = "\U0010fffe", "\U0010ffff"
"""Unicode noncharacters that are put into a control token spelled in a message, so that the tokenizer does not recognise it.

`MARK` is removed before the text is encoded. `KEPT_MARK` stays, as a token whose id is then dropped.
"""
REFUSALS = (jinja2.TemplateError, TypeError, RecursionError)
"""Errors of a chat template that does not take the messages, such as one that joins a number to a text."""
UNMASKED_TAGS = ("<think>", "</think>")
"""Tags that are not masked: templates look for them in earlier replies, to leave out the thoughts."""
TOOL_FIELDS = {"tool_calls", "reasoning_content"}
"""Fields of messages that templates name or write in different ways (`chat.tool_calls`)."""
BRACKETED = re.compile(r"[<\[({|].*[>\])}|]", re.DOTALL)


class ControlTokens:
    """Know a tokenizer's control tokens, and encode prompts whose messages spell some of them.

    Control tokens are those that the tokenizer calls special, and other added tokens in brackets that the template writes around
    messages, such as DeepSeek's `<｜User｜>`. Blank tokens and those of one character are text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_text: str) -> None:
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        special = {token for token, is_special in added.items() if is_special} | set(tokenizer.all_special_tokens)
        written = {token for token in added if token in template_text and BRACKETED.fullmatch(token)}
        control = {token for token in special | written if len(token) > 1 and token.strip()} - {*UNMASKED_TAGS}
        self.tokenizer = tokenizer
        self.tokens = sorted(control | (added.keys() & set(UNMASKED_TAGS)), key=lambda token: (-len(token), token))
        self._in_replies = _pattern(token for token in self.tokens if token in control)
        self._anywhere = _pattern(self.tokens)

    def mask(self, messages: list[Message]) -> list[Message] | None:
        """Put a mark into every control token that the messages spell; return None if they spell none."""
        if not any(_matches(self._pattern_of(message), message) for message in messages):
            return None
        return [
            {
                key: value if key == "role" else self._mask(value, self._pattern_of(message))
                for key, value in message.items()
            }
            for message in messages
        ]

    def encode(self, text: str) -> list[int]:
        """Encode a rendered prompt: unmasked control tokens become one id each, masked ones are encoded as text."""
        parts = self._anywhere.split(text)  # text, control token, text, ...
        parts[::2] = [part.replace(MARK, "") for part in parts[::2]]
        parts[1::2] = [self._names.get(token, token) for token in parts[1::2]]
        return [self._original_ids.get(i, i) for i in self._encode("".join(parts)) if i != self._kept_mark_id]

    def encode_text(self, text: str) -> list[int]:
        """Encode a text without recognising any control token."""
        masked = self._mask(text, self._anywhere) if self._anywhere.search(text) else None
        if masked is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.encode(masked)

    def _pattern_of(self, message: Message) -> re.Pattern[str]:
        return self._in_replies if message.get("role") == "assistant" else self._anywhere

    def _mask(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, dict):
            return {key: self._mask(part, pattern) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mask(part, pattern) for part in value]
        if not isinstance(value, str):
            return value
        text = value.replace(MARK, "\ufffd").replace(KEPT_MARK, "\ufffd")
        while pattern.search(text):
            text = pattern.sub(self._mask_token, text)
        return text

    def _mask_token(self, match: re.Match[str]) -> str:
        token, middle = match[0], len(match[0]) // 2
        return token[:middle] + (KEPT_MARK if token in self._unrenamed else MARK) + token[middle:]

    # ---- the second tokenizer, made when the first message spells a control token

    @cached_property
    def _names(self) -> dict[str, str]:
        """Map each control token to a name that no text can spell; empty if the tokenizer's tokens cannot be renamed."""
        is_fast = isinstance(self.tokenizer, PreTrainedTokenizerFast)
        return {token: f"{MARK}{i}{MARK}" for i, token in enumerate(self.tokens)} if is_fast else {}

    @cached_property
    def _second(self) -> Tokenizer | PreTrainedTokenizerBase:
        """Build the second tokenizer: control tokens are renamed, if that is possible, and `KEPT_MARK` is a token."""
        kept_mark = AddedToken(KEPT_MARK, normalized=False, special=True)
        if not self._names:
            second = copy.deepcopy(self.tokenizer)
            second.add_tokens([kept_mark], special_tokens=True)
            return second
        settings = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in settings["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        renamed = Tokenizer.from_str(json.dumps(settings))
        renamed.no_truncation()
        renamed.no_padding()
        renamed.add_special_tokens([kept_mark])
        return renamed

    def _encode(self, text: str) -> list[int]:
        if isinstance(self._second, Tokenizer):
            return self._second.encode(text, add_special_tokens=False).ids
        return self._second(text, add_special_tokens=False)["input_ids"]

    def _id_in_second(self, token: str) -> int | None:
        if isinstance(self._second, Tokenizer):
            return self._second.token_to_id(token)
        return self._second.convert_tokens_to_ids(token)

    @cached_property
    def _kept_mark_id(self) -> int | None:
        return self._id_in_second(KEPT_MARK)

    @cached_property
    def _original_ids(self) -> dict[int | None, int]:
        """Map the ids of added tokens in the second tokenizer to those in the first."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {self._id_in_second(self._names.get(token.content, token.content)): i for i, token in added}

    @cached_property
    def _unrenamed(self) -> frozenset[str]:
        """Return the control tokens that the second tokenizer still recognises: all in a slow one, pieces in a Unigram model."""
        if not self._names:
            return frozenset(self.tokens)
        ids = {self.tokenizer.convert_tokens_to_ids(token) for token in self.tokens} - {self.tokenizer.unk_token_id}
        return frozenset(token for token in self.tokens if ids & set(self._encode(token)))


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches any of the tokens, as a group; earlier tokens take precedence."""
    return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    """Return whether the pattern matches anywhere in a message, or in a part of one."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(_matches(pattern, part) for key, part in value.items() if key != "role")
    return isinstance(value, (list, tuple)) and any(_matches(pattern, part) for part in value)


# ---- the template


class StartClock:
    """The clock of chat templates (`strftime_now`), which stands still at the start of a run.

    The templates of Llama 3, gpt-oss, Granite and others write the date into the prompt, and a run that is resumed on another day would
    otherwise be another run.

    Args:
        started: local time of the start in ISO format; by default now.
    """

    def __init__(self, started: str | None = None) -> None:
        self.started = datetime.now().isoformat() if started is None else started

    def __call__(self, form: str) -> str:
        return datetime.fromisoformat(self.started).strftime(form)

    def bind(self, render: Renderer) -> Renderer:
        """Return a renderer that gives its templates this clock, if it takes `strftime_now`."""
        return partial(render, strftime_now=self) if accepts(render, "strftime_now") else render


def as_parts(messages: list[Message]) -> list[dict[str, Any]]:
    """Convert each message's text to a list with one part, which the templates of vision models iterate over."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def as_texts(messages: list[Message]) -> list[Message]:
    """Join the parts of each message whose content is a list of texts, as most templates need it."""
    texts = [text_of_parts(message.get("content")) for message in messages]
    return [
        message if text is None else message | {"content": text} for message, text in zip(messages, texts, strict=True)
    ]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], options: dict[str, Any]) -> str:
    """Apply the chat template and return the prompt as text; ValueError if the template refuses the messages."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    except REFUSALS as error:
        raise _refusal(tokenizer, messages, error) from error


def _refusal(tokenizer: PreTrainedTokenizerBase, messages: list[Message], error: Exception) -> ValueError:
    roles = ", ".join(str(message.get("role")) for message in messages)
    return ValueError(
        f"The chat template of the tokenizer {_name(tokenizer)} refuses messages of the roles {roles}: {error}"
    )


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(tokenizer.name_or_path or type(tokenizer).__name__)


@lru_cache(maxsize=8)
def _inspect_template(
    tokenizer: PreTrainedTokenizerBase, template: str, n_tokens: int, thinks: bool
) -> tuple[ControlTokens, bool]:
    """Render trial prompts to find the control tokens and whether the template needs texts as lists of parts."""
    options, word = {"chat_template": template, "enable_thinking": thinks}, "a8Qv3"

    def try_out(*roles: str, parts: bool = False) -> str:
        messages = [{"role": role, "content": word} for role in roles]
        try:
            return _render(tokenizer, as_parts(messages) if parts else messages, options)
        except (ValueError, TypeError):  # a template may refuse a role, and one for parts fails on a text
            return ""

    takes_parts = word not in try_out("user") and word in try_out("user", parts=True)
    chats = [("user",), ("system", "user"), ("user", "assistant", "user")]
    return ControlTokens(tokenizer, "".join(try_out(*roles, parts=takes_parts) for roles in chats)), takes_parts


def _inspect(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> tuple[ControlTokens, bool]:
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    return _inspect_template(tokenizer, template, len(tokenizer), bool(options["enable_thinking"]))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer and of its chat template, if it has one."""
    if tokenizer.chat_template is None:
        return ControlTokens(tokenizer, "")
    return _inspect(tokenizer, DEFAULT_OPTIONS)[0]


def chat_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> list[int]:
    """Encode messages by the tokenizer's chat template; Qwen3's thinking is off unless `options` has `enable_thinking`.

    A control token that a message spells is encoded as text. ValueError for a tokenizer without a template, and for messages that the
    template refuses.
    """
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError(
            f"The tokenizer {_name(tokenizer)} has no chat template, so messages cannot become a prompt. Use the "
            "tokenizer of an instruction-tuned model, set `tokenizer.chat_template`, or save a template as chat_template.jinja in its "
            "folder."
        )
    options = DEFAULT_OPTIONS | options
    if not options.get("tools") and any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
        # of the two templates of some tokenizers, the one without tools leaves earlier calls out
        options["chat_template"] = tokenizer.get_chat_template(options.get("chat_template"), TOOLS)
    control, takes_parts = _inspect(tokenizer, options)
    if any(message.keys() & TOOL_FIELDS or message.get("role") == "tool" for message in messages):
        form = tool_form(tokenizer, options.get("chat_template"))
        form.check(_name(tokenizer), messages)
        messages = form.adapted(messages)
    messages = as_parts(messages) if takes_parts else as_texts(messages)
    if (masked := control.mask(messages)) is not None:
        return control.encode(_render(tokenizer, masked, options))
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
    except REFUSALS as error:
        raise _refusal(tokenizer, messages, error) from error


def check_chats(
    render: Renderer, tokenizer: PreTrainedTokenizerBase, workflow: Workflow, problems: Iterable[Problem]
) -> None:
    """Raise ValueError if the tokenizer's template cannot render the conversations of a workflow on these problems.

    It renders a single user message and, after the history of each problem, the conversations that `workflow.structure` declares.
    """
    _check_chat(render, tokenizer, ("user",))
    histories = dict.fromkeys(tuple(message["role"] for message in problem.history) for problem in problems)
    for chat in structure_of(workflow).chats:
        for history in histories or [()]:
            try:
                _check_chat(render, tokenizer, (*history, *chat))
            except ValueError as error:
                raise ValueError(
                    f"The workflow {workflow.name!r} cannot be played with this tokenizer. {error} Use a model whose template takes these "
                    f"messages{' or rows without them' if history else ''}, or a workflow that quotes earlier messages in one user message."
                ) from error


def _check_chat(render: Renderer, tokenizer: PreTrainedTokenizerBase, roles: tuple[str, ...]) -> None:
    messages: list[Message] = [{"role": role, "content": f"Text {i}."} for i, role in enumerate(roles)]
    for message, following in pairwise(messages):
        if message["role"] == "assistant" and following["role"] == "tool":
            message |= {
                "content": "",
                "tool_calls": [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}],
            }
            following["tool_call_id"] = "call00000"
    try:
        prompt = render(tokenizer, messages)
        lost = [
            i
            for i, message in enumerate(messages)
            if message["content"]
            and render(tokenizer, [*messages[:i], message | {"content": "Other."}, *messages[i + 1 :]]) == prompt
        ]
    except jinja2.TemplateError as error:  # of a renderer that is not ours
        raise _refusal(tokenizer, messages, error) from error
    if lost:
        raise ValueError(
            f"The chat template of the tokenizer {_name(tokenizer)} leaves out message {lost[0] + 1} of a conversation of the roles {', '.join(roles)}. "
            "Set a template that renders every message."
        )


def check_tools(tokenizer: PreTrainedTokenizerBase, render: Renderer) -> None:
    """Raise ValueError if prompts cannot be rendered with `tools`: the chat template, or a renderer of the user's, does not know them.

    It warns if the chat template does not say how the model writes its calls.
    """
    if not accepts(render, "tools"):
        raise ValueError(
            f"The renderer {render!r} takes no `tools`. Describe the tools in a message, or use the chat template."
        )
    if template_options(render) is None:
        return
    form = reply_form(tokenizer, render)
    if form.loses_tools:
        raise ValueError(
            f"The chat template of the tokenizer {_name(tokenizer)} does not know `tools`: it leaves them out of the prompt. Describe the tools in a "
            "message, or use a model whose template has them, such as Qwen3."
        )
    if template := _reply_template(tokenizer, render):
        _warn_of_unknown_form(tokenizer, template)


def takes_several_calls(tokenizer: PreTrainedTokenizerBase, render: Renderer) -> bool:
    """Return whether the chat template renders several calls of a message. ValueError if it leaves calls or results out, as functions need them.

    A renderer of the user's is expected to render all of them.
    """
    check_tools(tokenizer, render)
    if template_options(render) is None:
        return True
    form = reply_form(tokenizer, render)
    if lost := form.lost_of_calls or form.lost_of_results:
        raise ValueError(
            f"The chat template of the tokenizer {_name(tokenizer)} leaves {lost} out of the prompt, so a role cannot use functions. Pass their "
            "descriptions and quote the results in a user message, or use a model whose template renders both, such as Qwen3."
        )
    return form.takes_several


def template_options(render: Renderer) -> dict[str, Any] | None:
    """Return the options of the template by which `chat_template` renders; None for a renderer of the user's."""
    # the trainer binds `chat_template_kwargs` and the clock to the renderer
    function, options = (render.func, render.keywords) if isinstance(render, partial) else (render, {})
    return DEFAULT_OPTIONS | options if function is chat_template else None


def reply_form(tokenizer: PreTrainedTokenizerBase, render: Renderer = chat_template) -> ToolForm:
    """Return how the model replies to the prompts of a renderer: the form of its chat template, or of the tokenizer's for a renderer of the user's.

    A tokenizer without a template has a form in which nothing is known.
    """
    template = _reply_template(tokenizer, render)
    return ToolForm() if template is None else tool_form(tokenizer, template)


def _reply_template(tokenizer: PreTrainedTokenizerBase, render: Renderer) -> str | None:
    chosen = (template_options(render) or {}).get("chat_template")
    if chosen is None and getattr(tokenizer, "chat_template", None) is None:
        return None
    return tokenizer.get_chat_template(chosen, TOOLS)


@lru_cache(maxsize=32)
def _warn_of_unknown_form(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Warn, once, if the template's tool calls cannot be read."""
    form = tool_form(tokenizer, template)
    if form.template is None:
        reason = (
            f"leaves {form.lost_of_calls} out"
            if form.lost_of_calls
            else "writes tool calls in a form that is not known"
        )
        logger.warning("The chat template of the tokenizer %s %s. A reply's calls are looked for in the forms of other models, and are text if they "
                       "have none of them.", _name(tokenizer), reason)  # fmt: skip
