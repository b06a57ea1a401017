"""The trainer's side of one zygote: start it, hand it units, receive its frames. None of the bytes in them is trusted."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from multirole.sandbox.inside import wire
from multirole.sandbox.verdict import SandboxError

_START_SECONDS, _GRACE_SECONDS = 60.0, 30.0
_HOME = Path(__file__).parent
_START = "import sys; sys.path.insert(0, {!r}); from inside import zygote; zygote.main()"
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LC_ALL": "C.UTF-8",
    "HOME": "/",
    "LD_BIND_NOW": "1",  # else each test's process looks up the functions of shared libraries again
    "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of the address space that a program may have
}


@dataclass(frozen=True)
class Frame:
    """One test's end: kind, code and output as in `inside.wire`; index within the unit, -1 for the end of the unit."""

    index: int
    kind: int
    code: int
    cpu_seconds: float
    output: bytes


class Worker:
    """A running zygote and its two channels; made once it has locked itself down."""

    def __init__(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.answers, answers = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-c", _START.format(str(_HOME))],  # not -I: it ignores PYTHONHASHSEED
            stdin=theirs,
            stdout=answers,
            stderr=self.errors,
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        theirs.close()
        os.close(answers)
        os.set_blocking(self.answers, False)
        self.buffer = bytearray()
        self.most = 1 << 12  # bytes that a frame may carry
        self.deadline = time.monotonic() + _START_SECONDS
        poller = select.poll()
        poller.register(self.answers, select.POLLIN)
        try:
            while not (frames := self.frames()):
                poller.poll(1000)
            self.level = frames[0].output.decode()
        except BaseException:
            self.close()
            raise

    def send(self, head: wire.Head, source: bytes, inputs: list[bytes]) -> None:
        """Hand over one unit; its frames will follow."""
        head_bytes = json.dumps(asdict(head)).encode()
        try:
            with open(os.memfd_create("unit"), "wb") as body:
                body.writelines([head_bytes, source, *inputs])
                body.flush()
                self.most = head.output_bytes
                self.deadline = time.monotonic() + head.unit_seconds + _GRACE_SECONDS
                socket.send_fds(self.channel, [wire.MESSAGE.pack(wire.UNIT, len(head_bytes))], [body.fileno()])
        except OSError as error:
            raise SandboxError(f"A worker accepts no work ({error}): {self.last_words()}") from error

    def stop(self) -> None:
        """Ask it to end its unit early; frames on their way and the end of the unit still arrive."""
        try:
            self.channel.send(wire.MESSAGE.pack(wire.STOP, 0))
        except OSError as error:
            raise SandboxError(f"A worker has ended ({error}): {self.last_words()}") from error

    def frames(self) -> list[Frame]:
        """Return the frames that have arrived; SandboxError if the worker has ended, is late or sends anything else."""
        try:
            while len(self.buffer) <= self.most + wire.FRAME.size:
                if not (chunk := os.read(self.answers, 1 << 20)):
                    raise SandboxError(f"A worker has ended: {self.last_words()}")
                self.buffer += chunk
        except BlockingIOError:
            pass
        if time.monotonic() > self.deadline:
            raise SandboxError(f"A worker does not answer: {self.last_words()}")
        found, at = [], 0
        while len(self.buffer) - at >= wire.FRAME.size:
            kind, index, how, code, seconds, size = wire.FRAME.unpack_from(self.buffer, at)
            if kind not in (wire.TEST, wire.END) or size > self.most:
                raise SandboxError("A worker sent bytes that are not a frame.")
            if len(self.buffer) - at - wire.FRAME.size < size:
                break
            start, at = at + wire.FRAME.size, at + wire.FRAME.size + size
            found.append(Frame(index if kind == wire.TEST else -1, how, code, seconds, bytes(self.buffer[start:at])))
        del self.buffer[:at]
        return found

    def last_words(self) -> str:
        """The end of its error output."""
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 2000))
        return self.errors.read().decode(errors="replace").strip() or "it wrote no message"

    def close(self) -> None:
        """End the process, which ends everything below it."""
        self.process.kill()
        self.process.wait()
        self.channel.close()
        os.close(self.answers)
        self.errors.close()
