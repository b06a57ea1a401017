"""User-supplied tasks: rows from any source, a reward in TRL's signature, hidden tests, and the errors of failing ones."""

import copy
import json
import sys
from decimal import Decimal
from functools import partial

import datasets
import numpy as np
import pytest
from paper_rows import write

from multirole.inputs.problems import check_dataset
from multirole.types import Episode, Turn
from multirole_sandbox import Limits
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import TaskReward
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


def test_built_in_and_user_supplied_tasks_have_the_interface_of_a_task():
    assert all(isinstance(candidate, TaskLike) for candidate in (Math(), Code(), TinyChain(), TinyPipe(), task()))
    assert [candidate.name for candidate in (Math(), Code(), TinyChain(), TinyPipe(), task())] == [
        "math", "code", "tiny_chain", "tiny_pipe", "sums",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [*SUFFIXES, "dataset"])
def test_rows_are_the_same_from_every_source(tmp_path, suffix):
    data = datasets.Dataset.from_list(ROWS) if suffix == "dataset" else write(tmp_path / f"rows{suffix}", ROWS)
    problems = task(train=data).problems("train")
    assert problems == task().problems("train") and [p.question for p in problems] == [row["prompt"] for row in ROWS]
    assert problems[0].reference == {"answer": "1", "level": "0"}
    assert task(train=data).problems("train", 2) == problems[:2]
    assert task(train=data).describe()["train"]["sha256"] == task().describe()["train"]["sha256"]
    assert task(train=ROWS[1:]).describe()["train"]["sha256"] != task().describe()["train"]["sha256"]


def test_equal_prompts_are_different_problems_and_the_ids_of_a_split_are_unique():
    problems = task(train=[*ROWS, {"prompt": "0+1?", "answer": "one"}]).problems("train")
    assert len({p.id for p in problems}) == 6 and problems[5].question == problems[0].question


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
def test_rows_that_are_not_problems_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        task(train=data).problems("train")


def test_a_count_or_a_split_that_does_not_exist_is_refused():
    with pytest.raises(DataError, match="holds 5 problems, got count=6.*In a cell this is `n_train`."):
        task().problems("train", 6)
    with pytest.raises(ValueError, match="must be 'train' or 'validation', got 'test'"):
        task().problems("test")


def test_the_reward_gets_prompts_completions_and_columns_as_in_trl():
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [1.5, 1, 0.99, -2]

    sums = task(reward)
    problems = sums.problems("train")
    rewards = sums.score([problems[0], problems[2], problems[2], problems[1]], ["a", "b", "c", "d"])
    assert [(r.value, r.reason, r.is_correct) for r in rewards] == [
        (1.5, "correct", True), (1.0, "correct", True), (0.99, "wrong", False), (-2.0, "wrong", False),
    ]  # fmt: skip
    assert sums.score([], []) == []
    assert seen == {
        "prompts": ["0+1?", "2+1?", "2+1?", "1+1?"], "completions": ["a", "b", "c", "d"],
        "answer": ["1", "3", "3", "2"], "level": ["0", "2", "2", "1"],
    }  # fmt: skip


def test_extraction_is_user_supplied_or_accepts_any_text():
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


async def asynchronous(prompts, **_):
    return [0.0] * len(prompts)


