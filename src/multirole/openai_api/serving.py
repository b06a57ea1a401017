"""Serve trained adapters through the API that agents were trained with, on an engine, without episodes or a trainer.

Here the request decides how its replies are sampled (`Asked`); what it leaves out is as in training.
"""

import asyncio
import errno
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from multirole.access import RequireKey, check_host
from multirole.chat.templates import Renderer, chat_template, check_tools, reply_form, template_options
from multirole.chat.tool_calls import parse_reply
from multirole.engines.protocol import Completion, Engine, Request, Sampling
from multirole.openai_api.app import Endpoint
from multirole.openai_api.dialect import BadRequest
from multirole.openai_api.session import RequestSampling, Session
from multirole.rollout.errors import PromptOverflow
from multirole.rollout.event_loop import EngineSelector
from multirole.rollout.replies import decode_reply, reply_text
from multirole.rollout.seeds import turn_seed
from multirole.types import Message, Turn

logger = logging.getLogger(__name__)

MAX_CHOICES, MAX_TEMPERATURE = 128, 2.0
"""Largest `n` and `temperature` of a request, as OpenAI's."""
LEAST_TEMPERATURE = 1e-5
"""Temperatures below this are 0: the likeliest token, in effect, and divided by it, logits would overflow."""
REFUSALS = {
    "top_logprobs": "the server keeps the log-probs of the sampled tokens alone (`logprobs=True`)",
    "response_format": "the server does not constrain replies to a grammar",
    "text": "the server does not constrain replies to a grammar",
    "logit_bias": "the server samples from the model's own distribution",
    "presence_penalty": "the server samples from the model's own distribution",
    "frequency_penalty": "the server samples from the model's own distribution",
    "tool_choice": "the model decides whether it calls a tool",
    "chat_template_kwargs": "prompts are rendered as in training",
}
"""Why fields are refused that this server does not honour; those of training have other reasons."""


@dataclass(frozen=True)
class Asked:
    """What a request asks of the sampling of one of its replies. A temperature or seed of None is the server's."""

    temperature: float | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


def choices_of(body: dict[str, Any]) -> list[Asked]:
    """Read what each of the `n` replies to a request asks for. `BadRequest` for a value of the wrong type or range.

    With a seed, the replies have seeds that follow from it, so that they differ and the same request gets the same replies.
    """
    temperature = _number(body, "temperature", MAX_TEMPERATURE)
    if temperature is not None and temperature < LEAST_TEMPERATURE:
        temperature = 0.0
    top_p = _number(body, "top_p", 1.0)
    seed, n, stop = body.get("seed"), body.get("n"), body.get("stop")
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise BadRequest(f"`seed` must be an integer, got {seed!r}.", param="seed")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES):
        raise BadRequest(f"`n` must be an integer from 1 to {MAX_CHOICES}, got {n!r}.", param="n")
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"`stop` must be a text or a list of texts, none of them empty, got {stop!r}.", param="stop")
    if not isinstance(body.get("logprobs"), bool | None):
        raise BadRequest(f"`logprobs` must be true or false, got {body['logprobs']!r}.", param="logprobs")
    seeds: Sequence[int | None] = [seed] * (n or 1)
    if seed is not None:
        seeds = [turn_seed(seed, 0, "", choice, "", 0, 0) for choice in range(n or 1)]
    return [Asked(temperature, 1.0 if top_p is None else top_p, of_choice, tuple(stop)) for of_choice in seeds]


def _before(stop: tuple[str, ...], text: str) -> str:
    """Return what a text has before the first of the texts in `stop`."""
    return text[: min((at for ending in stop if (at := text.find(ending)) >= 0), default=len(text))]


