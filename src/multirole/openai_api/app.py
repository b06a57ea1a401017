"""ASGI application for OpenAI's API. `model` names the role, and the API key the episode.

It serves `POST /v1/chat/completions`, `POST /v1/responses`, `GET /v1/models` and `GET /v1/models/MODEL`; errors have OpenAI's form and status. A stream
is one chunk. A field that cannot be honoured gives an error that names it, or is dropped if `ignore` lists it: the trainer decides how to sample.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import Function
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from multirole.chat.messages import normalised
from multirole.chat.tool_calls import parse_reply
from multirole.openai_api.dialect import HARMLESS, BadRequest, ClientReply, Dialect, token_logprobs
from multirole.openai_api.responses import RESPONSES
from multirole.openai_api.session import FAULTS, Session
from multirole.rollout.errors import PromptOverflow
from multirole.types import Message, Reply, Turn

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20
"""Largest request body that is read."""
READ = {"model", "messages", "stream", "stream_options", "tools", "max_tokens", "max_completion_tokens"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "response_format": ({"type": "text"},), "logit_bias": ({},), "top_p": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logprobs": (False, True), "top_logprobs": (0,), "stop": ([],), "top_k": (-1, 0),
    "tool_choice": ("auto", "none"), "min_p": (0,), "repetition_penalty": (1,), "verbosity": ("medium",),
}  # fmt: skip
"""Fields of chat completions that are accepted with these values, or null, only: the trainer's own behaviour."""
REFUSALS = {
    "temperature": "the trainer samples every turn at its own `temperature`, which the loss needs",
    "seed": "the trainer chooses a seed for every turn",
    "n": "a turn has one reply: make several calls",
    "response_format": "a constrained sampler would differ from the policy that is trained",
    "text": "a constrained sampler would differ from the policy that is trained",
    "logit_bias": "the loss needs log-probs of the policy that is trained",
    "top_logprobs": "only the log-probs of the sampled tokens are known",
}
ROUTES = "POST /v1/chat/completions, POST /v1/responses, GET /v1/models and GET /v1/models/MODEL"


def _no_such_model(role: object, session: Session) -> BadRequest:
    message = f"The model {role!r} does not exist. Models are the workflow's roles: {session.roles}."
    return BadRequest(message, 404, "model_not_found", "model")


