"""Roles that a model behind an OpenAI-compatible server plays. Its replies are recorded and never trained.

`WithEndpoints` is an engine that sends the requests of such roles to their servers, and all others to another engine. It asks with the package
`openai`, which repeats a request that was lost or refused for the moment. One that stays lost ends the run with an `EngineError`: it is a failure of
the infrastructure, and gets no reward. Every reply is appended to a file before the workflow reads it, so that a run that was killed and resumed
gets the replies of its first try, and neither differs from an uninterrupted run nor pays twice.
"""

import asyncio
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from multirole.engines.protocol import Completion, Engine, EngineError, Request, RequestRefused
from multirole.extras import needed_by
from multirole.types import OVERFLOW

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from peft import PeftModel

POLL = 0.05
"""Seconds to wait for a reply when nothing else runs."""
RETRIES, SECONDS = 5, 600.0
"""How often the client sends a request again, and the seconds that one may take."""
AT_ONCE = 32
"""Requests that one endpoint gets at a time."""
TOO_LONG = ("context_length_exceeded", "maximum context length", "exceed_context_size")
"""What the error of a server has if the conversation is longer than its model takes: OpenAI's, vLLM's and llama.cpp's."""
RECORD = "partner_replies"
"""Folder of the recorded replies, in the run's `output_dir`."""


@dataclass(frozen=True)
class Endpoint:
    """A model of an OpenAI-compatible server.

    Args:
        url: up to and with "/v1".
        model: the model's name on the server.
        key_env: the environment variable that holds the server's key; none for a server without keys.
        options: fields of the chat completion that replace the run's, or with None leave one out, such as `{"temperature": None}`.
    """

    url: str
    model: str
    key_env: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_text(self) -> str:
        """Return the JSON from which `from_text` makes this endpoint."""
        return json.dumps({name: value for name, value in asdict(self).items() if value}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> "Endpoint":
        """Return the endpoint of a parsed policy map."""
        return cls(**json.loads(text))

    @property
    def key(self) -> str:
        """The key of the environment; servers without keys take any."""
        return os.environ[self.key_env] if self.key_env else "none"


def parse_endpoint(role: str, given: Mapping[str, Any] | str, option: str = "policy") -> Endpoint:
    """Return the endpoint that a policy map, or another map of roles, gives a role; ValueError if it is none."""
    form = "Write {'url': 'http://host:8000/v1', 'model': 'name', 'key_env': 'NAME_OF_A_VARIABLE'}, where 'key_env' is optional."
    values = json.loads(given) if isinstance(given, str) else dict(given)
    known = {part.name for part in fields(Endpoint)}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"`{option}` gives the role {role!r} an endpoint with {unknown}, but it has {sorted(known)} only. {form}"
        )
    if not all(isinstance(values.get(name), str) and values[name] for name in ("url", "model")):
        raise ValueError(f"`{option}` gives the role {role!r} an endpoint without a url or a model: {values!r}. {form}")
    parts = urlsplit(values["url"])
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(
            f"`{option}` gives the role {role!r} the url {values['url'].rpartition('@')[2]!r}, which is not an address such as "
            "'https://host/v1'. Put a key in an environment variable, and its name in 'key_env'."
        )
    if not isinstance(values.get("key_env") or "", str) or not isinstance(values.get("options") or {}, Mapping):
        raise ValueError(  # noqa: TRY004
            f"`{option}` gives the role {role!r} a 'key_env' that is no name, or 'options' that are no dict: {values!r}. {form}"
        )
    return Endpoint(**{name: value for name, value in values.items() if value})


