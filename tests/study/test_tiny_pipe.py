"""tiny_pipe and the dialogues about it: programs that are read as the sandbox runs them, habits, and critics that compare."""

import random
import re
from itertools import islice

import pytest
from tiny_base import code_habits as habits
from tiny_base.code_dialogues import CodeCritic, CodeScript, taught
from tiny_base.code_tokenizer import build_tokenizer
from tiny_base.dialogues import WORKFLOW_OF, Mix, Row, make_rows
from tiny_base.habits import Draft, Steady
from tiny_base.train import MAX_LENGTH, encode

from multirole_study.tasks import tiny_pipe
from multirole_study.tasks.splits import split_of
from multirole_study.tasks.tiny_pipe import (
    LARGEST,
    LARGEST_MOVE,
    LENGTHS,
    TAUGHT_MOVE,
    TinyPipe,
    behaviour,
    extract,
    kind_of,
    parse,
    read_program,
    reads_of,
    stream,
    to_problem,
)

LONG = to_problem("at 7, add +5, sub +7, xor -3, rest +4")
WIDE = to_problem("at 3, add +28, rest -9")
RIGHT = """```python
def f(xs):
    r = xs[7]
    # +5
    r += xs[12]
    # +7
    r -= xs[19]
    # -3
    r ^= xs[16]
    # +4
    return r + sum(xs[20:])
```"""


@pytest.fixture
def sandbox(monkeypatch):
    """sandbox(rule, problems, texts) -> rewards, where every program runs in the sandbox."""

    def score(rule, problems, texts):
        with monkeypatch.context() as patched:
            patched.setattr(tiny_pipe, "read_program", lambda source: None)
            return TinyPipe(rule).score(problems, texts)

    return score


def rows(mix: Mix, count: int) -> list[Row]:
    return make_rows(CodeScript, mix, count, random.Random(0))


def test_python_itself_finds_the_reference(sandbox):
    problems = TinyPipe().problems("train", 100)
    texts = [habits.write(problem, "split", Steady()).text for problem in problems]
    assert all(reward.is_correct for reward in sandbox("all_pass", problems, texts))
    for problem in problems:
        assert all(0 <= position <= LARGEST for _, position in reads_of(parse(problem.question)))


def test_both_kinds_occur_alike_and_have_their_lengths():
    train, validation = (TinyPipe().problems(split, count) for split, count in (("train", 4096), ("validation", 512)))
    assert all(len(set(behaviour(p.question))) > 1 for p in train)
    assert 0.4 < sum(kind_of(p.question) == "wide" for p in validation) / 512 < 0.6
    for problem in validation:
        moves = [move for _, move in parse(problem.question)[1:]]
        least, most = LENGTHS[kind_of(problem.question)]
        assert least <= len(moves) == len(set(moves)) <= most


def test_some_moves_of_the_task_are_in_no_dialogue():
    def moves(problems):
        return {abs(move) for problem in problems for _, move in parse(problem.question)[1:]}

    assert max(moves(TinyPipe().problems("validation", 512))) == LARGEST_MOVE > TAUGHT_MOVE
    assert max(moves(islice(taught("train", random.Random(0)), 512))) == TAUGHT_MOVE


def test_two_ways_to_ask_for_one_function_are_in_the_same_split():
    one, other = "at 3, add +5, add +7, rest +1", "at 3, add +12, add -7, rest +8"
    assert behaviour(one) == behaviour(other)
    assert to_problem(one).reference == to_problem(other).reference


PROGRAMS = {
    "right": RIGHT,
    "wrong position": RIGHT.replace("xs[16]", "xs[15]"),
    "beyond the end": RIGHT.replace("xs[19]", "xs[199]"),
    "beyond the end of some": RIGHT.replace("xs[19]", f"xs[{LARGEST + 4}]"),
    "parts": RIGHT.replace("# +7", "## +7+4=16+3"),
    "second thoughts": RIGHT.replace("# +7", "# +7 18 wait 19"),
    "two folds exchanged": RIGHT.replace("+= xs[12]", "-= xs[12]"),
    "rest only": "```python\ndef f(xs):\n    r = xs[7]\n    return r + sum(xs[20:])\n```",
    "another form": RIGHT.replace("return r + sum(xs[20:])", "return sum(xs[20:], r)"),
    "stub": habits.STUB,
    "no fence": RIGHT.replace("```", ""),
    "leading zero": RIGHT.replace("xs[7]", "xs[07]"),
    "half a line": RIGHT.replace("r ^= xs[16]", "r ^="),
    "no fold": RIGHT.replace("r ^= xs[16]", "r = xs[16]"),
    "empty": "```python\n```",
}


