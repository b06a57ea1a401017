"""Run model-written programs without trusting them: `run_programs(jobs) -> outcomes`.

A job is a program's text, the name of the function it must define, and a list of argument lists. Expected outputs never
come here: the caller compares `Outcome.value`, which is plain JSON data, in its own process.

How it works. One small clean Python process (the zygote, `sandbox_child.py`) is started once: no torch, an empty
environment, a working directory that is empty and already unlinked, no descriptor of ours but its two pipes. It forks
one child per *program*; all argument lists of a program run in that child, one after another, so a program can see its
own earlier calls, but nothing of other programs. We talk to the zygote in length-prefixed frames; what a program wrote
is read as bounded JSON, checked value by value, and never unpickled or evaluated.

What is covered, at the full level "setuid+seccomp+landlock+rlimits" ("setuid" only when started as root):
  * no network and no sockets; no new processes and no threads; no exec; no signals, ptrace or limits for others;
  * no file can be written, created, renamed or removed anywhere; only Python's own library can be read;
  * CPU time, wall-clock time, memory, size of the result, open files and core dumps are limited;
  * the environment, the trainer's memory and its descriptors are out of reach; a child dies with the zygote, the zygote
    with the trainer;
  * a failure of the sandbox itself raises `SandboxError`; it never becomes an outcome, hence never a reward.

What is not covered:
  * the seccomp filters are deny-lists: a kernel call invented after they were written is allowed, and bugs of the
    kernel itself are no obstacle to a real attacker. There are no namespaces, cgroups or virtual machine around it;
  * a program may ask for the size and date of files outside (stat) and may read Python's library directory;
  * a program may measure time, and memory is limited as address space (RLIMIT_AS), not as resident memory;
  * a program that forges its result can only claim values that it could as well have returned. Argument lists of one
    program are visible to each other: a hidden call count or cache between them is possible;
  * below the full level (`level()` says which one this machine reached): without "landlock" no module beyond the
    preloaded ones can be imported; without "seccomp" (an unusual processor, an old kernel) a program may use UDP and
    Unix sockets and change the mode of files it owns; with "rlimits" alone it can do whatever this user can.
    A lower level than "seccomp+landlock+rlimits" is logged as a warning;
  * programs have the standard library only, no threads and no files; programs that need them fail. Linux only.
"""

import atexit
import json
import logging
import math
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

Status = Literal["ok", "error", "timeout", "memory", "output_limit", "violation"]
Job = tuple[str, str, list[list]]

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REQUEST = struct.Struct("!IddQI")  # as in sandbox_child.py
_RESPONSE = struct.Struct("!BiI")
_EXITED, _SIGNALLED, _TIMED_OUT, _NOT_STARTED = 0, 1, 2, 3
_SIGKILL, _SIGXCPU, _SIGXFSZ, _SIGSYS = 9, 24, 25, 31
_SLACK = 4096
_START_SECONDS, _GRACE_SECONDS = 60.0, 30.0
_MAX_JOB_BYTES = 4 << 20
_MAX_DEPTH, _MAX_VALUES, _MAX_INT_BITS = 40, 20_000, 4096
_REPORTED = {"error", "memory", "output_limit", "violation"}  # what a child may say about itself besides "ok"
_KNOWN_GOOD = "import math\ndef f(n):\n    return math.factorial(n)"
_KNOWN_BAD = {  # wall -> programs that must not come to their end behind it
    "seccomp": ("import socket\ndef f(n):\n    socket.socket()", "import os\ndef f(n):\n    os.fork()"),
    "landlock": ("def f(n):\n    open('/proc/self/environ')", "def f(n):\n    open('canary', 'w')"),
}


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the program that was to be run."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program, all its argument lists together."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        if self.cpu_seconds <= 0 or self.wall_seconds < self.cpu_seconds:
            raise ValueError(
                f"Limits got cpu_seconds={self.cpu_seconds}, wall_seconds={self.wall_seconds}. A program cannot use "
                "more CPU time than wall-clock time. Write 0 < cpu_seconds <= wall_seconds."
            )
        if self.memory_bytes < 64 << 20 or not 256 <= self.output_bytes <= 16 << 20:
            raise ValueError(
                f"Limits got memory_bytes={self.memory_bytes}, output_bytes={self.output_bytes}. Python itself needs "
                "about 32 MiB and our own memory must stay bounded. "
                "Write memory_bytes >= 64 MiB and 256 <= output_bytes <= 16 MiB."
            )


