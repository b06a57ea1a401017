"""The questions of the study at smollm2: verdicts by hand, numbers against pandas on tiny-r's results, and the control's budget."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from notebook_cells import computed, drawn, linked

from multirole_study.compare.estimates import differences
from multirole_study.compare.intervals import t_interval
from multirole_study.compare.measures import MEASURES, start_and_change
from multirole_study.compare.verdicts import decide
from multirole_study.paper.answers_figure import answers_figure
from multirole_study.paper.grid import Grid, Study
from multirole_study.paper.questions import (
    DECLARED,
    NAMES,
    _cell,
    answer,
    answers,
    as_text,
    columns_of,
    difference_of_bases,
    parameters_of,
    question_of,
)
from multirole_study.paper.results import Results
from multirole_study.paper.scales_figure import over_optimizer_steps, scales_figure

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny():
    return Results(ROOT / "results/tiny-r")


@pytest.fixture(scope="module")
def study():
    declared = yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"]["smollm2"]
    return Study(Grid("smollm2", **declared), **yaml.safe_load((ROOT / "studies/smollm2.yaml").read_text()))


@pytest.mark.parametrize(
    ("values", "of_accuracies", "expected"),
    [
        ([0.1, 0.11, 0.12], True, "yes"),
        ([-0.1, -0.11, -0.12], True, "no"),
        ([-0.2, 0.0, 0.2], True, "undecided"),
        ([-0.001, 0.0, 0.001], True, "equivalent"),
        ([-0.001, 0.0, 0.001], False, "undecided"),  # a margin is in points of accuracy
        ([0.1, 0.1], True, "undecided"),  # two seeds
    ],
)
def test_an_interval_answers_by_the_declared_rules(values, of_accuracies, expected):
    rule = question_of({"measure": "end" if of_accuracies else "change"}, {}).rule
    assert decide(t_interval(values, DECLARED["margin"]), rule) == expected


def numbers(*line: object) -> pd.Series:
    """Seed -> the number of a line (`answer`)."""
    return differences(answer(*line).numbers).set_index("seed")["value"]


def only(monkeypatch, *names: str) -> None:
    """Leave out the other questions, whose answers would take seconds."""
    monkeypatch.setitem(DECLARED, "questions", [about for about in DECLARED["questions"] if about["name"] in names])


def test_a_workflow_is_compared_with_its_control_seed_by_seed(tiny):
    """Voting-IP minus the single agent's control, from the packed table of evaluations."""
    about = next(question for question in DECLARED["questions"] if question["name"] == "gain")
    declared = Study.read(tiny.folder)
    values = numbers(tiny, declared, about, {"workflow": "voting"}, "ip", "math")
    rows = pd.read_parquet(tiny.folder / "eval.parquet", columns=["run", "step", "correct"])

    def end(run):
        by_step = rows[rows["run"] == run].groupby("step")["correct"].mean()
        return by_step.sort_index().iloc[-2:].mean()

    control = DECLARED["scales"]["tiny-r"]["control"]
    for seed in (0, 3):
        cells = tiny.grid.cell("voting", "ip", "math", seed), declared.cell(control, "single sp math", seed)
        assert math.isclose(values[seed], end(cells[0].id) - end(cells[1].id), abs_tol=1e-6)
    assert list(values.index) == tiny.grid.seeds


def test_every_line_of_tiny_r_has_an_answer_and_a_place_in_the_table(tiny):
    columns = columns_of([tiny])
    rows = columns[0].to_dict("records")
    assert len(rows) == sum(len(question["lines"]) * len(question["policies"]) for question in DECLARED["questions"])
    falls_of_one_policy = [row for row in rows if row["question"] == "farther" and "−" not in row["line"]]
    assert all(row["mean"] >= 0 for row in falls_of_one_policy)  # a verdict "no" is impossible
    read_before = [row for row in rows if row["question"] in ("iterations", "steps", "sharing")]
    for row in rows:
        is_shown_only = row in falls_of_one_policy or row in read_before
        assert (row["verdict"] == "–") == is_shown_only
        assert row["verdict"] in ("yes", "no", "undecided", "equivalent", "–")
    text = as_text(columns)
    assert text.count("10 seeds") == len(rows) and f"version {DECLARED['version']}" in text