def check_endpoint(role: str, endpoint: Endpoint) -> None:
    """Raise ValueError if an endpoint's key is not set, or no server answers there; ModuleNotFoundError without the package `openai`."""
    with needed_by("A role behind an endpoint"):
        import httpx
        import openai  # noqa: F401
    if endpoint.key_env and not os.environ.get(endpoint.key_env):
        raise ValueError(
            f"The key of the role {role!r} is to be in the environment variable {endpoint.key_env}, which is not set. Set it."
        )
    try:
        answer = httpx.get(
            f"{endpoint.url.rstrip('/')}/models", headers={"Authorization": f"Bearer {endpoint.key}"}, timeout=30
        )
    except httpx.HTTPError as error:
        raise ValueError(
            f"No server answers at {endpoint.url} for the role {role!r} ({type(error).__name__}). Start it, or correct 'url'."
        ) from None
    if answer.status_code in (401, 403):
        raise ValueError(f"The server at {endpoint.url} refuses the key of the role {role!r} (HTTP status {answer.status_code}). Put the "
                         "right one into the environment variable that 'key_env' names.")  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What a server replied, and the tokens that it counted. `OVERFLOW` is the finish reason where the conversation is too long for it."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def completion(self) -> Completion:
        """Return the reply as an engine's, without tokens of the trained model."""
        return Completion([], [], self.finish_reason, self.text, (self.prompt_tokens, self.completion_tokens))


class ReplyRecord:
    """The replies of a run's endpoints, in a file per process that is only appended to.

    A reply belongs to the start of the run, the turn (by its seed, which no two turns share), the endpoint and the messages.

    Args:
        folder: of the files; those of all processes are read.
        process: index of this one, which names the file that it writes.
        started: the start of the run, which a resumed one has from its checkpoint.
    """

    def __init__(self, folder: Path, process: int, started: Callable[[], str]) -> None:
        self.folder, self.file, self.started = folder, folder / f"{process}.jsonl", started

    @cached_property
    def _known(self) -> dict[str, Reply]:
        known = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a line that the end of the machine cut off
                    entry = json.loads(line)
                    key = entry.pop("key")
                    known[key] = Reply(**entry)
        return known

    def key(self, request: Request) -> str:
        """Return the key of the reply to a request."""
        assert request.endpoint is not None
        asked = json.dumps(
            [self.started(), request.endpoint.as_text(), request.messages, request.max_tokens], default=str
        )
        return f"{request.seed:016x}-{hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()}"

    def find(self, key: str) -> Reply | None:
        """Return a recorded reply, or None."""
        return self._known.get(key)

    def add(self, key: str, reply: Reply) -> None:
        """Append a reply to the file of this process."""
        self._known[key] = reply
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key} | asdict(reply)).encode() + b"\n"
        with self.file.open("ab+") as file:  # at its end
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = b"\n" * (file.read(1) != b"\n") + line  # after a line that was cut off
            file.write(line)


