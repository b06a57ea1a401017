"""Turn a function that calls OpenAI's API into a workflow (`from_openai`); the models it names become roles.

async def vote(question, client):
    ask = [{"role": "user", "content": question}]
    drafts = [client.chat.completions.create(model="solver", messages=ask) for _ in range(3)]
    ...

trainer = MultiRoleGRPOTrainer(model, from_openai(vote, {"solver": 3, "judge": 1}), ...)
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import httpx
import uvicorn
from openai import AsyncOpenAI, OpenAI

from multirole.core.types import Answer, Call, Message, Problem, Structure
from multirole.endpoint.app import Endpoint
from multirole.endpoint.session import Session

IN_MEMORY = "http://multirole/v1"
"""Base URL of the transport without a socket."""
T = TypeVar("T")


class OpenAIWorkflow:
    """A workflow whose episodes are calls of `agent(question, client)`; created by [`from_openai`]."""

    waits_outside = True

    def __init__(
        self, agent: Callable[..., Any], roles: Mapping[str, int], name: str, structure: Structure,
        ignore: Collection[str], use_socket: bool, patience: float,
    ) -> None:  # fmt: skip
        self.name, self.roles, self.structure = name, dict(roles), structure
        self.agent, self.patience, self.use_socket = agent, patience, use_socket
        self.endpoint = Endpoint(ignore)
        self._base_url = "" if use_socket else IN_MEMORY

    @property
    def base_url(self) -> str:
        """Return the endpoint's URL; with `use_socket` the first access starts the server."""
        if not self._base_url:
            self._base_url = serve_on_loopback(self.endpoint.app)
        return self._base_url

    async def run(self, problem: Problem, call: Call) -> Answer:
        """Run one episode: call the agent and return its answer."""
        session = Session(call, list(self.roles))
        key = self.endpoint.open(session)
        try:
            answer = await self._finish(
                session, self._start(problem.messages if problem.history else problem.question, key)
            )
        except Exception as error:
            if session.overflow is not None:  # even if the agent handled the error
                raise session.overflow from error
            raise
        finally:
            self.endpoint.close(key)
        if session.overflow is not None:
            raise session.overflow
        if not isinstance(answer, str):
            raise TypeError(f"the agent must return its answer as a string, got {type(answer).__name__}")
        return Answer(answer)

    def _start(self, question: str | list[Message], key: str) -> "asyncio.Future[Any]":
        """Start the agent; a synchronous one runs in a thread."""
        options: dict[str, Any] = {"api_key": key, "base_url": self.base_url, "max_retries": 0, "timeout": None}
        if inspect.iscoroutinefunction(self.agent):
            transport = None if self.use_socket else httpx.ASGITransport(self.endpoint.app)
            client = AsyncOpenAI(**options, http_client=httpx.AsyncClient(transport=transport, timeout=None))
            return asyncio.ensure_future(self._run_async(question, client))
        bridge = None if self.use_socket else LoopTransport(self.endpoint.app, asyncio.get_running_loop())
        sync_client = OpenAI(**options, http_client=httpx.Client(transport=bridge, timeout=None))
        return in_daemon_thread(lambda: self._run_in_thread(question, sync_client))

    async def _run_async(self, question: str | list[Message], client: AsyncOpenAI) -> Any:
        async with client:
            # its first request asks a thread about the platform, which would reorder calls that are gathered
            await client.models.list()
            return await self.agent(question, client)

    def _run_in_thread(self, question: str | list[Message], client: OpenAI) -> Any:
        with client:
            return self.agent(question, client)

    async def _finish(self, session: Session, running: "asyncio.Future[Any]") -> Any:
        """Return the agent's answer; `TimeoutError` if it neither calls nor returns for `patience` seconds."""
        while not (await asyncio.wait({running}, timeout=self.patience / 4))[0]:
            if session.idle_seconds > self.patience:
                running.cancel()
                raise TimeoutError(f"the agent made no call and returned nothing for {self.patience:g} s")
        return running.result()


def from_openai(
    agent: Callable[..., str] | Callable[..., Awaitable[str]], roles: Mapping[str, int] | Collection[str],
    name: str | None = None, structure: Structure | None = None, ignore: Collection[str] = (), use_socket: bool = False,
    patience: float = 120.0,
) -> OpenAIWorkflow:  # fmt: skip
    """Turn a function that calls OpenAI's API into a workflow. The model names that it uses are the trained roles.

    Args:
        agent: `async def agent(question, client) -> str` with an `openai.AsyncOpenAI` client, or a synchronous function with an
            `openai.OpenAI` client, which runs in a thread. Any other client can be made from `client.base_url` and `client.api_key`: the
            key identifies the episode. `question` is the row's prompt: a text, or the messages of a conversation with more than one.
        roles: role -> number of slots, or a list of roles of one slot each. A role may be called more often than it has slots.
        name: the workflow's name; by default the function's.
        structure: what the roles do, for diagnostics and the diagram.
        ignore: request fields that are dropped instead of refused, such as `("temperature",)`.
        use_socket: serve on the loopback interface, for frameworks that make their own connections. Otherwise calls stay in memory.
        patience: the most seconds that an agent may go without making a call or returning.
    """
    if isinstance(roles, str):
        raise TypeError(
            f"`roles` must be a list of roles or a dict of their slots, got {roles!r}. Write roles=[{roles!r}]."
        )
    if name is None and not hasattr(agent, "__name__"):
        raise ValueError("The agent has no name, as a `functools.partial` has none. Pass `name=`.")
    slots = dict(roles) if isinstance(roles, Mapping) else dict.fromkeys(roles, 1)
    return OpenAIWorkflow(agent, slots, name or agent.__name__, structure or Structure(), ignore, use_socket, patience)


class LoopTransport(httpx.BaseTransport):
    """HTTP transport that carries requests of a thread to an ASGI application on another thread's event loop."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = httpx.ASGITransport(app), loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._handle(request), self._loop).result()

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


def in_daemon_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` in a daemon thread and return its result as a future of the running loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_value: Callable[[Any], None], value: Any) -> None:
        if not future.cancelled():
            set_value(value)

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 (raised again where the future is awaited)
            loop.call_soon_threadsafe(finish, future.set_exception, error)
        else:
            loop.call_soon_threadsafe(finish, future.set_result, value)

    threading.Thread(target=run, daemon=True).start()
    return future


def serve_on_loopback(app: Any) -> str:
    """Serve an ASGI application on a free port of 127.0.0.1 until the process ends, and return its base URL."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", backlog=4096,
        timeout_keep_alive=3600,  # a client that finds its idle connection closed fails its call
    )  # fmt: skip
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
