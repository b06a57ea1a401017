"""The workers of this process and the schedule: which worker runs which tests of which program next.

Guided self-scheduling: a free worker takes the next tests of the first program that has any left, and as many of them as
would finish the batch in about two such units per worker. In a large batch that is a whole program; at the end of a
batch, or for a single program, the tests are spread over all workers. Results are compared as they arrive, and under
"all_pass" the first failure ends the program's tests wherever they run.

A program that makes its worker fail is tried once more on a new worker. If that fails as well, the rest of its tests
are errors and it is counted in `Stats.crashes`, provided that a new worker still grades a known program as it should.
Otherwise the sandbox itself is broken, which raises `SandboxError`.
"""

import contextlib
import logging
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from multirole.sandbox.compare import are_wrapped, is_right
from multirole.sandbox.inside import wire
from multirole.sandbox.verdict import Limits, Reason, SandboxError
from multirole.sandbox.worker import Frame, Worker

logger = logging.getLogger(__name__)

_LEAST_TESTS = 4  # fewer are not worth the start of another manager
_MOST_TESTS = 1000  # per unit: the head of a unit stays small
_MOST_PROGRAM_BYTES = 4 << 20
CONTROL = ("print(input())", {"input": "control", "output": "control", "testtype": "stdin"})
_EXIT_REASONS: dict[int, Reason] = {wire.NO_MEMORY: "memory", wire.FORBIDDEN: "violation"}
_SIGNAL_REASONS: dict[int, Reason] = {
    signal.SIGSYS: "violation", signal.SIGXCPU: "timeout", signal.SIGKILL: "memory", signal.SIGXFSZ: "output_limit",
}  # fmt: skip


class Tests:
    """A problem's normalised tests in the form that the workers and the comparison need, shared by all its programs."""

    def __init__(self, tests: list[dict]) -> None:
        self.tests = tests
        self.inputs = [test["input"].encode("utf-8", "surrogatepass") for test in tests]
        self.functions = [test["metadata"]["func_name"] if test["testtype"] == "functional" else "" for test in tests]
        self.is_wrapped = are_wrapped(tests)


@dataclass
class Job:
    """One program with its tests; `reasons` fills up as tests end."""

    program: str
    tests: Tests
    stops_early: bool
    reasons: list[Reason] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    timeouts: int = 0
    cpu_seconds: float = 0.0
    started: float = 0.0
    seconds: float = 0.0
    is_over: bool = False
    has_crashed: bool = False
    is_control: bool = False

    def __post_init__(self) -> None:
        self.reasons = ["not_run"] * len(self.tests.inputs)
        self.waiting = list(range(len(self.tests.inputs)))
        self.source = self.program.encode("utf-8", "surrogatepass")
        if len(self.source) > _MOST_PROGRAM_BYTES:
            self.end("error")

    def end(self, reason: Reason, unfinished: Iterable[int] = ()) -> None:
        """Give a reason to the unfinished tests and to those that wait; none of them will be run."""
        for test in (*unfinished, *self.waiting):
            self.reasons[test] = reason
        self.waiting = []
        self.is_over |= self.stops_early

    def note(self, test: int, frame: Frame) -> None:
        """Take one test's outcome and judge it."""
        reason: Reason
        if frame.kind == wire.TIMED_OUT:
            reason = "timeout"
            self.timeouts += 1
        elif frame.kind == wire.TOO_MUCH_OUTPUT:
            reason = "output_limit"
        elif frame.kind == wire.SIGNALLED:
            reason = _SIGNAL_REASONS.get(frame.code, "error")
        elif frame.code != wire.FINE:
            reason = _EXIT_REASONS.get(frame.code, "error")
        else:
            is_passed = is_right(frame.output, self.tests.tests[test], self.tests.is_wrapped)
            reason = "passed" if is_passed else "wrong_answer"
        self.reasons[test] = reason
        self.cpu_seconds += frame.cpu_seconds
        self.seconds = time.monotonic() - self.started
        if reason != "passed" and self.stops_early:
            self.end("not_run")


@dataclass
class _Unit:
    """Some tests of a job, on a worker; `left` are the ones that it has not reported."""

    job: Job
    tests: list[int]
    left: set[int]
    attempt: int = 1
    is_stopped: bool = False


