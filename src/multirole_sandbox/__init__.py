"""Run and grade untrusted, model-written programs in a sandbox: `grade`, `grade_batch`, `call`.

A small Python process per core (a zygote: no torch, an empty environment, none of this process's descriptors) installs the
sandbox walls on itself. It forks a manager per program, which compiles the program and forks a process per test. A test's
process has its input on stdin, its output in a memory file, and nothing else. Expected outputs never leave this process:
outputs come back as bytes of bounded length and are compared here, as plain data, by `multirole_sandbox.compare`.

Guarantees at level "setuid+seccomp+landlock+rlimits" ("setuid" only when started as root; the other walls suffice):
  * no network and no sockets except a private pair; no processes, no exec; no signals, ptrace or limits for others;
  * no file can be opened, listed, looked up, written or removed: a program sees an empty, read-only file system, and no
    call answers differently for a path, or for another process, that exists;
  * CPU time, wall-clock time, address space, output, open files, threads and core dumps are limited;
  * the environment, this process's memory and descriptors, and the inputs of other tests are out of reach;
  * a test cannot observe another test;
  * a test's process dies with its manager, and both with the zygote, within half a second of this process's end;
  * no program makes grading fail: a program that crashes two workers gets the reason "error". `SandboxError` means that
    the sandbox itself does not work; it never becomes a reward.
The seccomp filter is an allow-list and enforces all of this by itself; Landlock and the separate user id are a second layer.
Without seccomp nothing is graded unless `require(allow_unsafe=True)` was called.

Not guaranteed:
  * kernel bugs are not covered: there are no namespaces, cgroups or virtual machine around it;
  * memory is limited as address space per process, not as resident memory of all workers together;
  * threads are limited to about 500 per worker when started as root. Otherwise the limit counts all processes and threads of
    the user, and is 4,096 above their number when the worker started;
  * a program may measure time and see its own process id, so two tests, or two runs, can tell each other apart.

Available to programs. Linux only, the syntax and the standard library of the Python that trains, no files, and no other package:
`import numpy` is an error, because rewards would depend on what is installed, and its C code on files and threads. `ListNode` and
`TreeNode` are predefined (`inside.nodes`). The modules that a program's text names
in imports and in calls of `__import__` and `import_module` are loaded before it starts; others (a computed name, text
given to `exec`, what a function of email, tarfile or sqlite3 imports when it is called) are available only if they were
already loaded for another reason. Modules that need files, processes or the network (tempfile, subprocess, multiprocessing, urllib, tkinter,
zoneinfo) can be imported but fail when used. Only common encodings are available.
"""

import atexit
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from multirole_sandbox import selftest
from multirole_sandbox.compare import are_wrapped, is_right, longest_output
from multirole_sandbox.inside.limits import Limits
from multirole_sandbox.inside.runner import has_integers
from multirole_sandbox.pool import Job, Pool
from multirole_sandbox.published import normalise_tests
from multirole_sandbox.verdict import RULES, SandboxError, Verdict

__all__ = [
    "RULES", "Limits", "SandboxError", "Verdict", "call", "close", "grade", "grade_batch", "level", "normalise_tests",
    "require", "take_seconds",
]  # fmt: skip

__version__ = "0.3.0"

logger = logging.getLogger(__name__)

_INTEGER_KEY = re.compile(r'"-?[0-9]+"\s*:')
_SHAPES = ("passed", "passed_bare")
"""How an output may be right: as the expected value, or as the only member of an expected value that is wrapped."""
_NEWEST_SYNTAX = (3, 12)
"""The last version of Python with syntax that programs often use (PEP 695, PEP 701)."""
_CALLS = 16  # calls per manager, whose start costs as much as two or three calls

_lock = threading.RLock()
_pools: dict[tuple[str, str], Pool] = {}
_seconds = 0.0
_is_unsafe_allowed = False


def grade(program: str | None, tests: list[dict], rule: str = "fraction", limits: Limits | None = None) -> Verdict:
    """Grade one program; see `grade_batch`."""
    return grade_batch([program], [tests], rule, limits)[0]


