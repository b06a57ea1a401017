"""The words of docs/at_a_glance.md and of README's table are those of the committed verdicts, by the rules that the page states."""

import shutil
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import yaml

from multirole_study.compare.estimates import shares_of_variance
from multirole_study.paper import at_a_glance
from multirole_study.paper.at_a_glance import MAPPING, cell, filled, linked_cells, word_of_most, write
from multirole_study.paper.results import Results

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((Path(at_a_glance.__file__).parent / "claims.yaml").read_text(encoding="utf-8"))


def test_the_committed_tables_are_those_of_the_verdicts(tmp_path):
    pages = (at_a_glance.PAGE, Path("README.md"))
    for page in pages:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    (tmp_path / "results").symlink_to(ROOT / "results")
    write(tmp_path)
    for page in pages:
        assert (tmp_path / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8"), (
            "run `multirole paper results/tiny-r --page`"
        )


def test_every_table_and_figure_of_the_paper_has_a_line():
    named = " ".join(line["paper"] for line in MAPPING["lines"])
    assert all(f"Table {number}" in named for number in range(1, 8))
    assert all(f"Figure {number}" in named for number in range(1, 7))


def test_every_rule_is_one_of_the_declared_or_added_ones():
    known = {rule["name"] for part in ("claims", "looked_at_afterwards", "added") for rule in RULES[part]}
    assert {line["rule"] for line in MAPPING["lines"] if "rule" in line} <= known


def test_a_link_leads_to_a_file_below_results():
    for line in MAPPING["lines"]:
        see = line.get("see", {})
        targets = [*line["ours"], *([see] if isinstance(see, str) else see.values())]
        assert all((ROOT / "results" / target).exists() for target in targets), line["claim"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reproduced"] * 6 + ["undecided"] * 5, ("reproduced", 6)),
        (["reproduced"] * 5 + ["undecided"] * 5, ("undecided", 5)),
        (["reproduced", "contradicted"], ("undecided", 0)),
        (["contradicted"], ("contradicted", 1)),
        ([], ("untested", 0)),
    ],
)
def test_a_word_needs_more_than_half_of_the_verdicts(words, expected):
    assert word_of_most(words) == expected


@pytest.fixture
def results(tmp_path) -> Path:
    """Two scales without runs but for three claims of the miniature at the preset's rate, and a table of another study."""
    columns = ["claim", "rule", "regime", "policy", "verdict", "vacuous", "seed"]
    rows = [
        ("peaks", "declared", "paper", "ip", "yes", None, 0),
        ("peaks", "declared", "paper", "ip", "yes", None, 1),
        ("peaks", "declared", "paper", "sp", "no", None, 0),
        ("falls", "declared", "paper", "ip", "equivalent", "no run ends in a fall", 0),
        ("drifts", "looked at afterwards", "paper", "sp", "equivalent", None, 0),
        ("odd", "declared", "paper", "sp", "perhaps", None, 0),
    ]
    for scale in ("tiny-r", "smollm2"):
        (tmp_path / scale / "tables").mkdir(parents=True)
        pd.DataFrame(rows if scale == "tiny-r" else [], columns=columns).to_csv(tmp_path / scale / "tables/claims.csv")
    answers = pd.DataFrame({"question": "steps", "arm": ["a", "a", "b", "c"], "verdict": ["yes", "yes", "yes", "no"]})
    answers.to_csv(tmp_path / "answers.csv")
    return tmp_path


def test_a_cell_counts_a_policy_once_and_marks_rules_made_afterwards(results):
    def shown(**line: object) -> str:
        return str(cell({"claim": "made up", **line}, "miniature", results))

    assert shown(rule="peaks") == "undecided (0 of 2)"
    assert shown(rule="peaks", policies=["sp"]) == "contradicted"
    assert shown(rule="falls") == "not testable", "a vacuous verdict"
    assert shown(rule="drifts") == "no difference†"
    assert str(cell({"rule": "peaks"}, "smollm2", results)).startswith("untested")
    source = {"table": "answers.csv", "where": {"question": "steps"}, "each": ["arm"]}
    assert shown(miniature=source) == "reproduced (2 of 3)"
    with pytest.raises(ValueError, match="no word for the verdicts \\['perhaps'\\]"):
        shown(rule="odd")
    with pytest.raises(ValueError, match="has no line with"):
        shown(miniature={**source, "where": {"question": "stairs"}})


def test_a_line_may_correct_its_own_comparisons_and_carry_a_remark(results):
    """With p = .033 and below .001 both stay decided over two lines; with .048 twice neither does, which alone would be."""
    answers = {"question": "peak", "arm": ["a", "b"], "verdict": "yes", "seeds": 3, "value": 0.03}
    pd.DataFrame(answers | {"low": [0.006, 0.029], "high": [0.054, 0.031]}).to_csv(results / "peaks.csv")
    source = {"table": "peaks.csv", "where": {"question": "peak"}, "each": ["arm"], "holm": True}
    line = {
        "claim": "made up",
        "remark": {"smollm2": "one run"},
        "smollm2": {"word": "undecided"},
        "higher": {"word": "untested"},
    }

    def shown(source: dict[str, object]) -> list[str]:
        cells = linked_cells(line | {"miniature": source}, results / "page.md", results)
        return [text.removeprefix("[").partition("]")[0] for text in cells]

    assert shown(source) == ["reproduced", "untested", "undecided (one run)"]
    wider = pd.DataFrame(answers | {"low": [0.0005, 0.0005], "high": [0.0595, 0.0595]})
    wider.to_csv(results / "peaks.csv")
    assert shown(source)[0] == "undecided" and shown(source | {"holm": False})[0] == "reproduced"


def test_gains_depend_on_workflow_and_task_mostly_because_untrained_workflows_differ():
    """The page says which part of the variance workflow and task explain, and the policy, of gains and of peaks."""
    results = Results(ROOT / "results/tiny-r")
    cells = list(product(results.grid.workflows, results.grid.tasks, results.grid.policies))
    peak, base = (
        pd.DataFrame({cell: results.accuracy(cell[0], cell[2], cell[1], at) for cell in cells})
        for at in ("peak", "base")
    )
    names = (pd.Index([f"{workflow} {task}" for workflow, task, _ in cells]), pd.Index([cell[2] for cell in cells]))
    places = [codes.factorize()[0] for codes in names]
    gains, peaks = (shares_of_variance(table.to_numpy(), places) for table in (peak - base, peak))
    of_place = peak.mean().groupby(level=[0, 1]).mean(), base.mean().groupby(level=[0, 1]).mean()
    note = next(line for line in MAPPING["lines"] if line.get("rule") == "gains_depend_on_workflow_and_task")["note"]
    ranges = [f"{100 * means.min():.0f} to {100 * means.max():.0f} %" for means in of_place]
    shares = [f"{share:.2f}"[1:] for share in (*gains, *peaks)]
    assert f"({ranges[1]} right; at the peak {ranges[0]})" in note
    assert "explain {0} of the gain's variance and {2} of the peak's, the policy {1} and {3}".format(*shares) in note


def test_a_page_without_the_two_comments_is_refused():
    with pytest.raises(ValueError, match="once each"):
        filled("# A page\n", "| a |")
