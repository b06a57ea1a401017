"""The workers of this process and the schedule: which worker runs which tests of which program next.

Programs are cut into units of a few tests, and each worker has a thread that takes the next unit. Results are judged as
they arrive. Under "all_pass" the first failure ends the program: no other unit of it is started, and of those that run
nothing counts any more.

A program that makes its worker fail is tried once more on a new worker. If that fails as well, the rest of its tests
are errors, provided that a new worker still runs a known program as it should. Otherwise the sandbox itself is broken,
which raises `SandboxError`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from multirole.sandbox.inside import wire
from multirole.sandbox.verdict import Limits, SandboxError
from multirole.sandbox.worker import Frame, Worker

logger = logging.getLogger(__name__)

_UNIT_TESTS = 16  # starting a manager costs as much as two or three tests
_MOST_PROGRAM_BYTES = 4 << 20


@dataclass
class Job:
    """One program with the inputs of its tests; `reasons` fills up as tests end.

    functions: per test what to call, or "" for a test on stdin; is_right: whether a test's output is; rest: what the
    tests that have not been run count as, once no more of them are to be run.
    """

    program: str
    inputs: list[bytes]
    functions: list[str]
    is_right: Callable[[int, bytes], bool]
    stops_early: bool = False
    rest: str | None = None
    timeouts: int = 0
    started: float = 0.0
    workers: list[Worker] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.reasons: list[str] = ["not_run"] * len(self.inputs)
        self.source = self.program.encode("utf-8", "surrogatepass")
        if not self.program.strip():
            self.rest = "no_code"
        elif len(self.source) > _MOST_PROGRAM_BYTES:
            self.rest = "error"

    def end(self, reason: str, tests: Iterable[int]) -> None:
        """Give a reason to these tests and to all that have not been started."""
        self.rest = reason
        for test in tests:
            self.reasons[test] = reason

    def note(self, test: int, frame: Frame) -> None:
        """Take one test's outcome and judge it."""
        reason = frame.reason
        if reason == "ended":
            reason = "passed" if self.is_right(test, frame.output) else "wrong_answer"
        with self.lock:
            if self.stops_early and self.rest is not None:
                return
            self.reasons[test] = reason
            self.timeouts += reason == "timeout"
            if reason != "passed" and self.stops_early:
                self.rest = "not_run"


class Pool:
    """The workers; its owner takes care that one thread at a time calls it. Workers import the file `module` first."""

    def __init__(self, module: str = "") -> None:
        self.module, self.level = module, ""
        self.idle: list[Worker] = []

    def close(self) -> None:
        """Stop all workers."""
        while self.idle:
            self.idle.pop().close()

    def run(self, jobs: list[Job], limits: Limits) -> None:
        """Run all jobs to their end; SandboxError if the sandbox itself fails, whatever the programs are."""
        units = [
            (job, range(len(job.inputs))[start : start + _UNIT_TESTS])
            for job in jobs
            for start in range(0, len(job.inputs), _UNIT_TESTS)
        ]
        queue, n_workers = iter(units), max(1, min(limits.workers, len(units)))
        with ThreadPoolExecutor(n_workers) as threads:
            try:
                for done in as_completed([threads.submit(self._work, queue, limits) for _ in range(n_workers)]):
                    done.result()
            except BaseException:  # also Ctrl-C: nothing else is started, and what runs is ended
                for job in jobs:
                    with job.lock:
                        job.rest = "not_run"
                        for worker in job.workers:
                            worker.process.kill()
                raise

    def _work(self, units: Iterator[tuple[Job, range]], limits: Limits) -> None:
        """Run units until there are no more; the threads share the iterator, whose steps are atomic."""
        for job, tests in units:
            left = set(tests)
            for is_second in (False, True):
                if left and job.rest is None:
                    error = self._attempt(job, left, limits, on_new_worker=is_second)
                    if error and job.rest is None and not is_second:
                        logger.warning("A sandbox worker was replaced: %s", error)
                    elif error and job.rest is None:
                        self._blame(job, error)
            if job.rest is not None:
                job.end(job.rest, left)

    def _take(self) -> Worker:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            return self.idle.pop()
        return Worker(self.module)

    def _attempt(self, job: Job, left: set[int], limits: Limits, on_new_worker: bool) -> SandboxError | None:
        """Run tests on a worker and take those that it reports out of `left`; the error of a worker that fails."""
        worker, is_whole = Worker(self.module) if on_new_worker else self._take(), True
        self.level = worker.level
        try:
            with job.lock:
                if job.rest is not None:
                    return None
                job.started = job.started or time.monotonic()
                job.workers.append(worker)
            is_whole = False
            end = self._run(worker, job, left, limits)
            with job.lock:  # from here on nobody kills it, since its next unit will be another program's
                job.workers.remove(worker)
            if left and job.rest is None:
                if end.reason not in ("timeout", "error"):
                    raise SandboxError(f"A manager {end.reason}: {worker.last_words()}")
                job.end(end.reason, left)  # its text cannot be compiled
            is_whole = True
            return None
        except SandboxError as error:
            return error
        finally:
            self.idle.append(worker) if is_whole else worker.close()

    def _run(self, worker: Worker, job: Job, left: set[int], limits: Limits) -> Frame:
        """Hand over one unit, note the ends of its tests, and return the frame of its own end."""
        tests = sorted(left)
        head = wire.Head(
            source_bytes=len(job.source),
            sizes=[len(job.inputs[test]) for test in tests],
            functions=[job.functions[test] for test in tests],
            test_seconds=limits.test_seconds,
            wall_seconds=limits.wall_factor * limits.test_seconds,
            unit_seconds=max(0.0, limits.problem_seconds - (time.monotonic() - job.started)),
            full_timeouts=max(0, limits.full_timeouts - job.timeouts),
            memory_bytes=limits.memory_bytes,
            output_bytes=limits.output_bytes,
            stops_early=job.stops_early,
        )
        for frame in worker.run(head, job.source, [job.inputs[test] for test in tests]):
            if frame.test < 0:
                break
            if frame.test >= len(tests) or tests[frame.test] not in left:
                raise SandboxError(f"A worker reported test {frame.test}, which it was not given.")
            left.remove(tests[frame.test])
            job.note(tests[frame.test], frame)
        return frame

    def _blame(self, job: Job, error: SandboxError) -> None:
        """End a program that made two workers fail, or raise if a known program cannot be run either."""
        control = Job("print(input())", [b"control"], [""], lambda _, output: output == b"control\n")
        self._attempt(control, {0}, Limits(), on_new_worker=True)
        if control.reasons != ["passed"]:
            raise SandboxError(f"The sandbox does not work any more: {error}") from error
        logger.error("A program made two workers fail; its remaining tests count as errors. The last one: %s", error)
        job.rest = "error"