class Pool:
    """The workers; its owner takes care that one thread at a time uses it."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        self.restarts = 0
        self.level = ""

    def take(self) -> Worker:
        """Take an idle worker, or start one."""
        if self.idle:
            return self.idle.pop()
        worker = Worker()
        self.level = worker.level
        return worker

    def close(self) -> None:
        """Stop all workers."""
        while self.idle:
            self.idle.pop().close()

    def run(self, jobs: list[Job], limits: Limits) -> None:
        """Run all jobs to their end; SandboxError if the sandbox itself fails, whatever the programs are."""
        again: list[_Unit] = []
        busy: dict[int, tuple[Worker, _Unit]] = {}
        queue = [job for job in reversed(jobs) if job.waiting]
        n_workers = min(limits.workers, max(1, -(-sum(len(job.waiting) for job in jobs) // _LEAST_TESTS)), 256)
        try:
            while queue or again or busy:
                while len(busy) < n_workers and (unit := self._next_unit(queue, again, n_workers)):
                    self._dispatch(unit, limits, busy, again)
                self._listen(busy, again)
        finally:
            for worker, _ in busy.values():  # after an error or Ctrl-C, so that no answer is taken for the next one
                worker.close()

    def _next_unit(self, queue: list[Job], again: list[_Unit], n_workers: int) -> _Unit | None:
        if again:
            return again.pop()
        while queue and not queue[-1].waiting:
            queue.pop()
        if not queue:
            return None
        job = queue[-1]
        fair = -(-sum(len(job.waiting) for job in queue) // (2 * n_workers))
        size = len(job.waiting) if n_workers == 1 else max(_LEAST_TESTS, fair)
        tests, job.waiting = job.waiting[: min(size, _MOST_TESTS)], job.waiting[min(size, _MOST_TESTS) :]
        return _Unit(job, tests, set(tests))

    def _dispatch(self, unit: _Unit, limits: Limits, busy: dict, again: list[_Unit]) -> None:
        job = unit.job
        job.started = job.started or time.monotonic()
        unit.tests = [test for test in unit.tests if test in unit.left]
        head = wire.Head(
            source_bytes=len(job.source),
            sizes=[len(job.tests.inputs[test]) for test in unit.tests],
            functions=[job.tests.functions[test] for test in unit.tests],
            test_seconds=limits.test_seconds,
            wall_seconds=2 * limits.test_seconds,
            unit_seconds=max(0.0, limits.problem_seconds - (time.monotonic() - job.started)),
            full_timeouts=max(0, limits.full_timeouts - job.timeouts),
            short_seconds=limits.test_seconds / 20,
            memory_bytes=limits.memory_bytes,
            output_bytes=limits.output_bytes,
        )
        worker = self.take()
        try:
            worker.send(head, job.source, [job.tests.inputs[test] for test in unit.tests])
        except SandboxError as error:
            self._failed(worker, unit, error, again)
        else:
            busy[worker.answers] = worker, unit

    def _listen(self, busy: dict[int, tuple[Worker, _Unit]], again: list[_Unit]) -> None:
        poller = select.poll()
        for answers in busy:
            poller.register(answers, select.POLLIN)
        ready = poller.poll(1000) if busy else []
        for answers in [answers for answers, _ in ready] or list(busy):
            worker, unit = busy[answers]
            try:
                has_ended = self._hear(worker, unit)
            except SandboxError as error:
                del busy[answers]
                self._failed(worker, unit, error, again)
                continue
            if has_ended:
                del busy[answers]
                self.idle.append(worker)
        for worker, unit in busy.values():
            if unit.job.is_over and not unit.is_stopped:
                unit.is_stopped = True
                with contextlib.suppress(SandboxError):  # it will be noticed when it is listened to
                    worker.stop()

    def _hear(self, worker: Worker, unit: _Unit) -> bool:
        """Take a worker's frames; True at the end of its unit."""
        job = unit.job
        for frame in worker.frames():
            if frame.index >= 0:
                test = unit.tests[frame.index] if frame.index < len(unit.tests) else -1
                if test not in unit.left:
                    raise SandboxError(f"A worker reported test {frame.index}, which it was not given.")
                unit.left.remove(test)
                if not job.is_over:
                    job.note(test, frame)
                continue
            if unit.left and not job.is_over:
                job.end(self._reason_of_manager(frame, worker), unit.left)
            return True
        return False

    def _reason_of_manager(self, frame: Frame, worker: Worker) -> Reason:
        """Why a manager ended before its tests: compiling the program can time out or crash; the rest is a failure."""
        if frame.kind == wire.TIMED_OUT or (frame.kind == wire.SIGNALLED and frame.code == signal.SIGXCPU):
            return "timeout"
        if frame.kind == wire.SIGNALLED and frame.code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            return "error"
        raise SandboxError(f"A manager ended (kind {frame.kind}, code {frame.code}): {worker.last_words()}")

    def _failed(self, worker: Worker, unit: _Unit, error: SandboxError, again: list[_Unit]) -> None:
        """Replace a worker and try its unit again; the second time, the program is to blame, or else the sandbox."""
        worker.close()
        self.restarts += 1
        job = unit.job
        if unit.attempt == 1 and not job.has_crashed:
            logger.warning("A sandbox worker was replaced: %s", error)
            unit.attempt = 2
            again.append(unit)
            return
        if job.is_control or run_alone(self, *CONTROL, Limits(workers=1)) != "passed":
            raise SandboxError(f"The sandbox does not work any more: {error}") from error
        logger.error("A program made two workers fail; its remaining tests count as errors. The last one: %s", error)
        job.has_crashed = True
        job.end("error", unit.left)


def run_alone(pool: Pool, program: str, test: dict, limits: Limits) -> Reason:
    """The reason of one test of one program, for the self-test and as a control."""
    job = Job(program, Tests([test]), stops_early=False, is_control=True)
    pool.run([job], limits)
    return job.reasons[0]