@dataclass(frozen=True)
class Outcome:
    """What one call of a program came to; value is plain JSON data and None unless status is "ok"."""

    status: Status
    value: object = None


class _Zygote:
    """The running process and its two pipes."""

    def __init__(self) -> None:
        scratch = tempfile.mkdtemp(prefix="multirole-sandbox-")
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", str(_CHILD)],  # not -I: it would ignore PYTHONHASHSEED
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            bufsize=0,
            cwd=scratch,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        os.rmdir(scratch)  # its working directory now has no name: nothing can be put there and nothing is left behind
        os.set_blocking(self.process.stdin.fileno(), False)
        self.level = ""

    def greet(self) -> None:
        """Wait until the process has locked itself down, learn its level, and try both out."""
        deadline = time.monotonic() + _START_SECONDS
        (length,) = struct.unpack("!I", self._receive(4, deadline))
        self.level = self._receive(length, deadline).decode("ascii")
        _try_out(self)

    def exchange(self, payload: bytes, limits: Limits) -> tuple[int, int, bytes]:
        """Send one job; (how it ended, exit code or signal number, the bytes the program left)."""
        deadline = time.monotonic() + limits.wall_seconds + _GRACE_SECONDS
        sizes = limits.memory_bytes, limits.output_bytes
        self._send(_REQUEST.pack(len(payload), limits.cpu_seconds, limits.wall_seconds, *sizes) + payload, deadline)
        kind, code, length = _RESPONSE.unpack(self._receive(_RESPONSE.size, deadline))
        if length > limits.output_bytes + _SLACK:
            raise SandboxError(f"the zygote announced {length} bytes, more than it may send")
        output = self._receive(length, deadline)
        if kind == _NOT_STARTED:
            raise SandboxError(f"a child process could not be set up (wait status {code})")
        return kind, code, output

    def close(self) -> None:
        """End the process, which ends its children."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.stderr.close()

    def _wait_for(self, stream: int, event: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(stream, event)
        if not poller.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise SandboxError("the zygote does not answer")

    def _send(self, data: bytes, deadline: float) -> None:
        view, stream = memoryview(data), self.process.stdin.fileno()
        while view:
            self._wait_for(stream, select.POLLOUT, deadline)
            try:
                view = view[os.write(stream, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise SandboxError(f"the zygote is gone: {self._last_words()}") from error

    def _receive(self, length: int, deadline: float) -> bytes:
        chunks, stream = [], self.process.stdout.fileno()
        while length:
            self._wait_for(stream, select.POLLIN, deadline)
            chunk = os.read(stream, min(length, 1 << 16))
            if not chunk:
                raise SandboxError(f"the zygote is gone: {self._last_words()}")
            chunks.append(chunk)
            length -= len(chunk)
        return b"".join(chunks)

    def _last_words(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read(1 << 16).decode(errors="replace")[-500:].strip() or "no message"


_lock = threading.RLock()
_zygote: _Zygote | None = None


def run_programs(jobs: list[Job], limits: Limits = Limits()) -> list[list[Outcome]]:
    """Run each (source, function name, argument lists); one outcome per argument list. Safe to call from any thread."""
    payloads = [_encode(job) for job in jobs]
    outcomes = []
    for (_, _, calls), payload in zip(jobs, payloads, strict=True):
        with _lock:
            ended = _exchange_with_retry(payload, limits)
        outcomes.append(_decode(len(calls), *ended, limits))
    return outcomes


def level() -> str:
    """The walls that this machine offers, for example "setuid+seccomp+landlock+rlimits"; record it beside results."""
    with _lock:
        return _running().level


def close() -> None:
    """Stop the zygote; the next call starts another one."""
    global _zygote
    with _lock:
        if _zygote is not None:
            _zygote.close()
            _zygote = None


def _encode(job: Job) -> bytes:
    """The job as JSON bytes; a ValueError where the caller's data is not JSON or far too long."""
    source, function, calls = job
    try:
        payload = json.dumps({"source": source, "function": function, "calls": calls}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"run_programs got argument lists for {function!r} that are not JSON data ({error}). They are sent to "
            "another process as JSON. Write lists, strings, finite numbers, booleans, None and dicts with string keys."
        ) from error
    if len(payload) > _MAX_JOB_BYTES:
        raise ValueError(
            f"run_programs got a job of {len(payload)} bytes. The sandbox takes at most {_MAX_JOB_BYTES} per program. "
            "Write a shorter program or split its argument lists over several jobs."
        )
    return payload