def test_a_question_is_judged_on_the_bases_that_had_not_been_read(tiny, monkeypatch):
    """Orch-Workers minus the single agent with its iterations is above zero on tiny-r, which gives a verdict where the base is one of `judged_on`."""
    about = next(question for question in DECLARED["questions"] if question["name"] == "iterations")
    monkeypatch.setitem(DECLARED, "questions", [about, about | {"judged_on": ["tiny-r"]}])
    shown, judged = ([row["verdict"] for row in answers(tiny)][half] for half in (slice(0, 6), slice(6, 12)))
    assert shown == ["–"] * 6 and judged[4:] == ["yes", "yes"]


def test_a_workflow_is_compared_with_the_single_agent_of_the_grid(tiny):
    """`minus: grid` subtracts the grid's own single agent, and `minus: steps` the variant with more steps."""
    by_name = {question["name"]: question for question in DECLARED["questions"]}
    declared, line = Study.read(tiny.folder), {"workflow": "orch_workers"}

    def end(workflow, policy, **changed):
        return float(tiny.find(tiny.grid.cell(workflow, policy, "math", 4, **changed)).accuracy.iloc[-2:].mean())

    agents = {"iterations": {}, "steps": {"updates": "tokens", "step_tokens": 750}}
    for name, changed in agents.items():
        gaps = numbers(tiny, declared, by_name[name], line, "sp", "math")
        assert gaps[4] == pytest.approx(end("orch_workers", "sp") - end("single", "sp", **changed))


@pytest.mark.slow
def test_two_bases_of_one_scale_are_compared_by_seed(tiny):
    """A second base whose numbers are those of the first plus 1, 2 and 3 in three of the seeds: +2 [2 − 2.484, 2 + 2.484]."""
    first = pd.DataFrame(answers(tiny))
    seeds = tiny.grid.seeds
    moved = [values.iloc[:3] + np.array([1.0, 2.0, 3.0]) for values in first["by seed"]]
    second = first.assign(base="other", **{"by seed": pd.Series(moved, first.index)})
    difference = difference_of_bases(first, second)
    assert set(difference["base"]) == {"other − tiny-r"} and set(difference["verdict"]) == {"–"}
    whole = [len(values) == len(seeds) for values in first["by seed"]]
    assert difference[whole][["mean", "low", "high", "seeds"]].to_numpy() == pytest.approx(
        np.tile([2.0, -0.484138, 4.484138, 3.0], (sum(whole), 1))
    )
    assert "| tiny-r | tiny-r | tiny-r − tiny-r |" in as_text(columns_of([tiny, tiny]))
    assert "| line | tiny-r | smollm2 |\n" in as_text(columns_of([tiny, Results(ROOT / "results/smollm2")]))


def test_the_base_of_a_grid_is_its_model_or_its_scale():
    assert Grid("tiny-r").base == "tiny-r" and Grid("smollm2").base == "smollm2"
    assert Grid("tiny-r", parameters={"model": "tiny-r-vain"}, tasks=["math"]).base == "tiny-r-vain"


def test_a_question_may_leave_out_seeds_that_were_read_before_it(tiny):
    (about,) = (question for question in DECLARED["questions"] if question["name"] == "verdicts")
    declared, line = Study.read(tiny.folder), about["lines"][0]
    assert list(numbers(tiny, declared, about, line, "sp", "math").index) == tiny.grid.seeds
    some = about | {"seeds": {"tiny-r math": [1, 4, 99], "smollm2 math": [1]}}
    assert list(numbers(tiny, declared, some, line, "sp", "math").index) == [1, 4]  # 99 has no run
    assert (
        list(numbers(tiny, declared, some, line, "sp", "code").index) == tiny.grid.seeds
    )  # another task's were not read


