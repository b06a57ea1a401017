"""Headless Chromium through Debian's chromedriver and the W3C WebDriver protocol; no Python package is needed."""

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs Debian's chromium and chromium-driver",
)
ERRORS = ("SEVERE",)


class Browser:
    """One window. `send` sends a command of the protocol."""

    def __init__(self, port: int, width: int) -> None:
        self.root = f"http://127.0.0.1:{port}/session"
        options: dict[str, Any] = {"args": ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]}
        options["mobileEmulation"] = {
            "deviceMetrics": {"width": width, "height": 900, "pixelRatio": 1.0, "touch": width < 700}
        }
        capabilities = {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}, "goog:chromeOptions": options}
        self.root += "/" + self.send("POST", "", capabilities={"alwaysMatch": capabilities})["sessionId"]

    def send(self, method: str, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.root + path, json.dumps(body).encode() if method == "POST" else None, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path, query: str = "") -> None:
        self.send("POST", "/url", url=page.resolve().as_uri() + query)

    def run(self, script: str, *args: Any) -> Any:
        """Run the body of a JavaScript function and return its value."""
        return self.send("POST", "/execute/sync", script=script, args=args)

    def errors(self) -> list[str]:
        """Return the console's errors since the last call, violations of the content security policy included."""
        return [line["message"] for line in self.send("POST", "/se/log", type="browser") if line["level"] in ERRORS]


@contextmanager
def browser(width: int, port: int = 0) -> Iterator[Browser]:
    """Start a browser whose window is `width` CSS pixels wide; below 700 it emulates a phone."""
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "started successfully on port" in line)
        window = Browser(int(started.rsplit(" ", 1)[1].rstrip(".\n")), width)
        try:
            yield window
        finally:
            window.send("DELETE", "")  # closes Chromium, which would outlive its driver
    finally:
        driver.terminate()
        driver.wait()
