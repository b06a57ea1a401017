"""Client of one zygote: start it, send it units of work, receive its frames. Frame contents are untrusted."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from multirole_sandbox.inside import wire
from multirole_sandbox.inside.limits import Limits
from multirole_sandbox.verdict import SandboxError

_START_SECONDS, _GRACE_SECONDS = 60.0, 30.0
_HOME = Path(__file__).parent
_START = "import sys; sys.path.insert(0, {!r}); from inside import zygote; zygote.main({!r}, {!r})"
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LC_ALL": "C.UTF-8",
    "HOME": "/",
    "LD_BIND_NOW": "1",  # otherwise each test's process resolves library functions again
    "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of the address space that a program may have
}


class Frame(NamedTuple):
    """The result of one test: its index in the unit (-1: end of the unit), one of `wire.REASONS`, and its output."""

    test: int
    reason: str
    output: bytes


class Worker:
    """A running, sandboxed zygote and its two channels. It first imports `module` from `folder`, with this process's path."""

    def __init__(self, module: str = "", folder: str = "") -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.channel, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.answers, answers = os.pipe()
        flags = ["-P"] if module else ["-s", "-S", "-P"]  # not -I: it ignores PYTHONHASHSEED
        folders = [folder, *map(os.path.abspath, filter(None, sys.path))] if module else []
        self.process = subprocess.Popen(
            [sys.executable, *flags, "-c", _START.format(str(_HOME), module, folders)],
            stdin=child_socket,
            stdout=answers,
            stderr=self.errors,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        child_socket.close()
        os.close(answers)
        self.poller = select.poll()
        self.poller.register(self.answers, select.POLLIN)
        try:
            self.level = self._frame(1 << 12, time.monotonic() + _START_SECONDS).output.decode()
        except BaseException:
            self.close()
            raise

    def run(self, source: bytes, inputs: list[bytes], calls: list[tuple[str, bool]], limits: Limits) -> Iterator[Frame]:
        """Send one unit and yield its frames, including the end frame. Raises SandboxError if the worker fails."""
        deadline = time.monotonic() + limits.wall_seconds + _GRACE_SECONDS
        head = json.dumps([len(source), [len(test_input) for test_input in inputs], calls, asdict(limits)]).encode()
        try:
            with open(os.memfd_create("unit"), "wb") as body:
                body.writelines([head, source, *inputs])
                body.flush()
                socket.send_fds(self.channel, [wire.PACKET.pack(len(head), limits.wall_seconds)], [body.fileno()])
        except OSError as error:
            raise SandboxError(f"A worker accepts no work ({error}): {self.error_tail()}") from error
        index = 0
        while index >= 0:
            yield (frame := self._frame(limits.output_bytes, deadline))
            index = frame.test

    def _frame(self, max_bytes: int, deadline: float) -> Frame:
        mark, test, reason, size = wire.FRAME.unpack(self._read(wire.FRAME.size, deadline))
        if mark != wire.MARK or size > max_bytes or not 0 <= reason < len(wire.REASONS):
            raise SandboxError("A worker sent bytes that are not a frame.")
        return Frame(test, wire.REASONS[reason], self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        read = bytearray()
        while len(read) < size:
            if not self.poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                raise SandboxError(f"A worker does not answer: {self.error_tail()}")
            if not (chunk := os.read(self.answers, size - len(read))):
                raise SandboxError(f"A worker has ended: {self.error_tail()}")
            read += chunk
        return bytes(read)

    def error_tail(self) -> str:
        """Return the last 2,000 bytes of the worker's error output."""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 2000))
        return self.errors.read().decode(errors="replace").strip() or "it wrote no message"

    def close(self) -> None:
        """Kill the process, which ends all its children."""
        self.process.kill()
        self.process.wait()
        self.channel.close()
        os.close(self.answers)
        self.errors.close()
