"""A task of one's own: rows from anywhere, a reward in TRL's signature, hidden tests, and what is reported when it fails."""

import json
import sys

import datasets
import pytest
from paper_rows import write

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.preflight import load_problems, try_reward
from multirole_study.tasks import RewardError, Task, TaskLike, hidden_tests
from multirole_study.tasks.code import Code
from multirole_study.tasks.math import Math
from multirole_study.tasks.sources import SUFFIXES, DataError
from multirole_study.tasks.tiny_chain import TinyChain
from multirole_study.tasks.tiny_pipe import TinyPipe

ROWS = [{"prompt": f"{i}+1?", "answer": str(i + 1), "level": str(i)} for i in range(5)]


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def task(reward=correct, train=ROWS, **more) -> Task:
    return Task("sums", train, ROWS[:2], reward, **more)


def test_the_built_in_tasks_and_ones_own_are_tasks():
    assert all(isinstance(one, TaskLike) for one in (Math(), Code(), TinyChain(), TinyPipe(), task()))
    assert [one.name for one in (Math(), Code(), TinyChain(), TinyPipe(), task())] == [
        "math", "code", "tiny_chain", "tiny_pipe", "sums",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [*SUFFIXES, "dataset"])
def test_rows_are_the_same_from_every_source(tmp_path, suffix):
    data = datasets.Dataset.from_list(ROWS) if suffix == "dataset" else write(tmp_path / f"rows{suffix}", ROWS)
    found = task(train=data).problems("train")
    assert found == task().problems("train") and [p.question for p in found] == [row["prompt"] for row in ROWS]
    assert found[0].reference == {"answer": "1", "level": "0"}
    assert task(train=data).problems("train", 2) == found[:2]
    assert task(train=data).describe()["train"]["sha256"] == task().describe()["train"]["sha256"]
    assert task(train=ROWS[1:]).describe()["train"]["sha256"] != task().describe()["train"]["sha256"]


def test_equal_prompts_are_different_problems_and_the_ids_of_a_split_are_unique():
    found = task(train=[*ROWS, {"prompt": "0+1?", "answer": "one"}]).problems("train")
    assert len({p.id for p in found}) == 6 and found[5].question == found[0].question


def test_prompts_name_the_templates_of_the_workflows(tmp_path):
    assert task().problems("train")[0].task == ""
    assert task(prompts=tmp_path).problems("train")[0].task == str(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "needs at least one row, got none from a list in memory"),
        ([{"question": "1+1?"}], r"row 0 of a list in memory has None; its columns are \['question'\]"),
        ([*ROWS, {"prompt": 3}], "row 5 of a list in memory has 3"),
        ("absent.jsonl", "must be a file .*got 'absent.jsonl'"),
        ("rows.xlsx", "must be a file .*got 'rows.xlsx'"),
    ],
)
def test_rows_that_are_no_problems_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        task(train=data).problems("train")


def test_a_count_or_a_split_that_does_not_exist_is_refused():
    with pytest.raises(DataError, match="holds 5 problems, got count=6"):
        task().problems("train", 6)
    with pytest.raises(ValueError, match="must be 'train' or 'validation', got 'test'"):
        task().problems("test")


def test_the_reward_gets_prompts_completions_and_columns_as_in_trl():
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [1.5, 1, 0.99, -2]

    one = task(reward)
    problems = one.problems("train")
    rewards = one.score([problems[0], problems[2], problems[2], problems[1]], ["a", "b", "c", "d"])
    assert [(r.value, r.reason, r.is_correct) for r in rewards] == [
        (1.5, "correct", True), (1.0, "correct", True), (0.99, "wrong", False), (-2.0, "wrong", False),
    ]  # fmt: skip
    assert one.score([], []) == []
    assert seen == {
        "prompts": ["0+1?", "2+1?", "2+1?", "1+1?"], "completions": ["a", "b", "c", "d"],
        "answer": ["1", "3", "3", "2"], "level": ["0", "2", "2", "1"],
    }  # fmt: skip


def test_extraction_is_ones_own_or_any_text():
    assert [task().extract(text) for text in (" 7 ", " \n")] == ["7", None]
    assert task(extract=lambda text: text[:1] or None).extract("abc") == "a"


@pytest.mark.parametrize(
    ("extract", "message"),
    [
        (lambda text: text[9], "raised IndexError"),
        (lambda text: sys.exit(0), "raised SystemExit"),
        (len, "a text or None, got 3"),
    ],
)
def test_a_failing_extraction_is_reported_with_the_task_and_the_cause(extract, message):
    with pytest.raises(RewardError, match=f"`extract` of task 'sums' .*{message}"):
        task(extract=extract).extract("abc")


