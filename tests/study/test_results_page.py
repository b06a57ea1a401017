"""Numbers of the pages about results are those of the committed tables: filled in on results/README.md, compared on docs/results.md and docs/results_changes.md."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jinja2
import pandas as pd
import pytest
import yaml
from numbers_of_pages import seed_interval
from scipy import stats

from multirole_study.compare.corrections import corrected
from multirole_study.compare.rules import ALPHA, MARGIN, RULES
from multirole_study.falls import FALL
from multirole_study.paper.pages import Tables, span, total, write_page

ROOT = Path(__file__).parents[2]
SCALE = ROOT / "results" / "tiny-r"
PAGE = re.sub(
    r"\s+",
    " ",
    "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "results_changes.md")),
)
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


def test_the_tokens_that_estimators_sampled():
    """Typed on the page: percent more or fewer than `outcome`."""
    tables = ROOT / "results/credit/tiny-r/tables"
    names = [f"leaderboard_{workflow}_sp_math_accuracy.csv" for workflow in ("voting", "eval_opt")]
    ends = pd.concat(pd.read_csv(tables / name) for name in names).set_index(["workflow", "arm"])
    tokens = (100 * (ends["tokens"] - 1)).round()
    assert list(tokens["voting"][["critic", "shapley", "single agent, Voting's tokens"]]) == [23, -23, 23]
    arms = ["branches in Eval-Opt", "mean_over_turns", "single agent, Eval-Opt's tokens"]
    assert list(tokens["eval_opt"][arms]) == [-14, 23, 37]


def test_the_rate_of_the_agent_with_one_step_was_too_low():
    tuning = pd.read_csv(ROOT / "results/rates/tiny-r/tables/rates_tuning.csv")
    accuracy = tuning.query("arm == 'single agent, one step'").set_index("rate")["accuracy"]
    assert f"gives {100 * (accuracy[0.004] - accuracy[0.002]):.1f} points more on the tuning seeds" in RESULTS_PAGE


def test_a_correction_over_more_tests_undid_two_decisions():
    """docs/results_changes.md: Orch-Workers against the single agent with as many steps, over the 24 tests of `controls` before and its 36 now."""
    table = rows("controls")
    before = corrected(table[~table["run"].str.endswith("one step")])
    before = before[before["number"] == "peak − four steps"].set_index("run")
    decided = before.index[before["p_holm"] < ALPHA]
    assert list(decided) == ["Orch-Workers-IP", "Orch-Workers-SP"]
    now = corrected(table).query("run == 'Orch-Workers-SP' and number == 'peak − four steps'")["p_holm"].item()
    said = re.search(r"p = (\S+) and (\S+) over the 24 tests before, (\S+) over 36", PAGE)
    assert [float(text) for text in said.groups()] == [*before["p_holm"][decided].round(3), round(now, 3)]


def test_the_two_signs_of_the_language_model():
    """Means over workflows by seed, of the mean of the last two evaluations (ends) and of the best one minus it (falls)."""
    accuracy = (
        pd.read_parquet(ROOT / "results/smollm2/eval.parquet").groupby(["run", "step"])["correct"].mean().unstack()
    )
    settings = pd.read_parquet(ROOT / "results/smollm2/runs.parquet").set_index("run")["settings"].map(json.loads)
    end = accuracy.apply(lambda curve: curve.dropna().iloc[-2:].mean(), axis=1)
    fall = accuracy.max(axis=1) - end

    def by_seed(numbers: pd.Series, workflow: str, policy: str, schedule: str) -> pd.Series:
        """Return seed -> number of the runs with the scale's number of problems and this schedule."""
        runs = [
            run
            for run in numbers.index
            if run.startswith(f"{workflow}-{policy}-")
            and settings[run]["lr_schedule"] == schedule
            and settings[run]["n_problems"] == 4
            and settings[run]["iterations"] == 16
        ]
        return pd.Series({settings[run]["seed"]: numbers[run] for run in runs}).sort_index()

    gains = pd.concat(
        [
            by_seed(end, workflow, policy, "cosine") - by_seed(end, "single", "sp", "cosine")
            for workflow in ("voting", "eval_opt", "orch_workers")
            for policy in ("ip", "sp")
        ],
        axis=1,
    ).dropna()
    falls = pd.concat(
        [
            by_seed(fall, name, "sp", "constant") - by_seed(fall, name, "ip", "constant")
            for name in ("voting", "eval_opt")
        ],
        axis=1,
    )
    assert (len(gains), len(falls)) == (3, 5)
    for numbers, words in (
        (gains, "workflows end {} points [{}, {}] *below*"),
        (falls, "SP falls {} points [{}, {}] *less*"),
    ):
        mean, low, high = (f"{-100 * number:.1f}".replace("-", "−") for number in seed_interval(numbers.mean(axis=1)))
        assert words.format(mean, high, low) in RESULTS_PAGE


def test_the_six_cells_of_figure_3_differ():
    """F test of IP − SP at the peak over cells, with seeds as blocks."""
    peaks = rows("claims", claim="ip_has_the_higher_ceiling", regime="paper")
    table = peaks.pivot(index="seed", columns=["workflow", "task"], values="value").to_numpy()
    n_seeds, n_cells = table.shape
    residual = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (n_cells - 1, (n_cells - 1) * (n_seeds - 1))
    f = n_seeds * ((table.mean(0) - table.mean()) ** 2).sum() / freedom[0] / ((residual**2).sum() / freedom[1])
    assert (
        f"F({freedom[0]}, {freedom[1]}) = {f:.1f}, p = {stats.f.sf(f, *freedom):.4f}, seeds as blocks" in RESULTS_PAGE
    )


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
