"""Call one vLLM server (`vllm serve`), and check its answers.

Every call opens its own connection, so that a server that closes idle connections cannot break a call. TCP keep-alive detects a lost
machine within about a minute. The key comes from the environment (`multirole.access`), and is in no message of this module.
"""

import asyncio
import json
import socket
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from multirole.access import API_KEY, read_key
from multirole.engines import VLLM_VERSIONS
from multirole.engines.protocol import Completion, EngineError
from multirole.watched_thread import in_thread

CONNECT_SECONDS, CALL_SECONDS, LOAD_SECONDS = 10.0, 30.0, 300.0
"""Limits of a connection, of a short call, and of loading an adapter."""
WAIT = 1.0
"""Seconds between two looks at a server that does not answer yet."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Seconds of silence after which a connection is probed, between probes, and the probes that may be lost (Linux)."""
TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
RETRIED = (404, 408, 425, 429)
"""Statuses below 500 after which a request is sent again; a restarted server answers 404, since it has no adapters."""
TOKEN = "token_id:"
"""Prefix of the tokens in an answer to `return_tokens_as_token_ids`."""


class ServerError(EngineError):
    """A server sent an answer that cannot be used, or no answer to a request and its repetitions."""


class ServerLost(ServerError, ConnectionError):
    """A server does not answer."""


class ServerUnfit(ServerError, ValueError):
    """A server answers, and cannot serve this run."""


class Refused(ServerError):
    """A server answered with an error; `status` is that of HTTP, and `message` what the server says."""

    def __init__(self, url: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{url}{path} answered with HTTP status {status}: {message}")
        self.status, self.message = status, message
        self.may_pass = status >= 500 or status in RETRIED


class ServedModels(NamedTuple):
    """The models that `/v1/models` lists: bases with the longest sequence each takes, and adapters with their paths."""

    bases: dict[str, int | None]
    adapters: dict[str, str]


def checked_urls(text: str) -> list[str]:
    """Return the addresses in a text such as "http://node1:8000,http://node2:8000", without "/v1"; ValueError if one is not an address."""
    urls = [part.strip().rstrip("/").removesuffix("/v1") for part in text.split(",") if part.strip()]
    for url in urls:
        parts = urlsplit(url)
        try:
            is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # the port is no number
            is_fine = False
        if not is_fine or parts.query or parts.fragment or "@" in parts.netloc:
            shown = url.rpartition("@")[2].partition("?")[0]  # without a password or a key
            raise ValueError(
                f"`vllm_server_base_url` has {shown!r}, which is not the address of a server. Write addresses such as "
                f"'http://node1:8000', separated by commas; set a key in the environment variable {API_KEY}."
            )
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(f"`vllm_server_base_url` must name one or several different servers, got {text!r}.")
    return urls


def check_servers(text: str, seconds: float) -> None:
    """Raise ServerLost if an address does not answer within `seconds`, and ServerUnfit if one runs a vLLM that is not accepted."""
    urls = checked_urls(text)

    async def check(server: Server) -> None:
        await server.wait_until_healthy(seconds)
        await server.check_version()

    async def check_all() -> None:
        async with open_session(len(urls)) as session:
            await asyncio.gather(*(check(Server(url, session)) for url in urls))

    in_thread(lambda: asyncio.run(check_all()))


def open_session(n_connections: int) -> aiohttp.ClientSession:
    """Create a client with this many connections at most; call it in the event loop that uses it."""
    key = read_key()
    connector = aiohttp.TCPConnector(limit=n_connections, force_close=True, socket_factory=_kept_alive)
    return aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {key}"} if key else None)


def _kept_alive(address: tuple) -> socket.socket:
    """Return a socket for an address of `getaddrinfo`, which notices if its peer is gone."""
    connection = socket.socket(*address[:3])
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if name in vars(socket):
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)
    return connection


