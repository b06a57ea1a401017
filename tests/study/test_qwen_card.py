"""The card of scale qwen-0.5b on docs/bases.md is made from the recorded facts, and the scale's caps follow from them by the stated rule."""

import json

import pandas as pd
import pytest
import qwen_card as card

from multirole_study.experiment.presets import QWEN_LENGTHS

FACTS = json.loads(card.FACTS.read_text(encoding="utf-8"))


def test_the_page_holds_the_tables_of_the_facts():
    page = card.PAGE.read_text(encoding="utf-8")
    assert card.page_with(page, card.written(FACTS)) == page, "run tools/qwen_card.py write"


@pytest.mark.parametrize("task", ["math", "code"])
def test_the_cap_of_the_scale_is_the_shortest_that_costs_little(task):
    assert card.shortest_cap(FACTS[task]["caps"]) == QWEN_LENGTHS[task][1]


def test_programs_leave_something_to_choose_and_to_learn():
    facts = FACTS["code"]["caps"][str(QWEN_LENGTHS["code"][1])]
    for name, (low, high) in card.WANTED.items():
        assert low <= facts[name]["value"] <= high, name


def test_the_shortest_cap_keeps_95_percent_of_the_accuracy():
    """95 % of 0.30 is 0.285."""
    caps = {cap: {"accuracy": {"value": value}} for cap, value in (("128", 0.28), ("192", 0.29), ("384", 0.30))}
    assert card.shortest_cap(caps) == 192


def test_facts_are_over_problems():
    """Problem a is right in 2 of 4 replies, problem b in none: accuracy 0.25, one of four 0.5."""
    replies = pd.DataFrame({
        "problem": ["a"] * 4 + ["b"] * 4, "correct": [1.0, 1.0, 0, 0, 0, 0, 0, 0], "reward": [1.0] * 8, "has_answer": [1.0] * 8,
        "tokens": [10] * 8, "is_cut": [1.0, 0, 0, 0, 1.0, 0, 0, 0],
    })  # fmt: skip
    facts = card.facts_at_a_cap(replies)
    assert [facts[name]["value"] for name in ("accuracy", "one of four right", "cut off at the cap")] == [
        0.25,
        0.5,
        0.25,
    ]
    assert facts["accuracy"]["n"] == 2


def test_a_line_that_a_killed_process_left_is_dropped(tmp_path):
    (tmp_path / "math.jsonl").write_text('{"task": "math"}\n{"problem": "a"}\n{"problem": "b", "tok')
    assert card.read(tmp_path / "math.jsonl") == ({"task": "math"}, [{"problem": "a"}])


def test_a_problem_that_lacks_a_reply_ends_the_measured_ones():
    rows = [{"problem": name} for name in ["a"] * 4 + ["b"] * 3 + ["c"] * 4]
    assert card.sampled_problems(["a", "b", "c", "d"], rows) == ["a"]
