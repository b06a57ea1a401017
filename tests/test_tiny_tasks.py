"""The tiny tasks: disjoint splits, determinism, and scores that were computed by hand."""

import hashlib
import json
import random
from itertools import islice

import pytest

from multirole.core.types import Problem
from multirole.tasks import tiny_code, tiny_math
from multirole.tasks.splits import split_of
from multirole.tasks.tiny_code import TinyCode
from multirole.tasks.tiny_math import TinyMath

TASKS = {"tiny_math": TinyMath(), "tiny_code": TinyCode()}
MATH = Problem("tiny_math/7+5*2-9", "tiny_math", "7+5*2-9", 15)


def test_the_expression_is_read_from_left_to_right():
    value, ops = tiny_math.parse(MATH.question)
    for op, operand in ops:
        value = tiny_math.apply(value, op, operand)
    assert value == MATH.reference == 15


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_splits_are_disjoint_large_and_deterministic(task):
    train, validation = task.problems("train", 4096), task.problems("validation", 512)
    train_ids, validation_ids = {p.id for p in train}, {p.id for p in validation}
    assert len(train_ids) == 4096 and len(validation_ids) == 512 and not train_ids & validation_ids
    assert {split_of(p.question) for p in train} == {"train"}
    assert task.problems("train", 10) == train[:10]


_rng = random.Random("tiny_code")
PROBES = [[], *([_rng.randint(-20, 30) for _ in range(_rng.randint(1, 12))] for _ in range(63))]


def behaviour(question: str) -> tuple[int, ...]:
    """What the specified function returns for each of `PROBES`: equal for two ways to write one function."""
    steps, reducer = tiny_code.parse(question)
    return tuple(reducer.run(tiny_code.run_steps(steps, xs)) for xs in PROBES)


def test_specifications_of_one_function_behave_alike():
    same = ["sort, reverse, take first 2, sum", "reverse, sort, sort, reverse, take first 2, sum"]
    other = ["sort, take first 2, sum", "sort, reverse, take first 3, sum"]
    assert len({behaviour(question) for question in same}) == 1
    assert len({behaviour(question) for question in same + other}) == 3


def test_how_many_validation_problems_were_trained_on_in_other_words():
    train, validation = (TASKS["tiny_code"].problems(*split) for split in (("train", 4096), ("validation", 256)))
    known, asked = ([behaviour(p.question) for p in problems] for problems in (train, validation))
    known = set(known)
    assert sum(one in known for one in asked) == 74 and sum(len(set(one)) == 1 for one in asked) == 7


@pytest.mark.parametrize(("module", "length"), [(tiny_math, 0), (tiny_code, 3)], ids=TASKS)
def test_the_number_of_steps_changes_the_problems_and_not_the_split_rule(module, length):
    easy = list(islice(module.stream("validation", random.Random(0), (3, 3)), 64))
    assert {p.question.count(",") for p in easy} == {length}
    assert {split_of(p.question) for p in easy} == {"validation"}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_an_unknown_split_and_a_missing_count_are_refused(task):
    with pytest.raises(ValueError, match="must be 'train' or 'validation'"):
        task.problems("test", 1)
    with pytest.raises(ValueError, match="`count` must be a positive integer, got None"):
        task.problems("train")


def test_problems_are_the_ones_that_committed_results_were_trained_on():
    found = {}
    for name, task in TASKS.items():
        for split in ("train", "validation"):
            rows = [[p.id, p.question, p.reference] for p in task.problems(split, 500)]
            found[name, split] = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]
    assert found == {
        ("tiny_math", "train"): "5520279339d2",
        ("tiny_math", "validation"): "874b03b88eac",
        ("tiny_code", "train"): "b6029d65614e",
        ("tiny_code", "validation"): "38ea4115c324",
    }


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("=12*2-9\n=24-9\n\\boxed{15}", 1.0, "correct"),
        ("\\boxed{3} no: \\boxed{ 15 }", 1.0, "correct"),
        ("\\boxed{15} no: \\boxed{3}", 0.0, "wrong"),
        ("\\boxed{15.0}", 0.0, "wrong"),
        ("\\boxed{}", 0.0, "wrong"),
        ("\\boxed{\u0661\u0665}", 0.0, "wrong"),
        ("=24-9\n=15", -0.1, "no_box"),
        ("", -0.1, "no_box"),
    ],
)
def test_math_scores(text, value, reason):
    (reward,) = TinyMath(malformed_reward=-0.1).score([MATH], [text])
    assert (reward.value, reward.reason, reward.is_correct) == (value, reason, value == 1.0)


