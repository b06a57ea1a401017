"""The README's links lead somewhere, its commands exist, and the numbers of pages are those of the committed tables."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest
from numbers_of_pages import LISTED, check, unlisted

from multirole_study.experiment.progress import result_lines
from multirole_study.paper.grid import Grid
from multirole_study.paper.questions import answers
from multirole_study.paper.results import Results

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_every_make_target_that_it_names_exists():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= targets


def test_the_output_of_make_cell_is_what_the_run_printed():
    """docs/running.md shows the last lines that the record of one `make cell` gives. If this fails, paste the expected lines there."""
    outcomes = pd.read_parquet(ROOT / "tests" / "data" / "make_cell" / "eval.parquet")
    run = "runs/tiny-r/voting-sp-math-s0"
    printed = [
        "voting-sp-math-s0 is finished",
        *result_lines(outcomes),
        f"  folder      {run}",
        f"  to see it   multirole inspect {run}",
        f"  inspector   {run}/inspector.html",
        "  notebook    runs/tiny-r/voting-sp.html",
    ]
    assert "\n".join(["```", *printed, "```"]) in (ROOT / "docs/running.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", LISTED)
def test_the_numbers_of_a_page_are_those_of_its_tables(page):
    check(page)


def test_every_number_of_the_findings_has_a_table():
    findings = re.search(r"<!-- findings:[^>]*-->(.*?)<!-- end of findings -->", README, re.DOTALL)[1]
    assert unlisted("README.md", findings, constants=["95 %", "10 seeds", "5 or more"]) == []


def test_no_run_ends_fallen_at_the_usual_rate():
    """README says "none". The difference of IP and SP is zero in every seed, and so is SP's share."""
    claims = (
        pd.read_csv(ROOT / "results/tiny-r/tables/claims.csv").query("regime == 'paper'").set_index("claim")["value"]
    )
    assert not claims.loc[["sp_fails_too", "ip_falls_more_often"]].any()


def test_it_says_how_many_runs_were_trained():
    kinds = [pd.read_parquet(path, columns=["kind"]) for path in (ROOT / "results").rglob("runs.parquet")]
    n_runs = int((pd.concat(kinds)["kind"] == "run").sum())
    assert f"{n_runs:,} training runs" in README


def test_a_mini_batch_gradient_is_nearly_all_noise():
    """Slots of one role are exchangeable: the cosine of their gradients is the part of one slot's that is signal."""
    grid = {cell.id for cell in Grid.read(ROOT / "results" / "tiny-r").cells()}
    roles = pd.read_parquet(ROOT / "results" / "tiny-r" / "roles.parquet", columns=["run", "role", "coherence"])
    by_run = roles[roles["run"].isin(grid)].dropna().groupby(["run", "role"])["coherence"].mean()
    assert len(by_run) == 80 and by_run.abs().max() < 0.05


def test_the_table_of_answers_is_that_of_the_packed_runs():
    table = pd.read_csv(ROOT / "results/seed1/tiny-r/questions.csv")
    for name in ("seed1", "seed2"):
        here = table[table["base"] == f"tiny-r-{name}"]
        for row, now in zip(here.to_dict("records"), answers(Results(ROOT / "results" / name / "tiny-r")), strict=True):
            assert (row["verdict"], row["seeds"]) == (now["verdict"], now["seeds"])
            assert now["seeds"] == 0 or math.isclose(row["value"], now["mean"], rel_tol=1e-4, abs_tol=1e-6)
