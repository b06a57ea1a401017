"""The second generation of the embedded base: its task, its dialogues, and a card that says what was measured."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from tiny_base.dialogues import WORKFLOW_OF
from tiny_base.train import build_model, encode
from tiny_base2 import habits
from tiny_base2.build import LAYERS, Plan
from tiny_base2.card import WANTED, average, measure, write_card
from tiny_base2.dialogues import Draft, Mix, make_rows, point_out
from tiny_base2.skills import CAP, LONGEST, Fact
from tiny_base2.tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.core.types import Problem
from multirole.experiment.cell import Cell
from multirole.tasks.splits import split_of
from multirole.tasks.tiny_chain import LARGEST, LENGTHS, TinyChain, kind_of, stream

MODEL = Path(__file__).parents[1] / "src" / "multirole" / "models" / "tiny-r"
FACTS = json.loads((MODEL / "skills.json").read_text(encoding="utf-8"))
LONG = Problem("hand/long", "tiny_math", "7+5*2-9", 15)
WIDE = Problem("hand/wide", "tiny_math", "3+28-9", 22)


def values(question: str) -> list[int]:
    """Every intermediate value, by Python's own arithmetic on a question with its brackets written out."""
    parts = re.findall(r"[-+*]?\d+", question)
    return [eval("(" * n + ")".join(parts[: n + 1])) for n in range(len(parts))]


def test_an_independent_evaluator_finds_the_reference():
    for problem in TinyChain().problems("train", 400):
        found = values(problem.question)
        assert found[-1] == problem.reference
        assert all(0 <= value <= LARGEST for value in found)


def test_splits_are_disjoint_and_hold_both_kinds_alike():
    train, validation = (TinyChain().problems(split, count) for split, count in (("train", 2000), ("validation", 512)))
    assert not {p.question for p in train} & {p.question for p in validation}
    assert {split_of(p.question) for p in train} == {"train"}
    assert 0.4 < sum(kind_of(p.question) == "wide" for p in validation) / 512 < 0.6
    assert max(validation.count(p) for p in validation) == 1
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
    ("problem", "text", "found"),
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
def test_the_first_wrong_line_and_what_it_should_be(problem, text, found):
    assert habits.right_line(problem, text) == found


def test_going_on_from_any_line_ends_at_the_answer():
    for problem in islice(stream("train", random.Random(1)), 50):
        lines, value = habits.worked(problem, habits.Steady())
        assert value == problem.reference
        assert {habits.boxed(habits.go_on(problem, line, habits.Steady())) for line in lines} == {problem.reference}
        assert habits.go_on(problem, lines[-1], habits.Steady()) == f"\\boxed{{{value}}}"


def test_a_judges_conclusion_follows_from_its_derivation():
    rows = make_rows(Mix({"evaluator": 1, "aggregator": 1}, 1.0, LENGTHS), 120, random.Random(0))
    seen = set()
    for row in rows:
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
    rows = make_rows(Mix({"evaluator": 1, "aggregator": 1}, 0.5, LENGTHS, 0.5, drill=1.0), 120, random.Random(0))
    assert all(row.given for row in rows)
    for row in rows:
        found = re.findall(r"Solution \d (\d+) (ok|is wrong)", row.reply)
        assert all((int(claim) == habits.last_value(row.given)) == (word == "ok") for claim, word in found)


def test_a_review_names_the_right_line():
    assert point_out(LONG, Draft("=12*2-9\n=25-9\n\\boxed{16}", False)).text == (
        "Line 2 \nwait=24-9\n\\boxed{Incorrect}"
    )
    assert point_out(LONG, Draft("\\boxed{16}", False)) is None


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_a_refiner_goes_on_from_the_right_line(short):
    rows = make_rows(Mix({"refiner": 1}, 0.3, LENGTHS, short), 200, random.Random(0))
    told = [row for row in rows if row.messages[-2]["content"].startswith("Line ")]
    assert len(told) > 40
    for row in told:
        line = row.messages[-2]["content"].split("\n")[1]
        assert row.reply.startswith(f"\n{line}\n") or row.reply == f"\\boxed{{{line.removeprefix('wait=')}}}"


def test_dialogues_cover_every_role_and_quote_train_problems_only():
    rows = make_rows(Mix(dict.fromkeys(WORKFLOW_OF, 1.0), 0.3, LENGTHS), 300, random.Random(0))
    assert {row.role for row in rows} == set(WORKFLOW_OF)
    assert len(encode(rows, build_tokenizer())) >= 298  # rows over 512 tokens are dropped
    for row in rows:
        assert split_of(row.messages[0]["content"].split("\n")[0].partition(": ")[2]) == "train"


def test_operations_are_single_tokens_and_nothing_is_lost():
    tokenizer = build_tokenizer()
    text = ">23+8-29*3+17-1\n>31-29\nwait=2\n\\boxed{2}"
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([i]) for i in ids[:6]] == [">", "23", "+8", "-29", "*3", "+17"]
    assert tokenizer.decode(ids) == text


def test_the_scale_names_model_task_and_cap():
    cell = Cell("single", "sp", "math", "tiny-r")
    assert cell.make_task().name == "tiny_chain"
    assert cell.max_response_tokens == CAP
    assert cell.max_prompt_tokens + CAP <= LONGEST


def test_the_shipped_files_are_what_this_code_builds():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 2.2e6
    shipped, built = AutoTokenizer.from_pretrained(MODEL), build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    model, fresh = AutoModelForCausalLM.from_pretrained(MODEL), build_model(built, 0, LAYERS)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert model.num_parameters() == FACTS["parameters"]
    assert Plan(**FACTS["plan"]) == Plan()


def test_the_base_has_the_properties_of_the_table():
    least, most = 0.55, 0.75
    assert FACTS["problems"] == 512
    assert {row.label for row in WANTED if row.is_met(FACTS["untrained"], FACTS["trained"]) is False} == set()
    assert len(FACTS["agents"]) == 3
    assert all(least <= agent["solver"]["accuracy"]["value"] <= most for agent in FACTS["agents"])


def test_trained_agents_are_averaged():
    one, other = ({"solver": {"accuracy": Fact(value=v, low=v - 0.1, high=v + 0.1, n=9)}} for v in (0.4, 0.6))
    assert average([one, other]) == {"solver": {"accuracy": Fact(value=0.5, low=0.4, high=0.6, n=9)}}


@pytest.mark.slow
def test_the_base_measured_again_agrees_with_its_card():
    found = measure(MODEL, 256)
    for row in WANTED:
        claimed, again = FACTS["untrained"][row.part][row.key], found[row.part][row.key]
        half = (claimed["high"] - claimed["low"] + again["high"] - again["low"]) / 2
        assert abs(again["value"] - claimed["value"]) <= 1.5 * half + 0.1 * abs(claimed["value"]), row.label


def test_the_card_is_written_from_the_measured_facts(tmp_path):
    for name in ("skills.json", "README.md"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    write_card(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (MODEL / "README.md").read_text(encoding="utf-8")
