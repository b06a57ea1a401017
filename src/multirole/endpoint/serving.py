"""Serve trained adapters through the API that agents were trained with, on an engine, without episodes or a trainer."""

import asyncio
import errno
import itertools
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerBase

from multirole.core.chat import Renderer, chat_template, check_tools
from multirole.core.engine import Completion, Engine, Request, Sampling
from multirole.core.event_loop import EngineSelector
from multirole.core.rollout import PromptOverflow, reply_text, turn_seed
from multirole.core.tool_calls import parse_reply
from multirole.core.types import Message, Turn
from multirole.endpoint.app import Endpoint
from multirole.endpoint.session import Session


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


@dataclass
class ModelServer:
    """Answer chat completions with an engine whose weights have been published.

    `policy` maps each role (the `model` of a request) to its adapter, or to None for the base. The n-th call samples with the
    n-th seed. Request fields listed in `ignore` are dropped.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    policy: Mapping[str, str | None]
    sampling: Sampling
    max_prompt_tokens: int
    render: Renderer = chat_template
    ignore: tuple[str, ...] = ()
    seed: int = 0
    _waiting: dict[int, "asyncio.Future[Completion]"] = field(default_factory=dict, init=False)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count, init=False)

    def run(self, host: str, port: int, on_start: Callable[[str], object] = lambda url: None) -> None:
        """Serve until a signal arrives; `on_start` is called with the base URL. Any API key is accepted. ValueError if the port is in use."""
        selector = EngineSelector(self._advance, may_wait=True)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(self._serve(host, port, on_start))

    async def _serve(self, host: str, port: int, on_start: Callable[[str], object]) -> None:
        endpoint = Endpoint(self.ignore, default=Session(self._call, list(self.policy)))
        server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="warning", lifespan="off"))
        serving = asyncio.ensure_future(server.serve([listening(host, port)]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.05)
        if server.started:
            on_start(f"http://{host}:{server.servers[0].sockets[0].getsockname()[1]}/v1")
        await serving

    def _advance(self) -> bool:
        if not self._waiting:
            return False
        for key, completion in self.engine.step():
            self._waiting.pop(key).set_result(completion)
        return True

    async def _call(
        self, role: str, messages: list[Message], slot: int | None = None, round: int = 0,
        max_tokens: int | None = None, tools: list[dict] | None = None,
    ) -> Turn:  # fmt: skip
        options: dict[str, Any] = {"tools": tools} if tools else {}
        if tools:
            check_tools(self.tokenizer, self.render)
        prompt_ids = self.render(self.tokenizer, messages, **options)
        if len(prompt_ids) > self.max_prompt_tokens:
            raise PromptOverflow(f"{role}: {len(prompt_ids)} prompt tokens, {self.max_prompt_tokens} at most")
        key = next(self._numbers)
        most = self.sampling.max_tokens
        max_new_tokens = most if max_tokens is None else min(most, max_tokens)
        seed = turn_seed(self.seed, 0, "", key, role, 0, 0)
        self.engine.add(key, Request(prompt_ids, self.policy[role], seed, max_new_tokens, self.sampling.temperature))
        self._waiting[key] = asyncio.get_running_loop().create_future()
        completion = await self._waiting[key]
        text = reply_text(self.tokenizer, completion.token_ids, prompt_ids)
        reply = completion.token_ids, completion.logprobs, text, completion.finish_reason
        turn = Turn(role, 0, 0, prompt_ids, *reply)
        if tools:
            turn.reply = parse_reply(self.tokenizer, turn, tools)
        return turn