CODE = Problem(
    "tiny_code/hand",
    "tiny_code",
    "keep even, times 3, max or 0",
    {"arguments": [[[]], [[1, 2, 4]], [[1]], [[-2, 3]]], "expected": [0, 12, 0, -6]},
)


def fence(body: str) -> str:
    return f"```python\ndef f(xs):\n    {body}\n```"


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        (fence("return max([x * 3 for x in xs if x % 2 == 0], default=0)"), 1.0, "passed"),
        (fence("return max([x * 3 for x in xs if x % 2 == 0])"), 0.5, "error"),
        (fence("return 0"), 0.5, "wrong_answer"),
        (fence("return max([x * 3.0 for x in xs if x % 2 == 0], default=0.0)"), 1.0, "passed"),
        (fence("return str(max([x * 3 for x in xs if x % 2 == 0], default=0))"), 0.0, "wrong_answer"),
        (fence("return False"), 0.0, "wrong_answer"),
        (fence("return ("), 0.0, "error"),
        ("def f(xs):\n    return 0", 0.0, "no_code"),
        (fence("return 1") + "\n" + fence("return max([x * 3 for x in xs if x % 2 == 0], default=0)"), 1.0, "passed"),
    ],
)
def test_code_scores(text, value, reason):
    fraction, whole = (TinyCode(mode).score([CODE], [text])[0] for mode in ("fraction", "all_pass"))
    assert (fraction.value, fraction.reason, fraction.is_correct) == (value, reason, value == 1.0)
    assert whole.value == float(value == 1.0)


def test_code_that_never_ends_is_a_timeout_and_harms_no_neighbour():
    good = fence("return max([x * 3 for x in xs if x % 2 == 0], default=0)")
    rewards = TinyCode().score([CODE, CODE], [fence("while True: pass"), good])
    assert [reward.reason for reward in rewards] == ["timeout", "passed"]


def test_every_primitive_and_reducer_agrees_with_its_own_python():
    problems = [
        _problem(primitive, constant, reducer)
        for primitive in tiny_code.PRIMITIVES
        for constant in primitive.constants or (0,)
        for reducer in tiny_code.REDUCERS
    ]
    for problem in problems:
        for form in ("guarded", "nested"):
            scope: dict = {}
            exec(tiny_code.extract(_solution(problem, form)), scope)  # noqa: S102 (our own; graded elsewhere)
            outputs = [scope["f"](*arguments) for arguments in problem.reference["arguments"]]
            assert outputs == problem.reference["expected"], problem.question


def _problem(primitive, constant, reducer) -> Problem:
    question = f"{tiny_code.phrase((primitive, constant))}, {reducer.phrase}"
    inputs = [[], [3, -1, 4, 1, 5, -9, 2, 6], [7], [2, 2, 8, -4, 0]]
    expected = [reducer.run(primitive.run(xs, constant)) for xs in inputs]
    return Problem(
        f"hand/{question}", "tiny_code", question, {"arguments": [[x] for x in inputs], "expected": expected}
    )


def _solution(problem: Problem, form: str) -> str:
    ((primitive, constant),), reducer = tiny_code.parse(problem.question)
    inner = primitive.expression.format(e="xs", n=constant)
    if form == "nested":
        return fence("return " + reducer.nested.format(e=inner))
    return fence(f"xs = {inner}\n    return " + reducer.guarded.format(e="xs"))