def fails_on_two(prompts, completions, **_):
    if "2+1?" in prompts:
        raise KeyError("two")
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (fails_on_two, r"The reward of task 'sums' raised KeyError\('two'\) on row 2 of a list in memory\."),
        (lambda **_: [0.0], r"one number per completion. It returned 1 of them for 4 completions, of row 0 of"),
        (lambda **_: [0.0] * 5, r"one number per completion. It returned 5 of them for 4 completions"),
        (lambda **_: sys.exit(0), r"raised SystemExit\(0\) on row 0 of"),
        (lambda prompts: [0.0] * len(prompts), r"raised TypeError\(.*unexpected keyword argument.*on row 0 of"),
        # the message says what it returned, and not that it raised
        (lambda **_: None, r"It returned None for 4 completions"),
        (lambda **_: 0.5, r"It returned 0.5 \(float\) for 4 completions"),
        (lambda **_: "0.5", r"It returned '0.5' \(str\) for 4 completions"),
        (lambda **_: {"a": 1.0}, r"It returned {'a': 1.0} \(dict\) for 4"),
        (lambda **_: {0.0, 1.0, 2.0, 3.0}, r"It returned .* \(set\) for 4"),
        (asynchronous, r"It returned a coroutine \(a task's reward is a plain function"),
        (lambda prompts, **_: [None] * len(prompts), r"It returned None for row 0 of a list in memory\."),
        (lambda prompts, **_: [0.0, 0.0, None, 0.0], r"It returned None for row 2 of"),
        (lambda prompts, **_: [0.0, "right", 0.0, 0.0], r"It returned 'right' \(str\) for row 1 of"),
        (lambda prompts, **_: [0.0, "1.0", 0.0, 0.0], r"It returned '1.0' \(str\) for row 1 of"),
        (lambda prompts, **_: [[1.0]] * 4, r"It returned \[1.0\] \(list\) for row 0 of"),
        (lambda prompts, **_: np.ones((4, 2)), r"It returned array\(\[1., 1.\]\) \(ndarray\) for row 0 of"),
        (lambda prompts, **_: [0.0, 0.0, 0.0, float("nan")], r"It returned nan \(float\) for row 3 of"),
        (lambda prompts, **_: [0.0, 0.0, float("inf"), 0.0], r"It returned inf \(float\) for row 2 of"),
        (lambda prompts, **_: [0.0, 1e9, 0.0, 0.0], r"between -1e\+06 and 1e\+06. It returned 1000000000.0 \(float\) for row 1 of"),
        (lambda prompts, **_: [10**400] * 4, r"It returned 10+\.\.\. \(int\) for row 0 of"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_a_failing_reward_is_reported_with_the_task_the_row_and_the_cause(reward, message):
    sums = task(reward)
    with pytest.raises(
        RewardError, match=f"reward of task 'sums' .*{message}" if "The reward" not in message else message
    ):
        sums.score(sums.problems("train", 4), ["1", "2", "3", "4"])


@pytest.mark.parametrize("rewards", [[True, False], np.array([1, 0]), (1, 0.0), np.float32([1, 0]), iter([1.0, 0.0])])
def test_numbers_of_every_type_are_rewards(rewards):
    sums = task(lambda **_: rewards)
    assert [reward.value for reward in sums.score(sums.problems("train", 2), ["a", "b"])] == [1.0, 0.0]


def test_rows_are_named_by_their_file_number_and_id(tmp_path):
    rows = [{"prompt": f"{i}+1?", "answer": "1", "id": f"q{i}"} for i in range(3)]
    file = write(tmp_path / "rows.jsonl", rows)
    sums = Task("sums", file, rows[:1], lambda prompts, **_: [None] * len(prompts))
    with pytest.raises(RewardError, match=rf"returned None for row 2 \(id 'q2'\) of {file}\."):
        sums.score(sums.problems("train")[2:], ["1"])
    sums.problems("validation")  # has the first question too
    with pytest.raises(RewardError, match=rf"row 0 \(id 'q0'\) of {file} or row 0 \(id 'q0'\) of a list in memory\."):
        sums.score(sums.problems("train")[:1], ["1"])


def test_every_column_of_any_row_reaches_the_reward_in_every_batch(tmp_path):
    """huggingface/datasets#5772: the first row does not decide the columns."""
    rows = [{"prompt": "Say hello."}, {"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4", "unit": "m"}]
    full = [{"answer": None, "unit": None} | row for row in rows]  # `from_list` drops what its first row lacks
    seen = []

    def reward(prompts, completions, **columns):
        seen.append(columns)
        return [0.0] * len(prompts)

    for data in (
        rows,
        datasets.Dataset.from_list(full),
        write(tmp_path / "rows.jsonl", rows),
        write(tmp_path / "rows.parquet", full),
    ):
        sums = task(reward, train=data)
        problems = sums.problems("train")
        sums.score([problems[0]], ["a"])
        sums.score([problems[2], problems[0]], ["a", "b"])
    assert seen == [{"answer": [None], "unit": [None]}, {"answer": ["4", None], "unit": ["m", None]}] * 4


@pytest.mark.parametrize("column", ["episodes", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"])  # fmt: skip
def test_a_column_with_the_name_of_an_argument_is_refused(column):
    with pytest.raises(ValueError, match=f"row 1 of a list in memory has the column '{column}'.*Rename the column"):
        task(train=[ROWS[0], ROWS[1] | {column: 1}]).problems("train")
    with pytest.raises(ValueError, match=f"`train_dataset` has the column '{column}'.*Rename the column"):
        check_dataset("train_dataset", datasets.Dataset.from_list([ROWS[0] | {column: 1}]))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "nan, which is not a number"),
        (float("inf"), "inf, which is not a number"),
        (-float("inf"), "-inf, which is not a number"),
        (np.float32("nan"), "nan, which is not a number"),
        (np.array([1.0, float("nan")]), "nan, which is not a number"),
        (Decimal("NaN"), "NaN, which is not a number"),
        ([1.0, {"deep": [float("nan")]}], "nan, which is not a number"),
        ("cut \ud83d", "half a character"),
        ({"\udc80": 1}, "half a character"),
    ],
)
def test_invalid_values_are_refused_with_row_and_column(value, words):
    for row in (ROWS[1] | {"answer": value}, *([{"prompt": value}] if isinstance(value, str) else [])):
        with pytest.raises(DataError, match=f"column '.*' of row 2 of a list in memory holds {words}"):
            task(train=[ROWS[0], ROWS[3], row]).problems("train")