class Server:
    """One address.

    `is_up`, `n_losses` (how often it was found lost) and `was_loaded` (whether it was given adapters) are kept by the engine, one task
    at a time (`lock`).
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.is_up, self.n_losses, self.was_loaded, self.lock = True, 0, False, asyncio.Lock()

    async def call(self, path: str, body: dict[str, Any] | None = None, seconds: float = CALL_SECONDS) -> str:
        """GET, or POST with a body; the answer's text. `seconds` is the longest silence.

        Raises `Refused`, `ServerUnfit` for a refused key, or a transport error.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=seconds)
        method = "GET" if body is None else "POST"
        try:
            async with self.session.request(
                method, self.url + path, json=body, timeout=limits, allow_redirects=False
            ) as answer:
                text, status = await answer.text(), answer.status
        except aiohttp.ClientResponseError as error:  # its `repr` has the request's headers, and so the key
            raise aiohttp.ClientError(f"the answer is not one of HTTP: {error.status}, {error.message}") from None
        if status in (401, 403):
            raise ServerUnfit(
                f"The server at {self.url} refuses the key (HTTP status {status}). Set the environment variable {API_KEY} to the key that "
                "the server was started with."
            )
        if status != 200:
            raise Refused(self.url, path, status, _message(text))
        return text

    async def wait_until_healthy(self, seconds: float) -> None:
        """Wait until the server is up; ServerLost after this many seconds. 0 tries once."""
        give_up = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                await self.call("/health")
                return
            except (*TRANSPORT_ERRORS, Refused) as error:
                if asyncio.get_running_loop().time() >= give_up:
                    waited = f" Waited {seconds:g} s (`vllm_server_timeout`)." if seconds else ""
                    raise ServerLost(
                        f"The vLLM server at {self.url} does not answer ({_cause(error)}).{waited} Start it, or correct "
                        "`vllm_server_base_url`."
                    ) from error
            await asyncio.sleep(WAIT)

    async def check_version(self) -> None:
        """Refuse a server whose vLLM is none of `VLLM_VERSIONS` (ServerUnfit)."""
        number = _field(self.url, await self.call("/version"), "version")
        if str(number).partition("+")[0] not in VLLM_VERSIONS:  # a local label names the build
            raise ServerUnfit(
                f"The server at {self.url} runs vLLM {number}, but only {' or '.join(VLLM_VERSIONS)} is accepted. Start it from the lock "
                "file's environment."
            )

    async def models(self) -> ServedModels:
        """Return the models that the server lists."""
        cards = _field(self.url, await self.call("/v1/models"), "data")
        return ServedModels(
            {card["id"]: card.get("max_model_len") for card in cards if not card.get("parent")},
            {card["id"]: card.get("root") or "" for card in cards if card.get("parent")},
        )

    async def check_logprobs(self, base: str, seconds: float) -> None:
        """Refuse a server whose log-probs are not those of the distribution that it samples from (ServerUnfit).

        Where one token alone is allowed, its log-prob is 0 only with `--logprobs-mode processed_logprobs`.
        """
        body = completion_body(base, [0], seed=0, max_tokens=1, temperature=1.0, stop_token_ids=[])
        done = await self.complete(body | {"allowed_token_ids": [0]}, seconds)  # the first request may take long
        if done.logprobs != [0.0]:
            raise ServerUnfit(
                f"The server at {self.url} gives log-probs of the raw logits instead of the distribution after temperature. Start it "
                "with --logprobs-mode processed_logprobs."
            )

    async def n_slots(self) -> int | None:
        """Return how many adapters the server holds at once (`--max-loras`); None if its metrics do not say."""
        for line in (await self.call("/metrics")).splitlines():
            if line.startswith("vllm:lora_requests_info{") and 'max_lora="' in line:
                return int(line.partition('max_lora="')[2].partition('"')[0])
        return None

    async def complete(self, body: dict[str, Any], seconds: float) -> Completion:
        """Return the reply to `completion_body`. Raises what `call` raises, and `ServerError` for a reply that does not fit the request."""
        text = await self.call("/v1/completions", body, seconds)
        try:
            (choice,) = json.loads(text)["choices"]
            token_ids = [int(token.removeprefix(TOKEN)) for token in choice["logprobs"]["tokens"]]
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            reason = choice["finish_reason"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url} sent a completion that cannot be read: {text[:200]!r}") from error
        if reason not in ("stop", "length"):
            raise Refused(self.url, "/v1/completions", 500, f"the reply ended with finish_reason={reason!r}")
        if not 0 < len(token_ids) == len(logprobs) <= body["max_tokens"]:
            raise ServerError(
                f"{self.url} sent {len(token_ids)} tokens with {len(logprobs)} log-probs, but 1 to {body['max_tokens']} of both were "
                "asked for."
            )
        return Completion(token_ids, logprobs, reason)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter under a new name. A lost answer to an earlier call is no error; ServerUnfit where the server refuses."""
        hint = ""
        try:
            await self.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, LOAD_SECONDS)
            return
        except Refused as error:
            if (await self.models()).adapters.get(name) == path:
                return
            if error.status == 404 and error.message == "Not Found":
                hint = " Start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora."
            elif "max_lora_rank" in error.message:
                hint = " Start the server with a larger --max-lora-rank, or use a smaller rank."
            elif error.status == 404:
                hint = f" The server must find the adapter's files at {path}: see `vllm_server_adapter_dir`."
            raise ServerUnfit(f"The server at {self.url} did not load the adapter {name!r}: {error}.{hint}") from error

    async def unload(self, name: str) -> None:
        """Unload an adapter; one that is gone already is no error."""
        try:
            await self.call("/v1/unload_lora_adapter", {"lora_name": name})
        except Refused as error:
            if error.status != 404:
                raise


def completion_body(
    model: str, prompt_ids: list[int], seed: int, max_tokens: int, temperature: float, stop_token_ids: list[int],
    top_p: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Return a call of `/v1/completions` that samples from the whole distribution, or the part in `top_p`, whatever the server's defaults are."""
    return {
        "model": model, "prompt": prompt_ids, "seed": seed % 2**63, "max_tokens": max_tokens, "temperature": temperature,
        "stop_token_ids": stop_token_ids, "ignore_eos": bool(stop_token_ids), "top_p": top_p, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "watermarking": False, "n": 1, "stream": False,
        "logprobs": 0, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def _cause(error: Exception) -> str:
    """What went wrong with a call, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError):  # its own text has words for programmers
        return f"{error.os_error.strerror or error.os_error}"
    return f"{type(error).__name__}: {error}"


def _field(url: str, text: str, name: str) -> Any:
    """Return a field of a JSON answer; ServerError if the answer is not one of a vLLM server."""
    try:
        return json.loads(text)[name]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{url} does not answer as a vLLM server: {text[:200]!r}") from error


def _message(text: str) -> str:
    """Return the server's message of an error: vLLM's message, FastAPI's detail, or the beginning of the text."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text[:200]
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message or text)[:500]
