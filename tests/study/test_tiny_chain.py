"""tiny_chain and its dialogues: problems of two kinds, habits with correctly labelled answers, and critics that compare."""

import random
import re
from itertools import islice

import pytest
from tiny_base import math_habits as habits
from tiny_base.dialogues import WORKFLOW_OF, Mix, Row, make_rows
from tiny_base.habits import Draft, Steady
from tiny_base.math_dialogues import MathCritic, MathScript
from tiny_base.math_tokenizer import build_tokenizer
from tiny_base.train import MAX_LENGTH, encode

from multirole.types import Problem
from multirole_study.tasks.splits import split_of
from multirole_study.tasks.tiny_chain import LARGEST, LENGTHS, TinyChain, kind_of, stream

LONG = Problem("hand/long", "tiny_chain", "7+5*2-9", 15)
WIDE = Problem("hand/wide", "tiny_chain", "3+28-9", 22)


def rows(mix: Mix, count: int) -> list[Row]:
    return make_rows(MathScript, mix, count, random.Random(0))


def values(question: str) -> list[int]:
    """Return every intermediate value, from Python's arithmetic on the question with explicit brackets."""
    parts = re.findall(r"[-+*]?\d+", question)
    return [eval("(" * n + ")".join(parts[: n + 1])) for n in range(len(parts))]


def test_an_independent_evaluator_finds_the_reference():
    for problem in TinyChain().problems("train", 400):
        results = values(problem.question)
        assert results[-1] == problem.reference
        assert all(0 <= value <= LARGEST for value in results)


def test_both_kinds_occur_alike_and_have_their_lengths():
    validation = TinyChain().problems("validation", 512)
    assert 0.4 < sum(kind_of(p.question) == "wide" for p in validation) / 512 < 0.6
    for problem in validation:
        least, most = LENGTHS[kind_of(problem.question)]
        assert least <= len(re.findall(r"[-+*]", problem.question)) <= most


@pytest.mark.parametrize("is_quoted", [False, True])
def test_authors_know_whether_their_answers_are_right(is_quoted):
    rng, task = random.Random(0), TinyChain()
    for problem in task.problems("train", 60):
        for habit in habits.HABITS:
            draft = habits.write(problem, habit, rng, is_quoted)
            assert task.score([problem], [draft.text])[0].is_correct == draft.is_correct


def test_a_number_is_taken_apart_once():
    lines, value = habits.derive(3, [("+", 28), ("-", 9)], "split", random.Random(3), [("+", 28), ("-", 9)])
    assert (lines, value) == ([">23+8-9", ">31-9", ">26-4"], 22)


@pytest.mark.parametrize(
    ("problem", "text", "error"),
    [
        (LONG, "=12*2-9\n=24-9\n\\boxed{15}", None),
        (LONG, "=12*2-9\n=25-9\n\\boxed{16}", (2, "=24-9")),
        (LONG, "==24-9\n\\boxed{14}", (2, "=15")),
        (LONG, "hmm =13*2-9\nwait=12*2-9\n=24-9\n\\boxed{15}", None),
        (LONG, ">9+2*2-9\n>12*2-9\n>24-9\n>19-4\n\\boxed{15}", (1, "=10+2*2-9")),
        (WIDE, ">24+8-9\n>32-9\n>27-4\n\\boxed{23}", (1, ">23+8-9")),
        (LONG, "=12-9\n\\boxed{3}", (1, "=24-9")),
        (LONG, "nonsense", None),
    ],
)
def test_the_first_wrong_line_and_what_it_should_be(problem, text, error):
    assert habits.right_line(problem, text) == error


def test_going_on_from_any_line_ends_at_the_answer():
    for problem in islice(stream("train", random.Random(1)), 50):
        lines, value = habits.worked(problem, Steady())
        assert value == problem.reference
        assert {habits.claimed(habits.go_on(problem, line, Steady())) for line in lines} == {problem.reference}
        assert habits.go_on(problem, lines[-1], Steady()) == f"\\boxed{{{value}}}"


def test_a_judges_conclusion_follows_from_its_derivation():
    drawn = rows(Mix({"evaluator": 1, "aggregator": 1}, 1.0, LENGTHS), 120)
    seen = set()
    for row in drawn:
        value, concluded = habits.last_value(row.reply), row.reply.split("\n")[-1]
        agrees = re.findall(r"Solution (\d) (\d+) ok\. ", concluded)
        assert all(int(claimed) == value for _, claimed in agrees)
        assert all(int(claimed) != value for claimed in re.findall(r"Solution \d (\d+) is wrong", concluded))
        if row.role == "evaluator":
            assert ("\\boxed{Correct}" in concluded) == bool(agrees)
        elif agrees:
            assert concluded.endswith(f"\\boxed{{{agrees[0][0]}}}")
        seen.add((row.role, bool(agrees)))
    assert len(seen) >= 3


def test_a_given_derivation_is_compared_with_what_was_claimed():
    drawn = rows(Mix({"evaluator": 1, "aggregator": 1}, 0.5, LENGTHS, 0.5, drill=1.0), 120)
    assert all(row.given for row in drawn)
    for row in drawn:
        comparisons = re.findall(r"Solution \d (\d+) (ok|is wrong)", row.reply)
        assert all((int(claim) == habits.last_value(row.given)) == (word == "ok") for claim, word in comparisons)


def test_a_review_names_the_right_line():
    critic = MathCritic(LONG, Steady())
    review = critic.point_out(Draft("=12*2-9\n=25-9\n\\boxed{16}", False))
    assert review.text == "Line 2 \nwait=24-9\n\\boxed{Incorrect}"
    assert critic.point_out(Draft("\\boxed{16}", False)) is None


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_a_refiner_goes_on_from_the_right_line(short):
    drawn = rows(Mix({"refiner": 1}, 0.3, LENGTHS, short), 200)
    told = [row for row in drawn if row.messages[-2]["content"].startswith("Line ")]
    assert len(told) > 40
    for row in told:
        line = row.messages[-2]["content"].split("\n")[1]
        assert row.reply.startswith(f"\n{line}\n") or row.reply == f"\\boxed{{{line.removeprefix('wait=')}}}"


def test_dialogues_cover_every_role_and_quote_train_problems_only():
    drawn = rows(Mix(dict.fromkeys(WORKFLOW_OF, 1.0), 0.3, LENGTHS), 300)
    assert {row.role for row in drawn} == set(WORKFLOW_OF)
    lengths = [len(ids) for ids, _ in encode(drawn, build_tokenizer())]
    assert len(lengths) >= 298 and max(lengths) <= MAX_LENGTH  # longer ones are dropped
    for row in drawn:
        assert split_of(row.messages[0]["content"].split("\n")[0].partition(": ")[2]) == "train"