@pytest.mark.parametrize("rule", ["fraction", "all_pass"])
def test_reading_a_program_gives_what_the_sandbox_gives(rule, sandbox):
    texts = list(PROGRAMS.values())
    rewards = TinyPipe(rule).score([LONG] * len(texts), texts)
    assert rewards == sandbox(rule, [LONG] * len(texts), texts)
    names = {name for name, reward in zip(PROGRAMS, rewards, strict=True) if reward.is_correct}
    assert names == {"right", "parts", "second thoughts", "another form"}
    assert [read_program(extract(PROGRAMS[name]) or "") is None for name in ("right", "parts", "another form", "stub")] == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("is_quoted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_authors_know_whether_their_answers_are_right(is_quoted):
    rng, task = random.Random(0), TinyPipe()
    for problem in task.problems("train", 60):
        for habit in habits.HABITS:
            draft = habits.write(problem, habit, rng, is_quoted)
            assert task.score([problem], [draft.text])[0].is_correct == draft.is_correct


def test_a_number_is_taken_apart_once():
    assert habits.work(parse(WIDE.question), "split", Steady()).lines == [
        "3]", "    ## +28+20=23+8", "    r += xs[31]", "    ## -9-5=26-4", "    return r + sum(xs[22:])",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "text", "error"),
    [
        (LONG, RIGHT, None),
        (LONG, RIGHT.replace("19", "18"), (3, 19)),
        (LONG, RIGHT.replace("20", "21"), (5, 20)),
        (LONG, RIGHT.replace("# +7", "# +7 18 wait 19"), None),
        (WIDE, habits.fence(["3]", "    r += xs[32]", "    return r + sum(xs[23:])"]), (2, 31)),
        (LONG, habits.STUB, None),
        (LONG, "nonsense", None),
    ],
)
def test_the_first_wrong_step_and_what_it_should_be(problem, text, error):
    assert habits.right_step(problem, text) == error


def test_going_on_from_any_step_ends_at_the_answer():
    task = TinyPipe()
    for problem in islice(stream("train", random.Random(1)), 50):
        for number, (_, position) in list(enumerate(reads_of(parse(problem.question)), start=1))[1:]:
            text = habits.go_on(problem, (number, position), Steady())
            assert f" wait {position}\n" in text
            assert task.score([problem], [text])[0].is_correct


def test_a_judges_conclusion_follows_from_its_derivation():
    drawn = rows(Mix({"evaluator": 1, "aggregator": 1}, 1.0, LENGTHS), 120)
    seen = set()
    for row in drawn:
        value, concluded = habits.last_value(row.reply), row.reply.split("\n")[-1]
        assert value == habits.claimed(row.reply)
        agrees = re.findall(rf"Solution (\d) {value} [\d: ]+ ok\. ", concluded)
        assert concluded.count(" ok. ") == len(agrees)
        assert str(value) not in re.findall(r"Solution \d (\d+) [\d: ]+ is wrong", concluded)
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
        value = habits.last_value(row.given)
        for claim, digits, word in re.findall(r"Solution \d (\d+) ([\d: ]+) (ok|is wrong)", row.reply):
            tens, ones = zip(divmod(int(claim), 10), divmod(value, 10), strict=True)
            compared = [tens, ones] if tens[0] == tens[1] else [tens]
            assert digits == " ".join(f"{theirs}:{ours}" for theirs, ours in compared)
            assert (int(claim) == value) == (word == "ok")


def test_a_review_names_the_right_step():
    critic = CodeCritic(LONG, Steady())
    review = critic.point_out(Draft(RIGHT.replace("19", "18"), False))
    assert review.text == "Line 3 \n    # +7 wait 19\n\\boxed{Incorrect}"
    assert critic.point_out(Draft(habits.STUB, False)) is None


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_a_refiner_takes_over_the_right_step_or_the_whole_program(short):
    drawn = rows(Mix({"refiner": 1}, 0.3, LENGTHS, short), 200)
    told, shown = [], []
    for row in drawn:
        review = row.messages[-2]["content"]
        if review.startswith("Line "):
            told.append(row)
            assert review.split("\n")[1].strip("# ") in row.reply
        elif review.startswith("```"):
            shown.append(row)
            assert row.reply == habits.program_in(review)
    assert len(told) > 40
    assert len(shown) > 20


def test_dialogues_cover_every_role_and_quote_train_problems_only():
    drawn = rows(Mix(dict.fromkeys(WORKFLOW_OF, 1.0), 0.3, LENGTHS), 300)
    assert {row.role for row in drawn} == set(WORKFLOW_OF)
    lengths = [len(ids) for ids, _ in encode(drawn, build_tokenizer())]
    assert len(lengths) >= 298 and max(lengths) <= MAX_LENGTH  # longer ones are dropped
    for row in drawn:
        question = row.messages[0]["content"].split("\n")[0].partition(": ")[2]
        assert split_of(str(behaviour(question))) == "train"
