r"""Decide whether a mathematical answer equals the reference: `extract_boxed(text)` and `grade_answers(pairs)`.

Equal texts and plain numbers are decided here. The rest goes to math-verify, in the sandbox (`math_compare.py`),
because sympy evaluates what the model has written.

Verdicts of `grade_answers`, of which only "correct" earns a reward:
  "correct"     the same value, set, interval or expression
  "wrong"       something else
  "unparsable"  empty, unbalanced braces, or no mathematics that math-verify can read
  "timeout"     not decided within 2 s of CPU time, 30 s of wall-clock time, 512 MiB and the stack
  "too_long"    more than 1,000 characters

Departures from the released code, whose grader is string equality or a sympy comparison inside the trainer: 2/4 is 1/2
and 84/2 is 42 here; the text after the last `</think>` counts, not after the first; `<|begin_of_box|>` means nothing;
`\boxed {5}` with a space is a box.

Conventions, beside those of math-verify:
  * A percent sign and a degree sign at the end are left out: 50% is 50. So is a unit in \text{} behind an answer whose
    reference is a plain number: 5\text{ cm} is 5, but 5 cm without \text{} is not, nor is 5 a reference of 5\text{ cm}.
  * 1,000 and 1{,}000 and "1 000" are thousands, 1e3 is 1000; any other number with a space in it is unparsable.
  * Decimals are exact: 0.33 is not 1/3, 3.14 is not pi.
  * "1,2" is a set of two values, and also the pair (1,2) in this order. {1,2} is not (1,2). (1,2) is a pair and the
    open interval alike. [1,2] is closed.
  * `x=5` equals 5 in both directions, `y=5` does not equal `x=5`; x > 2 is (2, oo).
What math-verify gets wrong or cannot read is listed in `tests/data/math_pairs.tsv` as "known limit".
"""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import multirole_sandbox as sandbox
from multirole_sandbox import Limits, SandboxError

MAX_CHARACTERS = 1000
"""Of an answer, and of a reference."""
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

_SPELLING = (  # of whole texts: (pattern, replacement), in this order
    (re.compile(r"[–—−]"), "-"),
    (re.compile(r"\\?\$|\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|~|\s+"), " "),
    (re.compile(r"(?<![A-Za-z0-9]) +| +(?![A-Za-z0-9])"), ""),
    (re.compile(r"(?<!\.)\.$|\\?%$| percent$|°$|\^\\circ$|\^\{\\circ\}$"), ""),
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,|\{,\}| )\d{3}(?:\1\d{3})*(?:\.\d+)?", re.ASCII)
_SPACED = re.compile(r"[+-]?[\d.,]*\d \d")
_UNIT = re.compile(r"(?<=\d)\\(?:text|mathrm)\{(?![ied]\})[A-Za-z][A-Za-z/]*\}(?:\^\{?[23]\}?)?$")
_RATIONAL = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?|\d+/0*[1-9]\d*)", re.ASCII)


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes one opened just before `start`, or None."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


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
    asked = list(dict.fromkeys(item for item in decided if not isinstance(item, str)))
    found = dict(zip(asked, _compare(asked), strict=True))
    return [item if isinstance(item, str) else found[item] for item in decided]


def _compare(pairs: list[tuple[str, str]]) -> list[str]:
    """Return the words of math-verify; a comparison that does not end in order is a "timeout"."""
    results = sandbox.call(MODULE, "judge", [list(pair) for pair in pairs], LIMITS)
    words = [json.loads(output) if reason == "passed" else "timeout" for reason, output in results]
    if broken := [word for word in words if word.startswith("broken")]:
        raise SandboxError(f"math-verify could not be run behind the sandbox's walls: {broken[0]}")
    return words


def decide(answer: str, reference: str) -> str | tuple[str, str]:
    """Return the verdict where the texts give one, else the two texts that math-verify must compare."""
    if len(answer) > MAX_CHARACTERS:
        return "too_long"
    ours, gold = _spell(answer), _spell(reference)
    if not ours or closing_brace(ours + "}", 0) != len(ours):
        return "unparsable"
    if _RATIONAL.fullmatch(gold):
        ours = _UNIT.sub("", ours)
    if ours == gold:
        return "correct"
    if _SPACED.match(ours):  # math-verify would take it for a product
        return "unparsable"
    if _SPACED.match(gold):
        return "wrong"
    if _RATIONAL.fullmatch(ours) and _RATIONAL.fullmatch(gold):
        return "correct" if Fraction(ours) == Fraction(gold) else "wrong"
    return ours, gold


def _spell(text: str) -> str:
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    return re.sub(r",|\{,\}| ", "", text) if _THOUSANDS.fullmatch(text) else text
