"""The second generation's base for code: its task, its dialogues, and a card that says what was measured."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from tiny_base.dialogues import WORKFLOW_OF
from tiny_base.train import build_model, encode
from tiny_base2 import code_habits as habits
from tiny_base2.card import write_card
from tiny_base2.code_build import LAYERS, Plan
from tiny_base2.code_card import CODE, WANTED
from tiny_base2.code_dialogues import Draft, Mix, make_rows, point_out
from tiny_base2.code_skills import CAP
from tiny_base2.code_tokenizer import build_tokenizer
from tiny_base2.habits import Steady
from tiny_base2.skills import LONGEST
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.experiment.cell import Cell
from multirole.experiment.models import locate
from multirole.tasks.splits import split_of
from multirole.tasks.tiny_code import TinyCode, extract
from multirole.tasks.tiny_pipe import (
    LARGEST,
    LENGTHS,
    TinyPipe,
    behaviour,
    kind_of,
    parse,
    read_program,
    reads_of,
    stream,
    to_problem,
)

MODEL = Path(__file__).parents[1] / "src" / "multirole" / "models" / "tiny-r-code"
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


def test_python_itself_finds_the_reference():
    problems = TinyPipe().problems("train", 100)
    texts = [habits.write(problem, "split", Steady()).text for problem in problems]
    assert all(reward.is_correct for reward in TinyCode("all_pass").score(problems, texts))
    for problem in problems:
        assert all(0 <= position <= LARGEST for _, position in reads_of(parse(problem.question)))


def test_splits_are_disjoint_by_behaviour_and_hold_both_kinds_alike():
    train, validation = (TinyPipe().problems(split, count) for split, count in (("train", 4096), ("validation", 512)))
    seen = {behaviour(p.question) for p in train}
    assert not seen & {behaviour(p.question) for p in validation}
    assert all(len(set(found)) > 1 for found in seen)
    assert {split_of(str(found)) for found in seen} == {"train"}
    assert 0.4 < sum(kind_of(p.question) == "wide" for p in validation) / 512 < 0.6
    assert len({p.question for p in validation}) == 512
    for problem in validation:
        moves = [move for _, move in parse(problem.question)[1:]]
        least, most = LENGTHS[kind_of(problem.question)]
        assert least <= len(moves) == len(set(moves)) <= most


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
def test_reading_a_program_gives_what_the_sandbox_gives(rule):
    texts = list(PROGRAMS.values())
    rewards = TinyPipe(rule).score([LONG] * len(texts), texts)
    assert rewards == TinyCode(rule).score([LONG] * len(texts), texts)
    names = {name for name, reward in zip(PROGRAMS, rewards, strict=True) if reward.is_correct}
    assert names == {"right", "parts", "second thoughts", "another form"}
    assert [read_program(extract(PROGRAMS[name]) or "") is None for name in ("right", "parts", "another form", "stub")] == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("is_quoted", [False, True])
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
    ("problem", "text", "found"),
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
def test_the_first_wrong_step_and_what_it_should_be(problem, text, found):
    assert habits.right_step(problem, text) == found


def test_going_on_from_any_step_ends_at_the_answer():
    task = TinyPipe()
    for problem in islice(stream("train", random.Random(1)), 50):
        for number, (_, position) in list(enumerate(reads_of(parse(problem.question)), start=1))[1:]:
            text = habits.go_on(problem, (number, position), Steady())
            assert f" wait {position}\n" in text
            assert task.score([problem], [text])[0].is_correct


def test_a_judges_conclusion_follows_from_its_derivation():
    rows = make_rows(Mix({"evaluator": 1, "aggregator": 1}, 1.0, LENGTHS), 120, random.Random(0))
    seen = set()
    for row in rows:
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
    rows = make_rows(Mix({"evaluator": 1, "aggregator": 1}, 0.5, LENGTHS, 0.5, drill=1.0), 120, random.Random(0))
    assert all(row.given for row in rows)
    for row in rows:
        value = habits.last_value(row.given)
        for claim, digits, word in re.findall(r"Solution \d (\d+) ([\d: ]+) (ok|is wrong)", row.reply):
            tens, ones = zip(divmod(int(claim), 10), divmod(value, 10), strict=True)
            compared = [tens, ones] if tens[0] == tens[1] else [tens]
            assert digits == " ".join(f"{theirs}:{own}" for theirs, own in compared)
            assert (int(claim) == value) == (word == "ok")


def test_a_review_names_the_right_step():
    assert point_out(LONG, Draft(RIGHT.replace("19", "18"), False)).text == (
        "Line 3 \n    # +7 wait 19\n\\boxed{Incorrect}"
    )
    assert point_out(LONG, Draft(habits.STUB, False)) is None


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_a_refiner_takes_over_the_right_step_or_the_whole_program(short):
    rows = make_rows(Mix({"refiner": 1}, 0.3, LENGTHS, short), 200, random.Random(0))
    told, shown = [], []
    for row in rows:
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
    rows = make_rows(Mix(dict.fromkeys(WORKFLOW_OF, 1.0), 0.3, LENGTHS), 300, random.Random(0))
    assert {row.role for row in rows} == set(WORKFLOW_OF)
    assert len(encode(rows, build_tokenizer())) >= 298  # rows over 512 tokens are dropped
    for row in rows:
        question = row.messages[0]["content"].split("\n")[0].partition(": ")[2]
        assert split_of(str(behaviour(question))) == "train"


def test_moves_are_single_tokens_and_nothing_is_lost():
    tokenizer = build_tokenizer()
    text = habits.write(WIDE, "split", Steady()).text
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([i]) for i in ids[1:9]] == [
        "3", "]\n    ## ", "+28", "+20", "=", "23", "+8", "\n    r += xs[",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text


def test_the_shipped_files_are_what_this_code_builds():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 2.2e6
    facts = json.loads((MODEL / "skills.json").read_text(encoding="utf-8"))
    shipped, built = AutoTokenizer.from_pretrained(MODEL), build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    model, fresh = AutoModelForCausalLM.from_pretrained(MODEL), build_model(built, 0, LAYERS)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert model.num_parameters() == facts["parameters"]
    assert Plan(**facts["plan"]) == Plan()


def test_the_card_says_which_rows_are_not_met():
    facts = json.loads((MODEL / "skills.json").read_text(encoding="utf-8"))
    missed = {row.label for row in WANTED if row.is_met(facts["untrained"], facts.get("trained", {})) is False}
    assert missed == {"single agent, accuracy"}  # trained: above 0.75


def test_the_card_is_written_from_the_measured_facts(tmp_path):
    for name in ("skills.json", "README.md"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    write_card(tmp_path, CODE)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (MODEL / "README.md").read_text(encoding="utf-8")


def test_the_scale_names_model_task_and_cap():
    cell = Cell("single", "sp", "code", "tiny-r")
    assert isinstance(cell.make_task(), TinyPipe) and locate(cell) == MODEL
    assert cell.max_response_tokens == CAP and cell.max_prompt_tokens + CAP <= LONGEST
    assert locate(cell.replace(task="math")).name == "tiny-r"
