"""Numbers of the pages about results are those of the committed tables: filled in on results/README.md, compared on docs/results.md."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from multirole_study.falls import FALL
from multirole_study.paper.pages import Tables, must, span, total, write_page
from multirole_study.paper.statistics import MARGIN, RULES

ROOT = Path(__file__).parents[2]
SCALE = ROOT / "results" / "tiny-r"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
NUMBER = r"[+−]?\d+(?:\.\d+)?"
WITH_UNIT = rf"(?:{NUMBER},? (?:to|and|or) )?{NUMBER}(?: %| points| times as wide)"


def rows(table: str, **where: object) -> pd.DataFrame:
    lines = pd.read_csv(SCALE / "tables" / f"{table}.csv")
    return lines[(lines[list(where)] == list(where.values())).all(axis=1)]


def test_every_number_with_a_unit_on_the_page_is_a_rule_or_of_a_table():
    known = [rows("over_problems", number="times as wide")["value"].max(), 100 * MARGIN, 100 * FALL]
    known += [100 * effect for effect in RULES["effects"]]
    stated = re.findall(NUMBER, " ".join(re.findall(WITH_UNIT, PAGE)))
    assert len(stated) >= len(known)

    def is_known(text: str) -> bool:
        decimals = len(text.partition(".")[2])
        return any(float(text.replace("−", "-")) == round(value, decimals) for value in known)

    assert [text for text in stated if not is_known(text)] == []


def test_the_committed_page_is_its_template_filled_in(tmp_path):
    template = shutil.copy(ROOT / "results" / "README.md.jinja", tmp_path)
    page = write_page(Path(template), SCALE / "tables").read_text(encoding="utf-8")
    assert page == (ROOT / "results" / "README.md").read_text(encoding="utf-8"), "run `multirole paper results/tiny-r`"


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


def test_a_page_fails_at_a_missing_line_and_at_a_sentence_that_is_no_longer_true(table):
    with pytest.raises(ValueError, match="has no line with"):
        table.line("made", workflow="orch_workers")
    with pytest.raises(ValueError, match="has no line with"):
        table.lines("made", workflow=["voting", "orch_workers"])
    with pytest.raises(ValueError, match="has 2 lines"):
        table.line("made", unit="difference")
    with pytest.raises(ValueError, match="Rewrite it"):
        must(table.line("made", workflow="eval_opt").is_decided)
