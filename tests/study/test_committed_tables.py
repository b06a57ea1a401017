"""The committed tables are what this code makes of the packed runs: a change of a measure, rule or filter changes them."""

import json
from pathlib import Path

import pytest
import yaml

from multirole_study.paper.claims import claims
from multirole_study.paper.clock_study import ClockStudy
from multirole_study.paper.clock_tables import fall_table, verdict_table
from multirole_study.paper.grid import Study
from multirole_study.paper.leaderboard import boards, leaderboard_tables
from multirole_study.paper.output import Table
from multirole_study.paper.pack import read_measurement
from multirole_study.paper.rate_study import RateStudy
from multirole_study.paper.rate_tables import rate_tables, tuned
from multirole_study.paper.results import Results
from multirole_study.paper.tables import DECLARED, make, sentences

FOLDER = Path(__file__).parents[2] / "results"
RESULTS = Results(FOLDER / "tiny-r")
STUDY = Study.read(RESULTS.folder)


def check(table: Table, results: Results = RESULTS) -> None:
    """Compare a table's numbers, six digits of each, with the committed ones."""
    if len(table.shown):
        written = (results.folder / "tables" / f"{table.name}.csv").read_text(encoding="utf-8")
        assert table.values.to_csv(index=False, float_format="%.6g") == written


@pytest.mark.parametrize("declared", DECLARED["paper"], ids=lambda declared: declared["name"])
def test_tables_of_the_paper(declared):
    check(make(RESULTS, None, **declared))


@pytest.mark.parametrize("declared", DECLARED["study"], ids=lambda declared: declared["name"])
def test_tables_of_the_study(declared):
    check(make(RESULTS, STUDY, **declared))


def test_claims():
    check(claims(RESULTS, sentences(RESULTS)))


def test_tables_of_the_clock_study():
    results, study = Results(FOLDER / "clock/tiny-r"), ClockStudy.read(FOLDER / "clock/tiny-r")
    for table in (fall_table(results, study), verdict_table(results, study)):
        check(table, results)


def test_tables_of_the_leaderboard():
    results, study = Results(FOLDER / "credit/tiny-r"), Study.read(FOLDER / "credit/tiny-r")
    measured = read_measurement(RESULTS.folder, "credit_accuracy")
    for table in leaderboard_tables(boards(results, study), measured):
        check(table, results)


def test_tables_of_the_rate_study_and_the_rates_that_its_tuning_chose():
    results, study = Results(FOLDER / "rates/tiny-r"), RateStudy.read(FOLDER / "rates/tiny-r")
    for table in rate_tables(results, study):
        check(table, results)
    assert study.chosen and study.chosen == {arm: tuned(results, study, arm).rate for arm in study.chosen}
    assert study.chosen == yaml.safe_load((FOLDER.parent / "studies/rates.yaml").read_text())["chosen"]


@pytest.mark.parametrize("name", ["tables", "figures", "mechanisms", "study"])
def test_the_executed_notebooks_have_the_text_and_code_of_their_notebooks(name):
    notebook, executed = (
        [
            "".join(cell["source"])
            for cell in json.loads((folder / f"{name}.ipynb").read_text())["cells"]
            if "injected-parameters" not in cell["metadata"].get("tags", ())
        ]
        for folder in (FOLDER.parent / "notebooks", FOLDER / "tiny-r")
    )
    assert executed == notebook