def _number(body: dict[str, Any], name: str, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadRequest(f"`{name}` must be a number from 0 to {most:g}, got {value!r}.", param=name)
    return float(value)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. ValueError if there is no such address or another process has the port."""
    if not 0 <= port < 2**16:
        raise ValueError(f"The port must be from 0 to 65535, got {port}. Port 0 takes a free one.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "Port 0 takes a free one." if is_taken else "The host must be an address of this machine."
        raise ValueError(f"Nothing can be served at {host}:{port}: {error}. {advice}") from error


async def _healthy(request: HTTPRequest) -> Response:
    """Answer that the server is up, with or without a key."""
    return Response()


@dataclass
class ModelServer:
    """Answer chat completions with an engine whose weights have been published.

    `policy` maps each role (the `model` of a request) to its adapter, or to None for the base. `sampling` has the largest length of a reply,
    and the temperature of requests without one; the n-th reply to a request without a seed is sampled with the n-th seed. Request fields listed in `ignore` are dropped.
    `context` is the most tokens that the base takes of a prompt and its reply.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    policy: Mapping[str, str | None]
    sampling: Sampling
    max_prompt_tokens: int
    render: Renderer = chat_template
    ignore: tuple[str, ...] = ()
    seed: int = 0
    strip_thoughts: bool = True
    context: int | None = None
    _waiting: dict[int, "asyncio.Future[Completion]"] = field(default_factory=dict, init=False)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count, init=False)

    def run(self, host: str, port: int, on_start: Callable[[str], object] = lambda url: None) -> None:
        """Serve until a signal arrives; `on_start` is called with the base URL.

        With a key in the environment (`access`), every request but `GET /health` needs it. ValueError for an address that other machines
        can reach if there is none, and if the port is in use.
        """
        check_host(host)
        selector = EngineSelector(self._advance, may_wait=True)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(self._serve(host, port, on_start))

    def app(self) -> RequireKey:
        """Return the ASGI application. It must be called in the event loop that serves."""
        served, options = RequestSampling(choices_of, REFUSALS), template_options(self.render)
        session = Session(
            self._call, list(self.policy), tokenizer=self.tokenizer, served=served, template_options=options
        )
        endpoint = Endpoint(self.ignore, default=session)
        endpoint.app.router.routes.append(Route("/health", _healthy, methods=["GET"]))
        return RequireKey(endpoint.app)

    async def _serve(self, host: str, port: int, on_start: Callable[[str], object]) -> None:
        server = uvicorn.Server(uvicorn.Config(self.app(), log_level="warning", lifespan="off"))
        serving = asyncio.ensure_future(server.serve([listening(host, port)]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.05)
        if server.started:
            shown = f"[{host}]" if ":" in host else host
            on_start(f"http://{shown}:{server.servers[0].sockets[0].getsockname()[1]}/v1")
        await serving

    def _advance(self) -> bool:
        if not self._waiting:
            return False
        try:
            done = self.engine.step()
        except Exception as error:  # the engine has dropped its requests, and takes others
            logger.exception("The engine failed. Its requests are answered with the error.")
            failed, self._waiting = self._waiting, {}
            for future in failed.values():
                future.set_exception(error)
            return True
        for key, completion in done:
            self._waiting.pop(key).set_result(completion)
        return True

    async def _call(
        self, role: str, messages: list[Message], slot: int | None = None, round: int = 0,
        max_tokens: int | None = None, tools: list[dict] | None = None, asked: Asked = Asked(),
    ) -> Turn:  # fmt: skip
        options: dict[str, Any] = {"tools": tools} if tools else {}
        if tools:
            check_tools(self.tokenizer, self.render)
        prompt_ids = self.render(self.tokenizer, messages, **options)
        room = self.max_prompt_tokens + self.sampling.max_tokens if self.context is None else self.context
        longest = min(self.max_prompt_tokens, room - 1)
        if len(prompt_ids) > longest:
            raise PromptOverflow(f"{role}: {len(prompt_ids)} prompt tokens, {longest} at most")
        key = next(self._numbers)
        most = min(self.sampling.max_tokens, room - len(prompt_ids))
        max_new_tokens = most if max_tokens is None else min(most, max_tokens)
        seed = turn_seed(self.seed, 0, "", key, role, 0, 0) if asked.seed is None else asked.seed
        temperature = self.sampling.temperature if asked.temperature is None else asked.temperature
        top_p = asked.top_p if temperature else 1.0
        is_whole = self._stop_check(asked.stop, prompt_ids) if asked.stop else None
        self.engine.add(
            key, Request(prompt_ids, self.policy[role], seed, max_new_tokens, temperature, "", top_p, is_whole)
        )
        self._waiting[key] = asyncio.get_running_loop().create_future()
        done = await self._waiting[key]
        ids, reason = done.token_ids, done.finish_reason
        if is_whole is not None and (n := next((n for n in range(1, len(ids) + 1) if is_whole(ids[:n])), None)):
            ids, reason = ids[:n], "stop"
        text = _before(asked.stop, self._text(ids, prompt_ids))
        turn = Turn(role, 0, 0, prompt_ids, ids, done.logprobs[: len(ids)], text, reason)
        if tools:
            reply = parse_reply(self.tokenizer, turn, tools, reply_form(self.tokenizer, self.render))
            turn.reply = replace(reply, text=_before(asked.stop, reply.text))
        return turn

    def _text(self, ids: list[int], prompt_ids: list[int]) -> str:
        if not self.strip_thoughts:
            return decode_reply(self.tokenizer, ids)
        return reply_text(self.tokenizer, ids, prompt_ids, reply_form(self.tokenizer, self.render))

    def _stop_check(self, stop: tuple[str, ...], prompt_ids: list[int]) -> Callable[[list[int]], bool]:
        """Return a function that tells whether the text of a reply's first tokens has one of the texts in `stop`, which the last of them ends.

        A text that is a control token, which replies do not show, is looked for among the tokens.
        """
        tail = max(len(text.encode()) for text in stop) + 8  # tokens: most have a byte or more
        control = {token for text in stop if (token := self.tokenizer.get_added_vocab().get(text)) is not None}

        def is_whole(ids: list[int]) -> bool:
            if ids[-1] in control:
                return True
            ending = self.tokenizer.decode(ids[-tail:])
            return any(text in ending for text in stop) and any(text in self._text(ids, prompt_ids) for text in stop)

        return is_whole
