"""The workers of this process and the schedule: which worker runs which tests of which program next.

Programs are cut into units of a few tests, and each worker has a thread that takes the next unit. Results are judged as
they arrive.

A program that makes its worker fail is tried once more on a new worker. If that fails as well, the rest of its tests
are errors, provided that a new worker still runs a known program as it should. Otherwise the sandbox itself is broken,
which raises `SandboxError`.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from multirole.sandbox.inside import wire
from multirole.sandbox.verdict import Limits, SandboxError
from multirole.sandbox.worker import Worker

logger = logging.getLogger(__name__)

_UNIT_TESTS = 16  # starting a manager costs as much as two or three tests
_MOST_PROGRAM_BYTES = 4 << 20


@dataclass
class Job:
    """One program with the inputs of its tests; `reasons` fills up as tests end.

    functions: per test what to call, or "" for a test on stdin; is_right: whether a test's output is; rest: the reason
    of all tests that have not been run, once no more of them are to be run.
    """

    program: str
    inputs: list[bytes]
    functions: list[str]
    is_right: Callable[[int, bytes], bool]
    rest: str = ""
    started: float = 0.0

    def __post_init__(self) -> None:
        self.reasons = [""] * len(self.inputs)
        self.source = self.program.encode("utf-8", "surrogatepass")
        if not self.program.strip():
            self.rest = "no_code"
        elif len(self.source) > _MOST_PROGRAM_BYTES:
            self.rest = "error"


class Pool:
    """The workers; its owner takes care that one thread at a time calls it. Workers import the file `module` first."""

    def __init__(self, module: str = "") -> None:
        self.module, self.level = module, ""
        self.idle: list[Worker] = []
        self.busy: set[Worker] = set()
        self.is_ending = False

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
        self.is_ending = False
        with ThreadPoolExecutor(n_workers) as threads:
            try:
                for done in as_completed([threads.submit(self._work, queue, limits) for _ in range(n_workers)]):
                    done.result()
            except BaseException:  # also Ctrl-C: nothing else is started, and what runs is ended
                self.is_ending = True
                for worker in list(self.busy):
                    worker.process.kill()
                raise

    def _work(self, units: Iterator[tuple[Job, range]], limits: Limits) -> None:
        """Run units until there are no more; the threads share the iterator, whose steps are atomic."""
        for job, tests in units:
            left = set(tests)
            error = self._attempt(job, left, limits)
            if error and not self.is_ending:
                logger.warning("A sandbox worker was replaced: %s", error)
                error = self._attempt(job, left, limits, on_new_worker=True)
            if self.is_ending:
                return
            if error and not job.rest:
                self._blame(job, error)
            for test in left:
                job.reasons[test] = job.rest

    def _attempt(self, job: Job, left: set[int], limits: Limits, on_new_worker: bool = False) -> SandboxError | None:
        """Run tests on a worker and take those that it reports out of `left`; the error of a worker that fails."""
        if job.rest:
            return None
        worker = Worker(self.module) if on_new_worker else self._take()
        self.level = worker.level
        self.busy.add(worker)
        is_whole = False
        try:
            if not self.is_ending:
                self._run(worker, job, left, limits)
            is_whole = True
            return None
        except SandboxError as error:
            return error
        finally:
            self.busy.remove(worker)  # first: from here on nobody kills it, since its next unit is another program's
            self.idle.append(worker) if is_whole and not self.is_ending else worker.close()

    def _take(self) -> Worker:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            return self.idle.pop()
        return Worker(self.module)

    def _run(self, worker: Worker, job: Job, left: set[int], limits: Limits) -> None:
        """Hand over one unit and judge the outputs of its tests."""
        tests = sorted(left)
        job.started = job.started or time.monotonic()
        head = wire.Head(
            source_bytes=len(job.source),
            sizes=[len(job.inputs[test]) for test in tests],
            functions=[job.functions[test] for test in tests],
            test_seconds=limits.test_seconds,
            wall_seconds=limits.wall_factor * limits.test_seconds,
            unit_seconds=max(0.0, limits.problem_seconds - (time.monotonic() - job.started)),
            full_timeouts=max(0, limits.full_timeouts - job.reasons.count("timeout")),
            memory_bytes=limits.memory_bytes,
            output_bytes=limits.output_bytes,
        )
        for frame in worker.run(head, job.source, [job.inputs[test] for test in tests]):
            if frame.test < 0:
                break
            if frame.test >= len(tests) or tests[frame.test] not in left:
                raise SandboxError(f"A worker reported test {frame.test}, which it was not given.")
            test, reason = tests[frame.test], frame.reason
            if reason == "ended":
                reason = "passed" if job.is_right(test, frame.output) else "wrong_answer"
            job.reasons[test] = reason
            left.remove(test)
        if left and frame.reason not in ("timeout", "error"):
            raise SandboxError(f"A manager {frame.reason}: {worker.last_words()}")
        if left:
            job.rest = frame.reason  # its text cannot be compiled

    def _blame(self, job: Job, error: SandboxError) -> None:
        """End a program that made two workers fail, or raise if a known program cannot be run either."""
        control = Job("print(input())", [b"control"], [""], lambda _, output: output == b"control\n")
        self._attempt(control, {0}, Limits(), on_new_worker=True)
        if control.reasons != ["passed"]:
            raise SandboxError(f"The sandbox does not work any more: {error}") from error
        logger.error("A program made two workers fail; its remaining tests count as errors. The last one: %s", error)
        job.rest = "error"