def fails_on_two(prompts, completions, **_):
    if "2+1?" in prompts:
        raise KeyError("two")
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (fails_on_two, r"The reward of task 'sums' raised KeyError\('two'\) on {2}\."),
        (lambda **_: [0.0], r"one number per completion, got 1 for 4 completions, the first of {0}\."),
        (lambda **_: [0.0] * 5, r"one number per completion, got 5 for 4 completions"),
        (lambda **_: sys.exit(0), r"raised SystemExit\(0\) on {0}\."),
        (lambda prompts, **_: [None] * len(prompts), r"returned None and no number for the answer .* \({0}\)\."),
        (lambda prompts, **_: ["much"] * len(prompts), r"returned 'much' and no number for the answer .* \({0}\)\."),
        (lambda prompts: [0.0] * len(prompts), r"raised TypeError\(.*unexpected keyword argument.*on {0}\."),
    ],
)
def test_a_failing_reward_is_reported_with_the_task_the_problem_and_the_cause(reward, message):
    one = task(reward)
    problems = one.problems("train", 4)
    with pytest.raises(RewardError, match=message.format(*(p.id for p in problems))):
        one.score(problems, ["1", "2", "3", "4"])


def test_hidden_tests_run_the_last_program_in_the_sandbox():
    tests = [{"input": "1", "output": "2"}, {"input": "3", "output": "6"}]
    calls = [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}]
    rows = [{"prompt": "Twice.", "tests": tests}, {"prompt": "Twice, f.", "tests": json.dumps(calls)}]
    one = Task("twice", rows, rows, hidden_tests())
    first, second = one.problems("train")
    texts = [
        "```python\nprint(2 * int(input()))\n```", "```python\nprint(2)\n```", "no program",
        "```python\ndef f(x):\n    return 2 * x\n```",
    ]  # fmt: skip
    assert [r.value for r in one.score([first, first, first, second], texts)] == [1.0, 0.5, 0.0, 1.0]
    strict = Task("twice", rows, rows, hidden_tests(rule="all_pass"))
    assert [r.value for r in strict.score([first, first], texts[:2])] == [1.0, 0.0]
    with pytest.raises(RewardError, match="Write a non-empty list"):
        bad = Task("twice", [{"prompt": "a", "tests": "[{"}], rows, hidden_tests())
        bad.score(bad.problems("train"), texts[:1])
    with pytest.raises(RewardError, match=r"column='cases'.* needs this column, the rows have \['tests'\]"):
        Task("twice", rows, rows, hidden_tests("cases")).score([first], texts[:1])


def test_other_rows_are_another_run(tmp_path):
    """The file that names a task stays as it is; the rows that it reads do not."""
    source = "from multirole_study import Task\nmine = Task('mine', {rows!r}, {rows!r}, lambda prompts, completions, **_: [0.0] * len(prompts))\n"
    rows, file = tmp_path / "rows.jsonl", tmp_path / "task.py"
    file.write_text(source.format(rows=str(rows)))
    ids = []
    for n in (3, 3, 2):
        rows.write_text("".join(json.dumps({"prompt": f"{i}+1"}) + "\n" for i in range(n)))
        ids.append(Cell("single", "sp", f"{file}:mine").id)
        for name in [name for name in sys.modules if name.startswith("task_")]:  # as another process finds it
            del sys.modules[name]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, **_: [float("nan")] * len(completions), "problem 'sums/.*' the reward nan"),
        (lambda completions, **_: [1.0], "must return a list with one number per completion, got 1 for 2"),
        (lambda completions, **_: None, "must return a list with one number per completion, got None for 2"),
        (lambda completions, missing, **_: [1.0], "missing"),
    ],
    ids=["nan", "too few", "nothing", "a column that is not there"],
)
def test_a_reward_is_tried_before_anything_is_trained(reward, message):
    rows = [{"prompt": "1+1"}, {"prompt": "1+2"}]
    tried = Task("sums", rows, rows, reward)
    with pytest.raises(ValueError, match=f"Tried before training.*{message}"):
        try_reward(tried, tried.problems("train"))


def test_a_reward_is_tried_on_validation_rows_too(tmp_path, tokenizer):
    (tmp_path / "adding.py").write_text(
        "from multirole_study import Task\n"
        "rows = [{'prompt': f'{i}+1', 'right': i} for i in range(8)]\n"
        "bare = [{'prompt': '9+1'}]\n"
        "task = Task('adding', rows, bare, lambda completions, right, **_: [0.0 for _ in completions])\n"
    )
    with pytest.raises(ValueError, match="Tried before training.*'right'"):
        load_problems(Cell("single", "sp", f"{tmp_path}/adding.py:task"), tokenizer)
