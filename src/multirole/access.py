"""Decide who may call a server: anybody on this machine without a key, and from other machines only who has the key.

`multirole serve` and the vLLM servers of rollouts have the same rule and the same key, from the environment variable `VLLM_API_KEY`,
which vLLM reads as well. The key is in no command line, message or log of this package.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import IPv6Address, ip_address
from typing import Any

API_KEY = "VLLM_API_KEY"
"""Environment variable with the key of all servers, and of the trainer that calls them."""
OPEN_PATHS = ("/health",)
"""Paths that are answered without the key. They tell that a server is up, and nothing else."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def read_key() -> str | None:
    """Return the key in the environment; None without one. ValueError for a key that no HTTP header can carry."""
    key = os.environ.get(API_KEY, "").strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise ValueError(
            f"The environment variable {API_KEY} holds a space or a letter outside ASCII, which a request's header cannot carry. Set it to "
            "letters and digits, such as the output of `openssl rand -hex 16`."
        )
    return key or None


def is_loopback(host: str) -> bool:
    """Return whether a server that listens at `host` can be reached from this machine only.

    False for an empty host, "0.0.0.0" and "::", which are all addresses of the machine, and for every name but "localhost": names are looked up
    again by whoever listens, perhaps with another result.
    """
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def check_host(host: str) -> None:
    """Raise ValueError for an address that other machines can reach, if the environment holds no key."""
    if read_key() is None and not is_loopback(host):
        raise ValueError(
            f"--host {host or repr(host)} can be reached from other machines, and the server would have no key: whoever calls it could use its "
            f"models. Set the environment variable {API_KEY} to a random text, here and where the clients run, for example by "
            f"`export {API_KEY}=$(openssl rand -hex 16)`; or leave --host at 127.0.0.1."
        )


class RequireKey:
    """ASGI middleware: every request except `GET /health` needs the key as a bearer token, whichever route, method or protocol it is for.

    Without a key in the environment, only clients of this machine are answered. Refusals are status 401 in the form of OpenAI's errors. It is
    given to vLLM's server as `--middleware multirole.access.RequireKey`, whose own check covers a part of its paths only.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        key = read_key()
        self.digest = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        if scope["type"] == "lifespan" or self._is_open(scope) or self._is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})  # before it is accepted: status 403
        elif scope["type"] == "http":
            await self._refuse(scope, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS

    def _is_allowed(self, scope: Scope) -> bool:
        if self.digest is None:
            client = scope.get("client")  # None: a Unix socket
            return client is None or is_loopback(client[0])
        token = _bearer_token(scope)
        return token is not None and hmac.compare_digest(_digest(token), self.digest)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        """Answer with OpenAI's error for a wrong or missing key."""
        if self.digest is None:
            message = f"This server has no API key, so it answers clients of its own machine only. Start it with {API_KEY} set."
        elif _bearer_token(scope) is None:
            message = f"There is no API key. Send the server's key, that of its {API_KEY}, in the header `Authorization: Bearer KEY`."
        else:
            message = f"Incorrect API key. Send the key that the server was started with, that of its {API_KEY}."
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _bearer_token(scope: Scope) -> bytes | None:
    """Return the request's bearer token; None if there is none, or more than one such header."""
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return token.strip() or None if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    """Return a hash of fixed length, so that the comparison does not tell the key's length."""
    return hashlib.sha256(key).digest()
