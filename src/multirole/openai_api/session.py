"""Connect a client in any thread or event loop to one episode of the rollout."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from multirole.engines.protocol import RequestRefused, Sampling
from multirole.rollout.errors import RolloutStopped
from multirole.types import Message, Turn

FAULTS = (RequestRefused, RolloutStopped, TypeError)
"""Errors of a call that are no fault of the agent: of the engine, the end of the rollout, and of a renderer."""
MOST_REMEMBERED = 2**14
"""Responses and their items that a session keeps."""


@dataclass(eq=False)
class Played:
    """A model call of an episode. `is_lost` says that its client went away before the reply."""

    turn: "asyncio.Task[Turn]"
    is_lost: bool = False

    @property
    def has_failed(self) -> bool:
        """Return whether the call ended without a turn."""
        return self.turn.done() and (self.turn.cancelled() or self.turn.exception() is not None)


@dataclass(frozen=True)
class RequestSampling:
    """How requests decide on sampling, where no trainer does.

    Args:
        choices: reads the fields about sampling into what each of the replies asks for, the keyword `asked` of the call.
        refusals: field that is not honoured -> reason.
    """

    choices: Callable[[dict[str, Any]], list[Any]]
    refusals: Mapping[str, str]


class Session:
    """An open episode. `call` belongs to the rollout's event loop, in which the session must be created.

    `sampling` and `tokenizer` are the trainer's, if they are known: they tell which request fields change nothing, and spell tokens. `served` is None in an episode,
    whose trainer decides how to sample. `template_options` are those of the chat template, which `chat_template_kwargs` of a request may repeat.
    """

    current: "ContextVar[Session | None]" = ContextVar("multirole_session", default=None)
    """The episode whose agent runs in this task or thread."""

    def __init__(
        self, call: Callable[..., Awaitable[Turn]], roles: list[str], sampling: Sampling | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None, served: RequestSampling | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.template_options = template_options or {}
        self.roles, self.sampling, self.tokenizer, self.served = roles, sampling, tokenizer, served
        self.is_open, self.has_requests = True, False
        self.pending = self.n_turns = self.n_ended = 0
        """The calls that run, those that were answered, and those that have ended, answered or not."""
        self.refusal: str | None = None
        """The message of the last request that was refused."""
        self.error: Exception | None = None
        """A failure of a call that is no fault of the agent."""
        self.conversations: dict[str, list[Any]] = {}
        """The items of earlier responses by the response's id, and single items by their own (`endpoint.responses`)."""
        self._call = call
        self._played: dict[str, list[Played]] = defaultdict(list)
        self.loop = asyncio.get_running_loop()

    def remember(self, id: str, items: list[Any]) -> None:
        """Keep items under an id for later requests; the oldest are forgotten."""
        self.conversations[id] = items
        if len(self.conversations) > MOST_REMEMBERED:
            del self.conversations[next(iter(self.conversations))]

    async def play(
        self, role: str, messages: list[Message], max_tokens: int | None, tools: list[dict] | None, body: str = "",
        is_retry: bool = False, asked: Any = None,
    ) -> Turn:  # fmt: skip
        """Make one model call. May be awaited in any event loop. It goes on if the client disconnects: the turn is trained.

        A request with the same `body` as one that lost its client, or one that says that it is a retry, gets the turn of the earlier one.
        `asked` is one of the `RequestSampling.choices`.
        """
        turn = self._turn(role, messages, max_tokens, tools, body, is_retry, asked)
        if asyncio.get_running_loop() is self.loop:
            return await turn
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turn, self.loop))

    async def _turn(
        self, role: str, messages: list[Message], max_tokens: int | None, tools: list[dict] | None, body: str,
        is_retry: bool, asked: Any,
    ) -> Turn:  # fmt: skip
        played = self._earlier(body, is_retry)
        if played is None:
            played = Played(asyncio.ensure_future(self._play(role, messages, max_tokens, tools, asked)))
            if body:
                self._played[body].append(played)
        played.is_lost = False
        try:
            return await asyncio.shield(played.turn)
        except asyncio.CancelledError:
            played.is_lost = True
            raise

    def _earlier(self, body: str, is_retry: bool) -> Played | None:
        """Return the call that a request repeats, if any."""
        same = [played for played in self._played.get(body, ()) if not played.has_failed]
        candidates = [played for played in same if played.is_lost]
        if is_retry and not candidates:
            candidates = [played for played in same if not played.turn.done()] or same[-1:]
        return candidates[0] if candidates else None

    async def _play(
        self, role: str, messages: list[Message], max_tokens: int | None, tools: list[dict] | None, asked: Any
    ) -> Turn:  # fmt: skip
        options = {} if asked is None else {"asked": asked}
        self.pending += 1
        try:
            turn = await self._call(role, messages, slot=None, max_tokens=max_tokens, tools=tools, **options)
        except FAULTS as error:
            self.error = error
            raise
        else:
            self.n_turns += 1
            return turn
        finally:
            self.pending -= 1
            self.n_ended += 1
