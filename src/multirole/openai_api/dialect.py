"""Define what the two kinds of requests, chat completions and responses, have in common: fields, errors and the parsed reply."""

import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from multirole.openai_api.session import Session
from multirole.types import Turn

HARMLESS = {
    "user", "metadata", "store", "parallel_tool_calls", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "extra_headers",
}  # fmt: skip
"""Fields of both kinds that do not change sampling."""


class BadRequest(Exception):
    """A refused request, with the status, type and code of OpenAI's errors."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = {401: "authentication_error", 500: "server_error"}.get(status, "invalid_request_error")
        self.status, self.body = status, {"message": message, "type": kind, "param": param, "code": code}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.body}, self.status, {"x-should-retry": "false"})


@dataclass(frozen=True)
class ClientReply:
    """A turn as clients see it: its text, its thoughts, and its tool calls as (id, name, arguments in JSON)."""

    id: str
    """Random, because a client could otherwise continue the response of another one that it guesses."""
    role: str
    turn: Turn
    text: str
    thoughts: str
    calls: list[tuple[str, str, str]]
    logprobs: list[dict[str, Any]] | None
    """For each sampled token its text, its bytes and its log-probability, if the request asks for them."""


@dataclass(frozen=True)
class Dialect:
    """A kind of request.

    Args:
        read: the fields that the endpoint honours.
        sampling: the fields that a session without a trainer honours as well (`Session.served`).
        neutral: fields that are accepted with these values, or null, only: the trainer's own behaviour.
        to_chat: converts a body to that of a chat completion. ValueError or `BadRequest` for one that it cannot convert.
        write: converts a reply to the body of an answer.
        stream: converts the answer to server-sent events.
    """

    read: frozenset[str]
    sampling: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]
    to_chat: Callable[[dict, Session], dict]
    write: Callable[[dict, Session, ClientReply], dict]
    stream: Callable[[dict, dict], AsyncIterator[str]]


def token_logprobs(turn: Turn, tokenizer: PreTrainedTokenizerBase | None) -> list[dict[str, Any]]:
    """Return OpenAI's form of the log-probabilities of a turn's tokens, the end token included; -9999 for a token that was not scored."""
    entries = []
    for token_id, logprob in zip(turn.completion_ids, turn.logprobs, strict=True):
        token = f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id])
        known = -9999.0 if math.isnan(logprob) else logprob
        entries.append({"token": token, "bytes": list(token.encode()), "logprob": known, "top_logprobs": []})
    return entries
