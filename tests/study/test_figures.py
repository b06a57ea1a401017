"""Figures draw the numbers of the tables, the same results give the same bytes, and missing runs are counted."""

import asyncio
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from notebook_cells import NOTEBOOKS, computed, drawn, items_of, linked
from paper_results import recorded, without, without_iterations

from multirole.types import Problem, Turn
from multirole_study.compare.intervals import t_interval
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run_folder import folder_of
from multirole_study.labels import POLICY_COLOURS, ROLE_COLOURS, WORKFLOW_MARKERS, WORKFLOW_NAMES, cell_name, colours_of
from multirole_study.paper.dynamics import extremes, matched, over_first, smoothed, typical
from multirole_study.paper.figures import accuracy_by_regime, peaks_by_budget
from multirole_study.paper.grid import POLICIES, WORKFLOW_POLICIES, WORKFLOWS
from multirole_study.paper.output import Plate
from multirole_study.paper.overview_figures import gains_by_budget, line
from multirole_study.paper.results import Results
from multirole_study.paper.writer import Writer
from multirole_study.tasks.tiny_chain import PROMPTS

ROOT = Path(__file__).parents[2]
FIGURE_1 = ROOT / "docs/figures/workflows.svg"
SVG = "{http://www.w3.org/2000/svg}"
NAMES = [
    "figure_2",
    "figure_3",
    "figure_4_math",
    "figure_4_code",
    "figure_5",
    "figure_6",
    "role_gradients",
    "roles_math",
    "roles_code",
]


@pytest.fixture(scope="module")
def finished(grid_results) -> Results:
    return Results(grid_results)


@pytest.fixture(scope="module")
def unfinished(grid_results, tmp_path_factory) -> Results:
    """One seed, without Voting-SP and the single agent on math, and without Eval-Opt on code."""
    gone = [("voting", "sp", "math"), ("single", "sp", "math"), ("eval_opt", "ip", "code"), ("eval_opt", "sp", "code")]
    return Results(without(grid_results, [(*cell, 0) for cell in gone], tmp_path_factory.mktemp("part"), seeds=(0,)))


def all_drawn(folder: Path) -> dict[str, Plate]:
    return drawn("figures", folder) | drawn("mechanisms", folder, "roles", "role_gradients")


@pytest.fixture(scope="module")
def plates(finished, tmp_path_factory) -> dict[str, Plate]:
    return all_drawn(linked(finished.folder, tmp_path_factory.mktemp("drawn") / "tiny-r"))


def extremes_of_matched(results: Results) -> pd.DataFrame:
    rows = [
        {"workflow": workflow, "policy": policy, "task": task, "seed": seed}
        | extremes(results.runs_of(workflow, policy, task)[seed])
        for (workflow, task), seeds in matched(results).items()
        for policy in POLICIES
        for seed in seeds
    ]
    return pd.DataFrame(rows)


def gain(results: Results, workflow: str, policy: str, task: str) -> pd.Series:
    return results.accuracy(workflow, policy, task, "best") - results.accuracy(workflow, policy, task, "base")


def table_of(results: Results, name: str, key: tuple) -> pd.DataFrame:
    """A table of a run, from the folder that was packed."""
    return recorded(folder_of(results.grid.cell(*key), results.folder.parent) / f"{name}.parquet")


@pytest.mark.slow
def test_captions_state_n_seeds_and_method(plates):
    assert sorted(plates) == sorted(NAMES)
    for name in NAMES[:6]:
        caption = plates[name].caption
        assert "seeds 0, 1 and 2" in caption and "All runs are finished" in caption
        assert ("n = 16 validation problems" in caption) == (name != "figure_5")
        assert "0.45M parameters" in caption and "Regime `paper`" in caption
    for name in ("figure_2", "figure_3"):
        assert "95 % t intervals over seeds" in plates[name].caption


