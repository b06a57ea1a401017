"""Turn a function that calls OpenAI's API into a workflow (`from_openai`); the models it names become roles.

async def vote(question, client):
    ask = [{"role": "user", "content": question}]
    drafts = [client.chat.completions.create(model="solver", messages=ask) for _ in range(3)]
    ...

trainer = MultiRoleGRPOTrainer(model, from_openai(vote, {"solver": 3, "judge": 1}), ...)
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import httpx
import uvicorn
from openai import APIConnectionError, AsyncOpenAI, OpenAI
from openai._base_client import get_platform
from transformers import PreTrainedTokenizerBase

from multirole.chat.templates import Renderer, chat_template, template_options
from multirole.engines.protocol import Sampling
from multirole.openai_api.app import Endpoint
from multirole.openai_api.session import Session
from multirole.rollout.call_order import Branch, BranchTask
from multirole.rollout.errors import PromptOverflow
from multirole.types import Answer, Call, Message, Problem, Structure

logger = logging.getLogger(__name__)

HOST = "in-memory.multirole.invalid"
IN_MEMORY = f"http://{HOST}/v1"
"""Base URL of the transport without a socket; no name server knows it."""
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
        self._is_async = is_coroutine_function(agent)
        self.endpoint = Endpoint(ignore)
        self._sampling: Sampling | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._template_options: dict[str, Any] = {}
        self._base_url = "" if use_socket else IN_MEMORY
        self._has_warned = False

    @property
    def base_url(self) -> str:
        """Return the endpoint's URL; with `use_socket` the first access starts the server."""
        if not self._base_url:
            self._base_url = serve_on_loopback(self.endpoint.app)
        return self._base_url

    def on_rollout_begin(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, render: Renderer = chat_template
    ) -> None:
        """Take the trainer's tokenizer, sampling parameters and options of the chat template, which requests are compared with."""
        self._tokenizer, self._sampling, self._template_options = tokenizer, sampling, template_options(render) or {}

    async def run(self, problem: Problem, call: Call) -> Answer:
        """Run one episode: call the agent and return its answer."""
        session = Session(
            call, list(self.roles), self._sampling, self._tokenizer, template_options=self._template_options
        )
        key = self.endpoint.open(session)
        try:
            answer = await self._answer_of(session, problem.messages if problem.history else problem.question, key)
        except Exception as error:
            if session.error is not None:
                raise session.error from error
            if is_escaped_overflow(error):
                raise PromptOverflow(str(error)) from error
            if not self.use_socket and is_unreachable(error, session.has_requests):
                raise ConnectionError(
                    f"the agent opened a connection of its own to {IN_MEMORY}, but the endpoint is in memory only. Write `from_openai(..., "
                    "use_socket=True)` for clients that are made from `client.base_url`, or use the client that the agent receives."
                ) from error
            raise
        finally:
            self.endpoint.close(key)
        if session.error is not None:  # even if the agent handled it
            raise session.error
        if not isinstance(answer, str):
            advice = " Write `return await ...`." if inspect.isawaitable(answer) else ""
            raise TypeError(f"the agent must return its answer as a string, got {type(answer).__name__}.{advice}")
        if session.refusal is not None:
            self._report_refusal(session, session.refusal)
        return Answer(answer)

    def _report_refusal(self, session: Session, refusal: str) -> None:
        """Report a refused request whose error the agent handled: as a failure if no request was answered, otherwise in a warning."""
        if not session.n_turns:
            raise RuntimeError(
                f"no request of the agent was answered, and the agent handled the errors. The last refusal: {refusal}"
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A request of the agent %r was refused, and the agent went on. Further ones are not reported. %s",
                self.name,
                refusal,
            )

    async def _answer_of(self, session: Session, question: str | list[Message], key: str) -> Any:
        """Run the agent and return its answer; a synchronous one runs in a thread."""
        options: dict[str, Any] = {"api_key": key, "base_url": self.base_url, "max_retries": 0, "timeout": None}
        if not self._is_async:
            answer = await self._finish(
                session, in_daemon_thread(lambda: self._run_in_thread(session, question, options))
            )
            if not inspect.iscoroutine(answer):
                return answer
            answer.close()  # of a wrapper of a coroutine function, which needs the other client
            self._is_async = True
        return await self._finish(session, asyncio.ensure_future(self._run_async(session, question, options)))

    async def _run_async(self, session: Session, question: str | list[Message], options: dict[str, Any]) -> Any:
        Session.current.set(session)
        in_memory: Any = httpx.AsyncClient(transport=httpx.ASGITransport(self.endpoint.app), timeout=None)
        client = AsyncOpenAI(**options, http_client=in_memory)
        # otherwise its first request asks a thread for it, and gathered calls would arrive in any order
        client._platform = get_platform()
        return await self.agent(question, client)

    def _run_in_thread(self, session: Session, question: str | list[Message], options: dict[str, Any]) -> Any:
        Session.current.set(session)
        in_memory: Any = httpx.Client(transport=LoopTransport(self.endpoint.app, session.loop), timeout=None)
        return self.agent(question, OpenAI(**options, http_client=in_memory))

    async def _finish(self, session: Session, running: "asyncio.Future[Any]") -> Any:
        """Return the agent's answer; `TimeoutError` if it neither calls nor returns for `patience` seconds.

        They are counted in quarters, because an engine's step blocks the loop: however long it takes, it is one quarter at most.
        """
        n_idle, n_ended = 0, session.n_ended
        while not (await asyncio.wait({running}, timeout=self.patience / 4))[0]:
            is_idle = not session.pending and session.n_ended == n_ended
            n_idle, n_ended = n_idle + 1 if is_idle else 0, session.n_ended
            if n_idle == 4:
                running.cancel()
                raise TimeoutError(f"the agent made no call and returned nothing for {self.patience:g} s")
        return running.result()


