"""The paper's tasks: scores of right and wrong answers, published forms of hidden tests, and the questions asked."""

import json
from importlib.resources import files
from string import Template

import datasets
import pytest
from paper_rows import DEEPCODER, rows_of, write

from multirole.types import Problem
from multirole_sandbox import Verdict
from multirole_study.tasks import code, math, sources
from multirole_study.tasks.code import Code
from multirole_study.tasks.math import Math
from multirole_study.tasks.sources import DataError

# ---- math: scores


def test_math_scores_the_last_box(monkeypatch):
    asked = []

    def grade(pairs):
        asked.extend(pairs)
        return ["timeout" if answer == "slow" else "correct" if answer == gold else "wrong" for answer, gold in pairs]

    monkeypatch.setattr(math, "grade", grade)
    problem = Problem("math/1", "math", "q", "7")
    texts = ["\\boxed{3} no, \\boxed{7}", "\\boxed{7}", "\\boxed{7} no, \\boxed{3}", "seven", "\\boxed{slow}", ""]
    rewards = Math().score([problem] * 6, texts)
    assert [r.reason for r in rewards] == ["correct", "correct", "wrong", "no_box", "timeout", "no_box"]
    assert [r.value for r in rewards] == [1.0, 1.0, 0.0, -0.1, 0.0, -0.1]
    assert [r.is_correct for r in rewards] == [True, True, False, False, False, False]
    assert asked == [("7", "7"), ("7", "7"), ("3", "7"), ("slow", "7")]
    assert Math(malformed_reward=0.0).score([problem], ["none"])[0].value == 0.0
    with pytest.raises(ValueError):
        Math().score([problem], [])


# ---- code: rows


def code_row(tests: object) -> dict:
    return {"problem": "Do it.", "tests": tests if isinstance(tests, str) else json.dumps(tests)}


def stdin_test(stdin: str, expected: str) -> dict:
    return {"input": stdin, "output": expected, "testtype": "stdin"}


@pytest.mark.parametrize(
    ("reason", "tests"),
    [
        ("unreadable_tests", None),
        ("unreadable_tests", "[{"),
        ("unreadable_tests", [{"testtype": "interactive", "input": "1", "output": "1"}]),
        ("mixed_tests", [{"input": "1", "output": "1"}, {"type": "function_call", "fn_name": "f", "input": [1], "output": [1]}]),
    ],
)  # fmt: skip
def test_broken_tests_are_a_reason_and_never_a_problem(reason, tests):
    with pytest.raises(code.BadRow, match=f"^{reason}$"):
        code.to_problem({"problem": "Do it.", "tests": tests})


def test_broken_code_rows_are_left_out_and_counted(tmp_path):
    sound = [code_row([stdin_test("1", str(i))]) | {"problem": f"Print {i}."} for i in range(298)]
    broken = [code_row("[{"), code_row([]), code_row([stdin_test("1", "1")]) | {"problem": " "}]
    description = Code(write(tmp_path / "rows.jsonl", sound + broken + [sound[0]])).describe()
    assert description["skipped"] == {"duplicate": 1, "no_question": 1, "unreadable_tests": 2}
    assert description["train"] + description["validation"] == 298
    with pytest.raises(DataError, match="row .*: unreadable_tests"):
        Code(write(tmp_path / "fewer.jsonl", sound[:200] + broken)).problems("train")


def test_code_rows_split_one_in_ten_below_2000_rows_and_1000_from_there_on():
    assert [code.n_test(n) for n in (1, 16, 1999, 2000, 16_252)] == [1, 2, 200, 1000, 1000]
    train, validation = Code(DEEPCODER).problems("train"), Code(DEEPCODER).problems("validation")
    assert (len(train), len(validation)) == (14, 2)
    assert Code(DEEPCODER).problems("train", 3) == train[:3]
    expected = datasets.Dataset.from_dict({"row": list(range(16))}).shuffle(seed=42)["row"][:2]
    assert [rows_of(DEEPCODER)[i]["problem"] in p.question for i, p in zip(expected, validation, strict=True)] == [
        True
    ] * 2