def _running() -> _Zygote:
    """The zygote, started and tried out when there is none; the caller holds the lock."""
    global _zygote
    if _zygote is not None and _zygote.process.poll() is not None:
        close()
    if _zygote is None:
        if not sys.platform.startswith("linux"):
            raise SandboxError("model-written programs are run on Linux only; use the Docker image")
        _zygote = _Zygote()
        try:
            _zygote.greet()
        except SandboxError:
            close()
            raise
        if "seccomp+landlock" not in _zygote.level:
            logger.warning("sandbox at reduced level %r: see multirole.sandbox, 'What is not covered'", _zygote.level)
    return _zygote


def _try_out(zygote: _Zygote) -> None:
    """One program that must pass and, per wall that the zygote claims, some that must not: else refuse to start."""
    limits = Limits(cpu_seconds=10.0, wall_seconds=60.0)

    def run(source: str) -> Outcome:
        return _decode(1, *zygote.exchange(_encode((source, "f", [[5]])), limits), limits)[0]

    if (outcome := run(_KNOWN_GOOD)) != Outcome("ok", 120):
        raise SandboxError(f"a correct program came back as {outcome} at level {zygote.level!r}")
    for wall, sources in _KNOWN_BAD.items():
        for source in sources if wall in zygote.level else ():
            if (outcome := run(source)).status != "violation":
                raise SandboxError(f"a forbidden program came back as {outcome} at level {zygote.level!r}: {source!r}")


def _exchange_with_retry(payload: bytes, limits: Limits) -> tuple[int, int, bytes]:
    """One exchange; a failure of the sandbox is retried once with a new zygote, then raised."""
    for attempt in (1, 2):
        is_clean = False
        try:
            answer = _running().exchange(payload, limits)
            is_clean = True
            return answer
        except SandboxError as error:
            if attempt == 2:
                raise
            logger.warning("sandbox restarted: %s", error)
        finally:
            if not is_clean:  # also after Ctrl-C: a half-read answer must not be taken for the next one
                close()
    raise AssertionError("unreachable")


def _decode(n_calls: int, kind: int, code: int, output: bytes, limits: Limits) -> list[Outcome]:
    """Turn the bytes of a program into one outcome per call; calls it never answered get the reason of its end."""
    lines = output.split(b"\n")[:-1]  # an unfinished last line is no answer
    if len(output) > limits.output_bytes + 64 * n_calls or len(lines) > n_calls:
        return [Outcome("output_limit" if len(lines) <= n_calls else "violation")] * n_calls
    if kind == _TIMED_OUT:
        rest: Status = "timeout"
    elif kind == _SIGNALLED:
        reasons = {_SIGSYS: "violation", _SIGXCPU: "timeout", _SIGKILL: "memory", _SIGXFSZ: "output_limit"}
        rest = reasons.get(code, "error")
    else:
        rest = "error"
    return [_decode_line(line) for line in lines] + [Outcome(rest)] * (n_calls - len(lines))


def _decode_line(line: bytes) -> Outcome:
    """One answer, every value of it checked; anything but our own format is a violation."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Outcome("violation")
    if type(record) is not dict:
        return Outcome("violation")
    if record.get("status") == "ok" and set(record) == {"status", "value"}:
        return Outcome("ok", record["value"]) if _is_plain(record["value"]) else Outcome("violation")
    is_report = set(record) == {"status"} and type(record["status"]) is str and record["status"] in _REPORTED
    return Outcome(record["status"]) if is_report else Outcome("violation")


def _is_plain(value: object) -> bool:
    """Whether a decoded value is within the bounds: types, depth, number of values, size of integers, finite floats."""
    level_values, n_values, is_bounded = [value], 0, True
    for _ in range(_MAX_DEPTH):
        n_values += len(level_values)
        if n_values > _MAX_VALUES:
            return False
        below: list[object] = []
        for item in level_values:
            if type(item) is list:
                below.extend(item)
            elif type(item) is dict:
                below.extend(item.values())
            elif type(item) is float:
                is_bounded = is_bounded and math.isfinite(item)
            elif type(item) is int:
                is_bounded = is_bounded and item.bit_length() <= _MAX_INT_BITS
        if not below or not is_bounded:
            return is_bounded
        level_values = below
    return False


def _forget() -> None:
    """In a forked copy of the trainer: leave the parent's zygote alone and start an own one when needed."""
    global _zygote, _lock
    _lock, _zygote = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