def grade_batch(
    programs: Sequence[str | None],
    tests: Sequence[list[dict] | str],
    rule: str = "fraction",
    limits: Limits | None = None,
) -> list[Verdict]:
    """Grade each program with its list of tests, in any form that `normalise_tests` accepts. Thread-safe.

    Every test is run. The reward is the share of passed tests under the rule "fraction", and 1 or 0 under "all_pass". An
    empty program, or None, has the reason "no_code". Raises ValueError for malformed tests and SandboxError if the sandbox does not
    work; a program never causes an exception.
    """
    if rule not in RULES:
        raise ValueError(f"`rule` must be 'fraction' or 'all_pass', got {rule!r}.")
    if len(programs) != len(tests):
        raise ValueError(f"Each program needs a list of tests, got {len(programs)} programs and {len(tests)} lists.")
    problems = {
        key: _Problem(normalise_tests(test_list)) for key, test_list in {id(entry): entry for entry in tests}.items()
    }
    jobs = [problems[id(test_list)].job(program) for program, test_list in zip(programs, tests, strict=True)]
    global _seconds
    with _lock:
        pool, started = _running(), time.monotonic()
        pool.run(jobs, limits or Limits())
        _seconds += time.monotonic() - started
    return [_verdict(problems[id(test_list)].reasons(job), rule) for job, test_list in zip(jobs, tests, strict=True)]


class _Problem:
    """A problem's normalised tests, the runs that each of its programs needs, and how these are read.

    JSON turns integer dict keys into text, so a test with such an argument is run twice: with integer keys (as the graders of
    APPS and TACO do for a single argument; here at any depth) and with the published keys. One key type counts, for all
    tests of the problem: the one with which fewer tests end with an error, integer keys if these are equally many. The expected
    outputs have no part in this choice. The other key type counts only if it passes every test; so a program that answers by the type that
    it sees has two tries, if all tests that tell a right answer have such keys. Wrapped expected values (`published`) are read in one way for all tests, too.
    """

    def __init__(self, tests: list[dict]) -> None:
        self.tests = tests
        self.shapes = _SHAPES if are_wrapped(tests) else _SHAPES[:1]
        self.runs = [(i, keys) for i, test in enumerate(tests) for keys in _key_types(test)]

    def job(self, program: str | None) -> Job:
        """Return the runs of one program as a job."""
        tests = [self.tests[i] for i, _ in self.runs]
        return Job(
            program,
            [test["input"].encode("utf-8", "surrogatepass") for test in tests],
            [test["metadata"]["func_name"] if "metadata" in test else "" for test in tests],
            lambda run, output: self._judge(tests[run], output),
            [keys is True for _, keys in self.runs],
            max(map(longest_output, self.tests)),
        )

    def _judge(self, test: dict, output: bytes) -> str:
        """Return the shape in which an output is right, or "wrong_answer"."""
        shapes = (shape for shape in self.shapes if is_right(output, test, is_bare=shape == "passed_bare"))
        return next(shapes, "wrong_answer")

    def reasons(self, job: Job) -> list[str]:
        """Return the reason of each test under the one key type and the one shape that count."""
        by_keys = [max((self._read(job, keys, shape) for shape in self.shapes), key=_passes) for keys in (True, False)]
        return min(by_keys, key=lambda reasons: (_passes(reasons) < len(reasons), reasons.count("error")))

    def _read(self, job: Job, keys: bool, shape: str) -> list[str]:
        """Return the reason of each test if its arguments have keys of this type and its outputs this shape."""
        reasons = [reason for (_, of), reason in zip(self.runs, job.reasons, strict=True) if of in (None, keys)]
        return ["passed" if r == shape else "wrong_answer" if r in _SHAPES else r for r in reasons]


def _passes(reasons: list[str]) -> int:
    return reasons.count("passed")


def _key_types(test: dict) -> tuple[bool | None, ...]:
    """Return whether to run a test with integer keys: both ways if a dict of its arguments has them as text; else None, one run."""
    are_integers = []
    if "metadata" in test and _INTEGER_KEY.search(test["input"]):
        for line in test["input"].split("\n"):
            json.loads(
                line, parse_int=str, object_hook=lambda value: are_integers.append(bool(value) and has_integers(value))
            )
    return (True, False) if any(are_integers) else (None,)