def test_a_number_that_is_missing_may_be_left_out():
    sums = task(train=[{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "2"}])
    assert [problem.reference for problem in sums.problems("train")] == [{"answer": None}, {"answer": "2"}]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_literals_such_as_nan_in_a_file_are_refused(tmp_path, literal):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "1+1", "answer": 2}}\n{{"prompt": "2+2", "answer": {literal}}}\n')
    with pytest.raises(DataError, match=f"'answer' of row 1 of {file}"):
        task(train=file).problems("train")


@pytest.mark.parametrize(("start", "end"), [("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r\n")])
def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path, start, end):
    """huggingface/datasets#8241, microsoft/promptflow#4202."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes((start + "".join(json.dumps(row) + end for row in ROWS)).encode())
    assert task(train=file).problems("train") == task().problems("train")


def test_marks_inside_a_row_are_kept(tmp_path):
    marks = ["a\u2028b", "a\x85b", "tab\t", "null \x00", "\u202eabc", "e\u0301", "\ufeff", "👩‍👩‍👧"]
    rows = [{"prompt": f"{i} {mark}", "answer": mark} for i, mark in enumerate(marks)]
    for suffix in SUFFIXES:
        problems = task(train=write(tmp_path / f"rows{suffix}", rows)).problems("train")
        assert [(p.question, p.reference["answer"]) for p in problems] == [
            (row["prompt"], row["answer"]) for row in rows
        ]


def test_a_file_in_another_encoding_is_refused_by_name(tmp_path):
    file = tmp_path / "rows.jsonl"
    for encoding in ("utf-16", "latin-1"):
        file.write_bytes(json.dumps({"prompt": "größer?"}, ensure_ascii=False).encode(encoding))
        with pytest.raises(DataError, match=f"{file} cannot be read, because it is not UTF-8.*Save it as UTF-8"):
            task(train=file).problems("train")


def test_broken_values_in_published_rows_are_counted(tmp_path):
    rows = [{"prompt": f"What is {i}+1?", "solution": str(i + 1)} for i in range(500)]
    broken = [
        {"prompt": "Cut \ud83d", "solution": "1"},
        {"prompt": "a?", "solution": float("nan")},
        {"prompt": "b?", "solution": "nan"},
        {"prompt": "c?", "solution": "1" * 1001},
    ]
    description = Math(write(tmp_path / "rows.jsonl", rows + broken)).describe()
    assert description["skipped"] == {"half_a_character": 1, "not_finite": 2, "too_long": 1}


def test_an_episode_prints_as_one_line():
    """TRL prints every argument of a reward function if all rewards are None."""
    problem = task().problems("train")[0]
    turns = [Turn("solver", 0, 0, [1] * 500, [2] * 500, [0.0] * 500, "text " * 500, "stop")] * 3
    assert repr(Episode(problem, 2, turns)) == f"<Episode 2 of problem {problem.id!r}, 3 turns, reward None>"


def test_hidden_tests_run_the_last_program_in_the_sandbox():
    tests = [{"input": "1", "output": "2"}, {"input": "3", "output": "6"}]
    calls = [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}]
    rows = [{"prompt": "Twice.", "tests": tests}, {"prompt": "Twice, f.", "tests": json.dumps(calls)}]
    twice = Task("twice", rows, rows, hidden_tests())
    first, second = twice.problems("train")
    texts = [
        "```python\nprint(2 * int(input()))\n```", "```python\nprint(2)\n```", "no program",
        "```python\ndef f(x):\n    return 2 * x\n```",
    ]  # fmt: skip
    assert [r.value for r in twice.score([first, first, first, second], texts)] == [1.0, 0.5, 0.0, 1.0]
    messages = [[{"role": "assistant", "content": text}] for text in (texts[0], f"<think>{texts[0]}")]
    assert hidden_tests()(["", ""], messages, tests=[tests] * 2) == [1.0, 0.0]  # conversations; a thought is no answer
    strict = Task("twice", rows, rows, hidden_tests(rule="all_pass"))
    assert [r.value for r in strict.score([first, first], texts[:2])] == [1.0, 0.0]
    with pytest.raises(RewardError, match="Write a non-empty list"):
        bad = Task("twice", [{"prompt": "a", "tests": "[{"}], rows, hidden_tests())
        bad.score(bad.problems("train"), texts[:1])
    with pytest.raises(RewardError, match=r"column='cases'.* needs the column 'cases', the rows have \['tests'\]"):
        Task("twice", rows, rows, hidden_tests("cases")).score([first], texts[:1])


def test_other_rows_are_another_run(tmp_path):
    """The file that defines the task stays unchanged; the rows that it reads change."""
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
        (lambda completions, **_: [float("nan")] * len(completions), "returned nan .*row 0 of a list"),
        (lambda completions, **_: [1.0], "returned 1 of them for 2 completions"),
        (lambda completions, **_: None, "returned None for 2 completions"),
        (lambda completions, missing, **_: [1.0], "missing"),
    ],
    ids=["nan", "too few", "nothing", "a column that is not there"],
)
def test_a_reward_is_tried_before_anything_is_trained(reward, message):
    rows = [{"prompt": "1+1"}, {"prompt": "1+2"}]
    tried = Task("sums", rows, rows, reward)
    with pytest.raises(ValueError, match=f"In a trial before training.*{message}"):
        try_reward(tried, tried.problems("train"))


def test_a_reward_is_tried_on_validation_rows_too(tmp_path, tokenizer):
    (tmp_path / "adding.py").write_text(
        "from multirole_study import Task\n"
        "rows = [{'prompt': f'{i}+1', 'right': i} for i in range(8)]\n"
        "bare = [{'prompt': '9+1'}]\n"
        "task = Task('adding', rows, bare, lambda completions, right, **_: [0.0 for _ in completions])\n"
    )
    with pytest.raises(ValueError, match="In a trial before training.*'right'"):
        load_problems(Cell("single", "sp", f"{tmp_path}/adding.py:task"), tokenizer)


def test_rows_with_equal_prompts_are_scored_with_their_own_columns():
    """Both splits ask the same questions, and the answers differ; a row that is equal in both has one name."""
    train = [
        {"prompt": "Name the capital.", "answer": "Paris"},
        *({"prompt": "Play.", "answer": str(i)} for i in (1, 2)),
    ]
    validation = [
        {"prompt": "Name the capital.", "answer": "Rome"},
        *({"prompt": "Play.", "answer": str(i)} for i in (8, 2)),
    ]
    reward = lambda prompts, completions, answer: [float(t == a) for t, a in zip(completions, answer, strict=True)]
    tasks = [Task("asks", train, validation, reward) for _ in range(2)]
    for task, order in zip(tasks, (("train", "validation"), ("validation", "train")), strict=True):
        for split in order:
            task.problems(split)
    first, second = ({s: [p.id for p in task.problems(s)] for s in ("train", "validation")} for task in tasks)
    assert first == second  # whichever split is read first
    problems = [*tasks[0].problems("train"), *tasks[0].problems("validation")]
    scorer = TaskReward(tasks[0], problems)
    rewards = scorer.score(problems, ["Paris", "1", "2", "Rome", "8", "2"])
    assert [reward.value for reward in rewards] == [1.0] * 6


def test_an_edited_template_is_another_run(tmp_path):
    def described():
        return Task("t", [{"prompt": "1+1"}], [{"prompt": "2+2"}], len, prompts=tmp_path).describe()

    path = tmp_path / "generator.md"
    path.write_text("$question")
    before = described()
    path.write_text("Think. $question")
    assert before["prompts"].keys() == {"generator.md"} and described()["prompts"] != before["prompts"]
    assert "prompts" not in Task("t", [{"prompt": "1+1"}], [{"prompt": "2+2"}], len, prompts="math").describe()


def weighted(weight):
    return lambda completions, **_: [weight] * len(completions)


class Weight:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, completions, **_):
        return [self.weight] * len(completions)


def plain(completions, scale=1.0, **_):
    return [SCALE * scale] * len(completions)


SCALE = 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([weighted(0.5)], [weighted(1.0)]),
        ([partial(plain, scale=0.5)], [partial(plain, scale=1.0)]),
        ([Weight(0.5)], [Weight(1.0)]),
        ([Weight(0.5).__call__], [Weight(1.0).__call__]),
        ([hidden_tests()], [hidden_tests(rule="all_pass")]),
        ([hidden_tests()], [hidden_tests(limits=Limits(test_seconds=1.0))]),
        ([correct], [correct, Weight(1.0)]),
        ([correct, None, None], [correct, None, "math"]),
    ],
    ids=["closure", "partial", "object", "method", "rule", "limits", "extract", "prompts"],
)
def test_another_reward_or_set_of_prompts_is_another_run(one, other):
    same, same_again, another = (
        Cell("voting", "sp", Task("sums", ROWS, ROWS, *given)).id for given in (one, copy.deepcopy(one), other)
    )
    assert same == same_again != another


def test_a_constant_that_a_reward_reads_is_part_of_the_run(monkeypatch):
    before = Cell("voting", "sp", task(plain)).id
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert Cell("voting", "sp", task(plain)).id != before


def test_a_reward_without_source_is_refused_by_its_name():
    namespace: dict = {}
    exec("def reward(completions, **_): return [0.0] * len(completions)", namespace)  # noqa: S102
    with pytest.raises(ValueError, match="must be defined in a file or a notebook.* that of reward cannot be read"):
        Cell("voting", "sp", task(partial(namespace["reward"])))


def test_rows_that_were_edited_are_read_again(tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    sums = task(train=file)
    before = Cell("single", "sp", sums).id
    assert [len(sums.problems("train")), len(sums.problems("validation"))] == [5, 2]
    write(file, ROWS[:3])
    assert len(sums.problems("train")) == 3 and Cell("single", "sp", sums).id != before