@pytest.mark.parametrize(
    ("name", "policy", "first", "later", "used"),
    [
        ("skill", "sp", [0, 1, 2], [3, 4], 5),
        ("skill", "sp", [0, 1, 2], [3, 99], 3),  # one later seed has no run
        ("skill", "sp", [0, 1, 99], [3, 4], 2),  # nor has one of the first
        ("skill", "ip", [0, 1, 2, 5, 6, 7, 8, 9], [3, 4], 8),  # decided
        ("verbose", "ip", [0, 1, 2], [3, 4], 3),  # not a question with later seeds
        ("farther", "sp − ip", [0, 1, 2], [3, 4], 5),
        ("farther", "sp", [0, 1, 2], [3, 4], 5),  # not judged: shown by the seeds of the difference
    ],
)
def test_later_seeds_count_where_the_first_decide_nothing(tiny, monkeypatch, name, policy, first, later, used):
    """Voting's aggregator at tiny-r: undecided under SP in ten seeds, "no" under IP."""
    monkeypatch.setitem(DECLARED, "first_seeds", {"tiny-r": first})
    monkeypatch.setitem(DECLARED, "later_seeds", {"tiny-r": later})
    about = next(question for question in DECLARED["questions"] if question["name"] == name)
    values = numbers(tiny, Study.read(tiny.folder), about, about["lines"][0], policy, "math")
    assert list(values.index) == [seed for seed in first + later if seed != 99][:used]


def test_another_task_has_its_own_runs_and_name(tiny, tmp_path, monkeypatch):
    """The change of Voting's aggregator at tiny-r on programs, from the tables of its roles."""
    only(monkeypatch, "skill")
    made = linked(tiny.folder, tmp_path / "tiny-r")
    assert computed("questions", made, "questions", task="code")["questions"].text.startswith("Task: code.")
    assert (made / "questions.md").read_text().rstrip().endswith("--only questions -p task code`")
    assert drawn("questions", made, "scales", task="code")["scales"].caption.startswith("Validation accuracy on code")
    (row,) = (
        row for row in answers(tiny, "code") if (row["question"], row["line"]) == ("skill", "Voting, selects, SP")
    )
    by_hand = [
        start_and_change(tiny.find(tiny.grid.cell("voting", "sp", "code", seed)), gain="selects")[1]
        for seed in tiny.grid.seeds
    ]
    assert row["seeds"] == len(tiny.grid.seeds) and list(row["by seed"]) == by_hand
    with pytest.raises(ValueError, match="`task` must be one of math, code, .* got 'latin'"):
        columns_of([tiny], "latin")


def test_a_scale_without_questions_is_refused(tmp_path):
    Grid("0.6b").write(tmp_path)
    with pytest.raises(ValueError, match=r"declared for the scales tiny-r, smollm2, qwen-0\.5b, got runs of 0\.6b\."):
        columns_of([Results(tmp_path / "0.6b")])
    assert parameters_of(Results(tmp_path / "0.6b"), None, "control") is None  # as the overview asks


def test_programs_repeat_the_cells_of_arithmetic(study):
    """studies/programs.yaml: every run of studies/smollm2.yaml, on task code."""
    grid = yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"]["smollm2"]
    declared = yaml.safe_load((ROOT / "studies/programs.yaml").read_text())
    programs = Study(Grid("smollm2", **grid | declared.pop("grid")), **declared)
    assert [cell.id.replace("-code-", "-math-") for cell in programs.cells()] == [cell.id for cell in study.cells()]


def test_the_two_builds_of_the_base_have_the_same_runs():
    first, second = (yaml.safe_load((ROOT / f"studies/seed{seed}.yaml").read_text()) for seed in (1, 2))
    models = [declared["grid"]["parameters"].pop("model") for declared in (first, second)]
    assert models == ["tiny-r-seed1", "tiny-r-seed2"] and first == second


def test_sp_minus_ip_is_the_difference_of_the_two_policies(tiny):
    about = next(question for question in DECLARED["questions"] if question["name"] == "verbose")
    declared, line = Study.read(tiny.folder), about["lines"][0]
    sp, ip, gap = (numbers(tiny, declared, about, line, policy, "math") for policy in ("sp", "ip", "sp − ip"))
    pd.testing.assert_series_equal(gap, sp - ip)


