"""ASGI application for OpenAI's chat completions. `model` names the role, and the API key the episode.

It serves `POST /v1/chat/completions`, `GET /v1/models` and `GET /v1/models/MODEL`; errors have OpenAI's form and status. A stream is one chunk. A field
that cannot be honoured gives an error that names it, or is dropped if `ignore` lists it: the trainer decides how to sample.
"""

import hashlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_message_function_tool_call import Function
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from multirole.core.messages import normalised
from multirole.core.rollout import PromptOverflow
from multirole.core.tool_calls import parse_reply
from multirole.core.types import Message, Reply, Turn
from multirole.endpoint.session import Session

MAX_BODY_BYTES = 4 * 2**20
"""Largest request body that is read."""
READ = {"model", "messages", "stream", "stream_options", "tools", "max_tokens", "max_completion_tokens"}
HARMLESS = {
    "user", "metadata", "store", "parallel_tool_calls", "service_tier", "prompt_cache_key", "safety_identifier",
    "extra_headers",
}  # fmt: skip
"""Fields that do not change sampling."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "response_format": ({"type": "text"},), "logit_bias": ({},), "top_p": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logprobs": (False,), "top_logprobs": (0,), "stop": ([],), "tool_choice": ("auto",),
}  # fmt: skip
"""Fields accepted only with these values, or null, which are the trainer's own behaviour."""
REFUSALS = {
    "temperature": "the trainer samples every turn at its own `temperature`, which the loss needs",
    "seed": "the trainer chooses a seed for every turn",
    "n": "a turn has one reply: make several calls",
    "response_format": "a constrained sampler would differ from the policy that is trained",
    "logit_bias": "the loss needs log-probs of the policy that is trained",
}


class BadRequest(Exception):
    """A refused request, with the status, type and code of OpenAI's errors."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = {401: "authentication_error"}.get(status, "invalid_request_error")
        self.status, self.body = status, {"message": message, "type": kind, "param": param, "code": code}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.body}, self.status)


def _no_such_model(role: object, session: Session) -> BadRequest:
    message = f"The model {role!r} does not exist. Models are the workflow's roles: {session.roles}."
    return BadRequest(message, 404, "model_not_found", "model")


async def _as_error(request: Request, error: HTTPException) -> Response:
    """Return an error of the router, such as an unknown path, in OpenAI's form."""
    routes = "POST /v1/chat/completions, GET /v1/models and GET /v1/models/MODEL"
    return BadRequest(
        f"{request.method} {request.url.path} is not supported. There are {routes}.", error.status_code
    ).response()


