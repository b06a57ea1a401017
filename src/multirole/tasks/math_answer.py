"""Decide whether a mathematical answer equals the reference: `extract_boxed(text)` and `grade_answers(pairs)`.

Most pairs are decided by their texts and by exact fractions (`math_text.py`). The rest goes to math-verify, in
processes of its own (`math_worker.py`), because sympy evaluates what the model has written.

Verdicts of `grade_answers`, of which only "correct" earns a reward:
  "correct"     the same value, set, interval or expression
  "wrong"       something else
  "unparsable"  empty, unbalanced braces, or no mathematics that math-verify can read
  "timeout"     not decided within 2 s of CPU time, 6 s of wall-clock time, 512 MiB and the stack
  "error"       the process of this comparison was killed twice from outside
  "too_long"    more than 1,000 characters

Departures from the released code, whose grader is string equality or a sympy comparison inside the trainer: 2/4 is 1/2
and 84/2 is 42 here; the text after the last `</think>` counts, not after the first; `<|begin_of_box|>` means nothing;
`\\boxed {5}` with a space is a box.

Conventions:
  * A percent sign may be left out or added (50% equals 50 and 0.5), and so may a unit (5 cm equals 5). Two different
    units are wrong, and nothing is converted between them.
  * 1,000 and 1{,}000 and "1 000" are thousands; any other {,} is a decimal comma.
  * Decimals are exact: 0.33 is not 1/3, 3.14 is not pi.
  * "1,2" is a set of two values, and also the pair (1,2) in this order. {1,2} is not (1,2). (1,2) is a pair and the
    open interval alike. [1,2] is closed.
  * `x=5` equals 5 in both directions, `y=5` does not equal `x=5`; x > 2 is (2, oo).
  * Words in \\text{} are compared as words, without case.
What math-verify still gets wrong is listed in `tests/data/math_pairs.tsv` as "known limit".
"""

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from multirole.tasks.math_text import MAX_CHARACTERS, Comparison, closing_brace, decide

_WORKER = Path(__file__).with_name("math_worker.py")
_CPU_SECONDS = 2  # of one comparison; most take hundredths
_MAX_CACHED = 20_000

_lock = threading.RLock()
_worker: subprocess.Popen[str] | None = None
_cache: dict[Comparison, str] = {}


class GraderError(RuntimeError):
    """math-verify cannot be run at all; this says nothing about the answers."""


def extract_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, None without one or where its braces do not close; in linear time.

    The last `\\boxed` decides also when it is truncated or has no brace and an earlier one is complete (the released
    code's rule). `\\{` and `\\}` do not count as braces. Only text after the last `</think>` counts.
    """
    text = text.rpartition("</think>")[2]
    start, end = len(text), len(text)
    while (start := text.rfind("\\boxed", 0, end)) >= 0 and text[start + 6 : start + 7].isalpha():
        end = start  # another command, such as \boxedeq
    opening = re.compile(r"\s*\{").match(text, start + 6) if start >= 0 else None
    if opening is None:
        return None
    closing = closing_brace(text, opening.end())
    return None if closing is None else text[opening.end() : closing].strip()


def grade_answers(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return one verdict (see the module) per (answer, reference), both without their box. Safe to call from any thread.

    A verdict depends on its pair only. Raises ValueError for a reference of more than 1,000 characters, and GraderError
    where math-verify cannot be run.
    """
    for _, reference in pairs:
        if len(reference) > MAX_CHARACTERS:
            raise ValueError(
                f"References may have at most {MAX_CHARACTERS} characters, as answers may, got {len(reference)}: "
                f"{reference[:40]!r}... Shorten it, or leave the problem out."
            )
    decided = [decide(answer, reference) for answer, reference in pairs]
    wanted = dict.fromkeys(item for item in decided if not isinstance(item, str))
    with _lock:
        missing = [comparison for comparison in wanted if comparison not in _cache]
        if missing:
            _cache.update(zip(missing, _compare(missing), strict=True))
        words = {comparison: _cache[comparison] for comparison in wanted}
        while len(_cache) > _MAX_CACHED:
            del _cache[next(iter(_cache))]  # the oldest
    return [item if isinstance(item, str) else words[item] for item in decided]


def close() -> str:
    """Stop the process and return its messages; the next call of `grade_answers` starts another one."""
    global _worker
    with _lock:
        if _worker is None:
            return ""
        _worker.kill()
        _, messages = _worker.communicate()
        _worker = None
        return messages


def _compare(comparisons: list[Comparison], attempts: int = 2) -> list[str]:
    """Return the words of math-verify; a process that dies on the way is replaced once. The caller holds the lock."""
    global _worker
    _worker = worker = _worker or _start()
    reply, messages = "", ""
    try:
        assert worker.stdin is not None and worker.stdout is not None
        print(json.dumps(comparisons), file=worker.stdin, flush=True)
        reply = worker.stdout.readline()
    except BrokenPipeError:
        reply = ""
    finally:
        if not reply.endswith("]\n"):  # also after Ctrl-C: a late reply must not be taken for the next one
            messages = close()
    if reply.endswith("]\n"):
        return json.loads(reply)
    if attempts > 1:
        return _compare(comparisons, attempts - 1)
    raise GraderError(f"The process that runs math-verify ended twice; its last message: {messages[-500:].strip()!r}")


def _start() -> subprocess.Popen[str]:
    width = min(4, len(os.sched_getaffinity(0)))
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER), str(width), str(_CPU_SECONDS)],  # -I would ignore PYTHONHASHSEED
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _forget() -> None:
    """Leave the parent's process alone in a forked copy of this one."""
    global _worker, _lock
    _lock, _worker = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