def _verdict(reasons: list[str], rule: str) -> Verdict:
    share = reasons.count("passed") / len(reasons)
    reason = next((reason for reason in reasons if reason != "passed"), "passed")
    return Verdict(share if rule == "fraction" else float(share == 1.0), reason, tuple(reasons))


def call(
    folder: Path, module: str, function: str, arguments: Sequence[list], limits: Limits
) -> list[tuple[str, bytes]]:
    """Call a trusted function on untrusted values (JSON types), each call in a separate sandboxed process.

    The workers import `module` ("name" or "package.name") from `folder` and call its `preload()` before they enter the sandbox; it
    may use all packages that this process can import, also those of PYTHONPATH. Returns (reason, output) per call; a call that returned
    has the reason "passed" and its result as JSON.
    """
    source = f"from {module} import {function}"
    inputs = ["\n".join(map(json.dumps, values)).encode() for values in arguments]
    outputs = [b""] * len(inputs)

    def job(start: int) -> Job:
        def keep(index: int, output: bytes) -> str:
            outputs[start + index] = output
            return "passed"

        batch = inputs[start : start + _CALLS]
        return Job(source, batch, [function] * len(batch), keep)

    jobs = list(map(job, range(0, len(inputs), _CALLS)))
    with _lock:
        _running(module, str(folder)).run(jobs, limits)
    return list(zip([reason for job in jobs for reason in job.reasons], outputs, strict=True))


def level() -> str:
    """Return the sandbox level of this machine, such as "setuid+seccomp+landlock+rlimits", for a run's record."""
    with _lock:
        return _running().level


def require(allow_unsafe: bool = False) -> str:
    """Run the self-test and return the level. Raises SandboxError if a program escapes, unless allow_unsafe."""
    global _is_unsafe_allowed
    with _lock:
        _is_unsafe_allowed = allow_unsafe
        close()
        return _running().level


def take_seconds() -> float:
    """Return the wall-clock seconds spent in `grade_batch` since the last call of this function."""
    global _seconds
    with _lock:
        seconds, _seconds = _seconds, 0.0
        return seconds


def close() -> None:
    """Stop the workers; the next call starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].close()


def _running(module: str = "", folder: str = "") -> Pool:
    """Return the pool whose workers imported this module; start and test one if needed. The caller holds the lock."""
    if (module, folder) in _pools:
        return _pools[module, folder]
    if not sys.platform.startswith("linux"):
        raise SandboxError(
            f"Model-written programs cannot be run on {sys.platform}, because the sandbox uses Linux system calls. "
            "Use the Docker image, or Linux."
        )
    pool = Pool(module, folder)
    try:
        selftest.check(pool)
    except SandboxError as error:
        if not _is_unsafe_allowed or not pool.level:
            pool.close()
            raise SandboxError(
                f"The sandbox failed its self-test: {error} Model-written programs could do harm here and could cheat "
                "the grader. Use a Linux kernel with seccomp (a default Docker container has it), or set "
                "allow_unsafe_code=True to run them without a sandbox."
            ) from error
        logger.warning("UNSAFE: %s Programs are run anyway, because allow_unsafe was set.", error)
    if "landlock" not in pool.level:
        logger.warning("The sandbox runs at the reduced level %r; see the docstring of multirole_sandbox.", pool.level)
    if not module and sys.version_info < _NEWEST_SYNTAX:
        newest = ".".join(map(str, _NEWEST_SYNTAX))
        logger.warning(
            "Programs run on Python %d.%d, where the syntax of %s (type parameters, quotes of any kind inside of f-strings) is an "
            "error with the reward 0. Use Python %s or later where rewards are compared with those of another machine.",
            *sys.version_info[:2], newest, newest,
        )  # fmt: skip
    _pools[module, folder] = pool
    return pool


def _forget() -> None:
    """Drop the parent's workers in a forked child, which starts new ones when needed."""
    global _lock
    _lock = threading.RLock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
