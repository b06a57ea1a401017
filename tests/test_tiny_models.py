"""The shipped bases: small files, the tokenizer that this code builds, and skills that carry the workflows."""

import json
import random

import pytest
import torch
from tiny_base import code_habits, math_habits
from tiny_base.card import skill_table
from tiny_base.dialogues import DIFFICULTIES, WORKFLOW_OF, make_rows, synthetic
from tiny_base.grow import grow
from tiny_base.pretrain import MODELS, PLANS, Plan, serve
from tiny_base.skills import grade, play
from tiny_base.tokenizer import build_tokenizer
from tiny_base.train import SIZES, build_model, encode
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.tasks import EMBEDDED, TASKS
from multirole.tasks.splits import split_of

SCALES = sorted(path.parent.name for path in MODELS.glob("*/skills.json"))


def skills_of(scale):
    return json.loads((MODELS / scale / "skills.json").read_text(encoding="utf-8"))


def test_all_shipped_weights_together_are_at_most_25_mb():
    assert SCALES == sorted(SIZES)
    assert sum(path.stat().st_size for path in MODELS.glob("*/*")) <= 25e6


@pytest.mark.parametrize("scale", SCALES)
def test_shipped_tokenizer_is_the_one_this_code_builds(scale):
    shipped, built = AutoTokenizer.from_pretrained(MODELS / scale), build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped.chat_template == built.chat_template
    assert (shipped.eos_token_id, shipped.pad_token_id) == (built.eos_token_id, built.pad_token_id)


@pytest.mark.parametrize("task", EMBEDDED)
@pytest.mark.parametrize("scale", SCALES)
def test_claimed_skills_leave_headroom_and_critics_know_something(scale, task):
    roles = skills_of(scale)["skills"][task]
    assert 0.2 <= roles["generator"]["accuracy"] <= 0.65
    assert roles["evaluator"]["balanced_accuracy"] >= 0.65
    assert roles["aggregator"]["gain"] >= 0.03
    assert roles["worker"]["careful_accuracy"] >= 0.9
    for role in ("evaluator", "aggregator", "orchestrator"):
        assert roles[role]["parsed"] >= 0.95
    assert all(facts.get("truncated", 0) <= 0.02 for facts in roles.values())


def test_larger_scales_answer_better():
    """Right answers of the four answering roles, averaged over both tasks; one standard error is 0.6 points."""

    def accuracy(scale):
        roles = [skills_of(scale)["skills"][task] for task in EMBEDDED]
        answering = ("generator", "refiner", "worker", "synthesizer")
        return sum(r[name]["accuracy"] for r in roles for name in answering) / (len(roles) * len(answering))

    assert accuracy("tiny-s") + 0.01 < accuracy("tiny-m") and accuracy("tiny-m") + 0.01 < accuracy("tiny-l")


@pytest.mark.parametrize("scale", SCALES)
def test_the_rebuild_command_repeats_the_plan_that_made_the_weights(scale):
    assert Plan(**skills_of(scale)["plan"]) == PLANS[scale]


@pytest.mark.parametrize("scale", SCALES)
def test_model_card_holds_the_measured_tables(scale):
    card = (MODELS / scale / "README.md").read_text(encoding="utf-8")
    for roles in skills_of(scale)["skills"].values():
        assert skill_table(roles) in card


def test_one_skill_measured_again_agrees_with_the_claim():
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-s")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-s", dtype=torch.float32)
    problems = TASKS["tiny_math"].problems("validation", 200)
    episodes = play("single", problems, 1, serve(model, tokenizer), tokenizer, seed=1)
    accuracy = sum(right for graded in grade(episodes) for right in graded.values()) / len(problems)
    claimed = skills_of("tiny-s")["skills"]["tiny_math"]["generator"]["accuracy"]
    assert abs(accuracy - claimed) < 0.12  # more than three standard errors


@pytest.mark.parametrize("habits", [math_habits, code_habits], ids=["math", "code"])
def test_authors_know_whether_their_answers_are_right(habits):
    name = "tiny_math" if habits is math_habits else "tiny_code"
    task, rng = TASKS[name], random.Random(0)
    problems = task.problems("train", 60)
    for habit in habits.HABITS:
        texts, truths = zip(*(habits.write(problem, habit, rng) for problem in problems), strict=True)
        assert [reward.is_correct for reward in task.score_batch(problems, list(texts))] == list(truths)


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
    problem = TASKS["tiny_math"].problems("train", 1)[0]
    problem = type(problem)("hand", "tiny_math", "7+5*2-9", 15)
    assert math_habits.wrong_line(problem, text) == line


def test_dialogues_cover_every_role_and_quote_train_problems_only():
    rng, tokenizer = random.Random(0), build_tokenizer()
    shares = dict.fromkeys(WORKFLOW_OF, 1.0)
    rows = make_rows(shares, 400, rng, [synthetic(task, rng) for task in DIFFICULTIES])
    assert {row.role for row in rows} == set(WORKFLOW_OF)
    assert max(len(ids) for ids, _ in encode(rows, tokenizer)) < 300
    for row in rows:
        first = row.messages[0]["content"].split("\n")[0]
        assert split_of(first.partition(": ")[2]) == "train"


def test_growing_a_base_keeps_its_function():
    tokenizer = build_tokenizer()
    small = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-s", dtype=torch.float32).eval()
    ids = torch.arange(60).reshape(2, 30)  # (N, T)
    for scale in ("tiny-m", "tiny-l"):
        large = grow(small, build_model(scale, tokenizer, seed=1)).eval()
        with torch.inference_mode():
            assert torch.allclose(large(ids).logits, small(ids).logits, atol=1e-3)
    with pytest.raises(ValueError, match="write sizes with the same head_dim"):
        grow(large, small)
