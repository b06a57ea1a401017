"""Grade one file of pairs with this package and with math-verify, in one run: accuracy in both directions and time per pair.

    pip install "math-answers[benchmark]"
    python -m math_answers.against_math_verify            # the pairs of this package; or a file with the columns answer, reference, expected
    python -m math_answers.against_math_verify --write    # also record both graders' verdicts in the file

math-verify is called as its documentation says, `verify(parse(reference), parse(answer))`, with both texts in `\\boxed{}`. Both graders work on one
pair at a time. The time is wall-clock time after a first comparison, which starts this package's worker; math-verify grades in this process.
"""

import argparse
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median

from math_answers import grading
from math_answers.pairs import PAIRS, Pair, read_pairs, write_pairs

GROUPS = {
    "reported in an issue or a test": lambda pair: pair.source != "own" and not pair.source.startswith("kind of "),
    "variations of reported pairs": lambda pair: pair.source.startswith("kind of "),
    "written for this package": lambda pair: pair.source in ("own", ""),
}


def ours(pair: Pair) -> str:
    """Return this package's verdict."""
    return grading.grade([(pair.answer, pair.reference)])[0]


def math_verify(pair: Pair) -> str:
    """Return "yes" if math-verify accepts the answer, else "no"."""
    from math_verify import parse, verify

    gold, answer = (parse(rf"\boxed{{{text}}}") for text in (pair.reference, pair.answer))
    return "yes" if verify(gold, answer) else "no"


def timed(function: Callable[[Pair], str], pairs: Iterable[Pair]) -> tuple[list[str], list[float]]:
    """Return a function's results and the wall-clock seconds of each call."""
    results, seconds = [], []
    for pair in pairs:
        started = time.perf_counter()
        results.append(function(pair))
        seconds.append(time.perf_counter() - started)
    return results, seconds


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
    pairs = read_pairs(options.pairs)
    logging.disable(logging.CRITICAL)  # math-verify warns of every text that it cannot read
    grading.LIMITS = dataclasses.replace(grading.LIMITS, workers=1)
    first = Pair("2x", "x+x", "yes")
    ours(first), math_verify(first)
    verdicts, seconds = timed(ours, pairs)
    theirs, their_seconds = timed(math_verify, pairs)
    pairs = [pair._replace(verdict=a, math_verify=b) for pair, a, b in zip(pairs, verdicts, theirs, strict=True)]
    if options.write:
        write_pairs(pairs, options.pairs)
    print(
        f"math-verify {version('math-verify')}, sympy {version('sympy')}, {len(pairs):,} pairs of {options.pairs.name}\n"
    )
    print(table(pairs))
    means = [1000 * sum(times) / len(times) for times in (seconds, their_seconds)]
    medians = [1000 * median(times) for times in (seconds, their_seconds)]
    print(
        f"\nmilliseconds per pair: mean {means[0]:.1f} and {means[1]:.1f} (ratio {means[0] / means[1]:.2f}), "
        f"median {medians[0]:.2f} and {medians[1]:.2f} (ratio {medians[0] / medians[1]:.2f})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