@pytest.mark.parametrize(
    "names", [["figure_2", "figure_5"], pytest.param(NAMES, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_captions_of_an_unfinished_grid_state_what_is_missing(unfinished, names):
    plates = all_drawn(unfinished.folder) if names == NAMES else drawn("figures", unfinished.folder, *names)
    assert sorted(plates) == sorted(names)
    for name in NAMES[:6]:
        if name in names:
            assert "seed 0 alone" in plates[name].caption and "Not finished: 4 of 14 runs" in plates[name].caption


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(unfinished, tmp_path):
    for name in "ab":
        computed("figures", linked(unfinished.folder, tmp_path / name / "tiny-r"), "figure_2")
    for kind in ("pdf", "png"):
        one, other = (tmp_path / name / "tiny-r" / "figures" / f"figure_2.{kind}" for name in "ab")
        assert one.read_bytes() == other.read_bytes(), kind


def test_gains_are_peak_minus_base_of_the_validation_tables(finished):
    gains, bases = {}, {}
    for seed in (0, 1, 2):
        curve = table_of(finished, "eval", ("voting", "sp", "code", seed)).groupby("step")["correct"].mean()
        gains[seed], bases[seed] = curve[curve.index > 0].max() - curve[0], curve[0]
    assert gain(finished, "voting", "sp", "code").to_dict() == pytest.approx(gains)
    assert finished.base("voting", "code").to_dict() == pytest.approx(bases)


def test_figure_2_draws_a_bar_per_finished_cell(finished, tmp_path):
    plate = drawn("figures", linked(finished.folder, tmp_path / "tiny-r"), "figure_2")["figure_2"]
    assert "seeds 0, 1 and 2" in plate.caption and "95 % t intervals over seeds" in plate.caption
    bars = [bar.get_height() for bar in plate.figure.axes[0].patches]
    cells = [(workflow, policy) for workflow in WORKFLOWS for policy in POLICIES]
    means = [gain(finished, *cell, "math").mean() for cell in cells]
    assert bars == pytest.approx(means)


def test_matched_cells_are_compared_in_the_seeds_that_both_have(grid_results, finished, tmp_path):
    uneven = Results(without(grid_results, [("voting", "sp", "math", 1)], tmp_path))
    assert matched(uneven)["voting", "math"] == [0, 2] and matched(uneven)["voting", "code"] == [0, 1, 2]
    at_the_end = {}
    for seed in (0, 2):
        curve = table_of(finished, "eval", ("voting", "ip", "math", seed)).groupby("step")["correct"].mean()
        at_the_end[seed] = curve.iloc[-1]
    assert uneven.accuracy("voting", "ip", "math", "terminal")[[0, 2]].to_dict() == pytest.approx(at_the_end)
    table = extremes_of_matched(uneven)
    mine = table[(table["workflow"] == "voting") & (table["task"] == "math")]
    assert sorted(zip(mine["policy"], mine["seed"], strict=True)) == [("ip", 0), ("ip", 2), ("sp", 0), ("sp", 2)]


def test_figure_3_puts_sp_on_x_and_ip_on_y(finished, plates):
    panel = plates["figure_3"].figure.axes[1]
    clouds = [c.get_offsets().data for c in panel.collections if isinstance(c, PathCollection)]
    means = [cloud[0].tolist() for cloud in clouds if len(cloud) == 1]  # the other clouds are seeds
    expected = [
        [finished.accuracy(workflow, policy, task, "terminal").mean() for policy in ("sp", "ip")]
        for workflow, task in matched(finished)
    ]
    assert np.array(means) == pytest.approx(np.array(expected))


def test_figure_3_has_even_ticks_and_figure_6_ticks_that_do_not_touch(plates):
    for axes in plates["figure_3"].figure.axes:
        steps = np.diff(axes.get_xticks())
        assert np.allclose(steps, steps[0]) and round(100 * steps[0], 6) in (1, 2, 5, 10, 20, 50)
    figure = plates["figure_6"].figure
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        labels = [
            label
            for label in axes.get_yticklabels(which="both")
            if label.get_text() and low <= label.get_position()[1] <= high
        ]
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
        assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes)), [label.get_text() for label in labels]


def test_a_grid_without_the_cliff_cells_is_drawn_without_a_warning(grid_results, tmp_path, recwarn):
    gone = [(*cell, seed) for cell in (("voting", "ip", "math"), ("orch_workers", "sp", "math")) for seed in (0, 1, 2)]
    plate = drawn("figures", without(grid_results, gone, tmp_path), "figure_6")["figure_6"]
    legends = [axes.get_legend() for axes in plate.figure.axes[-2:]]
    assert legends == [None, None] and not [warning for warning in recwarn if "legend" in str(warning.message)]


def test_controls_draw_every_peak_in_the_row_of_its_budget():
    values = pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / "controls.csv")
    (axes,) = peaks_by_budget(values).axes
    drawn = [line for line in axes.lines if line.get_marker() in set(WORKFLOW_MARKERS.values())]
    peaks = values[(values["number"] == "peak") & ~values["run"].str.startswith("all cells")]
    assert sorted(line.get_xdata()[0] for line in drawn) == pytest.approx(sorted(peaks["value"]))
    rows = [label.get_text().split("\n")[0] for label in axes.get_yticklabels()]
    one_step = [line for line in drawn if rows[round(line.get_ydata()[0])] == "workflows, one step"]
    assert sorted(line.get_xdata()[0] for line in one_step) == pytest.approx(
        sorted(peaks.loc[peaks["run"].str.endswith("one step"), "value"])
    )
    assert not axes.texts, "a label on a point"


