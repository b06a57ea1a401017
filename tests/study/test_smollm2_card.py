"""The card of scale smollm2 on docs/smollm2.md is made from the recorded facts, and the facts are within the required bounds."""

import json

import pandas as pd
import smollm2_card as card

FACTS = json.loads(card.FACTS.read_text(encoding="utf-8"))


def test_the_page_holds_the_tables_of_the_facts():
    page = card.PAGE.read_text(encoding="utf-8")
    assert card.page_with(page, card.written(FACTS)) == page, "run tools/smollm2_card.py"


def test_both_tasks_leave_something_to_choose_and_to_learn():
    for task in ("math", "code"):
        for name, (low, high) in card.WANTED.items():
            assert low <= FACTS["facts"][f"single, {task}"][name]["value"] <= high, (task, name)


def test_an_interval_of_proportions_stays_between_0_and_1():
    """Wilson for 0 of 2: 0 and 1.96^2 / (2 + 1.96^2)."""
    assert card.mean_interval(pd.Series([0.0, 0.0])) == {"value": 0.0, "low": 0.0, "high": 0.6576, "n": 2}


def test_an_interval_is_over_problems():
    """Mean of 0, 0.5 and 1; standard deviation 0.5."""
    interval = card.mean_interval(pd.Series([0.0, 0.5, 1.0]))
    assert interval == {
        "value": 0.5,
        "low": round(0.5 - 1.96 * 0.5 / 3**0.5, 4),
        "high": round(0.5 + 1.96 * 0.5 / 3**0.5, 4),
        "n": 3,
    }
