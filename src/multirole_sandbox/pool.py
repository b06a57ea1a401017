"""Pool of sandbox workers: a thread per worker takes the next program, and outputs are graded as they arrive.

A program that crashes its worker is retried once on a new worker. If it crashes that too, its remaining tests are errors,
provided that a new worker still runs a known program correctly. Otherwise the sandbox itself is broken, which raises
`SandboxError`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

from multirole_sandbox.inside.limits import MAX_OUTPUT_BYTES, Limits
from multirole_sandbox.verdict import SandboxError
from multirole_sandbox.worker import Worker

logger = logging.getLogger(__name__)

_MAX_PROGRAM_BYTES = 4 << 20


@dataclass
class Job:
    """One program with the inputs of its tests. As tests end, `reasons` is filled and `left` shrinks.

    functions: the function to call per test, or "" for a test on stdin; judge: returns the reason of a test that ended with an
    output; integer_keys: per test, whether to restore integer keys in its arguments' dicts (default: no test);
    output_bytes: the length that an output must be allowed to have, beyond that of `Limits`.
    """

    program: str | None
    inputs: list[bytes]
    functions: list[str]
    judge: Callable[[int, bytes], str]
    integer_keys: list[bool] = field(default_factory=list)
    output_bytes: int = 0

    def __post_init__(self) -> None:
        self.reasons = [""] * len(self.inputs)
        self.integer_keys = self.integer_keys or [False] * len(self.inputs)
        self.left = set(range(len(self.inputs)))
        self.program = self.program or ""
        self.source = self.program.encode("utf-8", "surrogatepass")
        if not self.program.strip():
            self.end("no_code")
        elif len(self.source) > _MAX_PROGRAM_BYTES:
            self.end("error")

    def end(self, reason: str) -> None:
        """Set the reason of all remaining tests."""
        for test in self.left:
            self.reasons[test] = reason
        self.left.clear()


class Pool:
    """A set of workers that first import `module` from `folder`. Not thread-safe: the caller must hold a lock."""

    def __init__(self, module: str = "", folder: str = "") -> None:
        self.module, self.folder, self.level = module, folder, ""
        self.idle: list[Worker] = []
        self.busy: set[Worker] = set()
        self.is_ending = False

    def close(self) -> None:
        """Stop all workers."""
        while self.idle:
            self.idle.pop().close()

    def run(self, jobs: list[Job], limits: Limits) -> None:
        """Run all jobs to completion. Raises SandboxError only if the sandbox itself fails."""
        queue = iter([job for job in jobs if job.left])
        n_workers = max(1, min(limits.workers, len(jobs)))
        self.is_ending = False
        with ThreadPoolExecutor(n_workers) as threads:
            try:
                for future in as_completed([threads.submit(self._work, queue, limits) for _ in range(n_workers)]):
                    future.result()
            except BaseException:  # also Ctrl-C: start nothing more, and kill what runs
                self.is_ending = True
                for worker in list(self.busy):
                    worker.process.kill()
                raise

    def _work(self, jobs: Iterator[Job], limits: Limits) -> None:
        """Run jobs until none is left. The threads share the iterator, whose steps are atomic."""
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
        """Run a job's remaining tests on a worker; return the error if the worker fails."""
        worker = Worker(self.module, self.folder) if on_new_worker else self._take()
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
            self.busy.remove(worker)  # first, so that nobody kills the worker during its next program
            self.idle.append(worker) if is_whole and not self.is_ending else worker.close()

    def _take(self) -> Worker:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            return self.idle.pop()
        return Worker(self.module, self.folder)

    def _run(self, worker: Worker, job: Job, limits: Limits) -> None:
        """Send a program to a worker and grade the outputs of its tests."""
        tests = sorted(job.left)
        inputs = [job.inputs[test] for test in tests]
        calls = [(job.functions[test], job.integer_keys[test]) for test in tests]
        limits = replace(limits, output_bytes=max(limits.output_bytes, min(job.output_bytes, MAX_OUTPUT_BYTES)))
        for frame in worker.run(job.source, inputs, calls, limits):
            if frame.test < 0:
                break
            if frame.test >= len(tests) or tests[frame.test] not in job.left:
                raise SandboxError(f"A worker reported test {frame.test}, which was not sent to it.")
            test, reason = tests[frame.test], frame.reason
            if reason == "ended":
                reason = job.judge(test, frame.output)
            job.reasons[test] = reason
            job.left.remove(test)
        if job.left and frame.reason not in ("timeout", "error"):
            raise SandboxError(f"A manager {frame.reason}: {worker.error_tail()}")
        job.end(frame.reason)  # remaining tests, if the program does not compile or its time is up

    def _blame(self, job: Job, error: SandboxError) -> None:
        """Give up on a program that crashed two workers, or raise if a known program cannot be run either."""
        control = Job("print(input())", [b"control"], [""], lambda _, output: output.decode("utf-8", "replace").strip())
        self._attempt(control, Limits(), on_new_worker=True)
        if control.reasons != ["control"]:
            raise SandboxError(f"The sandbox stopped working: {error}") from error
        logger.error("A program crashed two workers; its remaining tests count as errors. Last error: %s", error)
        job.end("error")
