"""The manager of one program: compile it, run each test in a separate process, and report the results.

The zygote forks a manager per unit. A manager never runs the program's code: it forks a child that runs one test of the
compiled program and exits. Inputs and outputs travel between memory files and the pipe to the trainer inside
the kernel, so they are never in the manager's memory, which the tests' processes inherit.
"""

import fcntl
import gc
import json
import os
import resource
import signal
import time
import traceback
import types
from os import _exit as end_process  # a program may replace what `os` holds

from . import prelude, runner, walls, wire
from .limits import Limits

NOT_STARTED = signal.SIGUSR2  # a child that could not be set up ends by this signal, which a program cannot send
AWAITED = {signal.SIGCHLD}  # blocked in the zygote and its children, so that none is lost before it is waited for
MAX_FILES = 256
SHORT_LIMIT_FRACTION = 0.05  # of the time limits, for each test after several timeouts
LEAST_SHARE = 0.02  # of a core: a test that gets less is idle, one that gets more is at work
WINDOW_SECONDS = 1.0  # in which that share is measured
COMPILE_SECONDS = 5  # CPU time for compiling and importing, on top of that of one test: a program's text can be a bomb


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process from its kernel clock; 0 if the kernel does not provide it."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def cpu_seconds_of_ended() -> float:
    """Return the CPU seconds of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def copy(source: int, target: int, offset: int, count: int) -> None:
    """Copy bytes between descriptors inside the kernel."""
    while count > 0:
        moved = os.sendfile(target, source, offset, count)
        if moved == 0:
            raise OSError(f"a memory file ends {count} bytes early")
        offset, count = offset + moved, count - moved


def compile_program(source: str) -> types.CodeType | str:
    """Compile a program; return its code object, or the reason of the failure."""
    try:
        return compile(source, "<program>", "exec", dont_inherit=True)
    except MemoryError:  # the parser also raises this for deep nesting
        return "error" if len(source) < 1 << 20 else "memory"
    except Exception:  # noqa: BLE001 (any compiler error is the program's error)
        return "error"


class Manager:
    """Runs the tests of one unit sequentially."""

    def __init__(self, body: int, head_bytes: int, max_tasks: int, filters: tuple | None) -> None:
        self.body, self.head_bytes, self.max_tasks, self.filters = body, head_bytes, max_tasks, filters
        self.source_bytes, self.sizes, self.calls, fields = json.loads(os.pread(body, head_bytes, 0))
        self.limits = Limits(**fields)
        self.seconds_left = self.limits.problem_seconds  # CPU time and idle time of all tests
        self.full_timeouts = self.limits.full_timeouts

    def run(self) -> None:
        """Run all tests of the unit."""
        offset = self.head_bytes + self.source_bytes
        text = os.pread(self.body, self.source_bytes, self.head_bytes)
        source = text.decode("utf-8", "surrogatepass").removeprefix("\ufeff")
        code = compile_program(source)
        if isinstance(code, str):
            for index in range(len(self.sizes)):
                self.report(index, code)
            return
        names = prelude.import_ahead(source, code)
        max_seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]  # from here on no text of a program is read
        resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds))
        os.chdir("/")
        self.program = runner.Program(code, names, source)
        if self.filters is not None and not walls.install(self.filters[0]):
            raise OSError("the second seccomp filter was refused")
        gc.freeze()
        for index, size in enumerate(self.sizes):
            self.run_test(index, offset, size)
            offset += size

    def run_test(self, index: int, offset: int, size: int) -> None:
        """Run one test in a separate process and report it; time limits shrink after several timeouts."""
        seconds = self.limits.test_seconds * (1.0 if self.full_timeouts > 0 else SHORT_LIMIT_FRACTION)
        cpu_limit = min(self.seconds_left, seconds)
        idle_limit = min(self.seconds_left, seconds * self.limits.idle_factor)
        if cpu_limit <= 0:
            self.report(index, "timeout")
            return
        stdin_file, output = os.memfd_create("input"), os.memfd_create("output")
        copy(self.body, stdin_file, offset, size)
        os.lseek(stdin_file, 0, os.SEEK_SET)
        (function, has_integer_keys), null = self.calls[index], wire.NULL
        descriptors = (stdin_file, null, null, output) if function else (stdin_file, output, null)
        # all tests share this open file, whose flags could carry a message to the next one
        fcntl.fcntl(null, fcntl.F_SETFL, os.O_RDWR)
        manager, exit_code = os.getpid(), wire.FAILED
        pid = walls.FORK()
        if pid == 0:
            try:
                self.set_up(manager, descriptors, cpu_limit)
                exit_code = self.program.run(function, has_integer_keys)
            finally:
                end_process(exit_code)
        if pid < 0:
            raise OSError("a test's process could not be forked")
        code = self.watch(pid, cpu_limit, idle_limit)
        if code == -NOT_STARTED:
            raise OSError("a test's process could not be set up")
        reason = "timeout" if code is None else wire.REASON_OF_EXIT.get(code, "error")
        self.full_timeouts -= reason == "timeout"
        self.report(index, reason, output)
        os.close(stdin_file)
        os.close(output)

    def set_up(self, manager: int, descriptors: tuple[int, ...], cpu_seconds: float) -> None:
        """Set up a test's process: map descriptors to 0, 1, 2, 3, close the rest, and drop the manager's rights."""
        is_ready = False
        try:
            walls.prctl(1, signal.SIGKILL)  # die with the manager
            if os.getppid() != manager:
                os._exit(0)
            for target, source in enumerate(descriptors):
                os.dup2(source, target)
            os.closerange(len(descriptors), MAX_FILES)
            seconds = int(cpu_seconds) + 2  # the manager enforces the exact limit; this is the kernel's own
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_NPROC, (self.max_tasks, self.max_tasks))
            is_ready = self.filters is None or walls.install(self.filters[1])
        finally:
            if not is_ready:
                os.kill(os.getpid(), NOT_STARTED)

    def watch(self, pid: int, cpu_limit: float, idle_limit: float) -> int | None:
        """Wait for a test's process and kill it at its limit; return its exit code, or None if killed.

        Time in which it gets less than `LEAST_SHARE` of a core is idle time. Waiting for a busy machine is neither CPU time nor idle time.
        """
        cpu, idle, before, at_start = 0.0, 0.0, time.monotonic(), cpu_seconds_of_ended()
        code, is_running = None, True
        while is_running and (left := min(cpu_limit - cpu, idle_limit - idle)) > 0:
            signal.sigtimedwait(AWAITED, min(max(left, 0.001), WINDOW_SECONDS))
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code, is_running = os.waitstatus_to_exitcode(status), False
            used, now = cpu_seconds_of(pid) if is_running else cpu_seconds_of_ended() - at_start, time.monotonic()
            idle += max(0.0, now - before - (used - cpu) / LEAST_SHARE)
            cpu, before = used, now
        if is_running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.seconds_left -= cpu + idle
        return code

    def report(self, index: int, reason: str, output: int = -1) -> None:
        """Send one frame; a test that ended normally adds its output, unless that is too long."""
        size = os.fstat(output).st_size if reason == "ended" else 0
        if size > self.limits.output_bytes:
            reason, size = "output_limit", 0
        os.write(wire.ANSWERS, wire.FRAME.pack(wire.MARK, index, wire.REASONS.index(reason), size))
        copy(output, wire.ANSWERS, 0, size)


def main(body: int, head_bytes: int, max_tasks: int, filters: tuple | None) -> None:
    """Run a manager; never returns. An internal failure exits with code 70 and a traceback on the error output."""
    code = 70
    try:
        os.setsid()
        walls.prctl(1, signal.SIGKILL)  # die with the zygote
        manager = Manager(body, head_bytes, max_tasks, filters)
        limits = manager.limits
        for kind, limit in (
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_NOFILE, MAX_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, max(limits.output_bytes, *manager.sizes) + 1),
        ):
            resource.setrlimit(kind, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _, max_seconds = resource.getrlimit(resource.RLIMIT_CPU)  # the hard limit stays: a test may get more
        resource.setrlimit(resource.RLIMIT_CPU, (int(limits.test_seconds) + COMPILE_SECONDS, max_seconds))
        manager.run()
        code = 0
    finally:
        if code:
            os.write(wire.ERRORS, traceback.format_exc().encode(errors="replace"))
        os._exit(code)