def test_the_control_has_voting_s_optimizer_steps_and_answers(study):
    voting = study.grid.cell("voting", "sp", "math", 0)
    control = study.cell("four times the iterations", "single sp math", 0)
    calls = sum(voting.make_workflow().roles.values())
    assert control.max_steps == voting.max_steps * calls  # each of them one step of n_problems x n_episodes rows
    assert (control.n_problems, control.num_generations) == (voting.n_problems, voting.num_generations)
    assert control.warmup_steps == calls * voting.warmup_steps


def test_the_declared_study_names_what_the_rules_read(study):
    scale = DECLARED["scales"]["smollm2"]
    assert {scale["control"], scale["rate"]} == set(study.variants)
    for about in DECLARED["questions"]:
        assert NAMES.get(about["measure"], about["measure"]) in MEASURES and set(about["policies"]) <= {
            "ip",
            "sp",
            "sp − ip",
        }
        for line in about["lines"]:
            roles = study.grid.cell(line["workflow"], "sp", "math", 0).policy
            assert line.get("role") in (None, *roles)
    usual = study.grid.cell("voting", "sp", "math", 0)
    stressed = study.cell("stress", "voting sp math", 0)
    assert math.isclose(stressed.learning_rate, 3 * usual.learning_rate) and stressed.lr_schedule == "constant"


def test_the_page_of_smollm2_repeats_the_answers():
    every = list(answers(Results(ROOT / "results/smollm2")))
    rows, falls = ({row["line"]: row for row in every if row["question"] == name} for name in ("gain", "farther"))
    page = (ROOT / "docs/smollm2_study.md").read_text(encoding="utf-8")

    def points(row):
        return "{} [{}, {}]".format(*(f"{100 * row[name]:.1f}".replace("-", "−") for name in ("mean", "low", "high")))

    for workflow in ("Voting", "Eval-Opt"):
        of_policy = [falls[f"{workflow}, {name}"] for name in ("IP", "SP", "SP − IP")]
        assert {row["seeds"] for row in of_policy} == {5} and of_policy[2]["verdict"] == "undecided"
        assert f"| {workflow} | {' | '.join(map(points, of_policy))}, undecided |\n" in page
    for workflow in ("Voting", "Eval-Opt", "Orch-Workers"):
        cells = []
        for policy in ("IP", "SP"):
            row = rows[f"{workflow}, {policy}"]
            assert row["verdict"] == "no"
            cells.append(points(row) + {3: "", 5: ", 5 seeds"}[row["seeds"]])
        assert f"| {workflow} | {' | '.join(cells)} |\n" in page


SEEDS = (0, 1, 2)


def test_the_page_of_smollm2_has_the_runs_on_programs():
    """Accuracy of every run before training, and as the mean of its last two evaluations."""
    folder = ROOT / "results/programs/smollm2"
    by_step = pd.read_parquet(folder / "eval.parquet").groupby(["run", "step"])["correct"].mean()
    page = (ROOT / "docs/smollm2_study.md").read_text(encoding="utf-8")
    studied = Study.read(folder)
    control = {seed: studied.cell("four times the iterations", "single sp code", seed).id for seed in SEEDS}
    lines = {
        "Voting, isolated adapters": "voting-ip-code-s{}",
        "Voting, a shared adapter": "voting-sp-code-s{}",
        "single agent, as many iterations": "single-sp-code-s{}",
        "single agent, Voting's steps, four times the problems": "{control}",
    }
    for name, run in lines.items():
        curves = [by_step[run.format(seed, control=control[seed])].sort_index() for seed in SEEDS]
        cells = [f"{100 * curve.iloc[0]:.1f} to {100 * curve.iloc[-2:].mean():.1f}" for curve in curves]
        assert f"| {name} | {' | '.join(cells)} |\n" in page
    decided = {row["line"]: row for row in answers(Results(folder), "code") if row["verdict"] not in ("undecided", "–")}
    assert {line: row["verdict"] for line, row in decided.items()} == {
        "Voting, IP": "no", "Voting, SP": "no", "Voting, generator, SP": "yes",
    }  # fmt: skip
    for line in ("Voting, IP", "Voting, SP"):
        mean, low, high = (f"{100 * decided[line][key]:.1f}".replace("-", "−") for key in ("mean", "low", "high"))
        assert re.search(rf"{mean} (?:points )?\[{low}, {high}\]", page)
    mean, low, high = (f"{50 + 100 * decided['Voting, generator, SP'][key]:.0f}" for key in ("mean", "low", "high"))
    assert f"{mean} % [{low}, {high}]" in page


