"""NaN, infinity and half a character in data: rows that are left out and counted, or refused with their number."""

import json
import math
from decimal import Decimal

import pytest

from multirole_study import Task
from multirole_study.tasks.math import Math
from multirole_study.tasks.sources import DataError, fault_of

ROWS = [{"prompt": f"What is {i}+1?", "solution": str(i + 1)} for i in range(200)]
BROKEN = {
    "NaN": "NaN",  # JSON as Python and pandas write it
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e999": "1e999",
    '"nan"': '"nan"',
    '"NaN"': '"NaN"',
    '"-inf"': '"-inf"',
    '"\\ud83d"': '"\\ud83d"',
}


def reward(completions, solution, **_):
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def write(path, rows, broken=()):
    lines = [json.dumps(row) for row in rows] + [
        f'{{"prompt": "q{i}", "solution": {text}}}' for i, text in enumerate(broken)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_solution_of_math_is_left_out_and_counted(text, tmp_path):
    described = Math(write(tmp_path / "rows.jsonl", ROWS, [text])).describe()
    assert described["rows"] == 201 and sum(described["skipped"].values()) == 1


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_many_broken_solutions_of_math_are_refused_with_their_rows(text, tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl.*row 20\d: (not_finite|half_a_character)"):
        Math(write(tmp_path / "rows.jsonl", ROWS, [text] * 5)).problems("train")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, [1.0, math.nan], {"low": -math.inf}, Decimal("NaN"), "\ud83d"]
)
def test_a_broken_value_of_a_task_is_refused_with_its_row(value):
    rows = [*ROWS[:3], {"prompt": "q", "solution": value}]
    with pytest.raises(DataError, match="task 'sums' .* the column 'solution' of row 3 of a list in memory holds"):
        Task("sums", rows, rows, reward).problems("train")


def test_a_broken_row_of_a_file_is_refused_with_the_file_and_the_row(tmp_path):
    """huggingface/transformers#8886: half of an emoji."""
    path = write(tmp_path / "rows.jsonl", ROWS, ['"\\ud83d"'])
    with pytest.raises(DataError, match=r"row 200 of .*rows\.jsonl holds half a character"):
        Task("sums", path, path, reward).problems("train")


def test_a_question_with_half_a_character_is_refused():
    rows = [{"prompt": "Cut \ud83d", "solution": "1"}]
    with pytest.raises(DataError, match="the column 'prompt' of row 0 .* holds half a character"):
        Task("sums", rows, rows, reward).problems("train")


def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path):
    """huggingface/datasets#8241: Windows writes a byte order mark in front of JSON."""
    path = write(tmp_path / "rows.jsonl", ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(Task("sums", path, path, reward).problems("train")) == 200
    assert Math(path).describe()["rows"] == 200


@pytest.mark.parametrize("value", ["infinity", r"\infty", "1", 1, 2.5, None, [1, "a"], {"a": 1.5}, "😀", True, b"x"])
def test_sound_values(value):
    assert fault_of(value) is None
