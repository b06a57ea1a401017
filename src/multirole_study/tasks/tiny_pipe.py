"""tiny_pipe: write `f(xs)`, a pipeline of steps along a list, in which every position must be computed.

A question such as `at 57, add +5, sub +7, xor -3, rest +4` sets a cursor and moves it before every step. The element under the
cursor is folded into a result `r`, and `rest` adds the sum of all elements from the cursor on. The program needs positions
(`r = xs[57]`, `r += xs[62]`, `r -= xs[69]`, ...), so the moves have to be summed. A *long* question has many one-digit moves; a
*wide* one has fewer, most of them with two digits, which are best split into tens and ones. Moves above `TAUGHT_MOVE` are absent
from the embedded base's training data, so that care alone does not solve every problem. The answer is the last ```python fence, graded
on hidden tests. A hash of the *behaviour* decides the split, so that no validation function is in the training split in another
phrasing.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from multirole.types import Problem, Reward
from multirole_sandbox import Limits
from multirole_study.tasks.code import Rule, grade
from multirole_study.tasks.splits import KINDS, Generated, Kind, split_of

NAME = "tiny_pipe"
PROMPTS = "multirole_study:tasks/prompts/tiny_pipe"
"""The prompt templates of the roles (`multirole.workflows.prompts`)."""
LARGEST, LARGEST_MOVE, TAUGHT_MOVE = 99, 54, 49
LENGTHS: dict[Kind, tuple[int, int]] = {"long": (7, 10), "wide": (5, 7)}
"""The smallest and largest number of moves by kind."""
FOLDS = {"add": "+", "sub": "-", "xor": "^"}
START, REST = "at", "rest"
NARROW = [sign * n for sign in (1, -1) for n in range(1, 10)]
WIDE_SHARE = 0.7

Step = tuple[str, int]
"""A word of `FOLDS`, or `REST` in the last step, and the move before it; `START` and a position in the first."""
Reads = list[tuple[str, int]]
"""The reads of a program: a sign of `FOLDS` ("+" in the first) and a position; last "+" and the start of the rest."""


def _lists(seed: str, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(-99, 99) for _ in range(rng.randint(LARGEST + 1, LARGEST + 9))] for _ in range(count)]


PROBES = _lists(f"{NAME}/probes", 8)
TESTS = _lists(f"{NAME}/tests", 8)


def parse(question: str) -> list[Step]:
    """Parse a question into its steps."""
    return [(word, int(move)) for word, move in (part.split(" ") for part in question.split(", "))]


def phrase(steps: list[Step]) -> str:
    """Write steps as a question."""
    return ", ".join(f"{word} {move}" if word == START else f"{word} {move:+d}" for word, move in steps)


def reads_of(steps: list[Step]) -> Reads:
    """Return the reads of a correct program."""
    reads, cursor = [], 0
    for word, move in steps:
        cursor += move
        reads.append((FOLDS.get(word, "+"), cursor))
    return reads


def run(reads: Reads, xs: list[int]) -> int:
    """Compute the result of a program with these reads. Raises IndexError for a position beyond the end."""
    *folds, (_, start) = reads
    result = 0
    for sign, position in folds:
        x = xs[position]
        result = result + x if sign == "+" else result - x if sign == "-" else result ^ x
    return result + sum(xs[start:])


def behaviour(question: str) -> tuple[int, ...]:
    """Return the function's result for each of `PROBES`; equal results mean the same function."""
    reads = reads_of(parse(question))
    return tuple(run(reads, xs) for xs in PROBES)


def kind_of(question: str) -> Kind:
    """Return "wide" if a question has a two-digit move, else "long"."""
    return "wide" if any(abs(move) > 9 for _, move in parse(question)[1:]) else "long"


@cache
def _wide(largest_move: int) -> list[int]:
    return [sign * n for sign in (1, -1) for n in range(11, largest_move + 1) if n % 10]


def _sample(rng: random.Random, kind: Kind, n_steps: int, largest_move: int) -> str | None:
    """Sample a question without repeated moves; None if no move is left."""
    cursor = start = rng.randint(0, LARGEST)
    moves: list[int] = []
    for _ in range(n_steps):
        is_wide = kind == "wide" and rng.random() < WIDE_SHARE
        free = [
            m for m in (_wide(largest_move) if is_wide else NARROW) if m not in moves and 0 <= cursor + m <= LARGEST
        ]
        if not free:
            return None
        moves.append(rng.choice(free))
        cursor += moves[-1]
    folds = [(rng.choice(list(FOLDS)), move) for move in moves[:-1]]
    return phrase([(START, start), *folds, (REST, moves[-1])])