@pytest.mark.parametrize(
    ("place", "compared", "task"),
    [
        pytest.param("smollm2", ["tiny-r", "smollm2"], "math", marks=pytest.mark.slow),
        pytest.param("programs/smollm2", ["tiny-r", "programs/smollm2"], "code", marks=pytest.mark.slow),
        pytest.param("vain/tiny-r", ["tiny-r", "vain/tiny-r"], "math", marks=pytest.mark.slow),
        pytest.param("seed1/tiny-r", ["tiny-r", "seed1/tiny-r", "seed2/tiny-r"], "math", marks=pytest.mark.slow),
    ],
)
def test_the_notebook_repeats_the_committed_answers(place, compared, task, tmp_path):
    committed, made = ROOT / "results" / place, linked(ROOT / "results" / place, tmp_path / "made")
    folders = " ".join(str(made if name == place else ROOT / "results" / name) for name in compared)
    computed("questions", made, "questions", folders=folders, task=task)
    assert (made / "questions.csv").read_text() == (committed / "questions.csv").read_text()
    texts = [(folder / "questions.md").read_text().split("\n\nComputed in cell") for folder in (made, committed)]
    assert texts[0][0] == texts[1][0]
    assert f"-p folders '{' '.join(f'results/{name}' for name in compared)}' -p task {task}`" in texts[1][1]


def test_a_line_of_one_seed_has_no_interval():
    row = pd.Series({"verdict": "undecided", "mean": 0.25, "low": math.nan, "high": math.nan, "seeds": 1})
    assert _cell(row) == "**undecided**: +0.250, 1 seed"


def test_accuracy_is_drawn_over_the_optimizer_steps_of_all_adapters(tiny):
    """Voting takes four optimizer steps per iteration, under both policies."""
    run = tiny.find(tiny.grid.cell("voting", "ip", "math", 0))
    curve = over_optimizer_steps(run)
    assert list(curve.index[:2]) == [0, 4 * run.accuracy.index[1]] and list(curve) == list(run.accuracy)
    figure = scales_figure([tiny]).figure
    assert len(figure.axes[0].lines) == 3 * (len(tiny.grid.seeds) + 1)  # each seed and the mean, of three lines


def test_the_figure_of_answers_fills_the_marks_of_decided_lines(tiny, monkeypatch):
    """Three bases, of which one has no run on math of Eval-Opt: a mark per line that has runs, at its mean in points."""
    only(monkeypatch, "gain", "skill", "verbose")
    columns = columns_of([tiny, *(Results(ROOT / "results" / name) for name in ("vain/tiny-r", "smollm2"))])
    panels = answers_figure(columns).figure.axes
    rows = [row for column in columns for row in column.to_dict("records") if row["seeds"]]
    for axes, question in zip(panels, DECLARED["questions"], strict=False):
        here = [row for row in rows if row["question"] == question["name"]]
        marks = [line for line in axes.lines if line.get_marker() != "None"]
        assert sorted(float(mark.get_xdata()[0]) for mark in marks) == sorted(100 * row["mean"] for row in here)
        filled = [mark for mark in marks if mark.get_markerfacecolor() != "white"]
        assert len(filled) == sum(row["verdict"] in ("yes", "no") for row in here)
        assert [label.get_text() for label in axes.get_yticklabels()] == list(
            dict.fromkeys(row["line"] for row in here)
        )
