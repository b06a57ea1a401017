"""The committed tables are what the notebooks compute from the packed runs: a change of a measure, rule or filter changes them."""

import json
from pathlib import Path

import pytest
import yaml
from notebook_cells import computed, items_of, linked

from multirole_study.paper.rate_study import RateStudy
from multirole_study.paper.rate_tables import tuned
from multirole_study.paper.results import Results

FOLDER = Path(__file__).parents[2] / "results"
QUICK = {
    "tables": ("table_1", "ip_against_sp", "compute"),
    "rates": ("rates_answers",),
}
"""Notebook -> the items that are computed in seconds; the others are slow."""
PLACES = {"tables": "tiny-r", "mechanisms": "tiny-r", "study": "tiny-r", "clock": "clock/tiny-r", "rates": "rates/tiny-r",
          "credit": "credit/tiny-r"}  # fmt: skip
"""Notebook -> the committed results that it reads."""
SLOW = {
    name: {item for item, cell in items_of(name).items() if "table" in cell["metadata"]["tags"]}
    - set(QUICK.get(name, ()))
    for name in PLACES
}


def check(notebook: str, items: tuple[str, ...] | set[str], tmp_path: Path) -> None:
    """Compare the numbers, six digits of each, and the texts with the committed ones."""
    committed = FOLDER / PLACES[notebook]
    made = computed(notebook, linked(committed, tmp_path / "made"), *items, **measured_of(notebook))
    assert made
    for name in made:
        new, old = (folder / "tables" / name for folder in (tmp_path / "made", committed))
        assert new.with_suffix(".csv").read_text() == old.with_suffix(".csv").read_text(), name
        texts = [path.with_suffix(".md").read_text().partition("Computed in cell")[0] for path in (new, old)]
        assert texts[0] == texts[1], name


def measured_of(notebook: str) -> dict[str, str]:
    return {"measured": str(FOLDER / "tiny-r")} if notebook == "credit" else {}


@pytest.mark.parametrize("notebook", QUICK)
def test_tables(notebook, tmp_path):
    check(notebook, QUICK[notebook], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [name for name, items in SLOW.items() if items])
def test_all_other_tables(notebook, tmp_path):
    check(notebook, SLOW[notebook], tmp_path)


@pytest.mark.parametrize("name", PLACES)
def test_every_committed_table_is_of_a_cell_that_its_footer_names(name):
    """A table that no cell writes any more would stay in the folder, with old numbers."""
    for path in (FOLDER / PLACES[name] / "tables").glob("*.md"):
        cell, _, notebook, *_ = path.read_text().rpartition("Computed in cell `")[2].split("`")
        assert cell in items_of(Path(notebook).stem), path


def test_the_rates_that_the_tuning_chose_are_those_of_the_study():
    results, study = Results(FOLDER / "rates/tiny-r"), RateStudy.read(FOLDER / "rates/tiny-r")
    assert study.chosen and study.chosen == {arm: tuned(results, study, arm).rate for arm in study.chosen}
    assert study.chosen == yaml.safe_load((FOLDER.parent / "studies/rates.yaml").read_text())["chosen"]


@pytest.mark.parametrize("name", ["figures", *PLACES])
def test_the_executed_notebooks_have_the_text_and_code_of_their_notebooks(name):
    folder = FOLDER / PLACES.get(name, "tiny-r")
    notebook, executed = (
        [
            "".join(cell["source"])
            for cell in json.loads((place / f"{name}.ipynb").read_text())["cells"]
            if "injected-parameters" not in cell["metadata"].get("tags", ())
        ]
        for place in (FOLDER.parent / "notebooks", folder)
    )
    assert executed == notebook
