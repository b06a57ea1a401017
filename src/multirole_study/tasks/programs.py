"""programs: write a Python function of two steps and an edge case, such as "collects the numbers in xs that occur exactly once, and returns
the largest of them. If there are none, it returns -1".

A step chooses or changes elements of a list, words of a text or entries of a dictionary, the next one computes the result of those, and a
second sentence says what is returned where there are none. The table is that of `spec_table`: splits are disjoint by text and by
behaviour, and every function is tested on the edge cases of its argument. The prompts are those of `functions`, which ask for the program only: to the paper's prompts
for code a model of half a billion parameters replies with a program, examples and a long explanation.

The results were calibrated on training problems: a result of a first table was dropped if four or more replies were sampled for it and none passed all tests, and
results of one operation were added. Many replies failed only where there are no elements; so a result of nothing that exists, such as the sum 0, is what is returned, and
only the others return a special value. `tools/qwen_card.py` measured the result (docs/qwen.json); validation problems of an earlier table had been looked at before.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from multirole_study.tasks.functions import PROMPTS
from multirole_study.tasks.spec_table import Arguments, Spec, Table, TableTask

NAME = "programs"
WORDS = ["apple", "eve", "river", "stone", "otto", "green", "a", "seven", "music", "level", "window", "garden", "ant", "orange", "silver", "noon"]  # fmt: skip
NAMES = ["ann", "bob", "carla", "dave", "eve", "franz", "gina", "hugo", "ida", "julius"]
QUESTION = """Write a Python function f({signature}) that {sentence}"""

Step = tuple[str, Callable[[Any], list]]
"""What a step chooses or computes, in words, and the function."""
Result = tuple[str, Callable[[list], object]]


def _lists(rng: random.Random) -> Arguments:
    return ([rng.randint(-6, 12) for _ in range(rng.randint(2, 9))],)


def _texts(rng: random.Random) -> Arguments:
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 6))]
    return (" ".join(word.capitalize() if rng.random() < 0.25 else word for word in words),)


def _dictionaries(rng: random.Random) -> Arguments:
    return ({name: rng.randint(-3, 12) for name in rng.sample(NAMES, rng.randint(1, 6))},)


EDGES: dict[str, list[Arguments]] = {
    "xs": [([],), ([4],), ([3, 3, 3],), ([-5, -2, -2],)],
    "s": [("",), ("a",), ("noon noon",), ("Stone",)],
    "d": [({},), ({"ann": 4},), ({"ann": 3, "bob": 3},), ({"gina": -2, "eve": -5},)],
}


def _steps_of_a_list() -> Iterator[Step]:
    yield "even numbers in xs", lambda xs: [x for x in xs if x % 2 == 0]
    yield "numbers in xs whose absolute value is greater than 4", lambda xs: [x for x in xs if abs(x) > 4]
    yield "numbers in xs that differ from the number directly before them", lambda xs: [b for a, b in pairwise(xs) if a != b]  # fmt: skip
    yield "numbers in xs that are less than the number directly after them", lambda xs: [a for a, b in pairwise(xs) if a < b]  # fmt: skip
    yield "numbers at even positions of xs (the first number has position 0)", lambda xs: xs[::2]
    for k in (3, 4):
        yield f"numbers in xs that are divisible by {k}", lambda xs, k=k: [x for x in xs if x % k == 0]  # type: ignore[misc]
    for k in (0, 3, 6):
        yield f"numbers in xs that are less than {k}", lambda xs, k=k: [x for x in xs if x < k]  # type: ignore[misc]
    for k in (1, 2, 4, 5, 7):
        yield f"numbers in xs that are greater than {k}", lambda xs, k=k: [x for x in xs if x > k]  # type: ignore[misc]
    yield "squares of the odd numbers in xs", lambda xs: [x * x for x in xs if x % 2]
    yield "numbers in xs that occur exactly once", lambda xs: [x for x in xs if xs.count(x) == 1]
    yield "numbers in xs that occur more than once", lambda xs: [x for x in xs if xs.count(x) > 1]
    yield "numbers in xs that are greater than the number directly before them", lambda xs: [b for a, b in pairwise(xs) if b > a]  # fmt: skip
    yield "numbers in xs that are greater than all numbers before them (the first number is one of them)", lambda xs: [x for i, x in enumerate(xs) if all(y < x for y in xs[:i])]  # fmt: skip
    yield "numbers in xs that are greater than the average of xs", lambda xs: [x for x in xs if x * len(xs) > sum(xs)]
    yield "numbers at odd positions of xs (the first number has position 0)", lambda xs: xs[1::2]
    yield "absolute differences of neighbouring numbers in xs", lambda xs: [abs(b - a) for a, b in pairwise(xs)]  # fmt: skip
    yield "sums of neighbouring numbers in xs", lambda xs: [a + b for a, b in pairwise(xs)]
    yield "numbers in xs that come before the first negative number", lambda xs: xs[: next((i for i, x in enumerate(xs) if x < 0), len(xs))]  # fmt: skip
    yield "numbers in xs that come after the first even number", lambda xs: xs[next((i + 1 for i, x in enumerate(xs) if x % 2 == 0), len(xs)) :]  # fmt: skip


def _results_of_numbers() -> Iterator[Result]:
    yield "the sum of them", sum
    yield "the largest of them", max
    yield "the smallest of them", min
    yield "the difference between the largest and the smallest of them", lambda xs: max(xs) - min(xs)
    yield "how many there are", len
    yield "how many different ones there are", lambda xs: len(set(xs))
    yield "the last of them", lambda xs: xs[-1]
    yield "a list of them, in reverse order", lambda xs: xs[::-1]


def _steps_of_a_text() -> Iterator[Step]:
    yield "words of s that start with a vowel, in upper or lower case", lambda s: [w for w in s.split() if w[0].lower() in "aeiou"]  # fmt: skip
    for letter in "eno":
        yield f"words of s that contain the letter '{letter}', in lower case", lambda s, c=letter: [w for w in s.split() if c in w]  # type: ignore[misc]  # fmt: skip
    yield "words of s at odd positions (the first word has position 0)", lambda s: s.split()[1::2]
    yield "words of s that are shorter than the longest word of s", lambda s: [w for w in s.split() if len(w) < max(map(len, s.split()))]  # fmt: skip
    yield "words of s that end with a vowel", lambda s: [w for w in s.split() if w[-1] in "aeiou"]
    for k in (2, 3, 4, 5):
        yield f"words of s that have more than {k} letters", lambda s, k=k: [w for w in s.split() if len(w) > k]  # type: ignore[misc]
    yield "words of s that begin with a capital letter", lambda s: [w for w in s.split() if w[0].isupper()]
    yield "words of s that read the same backwards, in lower case", lambda s: [w.lower() for w in s.split() if w.lower() == w.lower()[::-1]]  # fmt: skip
    yield "words of s that occur exactly once", lambda s: [w for w in s.split() if s.split().count(w) == 1]
    yield "words of s that are longer than the word directly before them", lambda s: [b for a, b in pairwise(s.split()) if len(b) > len(a)]  # fmt: skip
    yield "words of s that contain a letter more than once, in upper or lower case", lambda s: [w for w in s.split() if max(Counter(w.lower()).values()) > 1]  # fmt: skip
    yield "words of s that have an even number of letters, reversed", lambda s: [w[::-1] for w in s.split() if len(w) % 2 == 0]  # fmt: skip


def _results_of_words() -> Iterator[Result]:
    yield "how many there are", len
    yield "how many different ones there are", lambda ws: len(set(ws))
    yield "the first of them", lambda ws: ws[0]
    yield "the longest of them (the first one if there are several)", lambda ws: max(ws, key=len)
    yield "a text of them, in reverse order and joined by hyphens", lambda ws: "-".join(ws[::-1])
    yield "a list of them, sorted by length and then alphabetically", lambda ws: sorted(ws, key=lambda w: (len(w), w))
    yield "the total number of vowels in them", lambda ws: sum(c in "aeiouAEIOU" for w in ws for c in w)
    yield "a list of them, in upper case", lambda ws: [w.upper() for w in ws]
    yield "the length of the shortest of them", lambda ws: min(map(len, ws))


def _steps_of_a_dictionary() -> Iterator[Step]:
    yield "entries of d whose value is negative", lambda d: [(n, v) for n, v in d.items() if v < 0]
    yield "entries of d whose value is less than 5", lambda d: [(n, v) for n, v in d.items() if v < 5]
    for letter in "ai":
        yield f"entries of d whose key contains the letter '{letter}'", lambda d, c=letter: [(n, v) for n, v in d.items() if c in n]  # type: ignore[misc]  # fmt: skip
    for k in (2, 4, 6, 8):
        yield f"entries of d whose value is greater than {k}", lambda d, k=k: [(n, v) for n, v in d.items() if v > k]  # type: ignore[misc]
    yield "entries of d whose value is even", lambda d: [(n, v) for n, v in d.items() if v % 2 == 0]
    yield "entries of d whose key has more than 3 letters", lambda d: [(n, v) for n, v in d.items() if len(n) > 3]
    yield "entries of d whose value is greater than the average of all values", lambda d: [(n, v) for n, v in d.items() if v * len(d) > sum(d.values())]  # fmt: skip
    yield "entries of d whose value no other key has", lambda d: [(n, v) for n, v in d.items() if [*d.values()].count(v) == 1]  # fmt: skip
    yield "entries of d whose key begins with a vowel", lambda d: [(n, v) for n, v in d.items() if n[0] in "aeiou"]


def _results_of_entries() -> Iterator[Result]:
    yield "how many there are", len
    yield "the largest of their values", lambda e: max(v for _, v in e)
    yield "a list of their values, sorted in ascending order", lambda e: sorted(v for _, v in e)
    yield "the sum of their values", lambda e: sum(v for _, v in e)
    yield "the key with the largest value among them (the alphabetically first one if there are several)", lambda e: min(e, key=lambda p: (-p[1], p[0]))[0]  # fmt: skip
    yield "a list of their keys, sorted by value in descending order and then alphabetically", lambda e: [n for n, _ in sorted(e, key=lambda p: (-p[1], p[0]))]  # fmt: skip
    yield "a dictionary of them, with every value doubled", lambda e: {n: 2 * v for n, v in e}
    yield "the total number of letters in their keys", lambda e: sum(len(n) for n, _ in e)
    yield "the difference between the largest and the smallest of their values", lambda e: max(v for _, v in e) - min(v for _, v in e)  # fmt: skip


EMPTY = (("-1", -1), ("None", None), ("0", 0))
"""What is returned in turn if a step leaves nothing and the result of nothing does not exist, such as the largest of no numbers: as it is written, and the value."""
COMBINED = {
    "xs": (_steps_of_a_list, _results_of_numbers),
    "s": (_steps_of_a_text, _results_of_words),
    "d": (_steps_of_a_dictionary, _results_of_entries),
}
INPUTS = {"xs": _lists, "s": _texts, "d": _dictionaries}


def _without_elements(result: Callable[[list], object], turn: int) -> tuple[str, object]:
    """Return what a result is if there are no elements, such as 0 for a sum, as it is written and the value; if it does not exist, one of `EMPTY`."""
    try:
        empty = result([])
    except (ValueError, IndexError):
        return EMPTY[turn % len(EMPTY)]
    return repr(empty), empty


def _programs() -> Iterator[Spec]:
    """Combine every step with every result."""
    for signature, (steps, results) in COMBINED.items():
        for i, (chosen, step) in enumerate(steps()):
            for j, (described, result) in enumerate(results()):
                written, empty = _without_elements(result, i + j)
                sentence = f"collects the {chosen}, and returns {described}. If there are none, it returns {written}."

                def function(argument: Any, step: Any = step, result: Any = result, empty: object = empty) -> object:
                    elements = step(argument)
                    return result(elements) if elements else empty

                yield Spec(signature, sentence, function)


TABLE = Table(NAME, PROMPTS, QUESTION, (_programs,), INPUTS, n_tests=10, edges=EDGES, validation_share=3)


@dataclass(frozen=True)
class Programs(TableTask):
    """The programs task."""

    name: ClassVar[str] = NAME
    table: ClassVar[Table] = TABLE
