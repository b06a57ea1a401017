r"""Decide whether mathematical answers equal their references: `grade(pairs)`, `is_equal(answer, reference)` and `accuracy_reward`.

Equal texts, words, units and plain numbers are decided by `decide`, in about 0.1 ms. The rest is compared by `compare`, which evaluates
model-written text with sympy and therefore runs in `multirole_sandbox`, in a process per comparison: no answer can hang or crash the
caller, fill its memory or run code in it. The first comparison starts the workers, which takes seconds.

Verdicts:
  "correct"     the same value, set, interval or expression
  "wrong"       something else
  "unparsable"  empty, unbalanced braces, or no mathematics that the parser can read
  "timeout"     not decided within 2 s of CPU time, 30 s of wall-clock time, 512 MiB and the stack, or a number of more
                than 4 million bits
  "too_long"    more than 1,000 characters, or 4,000 in normal form

Conventions:
  * Numbers are exact: 0.33 is not 1/3, 3.14 is not pi, 1/2004! is not 1/2006!. Variables are real, and
    positive under roots and logarithms, as in answer keys: `\ln x^2` is `2\ln x`. |x| is not x.
  * A unit that only one side has is ignored. Two units must be the same, or convert exactly: 100 cm are 1 m.
  * 50% is 50 and 1/2, but 0.5% is not 0.5. A degree sign is a unit, and 90 degrees are also pi/2.
    "2 hours 30 minutes" is 2.5 hours, `45^\circ 30'` is 45.5 degrees.
  * Number words are factors, not units: 5 lakh are 500000, 5百万 are 5000000. A counted noun is ignored: 8 real solutions are 8.
  * A numeral has one value. One with a base has that base, so `1010_2` is 10 and not 1010; one without a base is read in the
    reference's base, or in base ten: 4210 is `4210_5` only where the reference is. `20_2` is no numeral.
  * `142 \bmod 100` is 42, and `-1 \pmod 7` is 6 or -1.
  * 1,000 and 1{,}000 and "1 000" and 1.000.000 are thousands, 1e3 is 1000; 2 1/2 is 5/2; any other number with a space in
    it is unparsable. 3,14 is 3.14 if the reference is a decimal with a point (as in math-verify), else a list.
  * (2)(3) is 6, a product; math-verify's parser adds the factors, as if they were a mixed number.
  * 0.333... is 1/3, since the period is written three times; 3.14... is no number.
  * "1,2" is a set of two values, and also the pair (1,2) in this order. {1,2} is not (1,2). (1,2) is a pair and the
    open interval alike. [1,2] is closed, and as a reference no list: "1,2" is wrong. "x<1 or x>3" is a union; with a comma or "and", relations are a union or an intersection.
  * `x=5` equals 5 in both directions, `y=5` does not equal `x=5`; x > 2 is (2, oo). X is not x, e and i are constants,
    but names alone on the left side.
  * A letter of a multiple choice may have its text behind it: (B) 42 is B, but `B\cup C` is not. Where the reference has
    both, either is right, and both must agree: D and aspirin are (D) aspirin, (D) ibuprofen is not.
  * Letters that the answerer chooses are compared by meaning (`letters`): bound ones, declared ones, and constants of
    integration. `2n\pi, n\in\mathbb{Z}` is `2k\pi, k\in\mathbb{Z}`, x^2+c is x^2+C; without the constant, x^2 is wrong.
  * Two formats of one date are equal (`dates`); 3/5/2024 and 1/2 are no dates.
  * `x\approx 3` is no value, and `\sqrt{2}\approx 1.4` is `\sqrt{2}`. f'(x) is not f(x). 3:00 PM is 15:00, and 3:00.
    `k\pi, k\in\mathbb{Z}` is `k\pi`, and the same numbers as `\pi-k\pi, k\in\mathbb{Z}`.
`pairs.csv` has about 2,400 examples, including the known errors.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import multirole_sandbox as sandbox
from math_answers.decide import MAX_CHARACTERS, Undecided, decide
from math_answers.extraction import extract
from multirole_sandbox import Limits, SandboxError

Verdict = Literal["correct", "wrong", "unparsable", "timeout", "too_long"]

COMPARE = (Path(__file__).parents[1], "math_answers.compare")
"""The folder and the name of the module that the sandbox's workers import."""
LIMITS = Limits(
    test_seconds=2.0,  # per comparison; most take hundredths
    idle_factor=15.0,
    problem_seconds=86_400.0,
    full_timeouts=1_000_000,
    memory_bytes=512 << 20,
    output_bytes=4096,
    workers=min(4, Limits().workers),  # each holds sympy
)


