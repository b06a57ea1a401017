"""A reply that cannot be parsed is recorded as "unparsed", never silently taken for something else."""

import asyncio

import pytest

from multirole.types import Problem, Turn
from multirole.workflows.eval_opt import EvalOpt, parse_verdict
from multirole.workflows.orch_workers import parse_strategies
from multirole.workflows.voting import Voting, parse_selection

SECOND = [
    "\\boxed{2}", "\\boxed {2}", "\\boxed{ 2 }", "\\boxed{2.}", "\\fbox{2}", "\\boxed{\\boxed{2}}", "$\\boxed{2}$", "**\\boxed{2}**",
    "\\boxed{\\text{2}}", "\\boxed{\\mathbf{2}}", "\\boxed{\\text{Solution 2}}", "\\boxed{\\textbf{Solution 2.}}", "\\boxed{**2**}",
    "\\boxed{\\#2}", "\\boxed{Solution \\#2}", "\\boxed{\\mathrm{Solution}\\;2}", "\\boxed{(2)}", "\\boxed{2)}", "\\boxed{[2]}",
    "\\boxed{N = 2}", "\\boxed{\\text{Candidate } 2}", "\\boxed{\\text{The best solution is Solution 2}}", "\\boxed{Two}",
    "\\boxed{\\textcolor{red}{2}}", "\\boxed{2.0}", "\\boxed{02}", "\\boxed{２}", "\\boxed{Solution 2 is correct}", "\\boxed{\n2\n}",
    "\\boxed{\u00a02\u200b}", "\\boxed{I choose Solution 2.}", "2", "**2**", "The best is 2.", "Both err.\n\n**Solution 2**", "- Solution 2", "Final selection: 2",
    "I choose Solution 2.\n", "1. 1 is wrong.\n2. Best: \u00a0Solution #2", "```\nSolution 2\n```", "Solution 1?\nSolution 2", "\\text{Solution 2}",
    "\\\\boxed{2}", "- [ ] Solution 1\n- [x] Solution 2\n- [ ] Solution 3", "\\boxed{~~3~~ 2}", "first \\boxed{3}, then \\boxed{2}", "\\boxed{2}, whose answer is \\boxed{42}",
]  # fmt: skip
NO_SELECTION = [
    "\\boxed{4}", "\\boxed{0}", "The answer is 2.", "Solution 2 adds 1 and 2", "1 + 1 = 2", "Solution 1 or 2", "\\boxed{42} since 12 + 30", "", "\\boxed{-2}", "\\boxed{1/2}", "\\boxed{2.5}",
    "\\boxed{\\frac{1}{2}}", "\\boxed{\\sqrt{2}}", "\\boxed{1, 2}", "\\boxed{Solutions 1 and 2}", "\\boxed{2", "\\boxed{x=2}",
    "\\boxed{2\\%}", "\\boxed{2 ❌}", "\\boxed{2^2}", "\\boxed{}", "\\boxed{" + "9" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("text", SECOND)
def test_selection_in_every_style(text):
    """NVIDIA-NeMo/Gym#1844: judges style what they put into the box. The last selection counts."""
    assert parse_selection(text, 3) == (1, "2")


@pytest.mark.parametrize("text", NO_SELECTION)
def test_no_selection_is_unparsed(text):
    assert parse_selection(text, 3) == (0, "unparsed")


def test_selection_by_the_first_literal_box():
    assert parse_selection("\\boxed{3}, no, \\boxed{1}", 3, box_rule="first_literal") == (2, "3")
    assert parse_selection("\\boxed{\\text{2}}", 3, box_rule="first_literal") == (0, "unparsed")


def test_selection_by_the_rule_of_the_released_code():
    assert parse_selection("The best is 2.", 3, "first_digit") == (1, "digit:2")
    assert parse_selection("12 is right, so 3", 3, "first_digit") == (2, "digit:3")
    assert parse_selection("7 of 3", 3, "first_digit") == (0, "unparsed")  # only the first digit is tried
    assert parse_selection("\\boxed{3}, no, \\boxed{1}", 3, "first_digit") == (2, "3")  # the first box
    assert parse_selection("\\boxed{\\text{2}}", 3, "first_digit") == (1, "digit:2")  # a literal box only


STYLES = [
    "\\boxed{%s}", "\\boxed {%s}", "\\boxed{ %s }", "\\boxed{%s.}", "\\boxed{%s!}", "\\boxed{\\text{%s}}", "\\boxed{\\text{%s.}}",
    "\\boxed{\\textbf{%s}}", "\\boxed{\\mathrm{%s}}", "\\boxed{\\mathbf{ %s }}", "\\boxed{\\texttt{%s}}", "\\boxed{**%s**}",
    "**\\boxed{%s}**", "$\\boxed{%s}$", "\\fbox{%s}", "\\boxed{\\boxed{%s}}", "\\boxed{\\large\\text{%s}}", "\\boxed{{\\bf %s}}",
    "\\boxed{\\textcolor{green}{\\text{%s}}}", "\\boxed{\\checkmark \\text{%s}}", "\\boxed{'%s'}", "\\boxed{[%s]}",
    "\\boxed{\\{%s\\}}", "\\boxed{\\text{Verdict: %s}}", "\\boxed{\\text{The solution is %s}}", "\\boxed{\n%s\n}", "\\boxed{~%s\\,}",
    "\\\\boxed{%s}", "\\boxed{~~Wrong~~ %s}", "\\boxed{%s} since the answer is \\boxed{12}", "\\boxed{Incorrect}? No: \\boxed{Correct}? No: \\boxed{%s}",
]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("word", ["Correct", "correct", "INCORRECT", "Incorrect"])
def test_verdict_in_every_style(style, word):
    """NVIDIA-NeMo/Gym#1844, and kinds of it. The last verdict counts."""
    assert parse_verdict(style % word) == word.lower()


@pytest.mark.parametrize(
    "text",
    [
        "It is correct that 1 + 1 = 2.", "The first step is correct, the second is not.", "Is it correct?\nI cannot tell.", "Not incorrect",
        "\\boxed{Not incorrect}", "", "boxed{Correct}", "\\boxed{12}", "\\boxed{Correct", "\\boxed{Partially correct}", "\\boxed{Corrected}",
        "\\boxed{Correct/Incorrect}", "\\boxed{Correct or Incorrect}", "\\boxed{Probably correct}", "\\boxed{correct answer is 12}",
        "correct ❌", "\\boxed{Correct ❌}", "\\boxed{❌ Correct}", "✗ The solution is correct.", "~~Correct~~", "\\boxed{~~Correct~~}", "\\boxed{Correct} no: \\boxed{Correct ❌}", "- [ ] Correct\n- [ ] Incorrect",
    ],
)  # fmt: skip
def test_no_verdict_is_unparsed(text):
    assert parse_verdict(text) == "unparsed"


LINES = [
    "%s", "%s.", "**%s**", "**%s.**", "*%s*", "Verdict: %s.", "**Verdict:** %s", "**Verdict: %s**", "## Verdict: %s", "Final verdict: %s",
    "The answer is %s.", "The solution is\u00a0%s.", "- %s", "1. Checked.\n2. Verdict: %s", "> %s", "```\n%s\n```", "```text\nVerdict: %s\n```",
    "I add 1 and 2.\n\nMy evaluation: %s!", "\\text{%s}", "\\textbf{Verdict: %s}", "Correct\nNo:\n%s", "Incorrect. Wait.\n%s", "\\boxed{12}\n%s", "\u200b%s\n\n",
    "- [x] %s\n- [ ] Undecided", "1. [X] %s\n2. [ ] Correct\n3. [ ] Incorrect", "[ ] Correct\n[x] %s",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("word", ["Correct", "INCORRECT", "not correct", "wrong"])
def test_verdict_in_the_last_line(line, word):
    """NVIDIA-NeMo/Gym#1161 reads the last word, joshuaswarren/remnic#673 missed negations. A box has priority, and prose is no verdict."""
    verdict = "correct" if word == "Correct" else "incorrect"
    assert parse_verdict(line % word) == verdict
    assert parse_verdict(line % word, "last_box") == "unparsed"
    assert parse_verdict(f"\\boxed{{Incorrect}}\n{line % word}") == "incorrect"


def test_verdict_by_the_rule_of_the_released_code():
    assert parse_verdict("\\boxed{Incorrect} \\boxed{Correct}", "first_literal") == "incorrect"
    assert parse_verdict("\\boxed{\\text{Correct}}", "first_literal") == "unparsed"


@pytest.mark.parametrize(
    ("kind", "role", "reply", "outcome"),
    [(EvalOpt, "evaluator", "\\boxed{\\text{Correct}}", "correct"), (Voting, "aggregator", "\\boxed{\\text{2}}", "2")],
)
def test_a_workflow_parses_by_its_box_rule(kind, role, reply, outcome):
    def outcomes(**options):
        turns = []

        async def call(name, messages, slot=0, round=0):
            turns.append(Turn(name, slot, round, [1], [2], [0.0], reply, "stop"))
            return turns[-1]

        asyncio.run(kind(prompts="math", **options).run(Problem("0", "", "1+1?", None), call))
        return {turn.outcome for turn in turns if turn.role == role}

    assert outcomes() == {outcome} and outcomes(box_rule="first_literal") == {"unparsed"}


@pytest.mark.parametrize(
    "text",
    [
        "❌ Incorrect.",
        "Incorrect.❌",
        "\\boxed{\\text{Verdict: ✗ wrong}}",
        "\\boxed{Incorrect} then \\boxed{Correct ❌}",
    ],
)
def test_a_cross_beside_a_negative_verdict_changes_nothing(text):
    assert parse_verdict(text) == "incorrect"


def test_not_correct_is_incorrect():
    for words in ("Not correct", "is not correct", "isn't correct", "This is not\u00a0correct.", "Wrong"):
        assert parse_verdict(f"\\boxed{{\\text{{{words}}}}}") == "incorrect"


PLANS = [
    "STRATEGY 1: a\nSTRATEGY 2: b", "**STRATEGY 1:** a\n**STRATEGY 2:** b", "**Strategy 1**: a\n\n**Strategy 2**: b",
    "### Strategy 1: a\n### Strategy 2: b", "## STRATEGY 1\na\n## STRATEGY 2\nb", "\\textbf{STRATEGY 1:} a\n\\textbf{STRATEGY 2:} b",
    "Strategy #1: a\nStrategy #2: b", "- **Strategy 1:** a\n- **Strategy 2:** b", "1. **STRATEGY 1:** a\n2. **STRATEGY 2:** b",
    "STRATEGY 1 - a\nSTRATEGY 2 - b", "STRATEGY 1. a\nSTRATEGY 2. b", "STRATEGY 1 : a\nSTRATEGY 2 : b",
]  # fmt: skip


@pytest.mark.parametrize("text", PLANS)
def test_plan_in_every_style(text):
    assert parse_strategies(text, 3) == (["a", "b"], "strategies")


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


def test_long_markup_is_parsed_in_linear_time():
    for unit in ("*", "_#", "\n", " ", "1.\n", "STRATEGY ", "\\text{", "\\boxed{", "\\boxed{}", "the "):
        text = unit * (100_000 // len(unit))
        assert parse_verdict(text) == "unparsed" and parse_selection(text, 3) == (0, "unparsed")
        assert parse_strategies(text, 3)[1] in {"strategies", "list", "lines", "unparsed"}
        boxed = f"\\boxed{{{text}}}"
        assert parse_verdict(boxed) == "unparsed" and parse_selection(boxed, 3) == (0, "unparsed")