class WithEndpoints:
    """Engine (`multirole.engines.protocol`) of a run in which endpoints play roles: `engine` answers all other requests.

    Replies of endpoints are handed over together, when all of them are there and `engine` has nothing left to do. So what runs together, and
    with it the rounding of its log-probs, does not depend on how fast a server answers.
    """

    def __init__(self, engine: Engine, record: ReplyRecord) -> None:
        self.engine, self.record = engine, record
        self.plays_during_update = getattr(engine, "plays_during_update", False)
        self._finished: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._asked: set[int] = set()
        self._answered: dict[int, Reply] = {}
        self._error: BaseException | None = None  # of the first request without a reply
        self._running: set[int] = set()  # the other engine's requests
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True).start()
        self._clients: dict[Endpoint, AsyncOpenAI] = {}
        self._at_once: dict[Endpoint, asyncio.Semaphore] = {}

    def add(self, key: int, request: Request) -> None:
        """Queue one request, or ask its endpoint."""
        if request.endpoint is None:
            self.engine.add(key, request)
            self._running.add(key)
            return
        self._asked.add(key)
        recorded = self.record.key(request)
        if (reply := self.record.find(recorded)) is not None:
            self._finished.put((key, reply))
            return
        future = asyncio.run_coroutine_threadsafe(self._ask(request.endpoint, request), self._loop)
        future.add_done_callback(lambda done: self._finished.put((key, (recorded, done))))

    def step(self) -> list[tuple[int, Completion]]:
        """Step the other engine, and return what has finished.

        Raises EngineError or RequestRefused where an endpoint gave no reply, once the other engine has nothing left: it must not keep requests
        of a rollout that failed.
        """
        try:
            done = self.engine.step() if self._running else []
        except BaseException:
            self._running.clear()
            self._forget()
            raise
        self._running -= {key for key, _ in done}
        with suppress(queue.Empty):
            if not done and not self._running and self._asked:
                self._take(*self._finished.get(timeout=POLL))
            while True:
                self._take(*self._finished.get_nowait())
        if self._error is not None and not self._running:
            error = self._error
            self._forget()
            raise error
        if not done and not self._running and self._asked == self._answered.keys():
            done = [(key, self._answered[key].completion()) for key in sorted(self._answered)]
            self._forget()
        return done

    def _take(self, key: int, result: Any) -> None:
        """Take what an endpoint has replied to a request."""
        if key not in self._asked:  # of a rollout that has ended
            return
        if not isinstance(result, Reply):
            recorded, future = result
            if (error := future.exception()) is not None:
                self._error = self._error or error
                return
            result = future.result()
            self.record.add(recorded, result)
        self._answered[key] = result

    def _forget(self) -> None:
        self._asked.clear()
        self._answered.clear()
        self._error = None

    def publish(self, model: "PeftModel", version: int) -> None:
        """Publish the adapters to the other engine."""
        self.engine.publish(model, version)

    def sleep(self) -> None:
        """Let the other engine sleep."""
        self.engine.sleep()

    def close(self) -> None:
        """Close the other engine, and forget unanswered requests."""
        self._forget()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.engine.close()

    async def _ask(self, endpoint: Endpoint, request: Request) -> Reply:
        """Return the endpoint's reply to a request."""
        import openai

        if endpoint not in self._clients:
            self._clients[endpoint] = openai.AsyncOpenAI(
                base_url=endpoint.url, api_key=endpoint.key, max_retries=RETRIES, timeout=SECONDS
            )
            self._at_once[endpoint] = asyncio.Semaphore(AT_ONCE)
        body: dict[str, Any] = {
            "model": endpoint.model, "messages": list(request.messages or ()), "temperature": request.temperature,
            "max_tokens": request.max_tokens, "seed": request.seed % 2**31,
        }  # fmt: skip
        body = {name: value for name, value in (body | dict(endpoint.options)).items() if value is not None}
        standard: dict[str, Any] = {"model": body.pop("model"), "messages": body.pop("messages")}
        try:
            async with self._at_once[endpoint]:
                answer = await self._clients[endpoint].chat.completions.create(**standard, extra_body=body)
        except (
            openai.BadRequestError, openai.NotFoundError, openai.UnprocessableEntityError, openai.PermissionDeniedError
        ) as error:  # fmt: skip
            if any(mark in f"{error.message} {error.body}" for mark in TOO_LONG):
                return Reply(error.message, OVERFLOW, 0, 0)
            raise RequestRefused(
                f"The endpoint {endpoint.url} refuses a request to {endpoint.model!r}: {error.message}"
            ) from None
        except openai.OpenAIError as error:
            raise EngineError(
                f"The endpoint {endpoint.url} gave no reply to a request to {endpoint.model!r}, which was sent up to {RETRIES + 1} times: "
                f"{type(error).__name__}: {error}. The replies so far are recorded: resume the run when the server answers."
            ) from None
        if isinstance(answer, str):  # openai's client returns what is no JSON as text
            raise EngineError(
                f"The endpoint {endpoint.url} answered a request to {endpoint.model!r} with a text that is not JSON: {answer[:80]!r}. Does `url` end with "
                "the server's path, such as '/v1'?"
            )
        if not answer.choices:
            raise EngineError(f"The endpoint {endpoint.url} answered a request to {endpoint.model!r} without a reply.")
        choice, usage = answer.choices[0], answer.usage
        text = (
            (choice.message.content or "").encode(errors="replace").decode()
        )  # no lone surrogates, which no tokenizer encodes
        return Reply(
            text, "length" if choice.finish_reason == "length" else "stop", usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
        )  # fmt: skip
