"""A reply that cannot be parsed is recorded as "unparsed", never silently taken for something else."""

import pytest

from multirole.workflows.eval_opt import parse_verdict
from multirole.workflows.orch_workers import parse_strategies
from multirole.workflows.voting import parse_selection


@pytest.mark.parametrize(
    ("text", "chosen", "outcome"),
    [
        ("\\boxed{2}", 1, "2"),
        ("first \\boxed{3}, then \\boxed{1}", 2, "3"),
        ("\\boxed{4}", 0, "unparsed"),
        ("\\boxed{0}", 0, "unparsed"),
        ("The best is 2.", 0, "unparsed"),
        ("\\boxed{42} since 12 + 30", 0, "unparsed"),
        ("", 0, "unparsed"),
    ],
)
def test_selection(text, chosen, outcome):
    assert parse_selection(text, 3) == (chosen, outcome)


def test_selection_falls_back_to_a_digit_only_in_the_released_code():
    assert parse_selection("The best is 2.", 3, "first_digit") == (1, "digit:2")
    assert parse_selection("12 is right, so 3", 3, "first_digit") == (2, "digit:3")
    assert parse_selection("7 of 3", 3, "first_digit") == (0, "unparsed")  # only the first digit is tried


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("\\boxed{Correct}", "correct"),
        ("no. \\boxed{INCORRECT}", "incorrect"),
        ("\\boxed{Incorrect} \\boxed{Correct}", "incorrect"),
        ("\\boxed{ Correct }", "unparsed"),
        ("\\boxed{12}", "unparsed"),
        ("Correct", "unparsed"),
    ],
)
def test_verdict(text, verdict):
    assert parse_verdict(text) == verdict


@pytest.mark.parametrize(
    ("text", "strategies", "outcome"),
    [
        ("STRATEGY 1: a\nSTRATEGY 2: b", ["a", "b"], "strategies"),
        ("strategy 2: b\nSTRATEGY 1: a", ["a", "b"], "strategies"),
        ("STRATEGY 1: a STRATEGY 2: b STRATEGY 3: c STRATEGY 4: d", ["a", "b", "c"], "strategies"),
        ("1. add\n2) multiply", ["add", "multiply"], "list"),
        ("go step by step here\nno", ["go step by step here"], "lines"),
        ("hm", ["hm"], "unparsed"),
        ("", [""], "unparsed"),
    ],
)
def test_strategies(text, strategies, outcome):
    assert parse_strategies(text, 3) == (strategies, outcome)