class Endpoint:
    """The application and its open episodes.

    Args:
        ignore: fields of requests that are dropped instead of refused, such as `("temperature", "seed")`.
        default: the session of all requests, for any key; None if each episode has its own session.
    """

    def __init__(self, ignore: Collection[str] = (), default: Session | None = None) -> None:
        if needed := sorted(set(ignore) & (READ | RESPONSES.read)):
            raise ValueError(
                f"`ignore` names {needed}, which the endpoint reads, so they cannot be dropped. Leave them out."
            )
        self.ignore, self.default = frozenset(ignore), default
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{role}", self._models, methods=["GET"]),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self._sessions: dict[str, Session] = {}
        self._warned_of: set[str] = set()

    def open(self, session: Session) -> str:
        """Open an episode for calls and return its API key."""
        key = f"episode-{secrets.token_hex(16)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Close an episode; further calls are refused."""
        self._sessions.pop(key).is_open = False

    def _session(self, request: Request) -> Session:
        """Return the request's episode: that of the agent's task or thread if the client is in memory, otherwise that of the API key."""
        if self.default is not None:
            return self.default
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        named = self._sessions.get(key) if scheme.lower() == "bearer" else None
        current = Session.current.get()
        if current is not None and current.is_open and current in self._sessions.values():
            if named is not current:
                self._warn_once(
                    "An agent's client has the key of another episode, as one that is kept for later episodes has. Its calls in memory count for the "
                    "episode that makes them, but over a socket only the key could tell. Use the client that the agent receives."
                )
            return current
        if scheme.lower() != "bearer" or not key:
            raise BadRequest("There is no API key: pass the episode's key as a bearer token.", 401)
        if named is None:
            raise BadRequest(
                "The API key does not belong to a running episode. A key is valid while its agent function runs.",
                401, "invalid_api_key",
            )  # fmt: skip
        return named

    def _warn_once(self, message: str) -> None:
        if message not in self._warned_of:
            self._warned_of.add(message)
            logger.warning("%s", message)

    def _refused(self, request: Request, error: BadRequest) -> Response:
        """Return an error, and keep its message for the episode, whose agent may handle the error without a word.

        A prompt that is too long is not kept: an agent may shorten it, or answer without a reply.
        """
        try:
            session = self._session(request)
            if error.body["code"] != "context_length_exceeded":
                session.refusal = str(error)
        except BadRequest:
            self._warn_once(f"A request to {request.url.path} was refused. {error}")
        return error.response()

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Return an error of the router, such as an unknown path, in OpenAI's form."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path} is not supported. There are {ROUTES}."
        return self._refused(request, BadRequest(message, error.status_code))

    async def _models(self, request: Request) -> Response:
        try:
            session = self._session(request)
        except BadRequest as error:
            return self._refused(request, error)
        models = [{"id": role, "object": "model", "created": 0, "owned_by": "multirole"} for role in session.roles]
        if role := request.path_params.get("role"):
            known = [model for model in models if model["id"] == role]
            return JSONResponse(known[0]) if known else self._refused(request, _no_such_model(role, session))
        return JSONResponse({"object": "list", "data": models})

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, CHAT)

    async def _respond(self, request: Request) -> Response:
        return await self._answer(request, RESPONSES)

    async def _answer(self, request: Request, dialect: Dialect) -> Response:
        try:
            session = self._session(request)
            session.has_requests = True
            body, digest = await _read_json(request)
            role, messages, tools, max_tokens = self._parse(body, session, dialect)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            name = "" if session is self.default else f"{request.url.path} {digest}"
            choices = self._choices(body, session, dialect)
            plays = [session.play(role, messages, max_tokens, tools, name, is_retry, asked) for asked in choices]
            playing: Any = plays[0] if len(plays) == 1 else asyncio.gather(*plays)
            try:
                if asyncio.get_running_loop() is session.loop:  # a client in memory, which is cancelled with its task
                    played = await playing
                else:
                    played = await _unless_disconnected(request, asyncio.ensure_future(playing))
            except PromptOverflow as error:
                raise BadRequest(
                    f"The prompt is too long: {error}", 400, "context_length_exceeded", "messages"
                ) from error
            except ValueError as error:
                raise BadRequest(str(error)) from error
            except FAULTS as error:  # is `session.error`, which ends the episode
                raise BadRequest(f"{type(error).__name__}: {error}", 500) from error
        except BadRequest as error:
            return self._refused(request, error)
        if played is None:
            return Response(status_code=499)  # which nobody reads
        turns = played if isinstance(played, list) else [played]
        replies = [self._reply(role, turn, session, tools, body) for turn in turns]
        answer = _as_choices([dialect.write(body, session, reply) for reply in replies])
        if not body.get("stream"):
            return JSONResponse(answer)
        return StreamingResponse(dialect.stream(body, answer), media_type="text/event-stream")

    def _choices(self, body: dict, session: Session, dialect: Dialect) -> list[Any]:
        """Return what each reply to a request asks of the sampling; None for the one reply of an episode's call."""
        if session.served is None:
            return [None]
        return session.served.choices({name: body.get(name) for name in dialect.sampling - self.ignore})

    def _parse(
        self, body: dict, session: Session, dialect: Dialect
    ) -> tuple[str, list[Message], list[dict] | None, int | None]:
        """Parse a request into role, messages, tools and token cap. `BadRequest` with everything that cannot be honoured."""
        problems = [refused] if (refused := self._refused_fields(body, session, dialect)) else []
        if not isinstance(body.get("stream_options"), dict | None):
            problems.append(
                BadRequest(
                    f"`stream_options` must be an object, got {body['stream_options']!r}.", param="stream_options"
                )
            )
        role, messages, tools = body.get("model"), [], None
        if role not in session.roles:
            problems.insert(0, _no_such_model(role, session))
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        caps = {name: cap for name in names if name in dialect.read and (cap := body.get(name)) is not None}
        for name, cap in caps.items():
            if type(cap) is not int or cap < 1:
                problems.append(BadRequest(f"`{name}` must be a positive integer, got {cap!r}.", param=name))
        try:
            chat = dialect.to_chat(body, session)
            messages, tools = normalised(chat.get("messages"), from_wire=True), _tools(chat.get("tools"))
        except BadRequest as error:
            problems.append(error)
        except ValueError as error:
            problems.append(BadRequest(str(error), param="messages"))
        if problems:
            first = problems[0]
            raise BadRequest(
                "\n".join(map(str, problems)),
                first.status,
                first.body["code"],
                next(filter(None, (p.body["param"] for p in problems)), None),
            )
        if body.get("tool_choice") == "none" and "tool_choice" not in self.ignore:
            tools = None
        return str(role), messages, tools, min(caps.values(), default=None)

    def _refused_fields(self, body: dict, session: Session, dialect: Dialect) -> BadRequest | None:
        """Return one error for all fields that cannot be honoured; None if there are none."""
        usual = session.sampling.temperature if session.sampling is not None else None
        read, options = dialect.read, dict(session.template_options)
        if session.served is not None:
            read = read | dialect.sampling
        refused = {
            name: value
            for name, value in body.items()
            if name not in read | HARMLESS | self.ignore
            and value is not None
            and value not in dialect.neutral.get(name, ())
            and not (name == "temperature" and value == usual)
            and not (name == "chat_template_kwargs" and isinstance(value, dict) and options | value == options)
        }
        if not refused:
            return None
        reasons = REFUSALS | ({"temperature": f"{REFUSALS['temperature']}, {usual:g}"} if usual is not None else {})
        if session.served is not None:
            reasons = dict(session.served.refusals)
        texts = [
            f"`{name}={value!r}` is refused: {reasons.get(name, 'the endpoint does not support it')}."
            for name, value in refused.items()
        ]
        it, names = "them" if len(refused) > 1 else "it", list(refused)
        how = (
            f"`from_openai(..., ignore={names!r})`"
            if self.default is None
            else f"{' '.join(f'`--ignore {name}`' for name in names)} of the server"
        )
        return BadRequest(f"{' '.join(texts)} Leave {it} out, or ignore {it} with {how}.", param=names[0])

    def _wants_logprobs(self, body: dict) -> bool:
        include = body.get("include")
        is_listed = isinstance(include, list) and "message.output_text.logprobs" in include
        return is_listed or body.get("logprobs") is True and "logprobs" not in self.ignore

    def _reply(self, role: str, turn: Turn, session: Session, tools: list[dict] | None, body: dict) -> ClientReply:
        """Return a turn as the client sees it; of several calls the first, where it wants no parallel ones."""
        reply = (turn.reply or parse_reply(None, turn, tools)) if tools else Reply(turn.text)
        calls = [(_call_id(turn, i), name, json.dumps(arguments)) for i, (name, arguments) in enumerate(reply.calls)]
        if body.get("parallel_tool_calls") is False and "parallel_tool_calls" not in self.ignore:
            calls = calls[:1]
        logprobs = token_logprobs(turn, session.tokenizer) if self._wants_logprobs(body) else None
        return ClientReply(secrets.token_hex(12), role, turn, reply.text, reply.reasoning, calls, logprobs)


