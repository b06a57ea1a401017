"""A server with the part of vLLM's protocol that `vllm_server_engine` uses, over real sockets. Tests can make it fail.

Its replies follow from the request alone, as vLLM's do from the seed: `answer` may replace the canned tokens.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BASE = "the-base"


def canned(body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs that depend on the adapter's role, the prompt and the seed."""
    role = body["model"].rpartition(":")[2]
    digest = hashlib.blake2b(repr((role, body["prompt"], body["seed"])).encode()).digest()
    n = 1 + digest[0] % body["max_tokens"]
    return [3 + byte for byte in digest[1 : 1 + n]], [-byte / 256 for byte in digest[1 : 1 + n]]


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # of the usual 5, a client's system asks again for the sixth connection after 1, 3 and 7 s

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, because the clients of a killed server are gone."""


class FakeServer:
    """Runs from `start` to `stop`. What tests set:

    `version`, `max_model_len`, `max_rank`, `max_loras`, `key`, `processed`, `has_lora`: what the server was started with.
    `most_adapters`: the number of adapters above which loading is refused. `seconds`: the time of a reply. `statuses`: HTTP statuses
    of the next completions. `hangs`: number of completions that never come. `kill_after`: number of completions after which the server
    dies, together with its running requests.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[list[int], list[float]]] = canned) -> None:
        self.answer = answer
        self.version, self.max_model_len, self.max_rank, self.max_loras = "0.31.0", 4096, 16, 8
        self.key, self.processed, self.has_lora = None, True, True
        self.most_adapters, self.seconds, self.statuses, self.hangs, self.kill_after = 99, 0.0, [], 0, None
        self.adapters: dict[str, str] = {}
        self.loaded: list[str] = []  # what was loaded, as N:ADAPTER@VERSION
        self.asked: list[dict[str, Any]] = []  # the bodies of all completions, those included that failed
        self.answered: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.lock, self.is_killed, self.http, self.port = threading.Lock(), False, None, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "FakeServer":
        self.is_killed, self.adapters = False, {}
        self.http = Quiet(("127.0.0.1", self.port), lambda *args: Handler(self, *args))
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop the server and its running requests, whose handlers close their connections."""
        self.is_killed = True
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
        self.http = None

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_killed and time.monotonic() < end:
            time.sleep(0.005)

    # ---- replies: (status, answer), or None to close the connection

    def get(self, path: str) -> tuple[int, Any]:
        cards = [{"id": BASE, "max_model_len": self.max_model_len, "root": BASE, "parent": None}]
        cards += [{"id": name, "root": root, "parent": BASE} for name, root in self.adapters.items()]
        answers = {"/health": "", "/version": {"version": self.version}, "/v1/models": {"data": cards}}
        answers["/metrics"] = f'vllm:lora_requests_info{{max_lora="{self.max_loras}",running_lora_adapters=""}} 1.7\n'
        return (200, answers[path]) if path in answers else (404, {"detail": "Not Found"})

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if path == "/v1/completions":
            return self.complete(body)
        if not self.has_lora:
            return 404, {"detail": "Not Found"}
        return (self.load if path == "/v1/load_lora_adapter" else self.unload)(body)

    def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (path / "adapter_model.safetensors").exists():
            return error(404, f"Loading lora {name} failed: No adapter found for <path>")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            return error(
                500, f"Call to add_lora method failed: LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
            )
        if len(self.adapters) >= self.most_adapters:
            return error(400, "No free adapter slot.")
        self.adapters[name] = str(path)
        self.loaded.append(name.partition(":")[2].partition(":")[2])
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.adapters.pop(body["lora_name"], None) is None:
            return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return 200, "Success"

    def complete(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        with self.lock:
            if "allowed_token_ids" not in body:
                self.asked.append(body)
            if self.statuses and "allowed_token_ids" not in body:
                return error(self.statuses.pop(0), "overloaded")
            hangs, self.hangs = self.hangs > 0, max(0, self.hangs - 1)
        self.wait(60.0 if hangs else self.seconds)
        if body["model"] != BASE and body["model"] not in self.adapters:
            return error(404, f"The model `{body['model']}` does not exist.")
        if "allowed_token_ids" in body:
            ids, logprobs = body["allowed_token_ids"], [0.0 if self.processed else -7.5]
        else:
            ids, logprobs = self.answer(body)
        with self.lock:
            if self.is_killed:
                return None
            if "allowed_token_ids" not in body:
                self.answered.append(body)
                if self.kill_after is not None and len(self.answered) >= self.kill_after:
                    self.kill_after, self.is_killed = None, True
                    threading.Thread(target=self.stop).start()
                    return None
        reason = "stop" if ids and ids[-1] in body["stop_token_ids"] else "length"
        logprobs_field = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": logprobs}
        return 200, {"choices": [{"logprobs": logprobs_field, "finish_reason": reason}]}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    def __init__(self, fake: FakeServer, *args: Any) -> None:
        self.fake = fake
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.reply(self.fake.get(self.path) if self.is_allowed() else error(401, "Unauthorized"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(self.fake.post(self.path, body) if self.is_allowed() else error(401, "Unauthorized"))

    def is_allowed(self) -> bool:
        self.fake.headers.append(self.headers.get("Authorization"))
        expected = None if self.fake.key is None else f"Bearer {self.fake.key}"
        return self.path == "/health" or expected in (None, self.headers.get("Authorization"))

    def reply(self, said: tuple[int, Any] | None) -> None:
        if said is None or self.fake.is_killed:
            return  # the connection closes without an answer
        status, answer = said
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def error(status: int, message: str) -> tuple[int, Any]:
    """Return an error in vLLM's form."""
    return status, {"error": {"message": message, "code": status}}


@contextmanager
def running_servers(n: int) -> Iterator[list[FakeServer]]:
    """Start `n` servers, and stop them at the end."""
    servers = [FakeServer().start() for _ in range(n)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