def to_problem(question: str) -> Problem:
    """Return the problem with its hidden tests."""
    reads = reads_of(parse(question))
    reference = {"arguments": [[xs] for xs in TESTS], "expected": [run(reads, xs) for xs in TESTS]}
    return Problem(f"{NAME}/{question}", PROMPTS, question, reference)


def stream(
    split: str, rng: random.Random, lengths: dict[Kind, tuple[int, int]] | None = None, largest_move: int = LARGEST_MOVE
) -> Iterator[Problem]:
    """Yield an endless stream of problems of one split, with repeats; `lengths` are (min, max) moves by kind."""
    while True:
        kind = rng.choice(KINDS)
        question = _sample(rng, kind, rng.randint(*(lengths or LENGTHS)[kind]), largest_move)
        if question is None or kind_of(question) != kind:
            continue
        results = behaviour(question)
        if len(set(results)) > 1 and split_of(str(results)) == split:
            yield to_problem(question)


LIMITS = Limits(test_seconds=1.0, full_timeouts=1, memory_bytes=512 << 20, output_bytes=64 << 10)


def extract(text: str) -> str | None:
    """Return the body of the last ```python fence, or None."""
    fences = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return fences[-1] if fences else None


LINE = re.compile(r"    (?:#[-+=# \w]*|r ([-+^])= xs\[(0|[1-9]\d{0,3})\])\n", re.ASCII)
PROGRAM = re.compile(
    rf"def f\(xs\):\n    r = xs\[(0|[1-9]\d{{0,3}})\]\n((?:{LINE.pattern})*)    return r \+ sum\(xs\[(0|[1-9]\d{{0,3}}):\]\)\n",
    re.ASCII,
)


def read_program(source: str) -> Reads | None:
    """Parse the reads of a program in the usual form; None for any other program."""
    match = PROGRAM.fullmatch(source)
    if match is None:
        return None
    folds = [(sign, int(position)) for sign, position in LINE.findall(match[2]) if sign]
    return [("+", int(match[1])), *folds, ("+", int(match.groups()[-1]))]


@cache
def _computed(reads: tuple[tuple[str, int], ...], outputs: tuple[int, ...], rule: Rule) -> Reward:
    """Compute the sandbox's reward for a program with these reads."""
    reasons = []
    for xs, due in zip(TESTS, outputs, strict=True):
        try:
            reasons.append("passed" if run(list(reads), xs) == due else "wrong_answer")
        except IndexError:
            reasons.append("error")
    return _reward(reasons, rule)


def _reward(reasons: Sequence[str], rule: Rule) -> Reward:
    """Return the reward for these test reasons; of several failures the most severe is the reason."""
    failed = [reason for reason in reasons if reason != "passed"]
    worst = [reason for reason in ("timeout", "error") if reason in failed] or failed or ["passed"]
    value = reasons.count("passed") / len(reasons) if rule == "fraction" else float(not failed)
    return Reward(value, worst[0], not failed)


@dataclass(frozen=True)
class TinyPipe(Generated):
    """The tiny_pipe task. `reward` is the "fraction" of passed tests or "all_pass".

    Programs of the usual form are evaluated here; all others run in the sandbox, with the same result (test_tiny_pipe.py).
    """

    reward: Rule = "fraction"
    name: ClassVar[str] = NAME
    stream = staticmethod(stream)

    def extract(self, text: str) -> str | None:
        """Return the body of the last ```python fence, or None."""
        return extract(text)

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Score by hidden tests; the reason is the most severe failure."""
        programs = list(map(extract, texts))
        reads = [read_program(program or "") for program in programs]
        sandboxed = [None if program_reads else program for program, program_reads in zip(programs, reads, strict=True)]
        tests = [
            json.dumps({"fn_name": "f", "inputs": p.reference["arguments"], "outputs": p.reference["expected"]})
            for p in problems
        ]
        verdicts = grade(sandboxed, tests, self.reward, LIMITS)
        rewards = []
        for problem, program_reads, verdict in zip(problems, reads, verdicts, strict=True):
            if program_reads:
                rewards.append(_computed(tuple(program_reads), tuple(problem.reference["expected"]), self.reward))
            else:
                rewards.append(_reward(verdict.reasons, self.reward) if verdict else Reward(0.0, "no_code", False))
        return rewards
