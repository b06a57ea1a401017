"""The workers of this process and the schedule: which worker runs which program next.

Each worker has a thread that takes the next program. Outputs are judged as they arrive.

A program that makes its worker fail is tried once more on a new worker. If that fails as well, the rest of its tests
are errors, provided that a new worker still runs a known program as it should. Otherwise the sandbox itself is broken,
which raises `SandboxError`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from multirole_sandbox.inside.limits import Limits
from multirole_sandbox.verdict import SandboxError
from multirole_sandbox.worker import Worker

logger = logging.getLogger(__name__)

_MOST_PROGRAM_BYTES = 4 << 20


@dataclass
class Job:
    """One program with the inputs of its tests; as tests end, `reasons` fills up and `left` empties.

    functions: per test what to call, or "" for a test on stdin; is_right: whether a test's output is; integer_keys: per
    test whether its arguments' dicts get integer keys back (by default none do).
    """

    program: str
    inputs: list[bytes]
    functions: list[str]
    is_right: Callable[[int, bytes], bool]
    integer_keys: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reasons = [""] * len(self.inputs)
        self.integer_keys = self.integer_keys or [False] * len(self.inputs)
        self.left = set(range(len(self.inputs)))
        self.source = self.program.encode("utf-8", "surrogatepass")
        if not self.program.strip():
            self.end("no_code")
        elif len(self.source) > _MOST_PROGRAM_BYTES:
            self.end("error")

    def end(self, reason: str) -> None:
        """Give a reason to all tests that are left."""
        for test in self.left:
            self.reasons[test] = reason
        self.left.clear()


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
        queue = iter([job for job in jobs if job.left])
        n_workers = max(1, min(limits.workers, len(jobs)))
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

    def _work(self, jobs: Iterator[Job], limits: Limits) -> None:
        """Run jobs until there are no more; the threads share the iterator, whose steps are atomic."""
        for job in jobs:
            error = self._attempt(job, limits)
            if error and not self.is_ending:
                logger.warning("A sandbox worker was replaced: %s", error)
                error = self._attempt(job, limits, on_new_worker=True)
            if self.is_ending:
                return
            if error:
                self._blame(job, error)

    def _attempt(self, job: Job, limits: Limits, on_new_worker: bool = False) -> SandboxError | None:
        """Run the tests that are left on a worker; the error of a worker that fails."""
        worker = Worker(self.module) if on_new_worker else self._take()
        self.level = worker.level
        self.busy.add(worker)
        is_whole = False
        try:
            if not self.is_ending:
                self._run(worker, job, limits)
            is_whole = True
            return None
        except SandboxError as error:
            return error
        finally:
            self.busy.remove(worker)  # first: from here on nobody kills it, since its next program is another one
            self.idle.append(worker) if is_whole and not self.is_ending else worker.close()

    def _take(self) -> Worker:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            return self.idle.pop()
        return Worker(self.module)

    def _run(self, worker: Worker, job: Job, limits: Limits) -> None:
        """Hand over a program and judge the outputs of its tests."""
        tests = sorted(job.left)
        inputs = [job.inputs[test] for test in tests]
        calls = [(job.functions[test], job.integer_keys[test]) for test in tests]
        for frame in worker.run(job.source, inputs, calls, limits):
            if frame.test < 0:
                break
            if frame.test >= len(tests) or tests[frame.test] not in job.left:
                raise SandboxError(f"A worker reported test {frame.test}, which it was not given.")
            test, reason = tests[frame.test], frame.reason
            if reason == "ended":
                reason = "passed" if job.is_right(test, frame.output) else "wrong_answer"
            job.reasons[test] = reason
            job.left.remove(test)
        if job.left and frame.reason not in ("timeout", "error"):
            raise SandboxError(f"A manager {frame.reason}: {worker.last_words()}")
        job.end(frame.reason)  # what is left, where the text cannot be compiled or the program's time is up

    def _blame(self, job: Job, error: SandboxError) -> None:
        """End a program that made two workers fail, or raise if a known program cannot be run either."""
        control = Job("print(input())", [b"control"], [""], lambda _, output: output == b"control\n")
        self._attempt(control, Limits(), on_new_worker=True)
        if control.reasons != ["passed"]:
            raise SandboxError(f"The sandbox does not work any more: {error}") from error
        logger.error("A program made two workers fail; its remaining tests count as errors. The last one: %s", error)
        job.end("error")
