"""The shipped base: small files, the tokenizer that this code builds, and skills that carry the workflows."""

import json
import random
from pathlib import Path

import pytest
import torch
from tiny_base import math_habits
from tiny_base.card import skill_table
from tiny_base.dialogues import AUTHORS, WORKFLOW_OF, make_rows, synthetic
from tiny_base.pretrain import Plan, serve
from tiny_base.skills import grade, play
from tiny_base.tokenizer import build_tokenizer
from tiny_base.train import build_model, encode
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.tasks.splits import split_of

MODELS = Path(__file__).parents[1] / "src" / "multirole" / "models"
MODEL = MODELS / "tiny-s"
FACTS = json.loads((MODEL / "skills.json").read_text(encoding="utf-8"))


def test_all_shipped_weights_together_are_at_most_25_mb():
    assert {folder.name for folder in MODELS.iterdir()} == {"tiny-s", "tiny-r", "tiny-r-code"}
    assert sum(path.stat().st_size for path in MODELS.glob("*/*")) <= 25e6


def test_the_shipped_files_are_what_this_code_builds():
    shipped, built = AutoTokenizer.from_pretrained(MODEL), build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped.chat_template == built.chat_template
    assert (shipped.eos_token_id, shipped.pad_token_id) == (built.eos_token_id, built.pad_token_id)
    model, fresh = AutoModelForCausalLM.from_pretrained(MODEL), build_model(built, seed=0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert model.num_parameters() == FACTS["parameters"]
    assert Plan(**FACTS["plan"]) == Plan()


@pytest.mark.parametrize("task", AUTHORS)
def test_claimed_skills_leave_headroom_and_critics_know_something(task):
    roles = FACTS["skills"][task]
    assert 0.2 <= roles["generator"]["accuracy"] <= 0.65
    assert roles["evaluator"]["balanced_accuracy"] >= 0.65
    assert roles["aggregator"]["gain"] >= 0.03
    assert roles["worker"]["careful_accuracy"] >= 0.9
    for role in ("evaluator", "aggregator", "orchestrator"):
        assert roles[role]["parsed"] >= 0.95
    assert all(facts.get("truncated", 0) <= 0.02 for facts in roles.values())


def test_model_card_holds_the_measured_tables():
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    for roles in FACTS["skills"].values():
        assert skill_table(roles) in card


def test_one_skill_measured_again_agrees_with_the_claim():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    problems = AUTHORS["tiny_math"].task.problems("validation", 200)
    episodes = play("single", problems, 1, serve(model, tokenizer), tokenizer, seed=1)
    accuracy = sum(right for graded in grade(episodes) for right in graded.values()) / len(problems)
    claimed = FACTS["skills"]["tiny_math"]["generator"]["accuracy"]
    assert abs(accuracy - claimed) < 0.12  # more than three standard errors


@pytest.mark.parametrize("author", AUTHORS.values(), ids=AUTHORS)
def test_authors_know_whether_their_answers_are_right(author):
    rng, problems = random.Random(0), author.task.problems("train", 60)
    for habit in author.habits.HABITS:
        texts, truths = zip(*(author.habits.write(problem, habit, rng) for problem in problems), strict=True)
        assert [reward.is_correct for reward in author.task.score(problems, list(texts))] == list(truths)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("=12*2-9\n=24-9\n\\boxed{15}", None),
        ("=24-9\n\\boxed{15}", None),
        ("\\boxed{15}", None),
        ("=12*2-9\n=25-9\n\\boxed{16}", 2),
        ("=12*2-9\n=24-9\n\\boxed{14}", 3),
        ("=12-9\n\\boxed{3}", 1),
        ("nonsense", 1),
    ],
)
def test_first_wrong_line_of_a_derivation(text, line):
    problem = AUTHORS["tiny_math"].task.problems("train", 1)[0]
    problem = type(problem)("hand", "tiny_math", "7+5*2-9", 15)
    assert math_habits.wrong_line(problem, text) == line


def test_dialogues_cover_every_role_and_quote_train_problems_only():
    rng, tokenizer = random.Random(0), build_tokenizer()
    shares = dict.fromkeys(WORKFLOW_OF, 1.0)
    rows = make_rows(shares, 400, rng, [synthetic(task, rng) for task in AUTHORS])
    assert {row.role for row in rows} == set(WORKFLOW_OF)
    assert max(len(ids) for ids, _ in encode(rows, tokenizer)) < 300
    for row in rows:
        first = row.messages[0]["content"].split("\n")[0]
        assert split_of(first.partition(": ")[2]) == "train"