class Endpoint:
    """The application and its open episodes.

    Args:
        ignore: fields of requests that are dropped instead of refused, such as `("temperature", "seed")`.
        default: the session of all requests, for any key; None if each episode has its own session.
    """

    def __init__(self, ignore: Collection[str] = (), default: Session | None = None) -> None:
        if needed := sorted(set(ignore) & READ):
            raise ValueError(
                f"`ignore` names {needed}, which the endpoint reads, so they cannot be dropped. Leave them out."
            )
        self.ignore, self.default = frozenset(ignore), default
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{role}", self._models, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _as_error},
        )
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count()

    def open(self, session: Session) -> str:
        """Open an episode for calls and return its API key."""
        key = f"episode-{secrets.token_hex(16)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Close an episode; further calls are refused."""
        del self._sessions[key]

    def _session(self, request: Request) -> Session:
        if self.default is not None:
            return self.default
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise BadRequest("There is no API key: pass the episode's key as a bearer token.", 401)
        if key not in self._sessions:
            raise BadRequest(
                "The API key does not belong to a running episode. A key is valid while its agent function runs.",
                401, "invalid_api_key",
            )  # fmt: skip
        return self._sessions[key]

    async def _models(self, request: Request) -> Response:
        try:
            session = self._session(request)
        except BadRequest as error:
            return error.response()
        models = [{"id": role, "object": "model", "created": 0, "owned_by": "multirole"} for role in session.roles]
        if role := request.path_params.get("role"):
            known = [model for model in models if model["id"] == role]
            return JSONResponse(known[0]) if known else _no_such_model(role, session).response()
        return JSONResponse({"object": "list", "data": models})

    async def _answer(self, request: Request) -> Response:
        try:
            session = self._session(request)
            body = await _read_json(request)
            role, messages, tools, max_tokens = self._parse(body, session)
            try:
                turn = await session.play(role, messages, max_tokens, tools)
            except PromptOverflow as error:
                raise BadRequest(f"The prompt is too long: {error}.", code="context_length_exceeded") from error
            except ValueError as error:
                raise BadRequest(str(error)) from error
        except BadRequest as error:
            return error.response()
        completion = self._completion(role, turn, tools)
        if not body.get("stream"):
            return JSONResponse(completion.model_dump(exclude_none=True))
        is_counted = bool((body.get("stream_options") or {}).get("include_usage"))  # a dict or None, see `_parse`
        return StreamingResponse(_one_chunk(completion, is_counted), media_type="text/event-stream")

    def _parse(self, body: dict, session: Session) -> tuple[str, list[Message], list[dict] | None, int | None]:
        """Parse a request into role, messages, tools and token cap; `BadRequest` for a field that cannot be honoured."""
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest(
                "A text of the request holds half of a character, a lone surrogate. Send whole characters."
            ) from None
        if not isinstance(body.get("stream_options"), dict | None):
            raise BadRequest(
                f"`stream_options` must be an object, got {body['stream_options']!r}.", param="stream_options"
            )
        for name, value in body.items():
            if name in READ or name in HARMLESS or name in self.ignore or value is None:
                continue
            if value not in NEUTRAL.get(name, ()):
                reason = REFUSALS.get(name, "the endpoint does not support it")
                how = (
                    f"`from_openai(..., ignore={[name]!r})`"
                    if self.default is None
                    else f"`--ignore {name}` of the server"
                )
                raise BadRequest(
                    f"`{name}={value!r}` is refused: {reason}. Leave it out, or ignore it with {how}.", param=name
                )
        role = body.get("model")
        if role not in session.roles:
            raise _no_such_model(role, session)
        caps = [cap for name in ("max_tokens", "max_completion_tokens") if (cap := body.get(name)) is not None]
        if not all(isinstance(cap, int) and cap > 0 for cap in caps):
            raise BadRequest(f"`max_tokens` must be a positive integer, got {caps}.", param="max_tokens")
        try:
            messages = normalised(body.get("messages"), from_wire=True)
        except ValueError as error:
            raise BadRequest(str(error), param="messages") from error
        return role, messages, _tools(body.get("tools")), min(caps, default=None)

    def _completion(self, role: str, turn: Turn, tools: list[dict] | None) -> ChatCompletion:
        reply = (turn.reply or parse_reply(None, turn, tools)) if tools else Reply(turn.text)
        number = next(self._numbers)
        tool_calls: Any = [
            ChatCompletionMessageFunctionToolCall(
                id=_call_id(turn, i), type="function", function=Function(name=name, arguments=json.dumps(arguments))
            )
            for i, (name, arguments) in enumerate(reply.calls)
        ]
        thought: dict[str, Any] = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        message = ChatCompletionMessage(role="assistant", content=reply.text, tool_calls=tool_calls or None, **thought)
        reason = "tool_calls" if reply.calls else "stop" if turn.finish_reason == "stop" else "length"
        n_prompt, n_completion = len(turn.prompt_ids), len(turn.completion_ids)
        usage = CompletionUsage(
            prompt_tokens=n_prompt, completion_tokens=n_completion, total_tokens=n_prompt + n_completion
        )
        return ChatCompletion(
            id=f"chatcmpl-{number}", object="chat.completion", created=int(time.time()), model=role, usage=usage,
            choices=[Choice(index=0, message=message, finish_reason=reason)],
        )  # fmt: skip


def _call_id(turn: Turn, index: int) -> str:
    """Return the id of a tool call: nine letters and digits, as Mistral's templates want, which depend on nothing but the turn."""
    return hashlib.blake2b(repr((turn.prompt_ids, turn.completion_ids, index)).encode()).hexdigest()[:9]


async def _read_json(request: Request) -> dict:
    """Read the request's body, of at most `MAX_BODY_BYTES`, as a JSON object."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"The request is larger than {MAX_BODY_BYTES // 2**20} MiB.", 413)
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise BadRequest("The request's body must be a JSON object.")
    return parsed


def _tools(tools: Any) -> list[dict] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise BadRequest("`tools` must be a list of tools of the type 'function'.", param="tools")
    return tools


async def _one_chunk(completion: ChatCompletion, is_counted: bool) -> AsyncIterator[str]:
    """Format a completion as server-sent events: the whole message, the finish reason, usage on request, and the end mark."""
    whole = completion.model_dump(exclude_none=True)
    choice, usage = whole.pop("choices")[0], whole.pop("usage")
    head = whole | {"object": "chat.completion.chunk"}
    delta = choice["message"]
    for i, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = i
    first = {"index": 0, "delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [head | {"choices": [first]}, head | {"choices": [last]}]
    for chunk in [*chunks, *([head | {"choices": [], "usage": usage}] if is_counted else [])]:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
