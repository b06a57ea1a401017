"""The README's links lead somewhere, its commands exist, and the numbers of pages are those of the committed tables."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from numbers_of_pages import LISTED, check, unlisted

from multirole_study.experiment.progress import result_lines
from multirole_study.falls import first_fall
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
    assert (
        unlisted("README.md", findings, constants=["95 %", "10 seeds", "5 or more", "120 workflow runs", "1.2 to 2.0"])
        == []
    )


OPTIONS = ["learning_rate", "lr_schedule", "n_problems", "iterations", "updates", "process_reward", "credit"]


def with_options(folder: Path) -> pd.DataFrame:
    """The packed runs of a folder, with some of their settings as columns."""
    runs = pd.read_parquet(folder / "runs.parquet").query("kind == 'run'").set_index("run")
    settings = [json.loads(text) for text in runs["settings"]]
    return runs.assign(**{option: [own.get(option) for own in settings] for option in OPTIONS})


def usual_rate(folder: Path) -> pd.DataFrame:
    """The packed runs at the preset's rate with its cosine, and whether and how far accuracy falls in each."""
    runs = with_options(folder)
    runs = runs[(runs["learning_rate"] == 2e-3) & (runs["lr_schedule"] == "cosine")]
    outcomes = pd.read_parquet(folder / "eval.parquet", columns=["run", "step", "correct"]).astype({"run": str})
    curves = outcomes[outcomes["run"].isin(runs.index)].groupby(["run", "step"])["correct"].mean()
    falls = {run: first_fall(curves[run]) for run in runs.index}
    return runs.assign(
        falls=[falls[run] is not None for run in runs.index],
        ends_fallen=[falls[run] is not None and falls[run].is_terminal for run in runs.index],
        best_to_last=[f"{100 * curves[run].max():.1f} to {100 * curves[run].iloc[-1]:.1f}" for run in runs.index],
    )


def test_no_run_ends_fallen_at_the_usual_rate():
    """No run *of the grid* does: README counts its 120 runs of workflows, of which two fall on the way and recover.

    In other studies with that rate and its cosine four runs with the paper's credit end fallen, all of Eval-Opt-SP on math, and three with `critic`, all
    of Orch-Workers-SP on math: results/README.md names them.
    """
    folders = [ROOT / "results" / name / "tiny-r" for name in ("", "rates", "seed1", "seed2", "vain", "recipe")]
    runs = pd.concat([usual_rate(folder).assign(folder=folder.parent.name) for folder in folders])
    grid = [cell.id for cell in Results(folders[0]).grid.cells() if cell.workflow != "single"]
    of_grid = runs[runs["folder"] == "results"].loc[grid]
    assert f"of the grid's {len(of_grid)} workflow runs" in README
    assert not of_grid["ends_fallen"].any() and of_grid["falls"].sum() == 2
    is_paper = runs["credit"].fillna("outcome") == "outcome"
    others = runs[runs["ends_fallen"] & ~is_paper]
    assert list(others["credit"]) == ["critic"] * 3 and set(others["workflow"]) == {"orch_workers"}
    runs = runs[is_paper]
    ending = runs[runs["ends_fallen"]]
    assert len(ending) == 4 and set(ending[["workflow", "policy", "task"]].itertuples(index=False, name=None)) == {
        ("eval_opt", "sp", "math")
    }
    page = (ROOT / "results/README.md").read_text(encoding="utf-8")
    assert (
        all(numbers in page for numbers in ending["best_to_last"])
        and "three with `critic`, all of Orch-Workers on math" in page
    )
    eval_opt = runs[(runs["workflow"] == "eval_opt") & (runs["task"] == "math") & (runs["updates"] == "per_batch")]
    eval_opt = eval_opt[eval_opt["process_reward"] == 0]
    pairs = eval_opt.pivot_table(
        "ends_fallen", ["folder", "seed", "n_problems", "iterations"], "policy", "sum"
    ).dropna()
    assert f"{pairs['sp'].sum():.0f} of {len(pairs)} runs under SP and {pairs['ip'].sum():.0f} under IP" in page


def test_how_many_tokens_and_steps_the_agent_with_more_problems_takes():
    """At tuned rates, on the scoring seeds: README, docs/recipe.md and the page at a glance say how many times a workflow's."""
    folder = ROOT / "results/rates/tiny-r"
    runs = with_options(folder).query("seed >= 310 and iterations == 60")
    columns = ["run", "completion_tokens", "optimizer_steps"]
    sums = pd.read_parquet(folder / "metrics.parquet", columns=columns).astype({"run": str}).groupby("run").sum()
    means = runs.join(sums).groupby(["workflow", "policy", "n_problems", "updates"])[columns[1:]].mean()
    agents = means.loc["single"].xs("tokens", level="updates").droplevel("policy")
    ratios = {n: agents.loc[n] / means.drop("single") for n in agents.index}
    least, most = ({n: f(ratio).round(2) for n, ratio in ratios.items()} for f in (pd.DataFrame.min, pd.DataFrame.max))
    assert [least[32]["completion_tokens"], most[32]["completion_tokens"]] == pytest.approx([1.2, 2.0], abs=0.05)
    assert [least[32]["optimizer_steps"], most[32]["optimizer_steps"]] == pytest.approx([1.11, 1.39], abs=0.005)
    assert [least[8]["optimizer_steps"], most[8]["optimizer_steps"]] == pytest.approx([1.2, 1.5], abs=0.005)
    assert most[8]["completion_tokens"] < 1
    pages = "README.md", "docs/recipe.md", "docs/at_a_glance.md"
    assert all("1.2 to 2.0 times" in (ROOT / page).read_text(encoding="utf-8") for page in pages)


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