async def _unless_disconnected(request: Request, playing: "asyncio.Future[Any]") -> Any:
    """Return the turn or turns, or None if the client disconnects before it is there or the episode has ended."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching: asyncio.Future[Any] = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not playing.done():
            playing.cancel()
    return playing.result() if playing.done() and not playing.cancelled() else None


def _completion(body: dict, session: Session, reply: ClientReply) -> dict:
    """Return the body of a chat completion."""
    tool_calls: Any = [
        ChatCompletionMessageFunctionToolCall(id=id, type="function", function=Function(name=name, arguments=arguments))
        for id, name, arguments in reply.calls
    ]
    thoughts: dict[str, Any] = {"reasoning_content": reply.thoughts} if reply.thoughts else {}
    message = ChatCompletionMessage(role="assistant", content=reply.text, tool_calls=tool_calls or None, **thoughts)
    reason: Any = "tool_calls" if reply.calls else "stop" if reply.turn.finish_reason == "stop" else "length"
    n_prompt, n_completion = len(reply.turn.prompt_ids), len(reply.turn.completion_ids)
    usage = CompletionUsage(
        prompt_tokens=n_prompt, completion_tokens=n_completion, total_tokens=n_prompt + n_completion
    )
    content: Any = reply.logprobs
    choice = Choice(
        index=0, message=message, finish_reason=reason, logprobs=content and ChoiceLogprobs(content=content)
    )
    return ChatCompletion(
        id=f"chatcmpl-{reply.id}", object="chat.completion", created=int(time.time()), model=reply.role, usage=usage,
        choices=[choice],
    ).model_dump(exclude_none=True)  # fmt: skip


def _as_choices(answers: list[dict]) -> dict:
    """Return the completions of several replies to one request as one, with a choice for each."""
    whole = answers[0]
    for i, other in enumerate(answers[1:], 1):
        whole["choices"].append(other["choices"][0] | {"index": i})
        for name in ("completion_tokens", "total_tokens"):
            whole["usage"][name] += other["usage"]["completion_tokens"]
    return whole


def _call_id(turn: Turn, index: int) -> str:
    """Return the id of a tool call: nine letters and digits, as Mistral's templates want, which depend on nothing but the turn."""
    return hashlib.blake2b(repr((turn.prompt_ids, turn.completion_ids, index)).encode()).hexdigest()[:9]


async def _read_json(request: Request) -> tuple[dict, str]:
    """Read the request's body, of at most `MAX_BODY_BYTES`, as a JSON object. Also return its digest."""
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
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest(
            "A text of the request holds half of a character, a lone surrogate. Send whole characters."
        ) from None
    return parsed, hashlib.blake2b(body, digest_size=16).hexdigest()


def _tools(tools: Any) -> list[dict] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise BadRequest("`tools` must be a list of tools of the type 'function'.", param="tools")
    return tools


async def _one_chunk(body: dict, whole: dict) -> AsyncIterator[str]:
    """Format a completion as server-sent events: the whole message, the finish reason, usage on request, and the end mark."""
    head = {key: value for key, value in whole.items() if key != "usage"} | {"object": "chat.completion.chunk"}
    chunks = []
    for choice in whole["choices"]:
        delta = choice["message"]
        for i, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = i
        first = {key: value for key, value in choice.items() if key != "message"}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks += [
            head | {"choices": [first | {"delta": delta, "finish_reason": None}]},
            head | {"choices": [last]},
        ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": whole["usage"]})
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


SAMPLING = frozenset({"temperature", "top_p", "seed", "stop", "n", "logprobs"})
CHAT = Dialect(frozenset(READ), SAMPLING, NEUTRAL, lambda body, session: body, _completion, _one_chunk)
