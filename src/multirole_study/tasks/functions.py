"""functions: write a Python function from one English sentence, such as "returns the sum of the even numbers in xs".

The functions come from a table of sentence templates with numbers and letters (`spec_table`). The answer is the last ``` block, graded on
hidden tests in the sandbox.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from multirole_study.tasks.spec_table import Arguments, Function, Spec, Table, TableTask

NAME = "functions"
PROMPTS = "multirole_study:tasks/prompts/functions"
"""The prompt templates of the roles (`multirole.workflows.prompts`)."""
WORDS = [
    "apple",
    "banana",
    "river",
    "stone",
    "cloud",
    "green",
    "little",
    "seven",
    "music",
    "paper",
    "window",
    "garden",
    "summer",
    "orange",
    "silver",
]
LETTERS = "aegilnorst"
QUESTION = """Complete this Python function, so that it returns {sentence}.

```python
def f({signature}):
```"""


# ---- inputs


def _numbers(rng: random.Random) -> Arguments:
    return (rng.randint(-30, 60),)


def _pairs(rng: random.Random) -> Arguments:
    return rng.randint(-20, 40), rng.randint(1, 12)


def _lists(rng: random.Random) -> Arguments:
    return ([rng.randint(-9, 20) for _ in range(rng.randint(3, 8))],)


def _texts(rng: random.Random) -> Arguments:
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 3))]
    return (" ".join(word.capitalize() if rng.random() < 0.3 else word for word in words),)


INPUTS: dict[str, Callable[[random.Random], Arguments]] = {
    "n": _numbers,
    "a, b": _pairs,
    "xs": _lists,
    "s": _texts,
}
"""Generators of random arguments by signature."""


# ---- the table; loop variables are bound as default arguments, because a closure would see their last value


def _of_a_number() -> Iterator[Spec]:
    def spec(sentence: str, function: Function) -> Spec:
        return Spec("n", sentence, function)

    yield spec("the square of n", lambda n: n * n)
    yield spec("the cube of n", lambda n: n**3)
    yield spec("the absolute value of n", abs)
    yield spec("n with the opposite sign", lambda n: -n)
    yield spec("True if n is even and False otherwise", lambda n: n % 2 == 0)
    yield spec("True if n is odd and False otherwise", lambda n: n % 2 == 1)
    yield spec("True if n is positive and False otherwise", lambda n: n > 0)
    yield spec("True if n is negative and False otherwise", lambda n: n < 0)
    yield spec("the last digit of the absolute value of n", lambda n: abs(n) % 10)
    for k in range(2, 15):
        yield spec(f"n plus {k}", lambda n, k=k: n + k)
        yield spec(f"n minus {k}", lambda n, k=k: n - k)
        yield spec(f"n times {k}", lambda n, k=k: n * k)
        yield spec(f"{k} minus n", lambda n, k=k: k - n)
        yield spec(f"the square of n plus {k}", lambda n, k=k: n * n + k)
        yield spec(f"True if n is greater than {k} and False otherwise", lambda n, k=k: n > k)
        yield spec(f"the larger of n and {k}", lambda n, k=k: max(n, k))
        yield spec(f"the smaller of n and {k}", lambda n, k=k: min(n, k))
        yield spec(f"n times 2 plus {k}", lambda n, k=k: 2 * n + k)
        if k < 10:
            yield spec(f"the remainder of n divided by {k}", lambda n, k=k: n % k)
            yield spec(f"True if n is divisible by {k} and False otherwise", lambda n, k=k: n % k == 0)
            yield spec(f"n divided by {k}, rounded down", lambda n, k=k: n // k)


def _of_two_numbers() -> Iterator[Spec]:
    def spec(sentence: str, function: Function) -> Spec:
        return Spec("a, b", sentence, function)

    yield spec("the sum of a and b", lambda a, b: a + b)
    yield spec("a minus b", lambda a, b: a - b)
    yield spec("the product of a and b", lambda a, b: a * b)
    yield spec("the larger of a and b", max)
    yield spec("the smaller of a and b", min)
    yield spec("the absolute difference of a and b", lambda a, b: abs(a - b))
    yield spec("the remainder of a divided by b", lambda a, b: a % b)
    yield spec("the sum of the squares of a and b", lambda a, b: a * a + b * b)
    yield spec("the square of the sum of a and b", lambda a, b: (a + b) ** 2)
    yield spec("True if a is greater than b and False otherwise", lambda a, b: a > b)
    yield spec("True if a is divisible by b and False otherwise", lambda a, b: a % b == 0)
    for k in range(2, 10):
        yield spec(f"the sum of a, b and {k}", lambda a, b, k=k: a + b + k)
        yield spec(f"a plus {k} times b", lambda a, b, k=k: a + k * b)
        yield spec(f"{k} times the sum of a and b", lambda a, b, k=k: k * (a + b))
        yield spec(f"True if the sum of a and b is greater than {k} and False otherwise", lambda a, b, k=k: a + b > k)


def _filters() -> Iterator[tuple[str, Callable[[int], bool]]]:
    yield "even numbers", lambda x: x % 2 == 0
    yield "odd numbers", lambda x: x % 2 == 1
    yield "positive numbers", lambda x: x > 0
    yield "negative numbers", lambda x: x < 0
    for k in range(2, 10):
        yield f"numbers greater than {k}", lambda x, k=k: x > k  # type: ignore[misc]
        yield f"numbers less than {k}", lambda x, k=k: x < k  # type: ignore[misc]
    for k in (3, 4, 5):
        yield f"numbers divisible by {k}", lambda x, k=k: x % k == 0  # type: ignore[misc]


def _of_a_list() -> Iterator[Spec]:
    def spec(sentence: str, function: Function) -> Spec:
        return Spec("xs", sentence, function)

    yield spec("the sum of the numbers in xs", sum)
    yield spec("the largest number in xs", max)
    yield spec("the smallest number in xs", min)
    yield spec("the length of xs", len)
    yield spec("the first element of xs", lambda xs: xs[0])
    yield spec("the last element of xs", lambda xs: xs[-1])
    yield spec("the second element of xs", lambda xs: xs[1])
    yield spec("xs in reverse order", lambda xs: xs[::-1])
    yield spec("xs sorted in ascending order", sorted)
    yield spec("xs sorted in descending order", lambda xs: sorted(xs)[::-1])
    yield spec("the difference between the largest and the smallest number in xs", lambda xs: max(xs) - min(xs))
    yield spec("the sum of the first and the last element of xs", lambda xs: xs[0] + xs[-1])
    yield spec("the sum of the squares of the numbers in xs", lambda xs: sum(x * x for x in xs))
    yield spec("a list with the square of each number in xs", lambda xs: [x * x for x in xs])
    yield spec("a list with the absolute value of each number in xs", lambda xs: [abs(x) for x in xs])
    yield spec("every second element of xs, beginning with the first", lambda xs: xs[::2])
    for k in range(2, 10):
        yield spec(f"a list with {k} added to each number in xs", lambda xs, k=k: [x + k for x in xs])
        yield spec(f"a list with each number in xs times {k}", lambda xs, k=k: [x * k for x in xs])
        yield spec(f"the sum of the numbers in xs plus {k}", lambda xs, k=k: sum(xs) + k)
        yield spec(f"how often {k} occurs in xs", lambda xs, k=k: xs.count(k))
        yield spec(f"True if {k} is in xs and False otherwise", lambda xs, k=k: k in xs)
        yield spec(f"xs with {k} appended at the end", lambda xs, k=k: [*xs, k])
    for k in (2, 3):
        yield spec(f"the first {k} elements of xs", lambda xs, k=k: xs[:k])
        yield spec(f"the last {k} elements of xs", lambda xs, k=k: xs[-k:])
        yield spec(f"xs without its first {k} elements", lambda xs, k=k: xs[k:])
    for described, keeps in _filters():
        yield spec(f"the sum of the {described} in xs", lambda xs, keeps=keeps: sum(filter(keeps, xs)))
        yield spec(f"the number of {described} in xs", lambda xs, keeps=keeps: len(list(filter(keeps, xs))))
        yield spec(f"a list of the {described} in xs", lambda xs, keeps=keeps: list(filter(keeps, xs)))


def _of_a_text() -> Iterator[Spec]:
    def spec(sentence: str, function: Function) -> Spec:
        return Spec("s", sentence, function)

    yield spec("the length of s", len)
    yield spec("s in upper case", str.upper)
    yield spec("s in lower case", str.lower)
    yield spec("s reversed", lambda s: s[::-1])
    yield spec("the number of words in s", lambda s: len(s.split()))
    yield spec("a list of the words in s", str.split)
    yield spec("s without its spaces", lambda s: s.replace(" ", ""))
    yield spec("the first character of s", lambda s: s[0])
    yield spec("the last character of s", lambda s: s[-1])
    yield spec("the number of vowels in s", lambda s: sum(c in "aeiouAEIOU" for c in s))
    for letter in LETTERS:
        yield spec(f"how often the letter '{letter}' occurs in s", lambda s, c=letter: s.count(c))
        yield spec(f"s without the letter '{letter}'", lambda s, c=letter: s.replace(c, ""))
        yield spec(f"True if s contains the letter '{letter}' and False otherwise", lambda s, c=letter: c in s)
        yield spec(f"s with every '{letter}' replaced by '*'", lambda s, c=letter: s.replace(c, "*"))
        yield spec(f"s followed by the letter '{letter}'", lambda s, c=letter: s + c)
    for k in range(2, 6):
        yield spec(f"the first {k} characters of s", lambda s, k=k: s[:k])
        yield spec(f"the last {k} characters of s", lambda s, k=k: s[-k:])
        yield spec(f"s repeated {k} times", lambda s, k=k: s * k)
        yield spec(f"True if s has more than {3 * k} characters and False otherwise", lambda s, k=k: len(s) > 3 * k)


# ---- problems


TABLE = Table(NAME, PROMPTS, QUESTION, (_of_a_number, _of_two_numbers, _of_a_list, _of_a_text), INPUTS, n_tests=6)


@dataclass(frozen=True)
class Functions(TableTask):
    """The functions task."""

    name: ClassVar[str] = NAME
    table: ClassVar[Table] = TABLE
