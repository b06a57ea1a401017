"""Every verdict on the pairs of `pairs.csv` is the recorded one, and README's table counts them."""

import random
import re
from pathlib import Path

import pytest

import math_answers
from math_answers import grade, is_equal
from math_answers.against_math_verify import table
from math_answers.pairs import PAIRS, Pair, read_pairs, write_pairs

ALL = read_pairs()
KINDS = list(dict.fromkeys(pair.kind for pair in ALL))
PLAIN = [pair for pair in ALL if pair.kind != "tower"]
"""Towers of powers run into the time limit, which takes seconds each."""
FOLDER = Path(math_answers.__file__).parent


def check(pairs: list[Pair]) -> None:
    verdicts = grade([(pair.answer, pair.reference) for pair in pairs])
    assert [(*pair[:2], verdict) for pair, verdict in zip(pairs, verdicts, strict=True)] == [
        (*pair[:2], pair.verdict) for pair in pairs
    ]


def test_every_pair_has_a_source_and_known_limits_are_named() -> None:
    assert len({pair[:2] for pair in ALL}) == len(ALL) > 2300
    for pair in ALL:
        assert pair.source == "own" or re.fullmatch(r"(kind of )?[\w.-]+/[\w.-]+(#\d+| tests/\w+\.py)", pair.source), (
            pair
        )
        assert pair.verdict in ("correct", "wrong", "unparsable", "timeout", "too_long") and pair.kind, pair
        assert ((pair.verdict == "correct") == pair.is_right) != pair.note.startswith("known limit: "), pair


def test_verdicts_of_a_right_and_a_wrong_pair_per_kind_and_of_every_hundredth() -> None:
    first = {(pair.kind, pair.is_right): pair for pair in PLAIN[::-1]}
    check([*first.values(), *PLAIN[::100]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_of_all_pairs(kind: str) -> None:
    check([pair for pair in ALL if pair.kind == kind])


def test_order_and_splits_of_a_batch_do_not_matter() -> None:
    pairs = PLAIN[7::47]
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    verdicts = [
        verdict
        for part in (order[:1], order[1:3], order[3:])
        for verdict in grade([(pairs[i].answer, pairs[i].reference) for i in part])
    ]
    assert verdicts == [pairs[i].verdict for i in order]
    assert [is_equal(*pair[:2]) for pair in pairs[:20]] == [pair.verdict == "correct" for pair in pairs[:20]]


def test_an_equal_text_is_correct_whatever_it_is() -> None:
    references = [pair.reference for pair in ALL] + [r"\overline{AB}", "10:30", "no such \\command", "東京"]
    assert set(grade([(reference, reference) for reference in references])) == {"correct"}


def test_reference_that_cannot_be_parsed_is_matched_by_text_only() -> None:
    assert grade([("10:30", "10:30"), ("10.5", "10:30?"), ("42", r"\frac{")]) == ["correct", "wrong", "wrong"]


def test_readme_has_the_table_of_the_recorded_verdicts() -> None:
    assert table(ALL) in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_table_counts_each_direction() -> None:
    pairs = [
        Pair("1", "1", "yes", "correct", "no", "a", "o/r#1"),
        Pair("2", "2", "yes", "correct", "yes", "a", "kind of o/r#1"),
        Pair("3", "1", "no", "wrong", "yes", "a", "own"),
        Pair("4", "1", "no", "correct", "no", "a", "own"),
    ]
    assert table(pairs).splitlines()[2:] == [
        "| reported in an issue or a test: right answers accepted | 1 | 1 | 0 |",
        "| reported in an issue or a test: decided as expected | 1 | 1 | 0 |",
        "| variations of reported pairs: right answers accepted | 1 | 1 | 1 |",
        "| variations of reported pairs: decided as expected | 1 | 1 | 1 |",
        "| written for this package: wrong answers refused | 2 | 1 | 1 |",
        "| written for this package: decided as expected | 2 | 1 | 1 |",
        "| all: right answers accepted | 2 | 2 | 1 |",
        "| all: wrong answers refused | 2 | 1 | 1 |",
        "| all: decided as expected | 4 | 3 | 2 |",
    ]


def test_a_file_of_pairs_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "pairs.csv"
    write_pairs(ALL, path)
    assert path.read_bytes() == PAIRS.read_bytes() and read_pairs(path) == ALL
    path.write_text('answer,reference,expected\n"1,2"," 1",no\n', encoding="utf-8")
    assert read_pairs(path) == [Pair("1,2", " 1", "no")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("answer,reference\n1,1\n", "must have the columns"),
        ("answer,reference,expected,right\n1,1,yes,yes\n", "got .*'right'"),
        ("answer,reference,expected\n1,1,correct\n", "must be 'yes' or 'no', got 'correct'"),
    ],
)
def test_a_file_that_cannot_be_pairs_is_refused(text: str, message: str, tmp_path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_pairs(path)


def test_the_examples_of_readme_have_the_verdicts_that_it_gives_them():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"`([^`]+)` (=|≠) `([^`]+)`", text)
    assert len(examples) >= 60
    verdicts = grade([(answer, reference) for answer, _, reference in examples])
    assert [(*example, verdict == "correct") for example, verdict in zip(examples, verdicts, strict=True)] == [
        (*example, example[1] == "=") for example in examples
    ]