def test_what_a_role_adds_is_drawn_from_the_runs_of_its_policy(finished, plates):
    axes = plates["roles_math"].figure.axes[2 * len(WORKFLOWS) + WORKFLOWS.index("eval_opt")]
    for policy, drawn_line in zip(POLICY_COLOURS, axes.lines, strict=False):
        runs = [table_of(finished, "skills", ("eval_opt", policy, "math", seed)) for seed in (0, 1, 2)]
        skills = pd.concat(runs).query("measure == 'judges'")
        gains = (skills["skill"] - skills["trivial"]).groupby(skills["step"]).mean()
        assert drawn_line.get_xdata().tolist() == gains.index.tolist()
        assert drawn_line.get_ydata() == pytest.approx(gains)


def test_every_regime_that_has_runs_is_a_row(finished):
    rows = [
        (regime, *cell, seed, step, accuracy)
        for regime in ("paper", "again")
        for cell in (WORKFLOW_POLICIES[-1], *WORKFLOW_POLICIES[:-1])
        for seed, run in finished.runs_of(*cell, "math").items()
        for step, accuracy in run.accuracy.items()
    ]
    assert accuracy_by_regime(rows[: len(rows) // 2]) is None, "Figure 4 shows one regime"
    figure = accuracy_by_regime(rows)
    assert len(figure.axes) == 2 * 4  # the single agent and three workflows
    lines = {line.get_color(): line for line in figure.axes[4 + 2].lines}
    for policy in POLICIES:
        curves = [finished.runs_of("voting", policy, "math")[seed].accuracy for seed in (0, 1, 2)]
        assert lines[POLICY_COLOURS[policy]].get_ydata() == pytest.approx(sum(curves) / 3)


def test_a_mark_is_at_its_mean_and_what_was_not_run_is_called_so():
    interval = t_interval([0.10, 0.14, 0.12])
    rows = [
        line("one, at its rate", "equal", ("voting", "ip"), interval),
        line("one, at its rate", "equal", ("voting", "sp"), t_interval([0.2])),
        line("one, at its rate", "more", ("voting", "ip"), t_interval([])),
    ]
    equal, more = gains_by_budget(rows, ["one, at its rate", "two"], ["equal", "more"]).axes
    marks = [mark for mark in equal.lines if mark.get_marker() == WORKFLOW_MARKERS["voting"]]
    assert [mark.get_xdata()[0] for mark in marks] == pytest.approx([12, 20])
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True], "one seed has no interval"
    bars = [segment[:, 0].tolist() for bar in equal.collections for segment in bar.get_segments() if len(segment)]
    assert bars[0] == pytest.approx([100 * interval.low, 100 * interval.high])
    texts = [[text.get_text() for text in axes.texts if "not run" in text.get_text()] for axes in (equal, more)]
    assert texts == [["Eval-Opt: not run", "Orch-Workers: not run", "not run"], ["not run", "not run"]]
    assert equal.get_xlim() == more.get_xlim()
    assert [label.get_text() for label in equal.get_yticklabels()] == ["one\nat its rate, n = 1 to 3", "two"]


@pytest.mark.slow
def test_the_overview_draws_the_declared_answers(tmp_path):
    """Of the miniature on math: workflow minus single agent by budget, at the preset's rate and at tuned rates. Of SmolLM2: all five seeds."""
    results = linked(ROOT / "results/tiny-r", tmp_path / "tiny-r")
    tuned, smollm2, more = (ROOT / "results" / name for name in ("rates/tiny-r", "smollm2", "iterations/smollm2"))
    figure = drawn("overview", results, "budgets", tuned=str(tuned), folders=f"{results} {smollm2}+{more}")[
        "budgets"
    ].figure
    declared = pd.read_csv(ROOT / "results/smollm2/questions.csv").query("base == 'tiny-r'")
    answers = pd.read_csv(tuned / "tables/rates_answers.csv")
    for axes, (asked, of_rates) in zip(
        figure.axes, {"iterations": "step", "steps": "steps", "gain": "problems"}.items(), strict=True
    ):
        marks = [mark for mark in axes.lines if mark.get_marker() in WORKFLOW_MARKERS.values()]
        for height, expected in enumerate(
            (
                answers.loc[answers["question"] == of_rates, "difference"],
                declared.loc[declared["question"] == asked, "value"],
            )
        ):
            here = [mark.get_xdata()[0] for mark in marks if round(mark.get_ydata()[0]) == height]
            assert sorted(here) == pytest.approx(sorted(100 * expected), rel=1e-4)
    of_five = pd.read_csv(more / "tables/compare.csv").query("question == 'cells'")
    marks = [mark for mark in figure.axes[0].lines if mark.get_marker() in WORKFLOW_MARKERS.values()]
    here = [mark.get_xdata()[0] for mark in marks if round(mark.get_ydata()[0]) == 3]
    assert set(of_five["seeds"]) == {5} and sorted(here) == pytest.approx(sorted(100 * of_five["value"]), rel=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_amplitudes_are_the_extremes_of_a_run(finished, policy):
    key = ("orch_workers", policy, "math", 1)
    roles, ledger = table_of(finished, "roles", key), table_of(finished, "ledger", key)
    pooled, entropies = [], []
    for _, rows in roles.groupby("iteration"):
        pooled.append(np.average(rows["chi2"], weights=rows["tokens"]))
        entropies.append(np.average(rows["entropy"], weights=rows["tokens"]))
    table = extremes_of_matched(finished)
    row = table[(table[["workflow", "policy", "task", "seed"]] == list(key)).all(axis=1)].iloc[0]
    assert row["chi2_role"] == pytest.approx(roles["chi2"].max())
    assert row["chi2"] == pytest.approx(max(pooled) if policy == "sp" else roles["chi2"].max())
    assert max(pooled) < roles["chi2"].max()
    assert row["grad_norm"] == pytest.approx(ledger["grad_norm"].max())
    assert row["entropy"] == pytest.approx(entropies[0] - min(entropies))


def test_figure_5_draws_each_matched_run_at_its_amplitude(finished, plates):
    table, panel = extremes_of_matched(finished), plates["figure_5"].figure.axes[2]
    clouds = [cloud for cloud in panel.collections if isinstance(cloud, PathCollection)]
    drawn_runs = [y for cloud in clouds for _, y in cloud.get_offsets().data]
    assert sorted(drawn_runs) == pytest.approx(sorted(table["grad_norm"])) and len(drawn_runs) == 36
    bars = [bar.get_segments()[0][0, 1] for bar in panel.collections if isinstance(bar, LineCollection)]
    medians = table.groupby(["workflow", "task", "policy"])["grad_norm"].median()
    assert sorted(bars) == pytest.approx(sorted(medians)) and len(bars) == 12


def test_curves_are_smoothed_and_scaled_as_the_captions_say():
    noisy = pd.Series([2.0, 100.0, 4.0, 1.0, 4.0, 8.0, 8.0])
    assert over_first(noisy).iloc[-1] == 2.0  # the median of the first five is 4
    assert smoothed(noisy).tolist() == pytest.approx([106 / 3, 107 / 4, 111 / 5, 117 / 5, 25 / 5, 21 / 4, 20 / 3])
    assert typical(pd.DataFrame({0: noisy, 1: noisy, 2: 0 * noisy})).tolist() == [4, 3, 4, 4, 4, 6, 8]


READERS = ["tables", "figures", "mechanisms", "study", "clock", "rates", "credit", "compare", "questions", "overview"]


@pytest.mark.parametrize("name", READERS)
def test_the_notebooks_are_short_cells_that_write_what_their_tags_say(name):
    """The id of a cell is the name of what it writes, so that a footer leads to it, and `--only` runs it."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells) and max(len(s.splitlines()) for s in sources) <= 30
    assert not any(line.lstrip().startswith(("def ", "class ")) for s in sources for line in s.splitlines())
    for item, cell in items_of(name).items():
        written = re.findall(r'write\.(table|figure|finished)\("(\w+)"', "".join(cell["source"]))
        assert {named for _, named in written} == {item}
        assert {kind for kind, _ in written} <= {*cell["metadata"]["tags"], "finished"}


def test_no_two_notebooks_compute_the_same_item():
    items = [item for name in READERS for item in items_of(name)]
    assert len(set(items)) == len(items)


def test_names_and_colours_cover_every_role_and_workflow():
    roles = {role for workflow in (*WORKFLOWS, "single") for role in Cell(workflow, "sp").make_workflow().roles}
    assert roles == set(ROLE_COLOURS) and len(set(ROLE_COLOURS.values())) == len(roles)
    assert set(WORKFLOW_NAMES) == {*WORKFLOWS, "single"} and set(POLICY_COLOURS) == set(POLICIES)
    assert colours_of(["worker", "judge"])["judge"] not in ROLE_COLOURS.values()
    assert cell_name("voting", "ip", "math") == "Voting-IP, math" and cell_name("single", "sp") == "Single agent"


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_the_arrows_of_figure_1_are_the_messages_that_the_workflow_sends(workflow):
    seen = set()

    async def call(role: str, messages: list, slot: int = 0, round: int = 0) -> Turn:
        prompt = json.dumps([str(message) for message in messages])
        seen.update((other, role) for other in roles if other != role and f"said-by-{other}" in prompt)
        text = f"STRATEGY 1: said-by-{role}\nSTRATEGY 2: said-by-{role}\n\\boxed{{Incorrect}} \\boxed{{1}}"
        return Turn(role, slot, round, [], [], [], text, "stop", "")

    made = Cell(workflow, "ip").make_workflow()
    roles = made.roles
    asyncio.run(made.run(Problem("0", PROMPTS, "1+1", None), call))
    (panel,) = (group for group in ElementTree.parse(FIGURE_1).iter(f"{SVG}g") if group.get("id") == workflow)
    drawn = {(path.get("data-from"), path.get("data-to")) for path in panel.iter(f"{SVG}path")}
    assert {message for message in drawn if not {"problem", "answer", None} & set(message)} == seen


def test_the_file_of_a_task_of_one_s_own_has_no_folder_in_its_name(grid_results, tmp_path):
    write = Writer("figures", Results(linked(grid_results, tmp_path / "tiny-r")))
    write.figure("figure_4", Figure(), task="examples/debate.py:task")
    assert (tmp_path / "tiny-r/figures/figure_4_examples_debate.py_task.png").exists()


def test_figures_have_a_run_that_diverged_in_its_first_iteration(grid_results, tmp_path):
    run = without_iterations(grid_results, tmp_path / "tiny-r", "voting", "ip", "math", 2)
    assert {"figure_4_math", "figure_5"} <= set(drawn("figures", run.folder, "figure_4", "figure_5"))
    assert all(math.isnan(value) for value in extremes(run).values())