def is_equal(answer: str, reference: str) -> bool:
    """Return whether an answer equals a reference, both without their box; see `grade`."""
    return grade([(answer, reference)]) == ["correct"]


def grade(pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Return one verdict (see the module) per (answer, reference) pair, both without their box. Thread-safe.

    A verdict depends only on its pair. Many pairs in one call share the workers, up to four.

    Raises:
        ValueError: a reference has more than 1,000 characters.
        multirole_sandbox.SandboxError: the comparison cannot run on this machine (it needs Linux with seccomp), or sympy or the parser
            cannot be imported. No answer causes it.
    """
    for _, reference in pairs:
        if len(reference) > MAX_CHARACTERS:
            raise ValueError(
                f"References may have at most {MAX_CHARACTERS} characters, got {len(reference)}: "
                f"{reference[:40]!r}... Shorten it, or leave the problem out."
            )
    decided = [decide(answer, reference) for answer, reference in pairs]
    undecided = list(dict.fromkeys(item for item in decided if not isinstance(item, str)))
    verdicts = dict(zip(undecided, _compare(undecided), strict=True))
    return [cast(Verdict, item if isinstance(item, str) else verdicts[item]) for item in decided]


def _compare(pairs: list[Undecided]) -> list[str]:
    """Run the comparisons in the sandbox; one that does not finish normally is a "timeout"."""
    results = sandbox.call(*COMPARE, "judge", [list(pair) for pair in pairs], LIMITS)
    words = [json.loads(output) if reason == "passed" else "timeout" for reason, output in results]
    if broken := [word for word in words if word.startswith("broken")]:
        raise SandboxError(f"The comparison could not be run inside the sandbox: {broken[0]}")
    return words


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str | None] | None = None,
    answer: Sequence[str | None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward 1 for a completion whose boxed answer equals its reference, else 0: a reward function for TRL's trainers.

    Args:
        completions: texts, or conversations (lists of messages) whose last message is graded.
        solution: the references, one per completion: the dataset's column of this name, as for `trl.rewards.accuracy_reward`. A
            reference may have a box with text around it.
        answer: the references, if the column has this name instead.

    A completion without a box has the reward 0, also where only its thought has one. Where the reference is None, so is the reward: TRL
    leaves this function out there. The errors are those of `grade`, and ValueError
    unless the dataset has exactly one of the two columns.
    """
    if (solution is None) == (answer is None):
        raise ValueError(
            "The dataset needs the column `solution` or the column `answer` with the references, got "
            f"{'neither' if solution is None else 'both'}. Rename its column, or remove one of the two."
        )
    references = [None if text is None else str(text) for text in (answer if solution is None else solution) or ()]
    rows = list(zip([extract(_text_of(completion)) for completion in completions], references, strict=True))
    boxes = [(reply, extract(text) or text) for reply, text in rows if reply is not None and text is not None]
    verdicts = iter(grade(boxes))
    return [
        None if text is None else 0.0 if reply is None else float(next(verdicts) == "correct") for reply, text in rows
    ]


def _text_of(completion: Any) -> str:
    """Return the text of a completion; of a conversation, that of its last message."""
    content = completion if isinstance(completion, str) else completion[-1].get("content")
    if isinstance(content, list):  # parts, as of models that read images
        return "".join(part.get("text") or "" for part in content)
    return content or ""
