"""The task programs: two steps and an edge case, hidden tests with every edge, splits disjoint by text and by behaviour."""

import json

from multirole_study.experiment.cell import Cell
from multirole_study.tasks.functions import PROMPTS
from multirole_study.tasks.programs import EDGES, TABLE, Programs

FENCE = "```python\n{}\n```"
SENTENCE = "collects the even numbers in xs, and returns the largest of them. If there are none, it returns None."
GOOD = "def f(xs):\n    ys = [x for x in xs if x % 2 == 0]\n    return max(ys) if ys else None"
CARELESS = "def f(xs):\n    return max(x for x in xs if x % 2 == 0)"


def test_the_splits_share_no_text_and_no_behaviour():
    splits = {split: Programs().problems(split) for split in ("train", "validation")}
    assert sum(map(len, splits.values())) == len(TABLE.specs()) and len(splits["validation"]) >= 128
    behaviours = {TABLE.to_problem(spec).id: (spec.signature, TABLE.behaviour(spec)) for spec in TABLE.specs().values()}
    for key in (lambda p: p.question, lambda p: behaviours[p.id]):
        assert not {*map(key, splits["train"])} & {*map(key, splits["validation"])}


def test_no_training_function_passes_the_hidden_tests_of_a_validation_problem():
    training = {problem.id for problem in Programs().problems("train")}
    specs = [(spec, TABLE.to_problem(spec)) for spec in TABLE.specs().values()]
    for validation, problem in specs:
        if problem.id in training:
            continue
        tests = [(tuple(map(json.loads, t["input"].split("\n"))), t["output"]) for t in json.loads(problem.reference)]
        rivals = [spec for spec, other in specs if other.id in training and spec.signature == validation.signature]
        for spec in rivals:
            assert any(json.dumps(spec.function(*arguments)) != output for arguments, output in tests), (
                validation.sentence,
                spec.sentence,
            )


def test_every_function_is_tested_on_the_edge_cases_and_told_from_all_others():
    for spec in list(TABLE.specs().values())[::9]:
        tests = TABLE.tests_of(spec)
        inputs = [tuple(map(json.loads, test["input"].split("\n"))) for test in tests]
        assert inputs[: len(EDGES[spec.signature])] == EDGES[spec.signature]
        passed = [
            other for other in TABLE.specs().values() if other.signature == spec.signature
            and all(json.dumps(other.function(*arguments)) == test["output"] for arguments, test in zip(inputs, tests, strict=True))
        ]  # fmt: skip
        assert passed == [spec], spec.sentence


def test_a_program_that_forgets_the_edge_case_earns_a_part():
    (spec,) = [spec for spec in TABLE.specs().values() if spec.sentence == SENTENCE]
    assert [spec.function(xs) for xs in ([], [1, 3], [2, 4, 5], [0])] == [None, None, 4, 0]
    problem = TABLE.to_problem(spec)
    good, careless = Programs().score([problem] * 2, [FENCE.format(GOOD), FENCE.format(CARELESS)])
    assert good.is_correct and good.value == 1.0
    assert not careless.is_correct and 0.3 < careless.value < 1.0
    assert Programs("all_pass").score([problem], [FENCE.format(CARELESS)])[0].value == 0.0


def test_a_cell_of_programs_at_qwen_has_this_task_and_short_prompts():
    task = Cell("voting", "sp", "code", "qwen-0.5b").make_task()
    assert task == Programs("fraction") and task.problems("train", 1)[0].task == PROMPTS