def is_coroutine_function(agent: Callable[..., Any]) -> bool:
    """Return whether calling an agent gives a coroutine: a function, one that `functools.wraps` wraps, or an object with such a `__call__`."""
    inner = inspect.unwrap(agent)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def errors_behind(error: BaseException) -> list[BaseException]:
    """Return an error and those that it was raised from, the outermost first."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def is_escaped_overflow(error: BaseException) -> bool:
    """Return whether an agent failed because a prompt was too long, also in the error of a framework and in the group of a `TaskGroup`."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_escaped_overflow, error.exceptions))
    texts = [
        f"{cause} {cause.response.text}" if isinstance(cause, httpx.HTTPStatusError) else str(cause)
        for cause in errors_behind(error)
    ]
    return any(
        mark in text for text in texts for mark in ("context_length_exceeded", "This model's maximum context length")
    )


def is_unreachable(error: BaseException, has_requests: bool) -> bool:
    """Return whether an agent failed because it tried to reach `IN_MEMORY` through a socket."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_unreachable(cause, has_requests) for cause in error.exceptions)
    for cause in errors_behind(error):
        if (
            HOST in str(cause)
            or isinstance(cause, APIConnectionError | httpx.TransportError)
            and cause.request.url.host == HOST
        ):
            return True
    return not has_requests and "connection error" in str(error).lower()


def from_openai(
    agent: Callable[..., str] | Callable[..., Awaitable[str]], roles: Mapping[str, int] | Collection[str],
    name: str | None = None, structure: Structure | None = None, ignore: Collection[str] = (), use_socket: bool = False,
    patience: float = 120.0,
) -> OpenAIWorkflow:  # fmt: skip
    """Turn a function that calls OpenAI's API into a workflow. The model names that it uses are the trained roles.

    Args:
        agent: `async def agent(question, client) -> str` with an `openai.AsyncOpenAI` client, or a synchronous function with an
            `openai.OpenAI` client, which runs in a thread. With `use_socket`, any other client can be made in the agent from `client.base_url` and
            `client.api_key`: the key identifies the episode. `question` is the row's prompt: a text, or the messages of a conversation with more than one.
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
    """HTTP transport that carries requests of an agent's threads to an ASGI application on another thread's event loop.

    It is made in the agent's thread, which counts as the one that made all others.
    """

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = httpx.ASGITransport(app), loop
        self._branches: dict[threading.Thread, Branch] = {}
        self._looked = time.monotonic_ns()
        self._root = self._branches[threading.current_thread()] = Branch()
        self._look()

    def _look(self) -> None:
        """Note the threads that are new since the last look."""
        looked, now = self._looked, time.monotonic_ns()
        for thread in threading.enumerate():
            if thread not in self._branches:
                self._branches[thread] = Branch(self._root, looked)
        self._looked = now

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._look()
        branch = self._branches.get(threading.current_thread())
        handling = self._handle(request, branch, Session.current.get())
        response = asyncio.run_coroutine_threadsafe(handling, self._loop).result()
        self._look()
        return response

    async def _handle(self, request: httpx.Request, branch: Branch | None, session: Session | None) -> httpx.Response:
        Session.current.set(session)
        task = asyncio.current_task()
        if branch is not None and isinstance(task, BranchTask):
            task.branch = Branch(branch)
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
        except StopIteration as error:  # which no future can hold
            stopped = RuntimeError("the agent raised StopIteration, as `next` does at the end of an iterator")
            stopped.__cause__ = error
            loop.call_soon_threadsafe(finish, future.set_exception, stopped)
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
