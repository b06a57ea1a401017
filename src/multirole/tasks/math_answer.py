"""Decide whether a mathematical answer equals the reference: `extract_boxed(text)` and `grade_answers(pairs)`.

Most pairs are decided by their texts and by exact fractions (`math_text.py`). The rest goes to math-verify, in the
sandbox (`math_compare.py`), because sympy evaluates what the model has written.

Verdicts of `grade_answers`, of which only "correct" earns a reward:
  "correct"     the same value, set, interval or expression
  "wrong"       something else
  "unparsable"  empty, unbalanced braces, or no mathematics that math-verify can read
  "timeout"     not decided within 2 s of CPU time, 30 s of wall-clock time, 512 MiB and the stack
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

import json
import re
from collections.abc import Sequence
from pathlib import Path

from multirole import sandbox
from multirole.sandbox import Limits, SandboxError
from multirole.tasks.math_text import MAX_CHARACTERS, Comparison, closing_brace, decide

MODULE = Path(__file__).with_name("math_compare.py")
LIMITS = Limits(
    test_seconds=2.0,  # of one comparison; most take hundredths
    wall_factor=15.0,
    problem_seconds=86_400.0,
    full_timeouts=1_000_000,
    memory_bytes=512 << 20,
    output_bytes=4096,
    workers=min(4, Limits().workers),  # each holds sympy
)
_MOST_CACHED = 20_000
_cache: dict[Comparison, str] = {}


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

    A verdict depends on its pair only. Raises ValueError for a reference of more than 1,000 characters, and SandboxError
    where math-verify cannot be run.
    """
    for _, reference in pairs:
        if len(reference) > MAX_CHARACTERS:
            raise ValueError(
                f"References may have at most {MAX_CHARACTERS} characters, as answers may, got {len(reference)}: "
                f"{reference[:40]!r}... Shorten it, or leave the problem out."
            )
    decided = [decide(answer, reference) for answer, reference in pairs]
    known = {item: _cache[item] for item in decided if item in _cache}
    missing = list(dict.fromkeys(item for item in decided if not isinstance(item, str) and item not in known))
    known.update(zip(missing, _compare(missing), strict=True))
    if len(_cache) > _MOST_CACHED:
        _cache.clear()
    _cache.update(known)
    return [item if isinstance(item, str) else known[item] for item in decided]


def _compare(comparisons: list[Comparison]) -> list[str]:
    """Return the words of math-verify; a comparison that does not end in order is a "timeout"."""
    results = sandbox.call(MODULE, "judge", [[list(answers), gold] for answers, gold in comparisons], LIMITS)
    words = [json.loads(output) if reason == "passed" else "timeout" for reason, output in results]
    if broken := [word for word in words if word.startswith("broken")]:
        raise SandboxError(f"math-verify could not be run behind the sandbox's walls: {broken[0]}")
    return words
