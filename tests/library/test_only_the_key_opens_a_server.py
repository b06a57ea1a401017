"""Who has no key gets nowhere: every route, method and protocol of a server wants it, and no server listens beyond the machine without one."""

import asyncio
import json
import logging

import httpx
import pytest
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine

from multirole.access import RequireKey, check_host, is_loopback, read_key
from multirole.engines.protocol import Sampling
from multirole.engines.vllm_launch import serve_command
from multirole.openai_api.serving import ModelServer

KEY = "open-sesame-0123456789"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
ODD_PATHS = (
    "", "/", "*", "//v1/models", "/v1//models", "/v1/models/", "/v1/models/../x", "/health/", "/health/../v1/models", "//health",
    "/health/../health", "/Health", "/health;/v1/models", "/health\x00", " /health", "/v1/models?/health", "/unknown", "/metrics",
    "/invocations", "/adapters", "/docs", "/openapi.json",
)  # fmt: skip


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def model_server(tokenizer) -> ModelServer:
    engine = ScriptedEngine(lambda key, request: ([7, tokenizer.eos_token_id], 1), tokenizer.eos_token_id)
    return ModelServer(engine, tokenizer, {"solver": "a"}, Sampling(10, 1.0), max_prompt_tokens=100)


def scope_of(method: str, path: str, headers=(), client=("10.0.0.9", 5), kind="http") -> dict:
    """An ASGI request from another machine, with a path that no client library has tidied."""
    return {
        "type": kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": list(headers), "client": client, "server": ("h", 80),
    }  # fmt: skip


async def answer_to(app, scope: dict) -> list[dict]:
    """What an application sends; it fails if the body of the request is read."""
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def reached(scope, receive, send) -> None:
    """An application that answers everything."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


def bearer(token: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()


STRANGERS = {
    "no key": [], "another key": [bearer("x" * len(KEY))], "its beginning": [bearer(KEY[:-1])], "more than it": [bearer(KEY + "x")],
    "an empty key": [bearer("")], "another scheme": [(b"authorization", f"Basic {KEY}".encode())], "no scheme": [(b"authorization", KEY.encode())],
    "two headers": [bearer(KEY), bearer("x")], "another header": [(b"x-api-key", KEY.encode())], "no ASCII": [(b"authorization", b"Bearer \xff\xfe")],
}  # fmt: skip


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
def test_every_route_of_a_model_server_wants_the_key(tokenizer, headers):
    """Its routes are read from the application, so that a new one is tried as well."""

    async def try_all() -> int:
        app = model_server(tokenizer).app()
        paths = [route.path.replace("{role}", "solver") for route in app.app.routes]
        assert {"/v1/chat/completions", "/v1/models", "/health"} <= set(paths)
        n = 0
        for path in (*paths, *ODD_PATHS):
            for method in METHODS:
                if (method, path) in (("GET", "/health"), ("HEAD", "/health")):
                    continue
                start, body = await answer_to(app, scope_of(method, path, headers))
                assert start["status"] == 401, (method, path)
                error = {} if method == "HEAD" else json.loads(body["body"])["error"]
                assert method == "HEAD" or (error["code"], error["type"]) == (
                    "invalid_api_key",
                    "invalid_request_error",
                )
                assert KEY not in str(error) and dict(start["headers"])[b"www-authenticate"] == b"Bearer"
                n += 1
        return n

    assert asyncio.run(try_all()) > 150


def test_the_key_opens_every_route_and_the_health_check_needs_none(tokenizer, caplog):
    caplog.set_level(logging.DEBUG)

    async def try_all():
        app = model_server(tokenizer).app()
        transport = httpx.ASGITransport(app, client=("10.0.0.9", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as plain:
            assert [(await plain.request(method, "/health")).status_code for method in ("GET", "HEAD")] == [200, 200]
            assert (await plain.get("/v1/models", headers={"authorization": f"bearer  {KEY}"})).status_code == 200
            assert (await plain.get("/nowhere", headers={"authorization": f"Bearer {KEY}"})).status_code == 404
        async with AsyncOpenAI(
            base_url="http://h/v1", api_key=KEY, http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            assert [model.id async for model in client.models.list()] == ["solver"]

    asyncio.run(try_all())
    assert KEY not in caplog.text


@pytest.mark.parametrize("path", ["/v1/realtime", "/health"])
def test_a_websocket_is_closed_before_it_is_accepted(path):
    stranger = asyncio.run(answer_to(RequireKey(reached), scope_of("GET", path, kind="websocket")))
    assert stranger == [{"type": "websocket.close", "code": 1008, "reason": ""}]
    assert (
        asyncio.run(answer_to(RequireKey(reached), scope_of("GET", path, [bearer(KEY)], kind="websocket"))) != stranger
    )
    assert asyncio.run(answer_to(RequireKey(reached), scope_of("GET", path, kind="protocol of the future"))) == []
    assert asyncio.run(answer_to(RequireKey(reached), {"type": "lifespan"}))


@pytest.mark.parametrize(("client", "status"), [
    (("127.0.0.1", 5), 200), (("::1", 5), 200), (("::ffff:127.0.0.1", 5), 200), (None, 200), (("10.0.0.9", 5), 401), (("::ffff:10.0.0.9", 5), 401),
])  # fmt: skip
def test_without_a_key_only_this_machine_is_answered(monkeypatch, client, status):
    """Whatever address the server listens at: vLLM's command line may be copied to a shell without the key."""
    monkeypatch.delenv("VLLM_API_KEY")
    start, *_ = asyncio.run(answer_to(RequireKey(reached), scope_of("POST", "/adapters", client=client)))
    assert start["status"] == status


HOSTS = {
    True: ("127.0.0.1", "127.0.0.2", "localhost", "LOCALHOST", "::1", "::ffff:127.0.0.1"),
    False: ("0.0.0.0", "::", "", "0", "::ffff:10.0.0.1", "::ffff:0.0.0.0", "10.0.0.9", "node1", "localhost.example.org", "127.0.0.1.example.org", "[::]"),
}  # fmt: skip


def test_an_address_that_others_can_reach_needs_a_key(tokenizer, monkeypatch):
    for expected, hosts in HOSTS.items():
        assert [is_loopback(host) for host in hosts] == [expected] * len(hosts)
    for host in HOSTS[False]:
        check_host(host)
    for empty in (None, "", "  "):
        monkeypatch.delenv("VLLM_API_KEY") if empty is None else monkeypatch.setenv("VLLM_API_KEY", empty)
        assert read_key() is None
        for host in HOSTS[True]:
            check_host(host)
        for host in HOSTS[False]:
            with pytest.raises(ValueError, match=r"export VLLM_API_KEY=\$\(openssl rand -hex 16\)"):
                model_server(tokenizer).run(host, 0)
            with pytest.raises(ValueError, match="can be reached from other machines"):
                serve_command("m", 1, 8, 64, None, host, 0)


@pytest.mark.parametrize(
    "words", [["--host", "0.0.0.0"], ["--host=0.0.0.0"], ["--hos", "::"], ["--api-key", KEY], ["--api_key", KEY], ["--uds", "s"], ["--grpc"], ["--port=1"]]
)  # fmt: skip
def test_words_for_vllm_cannot_open_what_was_checked(words):
    with pytest.raises(ValueError, match="cannot be passed on to vLLM") as error:
        serve_command("m", 1, 8, 64, None, "127.0.0.1", 0, words)
    assert KEY not in str(error.value)
