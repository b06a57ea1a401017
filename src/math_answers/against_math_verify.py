"""Grade one file of pairs with this package and with math-verify, in one run: accuracy in both directions and time per pair.

    pip install "math-answers[benchmark]"
    python -m math_answers.against_math_verify            # the pairs of this package; or a file with the columns answer, reference, expected
    python -m math_answers.against_math_verify --write    # also record both graders' verdicts in the file

math-verify is called as its documentation says, `verify(parse(reference), parse(answer))`, with both texts in `\\boxed{}`, pair by pair in this process.
This package gets all pairs in one call, as from a reward function, with one worker. Times are CPU time of all processes, which other work on the machine
hardly changes; the start of the worker is measured on its own.
"""

import argparse
import dataclasses
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import multirole_sandbox as sandbox
from math_answers import grading
from math_answers.decide import decide
from math_answers.pairs import PAIRS, Pair, read_pairs, write_pairs

GROUPS = {
    "reported in an issue or a test": lambda pair: pair.source != "own" and not pair.source.startswith("kind of "),
    "variations of reported pairs": lambda pair: pair.source.startswith("kind of "),
    "written for this package": lambda pair: pair.source in ("own", ""),
}


def math_verify(pair: Pair) -> str:
    """Return "yes" if math-verify accepts the answer, else "no"."""
    from math_verify import parse, verify

    gold, answer = (parse(rf"\boxed{{{text}}}") for text in (pair.reference, pair.answer))
    return "yes" if verify(gold, answer) else "no"


def timed(function: Callable[[Pair], Any], pairs: Iterable[Pair]) -> tuple[list, float]:
    """Return a function's results and its CPU seconds."""
    started = time.process_time()
    return [function(pair) for pair in pairs], time.process_time() - started


def graded(pairs: list[Pair]) -> tuple[list[str], float]:
    """Return this package's verdicts, and the CPU seconds of this process and of a new worker."""
    sandbox.close()
    started = _cpu_seconds()
    verdicts = grading.grade([(pair.answer, pair.reference) for pair in pairs])
    sandbox.close()  # the time of a process is known when it has ended
    return list(verdicts), _cpu_seconds() - started


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def table(pairs: list[Pair]) -> str:
    """Return the table of both graders' right decisions, from the columns `verdict` and `math_verify`."""
    lines = ["| pairs | n | math_answers | math-verify |", "|---|---|---|---|"]
    for name, belongs in (GROUPS | {"all": lambda pair: True}).items():
        group = [pair for pair in pairs if belongs(pair)]
        for title, rows in (
            ("right answers accepted", [pair for pair in group if pair.is_right]),
            ("wrong answers refused", [pair for pair in group if not pair.is_right]),
            ("decided as expected", group),
        ):
            if rows:
                counts = Counter(
                    (grader, says == pair.is_right)
                    for pair in rows
                    for grader, says in (("ours", pair.verdict == "correct"), ("theirs", pair.math_verify == "yes"))
                )
                lines.append(
                    f"| {name}: {title} | {len(rows):,} | {counts['ours', True]:,} | {counts['theirs', True]:,} |"
                )
    return "\n".join(lines)


def main() -> int:
    """Grade the pairs with both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs", nargs="?", type=Path, default=PAIRS, help="a CSV file; default: the pairs of this package"
    )
    parser.add_argument("--write", action="store_true", help="record both graders' verdicts in the file")
    options = parser.parse_args()
    if find_spec("math_verify") is None:
        parser.error("math-verify is not installed. Write: pip install math-verify==0.9.0")
    pairs = read_pairs(options.pairs)
    logging.disable(logging.CRITICAL)  # math-verify warns of every text that it cannot read
    grading.LIMITS = dataclasses.replace(grading.LIMITS, workers=1)
    first = Pair("2x", "x+x", "yes")
    math_verify(first)
    start = graded([first])[1]
    verdicts, seconds = graded(pairs)
    theirs, their_seconds = timed(math_verify, pairs)
    decided, by_text = timed(lambda pair: decide(pair.answer, pair.reference), pairs)
    pairs = [pair._replace(verdict=a, math_verify=b) for pair, a, b in zip(pairs, verdicts, theirs, strict=True)]
    if options.write:
        write_pairs(pairs, options.pairs)
    print(
        f"math-verify {version('math-verify')}, sympy {version('sympy')}, {len(pairs):,} pairs of {options.pairs.name}\n"
    )
    print(table(pairs))
    ours, base = (1000 * total / len(pairs) for total in (seconds - start, their_seconds))
    print(
        f"\nCPU time per pair: math_answers {ours:.1f} ms, math-verify {base:.1f} ms, ratio {ours / base:.2f}. The start of a worker takes {start:.1f} s.\n"
        f"{sum(isinstance(item, str) for item in decided):,} pairs are decided by their texts; reading a pair takes {1000 * by_text / len(pairs):.2f} ms."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
