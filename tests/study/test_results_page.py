"""Numbers of the pages about results are those of the committed tables: filled in on results/README.md, compared on docs/results.md."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jinja2
import pandas as pd
import pytest
import yaml

from multirole_study.falls import FALL
from multirole_study.paper.pages import Tables, span, total, write_page
from multirole_study.paper.statistics import MARGIN, RULES

ROOT = Path(__file__).parents[2]
SCALE = ROOT / "results" / "tiny-r"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
NUMBER = r"[+−]?\d+(?:\.\d+)?"
WITH_UNIT = rf"(?:{NUMBER},? (?:to|and|or) )?{NUMBER}(?: %| points)"


def rows(table: str, **where: object) -> pd.DataFrame:
    lines = pd.read_csv(SCALE / "tables" / f"{table}.csv")
    return lines[(lines[list(where)] == list(where.values())).all(axis=1)]


def expected() -> dict[str, list[float]]:
    """Sentence, "N" standing for a number -> the numbers."""
    return {
        "at most N times as wide": [rows("over_problems", number="times as wide")["value"].max()],
        "equivalence within N points": [100 * MARGIN],
        "an evaluation N points or more below the best": [100 * FALL],
        "difference of N or N points": [100 * effect for effect in RULES["effects"]],
    }


def test_every_number_on_the_page_is_that_of_its_table():
    left = PAGE
    for sentence, values in expected().items():
        pattern = re.escape(sentence).replace("N", f"({NUMBER})")
        match = re.search(pattern, left)
        assert match, sentence
        for text, value in zip(match.groups(), values, strict=True):
            decimals = len(text.partition(".")[2])
            assert float(text.replace("−", "-")) == round(value, decimals), sentence
        left = left.replace(match[0], "")
    untraced = re.findall(WITH_UNIT, left)
    assert not untraced, f"no table is named for {untraced}"


def test_the_committed_page_is_its_template_filled_in(tmp_path):
    template = shutil.copy(ROOT / "results" / "README.md.jinja", tmp_path)
    page = write_page(Path(template), SCALE / "tables").read_text(encoding="utf-8")
    assert page == (ROOT / "results" / "README.md").read_text(encoding="utf-8"), "run `multirole paper results/tiny-r`"


STATEMENTS = yaml.safe_load((ROOT / "tests/data/statements_of_results.yaml").read_text(encoding="utf-8"))
RESULTS_PAGE = (ROOT / "results" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def evaluate() -> Callable[[str], object]:
    """Return a function that evaluates an expression of the template on the committed tables."""
    tables = Tables(SCALE / "tables")

    def all_are(verdict: str, table: str, seeds: int, **columns: object) -> bool:
        answers = tables.answers(table, **columns)
        return {answer.verdict for answer in answers} == {verdict} and min(
            answer.number.seeds for answer in answers
        ) >= seeds

    known = tables.functions | {"all_are": all_are}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)

    def value(expression: str) -> object:
        return environment.compile_expression(expression, undefined_to_none=False)(**known)

    for name, expression in STATEMENTS["names"].items():
        known[name] = value(expression)
    return value


@pytest.mark.parametrize("statement", STATEMENTS["statements"], ids=lambda statement: statement["says"])
def test_a_sentence_of_the_page_says_what_the_tables_show(evaluate, statement):
    assert statement["says"] in RESULTS_PAGE
    assert [expression for expression in statement["holds"] if not evaluate(expression)] == []


@pytest.fixture
def table(tmp_path) -> Tables:
    rows = [
        ("voting", "difference", 0.0231, 0.0104, 0.0358, 0.001, 0.2, 5),
        ("eval_opt", "difference", -0.004, -0.012, 0.004, 0.3, 0.001, 10),
        ("single", "count", 3, None, None, None, None, None),
    ]
    names = ["workflow", "unit", "value", "low", "high", "p", "p_match", "seeds"]
    pd.DataFrame(rows, columns=names).to_csv(tmp_path / "made.csv", index=False)
    return Tables(tmp_path)


def test_a_line_is_written_with_its_interval_and_its_verdict(table):
    voting, eval_opt = table.lines("made", workflow=["voting", "eval_opt"])
    assert (voting.points, voting.verdict) == ("2.3 points [1.0, 3.6]", "decided")
    assert (-voting).interval == "−2.3 [−3.6, −1.0]"
    assert (str(eval_opt), eval_opt.verdict, eval_opt.seeds) == ("−0.4", "equivalent", 10)
    assert span([voting, eval_opt]) == "−0.4 to 2.3"
    assert total(table.lines("made", workflow="single")) == 3


def test_an_answer_of_a_declared_question_has_its_verdict(tmp_path):
    """In points or in percent; only the number if the question is not judged on the base, and a dash without runs."""
    rows = [
        ("sharing", "Voting, SP − IP", "one", -0.004, -0.012, 0.004, 5, "equivalent"),
        ("sharing", "Voting, SP − IP", "other", 0.031, 0.002, 0.06, 5, "–"),
        ("sharing", "Eval-Opt, SP − IP", "one", None, None, None, 0, "–"),
    ]
    (tmp_path / "seed1/tiny-r").mkdir(parents=True)
    names = ["question", "line", "base", "value", "low", "high", "seeds", "verdict"]
    pd.DataFrame(rows, columns=names).to_csv(tmp_path / "seed1/tiny-r/questions.csv", index=False)
    tables, table = Tables(tmp_path / "tiny-r/tables"), "seed1/tiny-r/questions"
    one, other = tables.answers(table, base=["one", "other"], line="Voting, SP − IP")
    assert one.points == "−0.4 points [−1.2, 0.4]: equivalent" and one.number.seeds == 5
    assert other.percent == "3.1 % [0.2, 6.0]"
    assert tables.answer(table, base="one", line="Eval-Opt, SP − IP").points == "–"


def test_a_page_fails_at_a_missing_line(table):
    with pytest.raises(ValueError, match="has no line with"):
        table.line("made", workflow="orch_workers")
    with pytest.raises(ValueError, match="has no line with"):
        table.lines("made", workflow=["voting", "orch_workers"])
    with pytest.raises(ValueError, match="has 2 lines"):
        table.line("made", unit="difference")
