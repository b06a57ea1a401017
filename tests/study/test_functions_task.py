"""The task functions: many functions, distinguished by behaviour, with hidden tests that no other function of the table passes."""

import hashlib
import json

import pytest

from multirole.types import Problem
from multirole_study.experiment.cell import Cell
from multirole_study.tasks.functions import TABLE, Functions

FENCE = "```python\n{}\n```"


def test_there_are_many_functions_and_no_paraphrase_is_in_the_other_split():
    splits = {split: Functions().problems(split) for split in ("train", "validation")}
    assert sum(map(len, splits.values())) == len(TABLE.specs()) >= 200
    assert len(splits["validation"]) >= 64
    sentences = {spec.sentence: (spec.signature, TABLE.behaviour(spec)) for spec in TABLE.specs().values()}
    results = {
        split: {sentences[p.question.split(" returns ")[1].partition(".\n")[0]] for p in problems}
        for split, problems in splits.items()
    }
    assert not results["train"] & results["validation"]


def test_the_problems_are_the_same_everywhere():
    text = json.dumps(
        [(p.id, p.question, p.reference) for split in ("train", "validation") for p in Functions().problems(split)]
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "8a0dfa66a407"


def test_two_sentences_for_one_function_count_once():
    sentences = {spec.sentence for spec in TABLE.specs().values()}
    assert "True if n is even and False otherwise" in sentences
    assert "True if n is divisible by 2 and False otherwise" not in sentences


def test_the_hidden_tests_of_a_function_fail_every_other_one():
    for spec in TABLE.specs().values():
        tests = TABLE.tests_of(spec)
        inputs = [tuple(map(json.loads, test["input"].split("\n"))) for test in tests]
        passed = [
            other for other in TABLE.specs().values() if other.signature == spec.signature
            and all(json.dumps(other.function(*arguments)) == test["output"] for arguments, test in zip(inputs, tests, strict=True))
        ]  # fmt: skip
        assert passed == [spec], spec.sentence
        assert len({test["output"] for test in tests}) > 1, "a constant would pass"


def test_inputs_suit_every_function():
    """No function raises on a probe or returns a value that is not JSON."""
    assert all(len(TABLE.behaviour(spec)) == len(TABLE.probes(spec.signature)) for spec in TABLE.specs().values())


def test_programs_are_graded_in_the_sandbox():
    (problem,) = [p for p in [*Functions().problems("train"), *Functions().problems("validation")]
                  if "returns n plus 7.\n" in p.question]  # fmt: skip
    texts = ["def f(n):\n    return n + 7", "def f(n):\n    return n + 8", "def g(n):\n    return n + 7"]
    rewards = Functions().score([problem] * 4, [FENCE.format(text) for text in texts] + ["n + 7"])
    assert [(reward.value, reward.is_correct) for reward in rewards] == [
        (1.0, True),
        (0.0, False),
        (0.0, False),
        (0.0, False),
    ]
    assert rewards[-1].reason == "no_code"


@pytest.mark.parametrize(("reward", "expected"), [("fraction", 0.5), ("all_pass", 0.0)])
def test_the_share_of_passed_tests_is_the_reward_unless_all_must_pass(reward, expected):
    call = {"testtype": "functional", "metadata": {"func_name": "f"}}
    tests = json.dumps([{"input": str(n), "output": str(n)} | call for n in (0, 1)])
    problem = Problem("x", "functions", "", tests)
    assert Functions(reward).score([problem], [FENCE.format("def f(n):\n    return 0")])[0].value == expected


def test_a_cell_of_programs_at_smollm2_has_this_task():
    assert Cell("single", "sp", "code", "smollm2").make_task() == Functions("fraction")
