"""A server on this machine that answers the requests of a test with JSON."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonServer:
    """A server at a free port. A subclass answers requests by `post`; `close` ends it."""

    def __init__(self) -> None:
        outer, self.asked = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*outer.get())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.answer(*outer.post(body, self.headers))

            def answer(self, status: int, body: dict) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.close = self.http.shutdown

    def get(self) -> tuple[int, dict]:
        """Return the status and the data that answer a GET."""
        return 200, {"data": []}

    def post(self, body: dict, headers: Mapping[str, str]) -> tuple[int, dict]:
        """Return the status and the data that answer a POST."""
        raise NotImplementedError