def test_the_question_states_the_format_that_the_tests_need():
    for row, problem in zip(rows_of(DEEPCODER), all_code_problems(), strict=True):
        kind = json.loads(problem.reference)[0]["testtype"]
        assert row["problem"] in problem.question
        assert ("standard output" in problem.question) == (kind == "stdin")
        if kind == "functional":
            assert json.loads(problem.reference)[0]["metadata"]["func_name"] in problem.question
        assert not any(test["output"].strip() in problem.question for test in json.loads(problem.reference)[2:3]
                       if len(test["output"]) > 5)  # fmt: skip
        assert problem.id == sources.question_id("code", problem.question)


@pytest.mark.parametrize(("name", "field"), [("stdin", None), ("function", "func_name")])
def test_the_frame_of_a_code_question_states_its_format(name, field):
    text = files("multirole_study.tasks").joinpath("code_formats", f"{name}.md").read_text(encoding="utf-8")
    assert set(Template(text).get_identifiers()) == {"problem", field} - {None}
    assert text.index("$problem") < text.index("### Format:") < text.index("```python") < text.index("### Answer:")


def all_code_problems() -> list[Problem]:
    return [code.to_problem(row) for row in rows_of(DEEPCODER)]


# ---- code: scores


def test_the_solution_of_every_code_row_passes_all_of_its_tests():
    texts = [row["solutions"][0] for row in rows_of(DEEPCODER)]
    rewards = Code().score(all_code_problems(), texts)
    assert [(r.value, r.reason, r.is_correct) for r in rewards] == [(1.0, "passed", True)] * 16


DOUBLE = Problem(
    "code/double", "code", "Print twice the number.",
    json.dumps([stdin_test("1\n", "2"), stdin_test("2\n", "4"), stdin_test("0\n", "0"), stdin_test("-3\n", "-6")]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("```python\nprint(2 * int(input()))\n```", 1.0, "passed"),
        ("```\nprint(int(input()) ** 2)\n```", 0.5, "wrong_answer"),
        ("```python\nprint(2 * int(input()))\n```\nor\n```python\nprint(int(input()) ** 2)\n```", 0.5, "wrong_answer"),
        ("```python\nn = int(input())\nprint(2 * n if n > 0 else 1 / n)\n```", 0.5, "error"),
        ("```python\nprint(2 *\n```", 0.0, "error"),
        ("```python\n\n```", 0.0, "no_code"),
        ("print(2 * int(input()))", 0.0, "no_code"),
        ("```python\nprint(2 * int(input()))", 1.0, "passed"),
        ("", 0.0, "no_code"),
    ],
)
def test_code_scores(text, value, reason):
    fraction, whole = (Code(reward=mode).score([DOUBLE], [text])[0] for mode in ("fraction", "all_pass"))
    assert (fraction.value, fraction.reason, fraction.is_correct) == (value, reason, value == 1.0)
    assert (whole.value, whole.is_correct) == (float(value == 1.0), value == 1.0)


def test_code_asks_the_sandbox_once_per_distinct_program_and_never_shows_it_the_question(monkeypatch):
    asked = []

    def grade(programs, tests, rule, limits):
        asked.append((programs, tests, rule, limits))
        return [Verdict(0.25, "timeout", ("timeout",)) for _ in programs]

    monkeypatch.setattr(code, "grade_batch", grade)
    other = Problem("code/other", "code", "Another.", json.dumps([stdin_test("1", "1")]))
    texts = ["```python\na\n```", "```py\na\n```", "```python\na\n```", "nothing"]
    rewards = Code(reward="all_pass").score([DOUBLE, DOUBLE, other, other], texts)
    assert [(r.value, r.reason, r.is_correct) for r in rewards] == [(0.25, "timeout", False)] * 3 + [
        (0.0, "no_code", False)
    ]
    assert asked == [(["a\n", "a\n"], [DOUBLE.reference, other.reference], "all_pass", None)]
