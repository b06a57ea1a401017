"""The tiny tasks: disjoint splits, determinism, and scores that were computed by hand."""

import hashlib
import json

import pytest

from multirole.types import Problem
from multirole_study.tasks import tiny_chain, tiny_pipe
from multirole_study.tasks.splits import split_of
from multirole_study.tasks.tiny_chain import TinyChain
from multirole_study.tasks.tiny_pipe import TinyPipe

TASKS = {"tiny_chain": TinyChain(), "tiny_pipe": TinyPipe()}
MATH = Problem("tiny_chain/7+5*2-9", "tiny_chain", "7+5*2-9", 15)


def test_the_expression_is_read_from_left_to_right():
    value, ops = tiny_chain.parse(MATH.question)
    for op, operand in ops:
        value = tiny_chain.apply(value, op, operand)
    assert value == MATH.reference == 15


@pytest.mark.parametrize(
    ("name", "same"),
    [("tiny_chain", lambda p: p.question), ("tiny_pipe", lambda p: str(tiny_pipe.behaviour(p.question)))],
    ids=TASKS,
)
def test_splits_are_disjoint_large_and_deterministic(name, same):
    """Programs are compared by what they return: no function of the validation split is in the training split under another phrasing."""
    task = TASKS[name]
    train, validation = task.problems("train", 4096), task.problems("validation", 512)
    train_ids, validation_ids = {p.id for p in train}, {p.id for p in validation}
    assert len(train_ids) == 4096 and len(validation_ids) == 512 and not train_ids & validation_ids
    assert {split_of(same(p)) for p in train} == {"train"}
    assert not set(map(same, train)) & set(map(same, validation))
    assert task.problems("train", 10) == train[:10]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_an_unknown_split_and_a_missing_count_are_refused(task):
    with pytest.raises(ValueError, match="must be 'train' or 'validation'"):
        task.problems("test", 1)
    with pytest.raises(ValueError, match="`count` must be a positive integer, got None"):
        task.problems("train")


def test_problems_are_the_ones_that_committed_results_were_trained_on():
    digests = {}
    for name, task in TASKS.items():
        for split in ("train", "validation"):
            rows = [[p.id, p.question, p.reference] for p in task.problems(split, 500)]
            digests[name, split] = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]
    assert digests == {
        ("tiny_chain", "train"): "a782abe733e3",
        ("tiny_chain", "validation"): "cd47f9c16dda",
        ("tiny_pipe", "train"): "7d5509174598",
        ("tiny_pipe", "validation"): "1f3c039ad63d",
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
    (reward,) = TinyChain(malformed_reward=-0.1).score([MATH], [text])
    assert (reward.value, reward.reason, reward.is_correct) == (value, reason, value == 1.0)


CODE = Problem(
    "tiny_pipe/hand",
    "tiny_pipe",
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
    fraction, whole = (TinyPipe(mode).score([CODE], [text])[0] for mode in ("fraction", "all_pass"))
    assert (fraction.value, fraction.reason, fraction.is_correct) == (value, reason, value == 1.0)
    assert whole.value == float(value == 1.0)


def test_code_that_never_ends_is_a_timeout_and_harms_no_neighbour():
    good = fence("return max([x * 3 for x in xs if x % 2 == 0], default=0)")
    rewards = TinyPipe().score([CODE, CODE], [fence("while True: pass"), good])
    assert [reward.reason for reward in rewards] == ["timeout", "passed"]
