"""The leaderboard of credit estimators (`studies/credit.yaml`): its verdicts from hand-made runs."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from notebook_cells import computed
from paper_results import made_up_results

from multirole_study.compare.corrections import holm_over_declared
from multirole_study.compare.intervals import rank_correlation
from multirole_study.compare.rules import MARGIN
from multirole_study.experiment.cell import Cell
from multirole_study.paper import pack
from multirole_study.paper.declarations import declare, read_declaration
from multirole_study.paper.grid import Grid, Study
from multirole_study.paper.leaderboard import (
    SCORES,
    Board,
    answer_table,
    answers,
    board_table,
    boards,
    measured_in,
    placebo_answer,
    shares_of_effect,
)
from multirole_study.paper.leaderboard_figure import leaderboard_figure
from multirole_study.paper.results import Run

ROOT = Path(__file__).parents[2]
ABOUT = yaml.safe_load((ROOT / "studies/credit.yaml").read_text())


THREE = [200, 201, 202]


def declared(seeds: list[int] = THREE, **changed: object) -> Study:
    """Declare the study with so few seeds that hand-made runs can finish it."""
    fields = {name: value for name, value in ABOUT.items() if name != "grid"}
    return declare(Grid("tiny-r", **ABOUT["grid"] | {"seeds": seeds}), fields | {"seeds": seeds} | changed)


class MadeUp(Run):
    """A run that starts at 30 %, ends at `end` of 100 problems, and samples `tokens` per iteration, replays included."""

    def __init__(self, cell: Cell, end: float, tokens: float = 1000.0, skill: float = 0.5) -> None:
        super().__init__(cell, ROOT)
        accuracies = [0.3, 0.4, 0.45, end]
        self.correct = pd.DataFrame(
            (np.arange(100)[:, None] < np.round(100 * np.array(accuracies))).astype(float), columns=[0, 20, 40, 60]
        )
        replays = cell.credit in ("leave_one_out", "branches", "shapley")
        sampled = [tokens - 100, tokens + 100]
        metrics = {"completion_tokens": [tokens / 5] * 2, "sampled_tokens": sampled} if replays else {
            "completion_tokens": sampled, "sampled_tokens": [math.nan] * 2}  # fmt: skip
        measure = {"voting": "selects", "eval_opt": "judges"}.get(cell.workflow, "solves")
        skills = {
            "measure": [measure, "solves", measure, measure],
            "step": [60, 60, 20, 0],
            "skill": [skill, 0.1, 0.6, 0.9],
        }
        self.tables = {"metrics": pd.DataFrame(metrics), "skills": pd.DataFrame(skills)}

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        return self.tables[name]


def board_of(monkeypatch, made_up: Callable[[Cell], dict | None], workflow: str = "voting", **changed: object) -> Board:
    """The board of a workflow whose run of a cell is `MadeUp(cell, **made_up(cell))`, or missing."""
    return next(board for board in all_boards(monkeypatch, made_up, **changed) if board.workflow == workflow)


def all_boards(monkeypatch, made_up: Callable[[Cell], dict | None], **changed: object) -> list[Board]:
    results = made_up_results(monkeypatch, made_up, lambda cell, values: MadeUp(cell, **values))
    return boards(results, declared(**changed))


GAINS = {"critic": (0.10, 0.12, 0.11), "joint_return": (0.0, 0.02, -0.02), "permuted": (-0.20, -0.21, -0.22)}
"""Credit -> by how many points its runs with seeds 200 to 202 end above those of `outcome`."""


def three_seeds(cell: Cell) -> dict | None:
    """`outcome` ends at 50, 52 and 54 %, a single agent with its tokens at 55, 57 and 59 %; other arms as `GAINS` says."""
    i = cell.seed - 200
    if i > 2:
        return None
    if cell.workflow == "single":
        return (
            {"end": 0.55 + 0.02 * i, "tokens": 1050.0} if cell.n_problems in (27, 22) else {"end": 0.6, "tokens": 300.0}
        )
    if cell.credit in GAINS:
        return {"end": 0.5 + 0.02 * i + GAINS[cell.credit][i], "skill": 0.5 + GAINS[cell.credit][i]}
    if cell.credit == "leave_one_out":
        return {"end": 0.9, "tokens": 1101.0}
    if cell.credit == "branches":
        return {"end": 0.5, "tokens": 905.0} if i == 0 else None
    return {"end": 0.5 + 0.02 * i} if cell.credit == "outcome" else None


def p_of_three(mean: float, sd: float) -> float:
    """Student's t with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2)."""
    t = abs(mean) * math.sqrt(3) / sd
    return 1 - t / math.sqrt(t**2 + 2)


def test_verdicts_by_hand(monkeypatch):
    """Six arms in Voting; the smallest p counts six times, the next one five times."""
    board = board_of(monkeypatch, three_seeds)
    lines = {line.arm.credit: line for line in board.against_reference["accuracy"]}
    assert {credit: line.verdict for credit, line in lines.items()} == {
        "permuted": "no", "leave_one_out": "unequal tokens", "branches": "unfinished", "critic": "yes",
        "joint_return": "undecided", "shapley": "not run",
    }  # fmt: skip
    critic = lines["critic"]
    assert critic.gap.mean == pytest.approx(0.11) and critic.gap.seeds == 3
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (critic.gap.low, critic.gap.high) == (pytest.approx(0.11 - half), pytest.approx(0.11 + half))
    # leave_one_out ends at 40, 38 and 36 points above: p = .0018 lies between the two, and is counted although it has no verdict
    assert lines["permuted"].p_holm == pytest.approx(6 * p_of_three(0.21, 0.01))
    assert lines["leave_one_out"].p_holm == pytest.approx(5 * p_of_three(0.38, 0.02))
    assert critic.p_holm == pytest.approx(max(4 * p_of_three(0.11, 0.01), 5 * p_of_three(0.38, 0.02)))
    assert lines["joint_return"].p_holm == 1.0 and math.isnan(lines["branches"].p_holm)
    assert [lines[name].tokens for name in ("critic", "leave_one_out", "branches")] == pytest.approx([1, 1.101, 0.905])
    assert critic.end.mean == pytest.approx(0.63) and critic.peak.mean == pytest.approx(0.63)


def test_no_verdict_before_the_last_declared_seed(monkeypatch):
    """Three of four seeds, whose differences would decide: the numbers are shown, and nothing is tested."""
    study_boards = all_boards(monkeypatch, three_seeds, seeds=[*THREE, 203])
    board = next(board for board in study_boards if board.workflow == "voting")
    lines = [*board.against_reference["accuracy"], *board.against_reference["skill"], *board.against_single]
    assert {line.verdict for line in lines} == {"unfinished", "not run"}
    assert all(math.isnan(line.p_holm) for line in lines)
    shown = board_table(board, "accuracy").shown.set_index("arm").loc["critic"]
    assert (shown["n"], shown["− outcome"], shown["verdict"]) == ("3", "+11.0 [+8.5, +13.5]", "**unfinished**")
    measured = pack.read_measurement(ROOT / "results/tiny-r", "credit_accuracy")
    assert {answer.verdict for answer in answers(study_boards, measured)} == {"unfinished"}


def test_missing_arms_count_in_the_correction():
    assert holm_over_declared([0.01, math.nan, 0.02]) == pytest.approx([0.03, 1.0, 0.04])
    assert holm_over_declared([]) == []


def test_ten_seeds_within_three_points_are_equivalent(monkeypatch):
    """Differences of +1 and -1 points: standard error .0033, nine of them from the margin."""
    assert MARGIN == 0.03  # studies/credit.yaml says 3 points
    ten = ABOUT["seeds"]

    def made_up(cell: Cell) -> dict | None:
        return (
            {"end": 0.6 + 0.01 * (-1) ** cell.seed * (cell.credit == "critic")} if cell.workflow == "voting" else None
        )

    lines = {line.arm.credit: line for line in board_of(monkeypatch, made_up, seeds=ten).against_reference["accuracy"]}
    assert lines["critic"].verdict == "equivalent" and lines["critic"].gap.mean == pytest.approx(0)
    assert lines["critic"].gap.sd / math.sqrt(10) == pytest.approx(0.01 / 3)


def test_the_skill_is_that_of_the_judging_role_at_the_last_iteration(monkeypatch):
    """Its peak is that of a trained checkpoint: 60 % at iteration 20, not 90 % at the start."""
    board = board_of(monkeypatch, three_seeds)
    lines = {line.arm.credit: line for line in board.against_reference["skill"]}
    assert lines["critic"].end.mean == pytest.approx(0.61) and lines["critic"].gap.mean == pytest.approx(0.11)
    assert lines["joint_return"].peak.mean == pytest.approx(0.6)
    assert lines["critic"].verdict == "yes" and lines["permuted"].verdict == "no"


def test_a_run_without_a_case_of_the_skill_is_in_no_pair(monkeypatch):
    def made_up(cell: Cell) -> dict | None:
        values = three_seeds(cell)
        return values and values | {"skill": math.nan if (cell.credit, cell.seed) == ("critic", 201) else 0.5}

    board = board_of(monkeypatch, made_up)
    skills, accuracies = (
        next(line for line in board.against_reference[name] if line.arm.credit == "critic")
        for name in ("skill", "accuracy")
    )
    assert (skills.gap.seeds, skills.end.seeds, accuracies.gap.seeds) == (2, 2, 3)


def test_the_single_agent_with_equal_tokens_by_hand(monkeypatch):
    """`critic` ends 5, 7 and 6 points above it; `outcome` 5 points below in every seed, which says nothing about the spread."""
    board = board_of(monkeypatch, three_seeds)
    assert board.single is not None and board.single.name == "single agent, Voting's tokens"
    lines = {line.arm.credit: line for line in board.against_single}
    assert lines["critic"].gap.mean == pytest.approx(0.06) and lines["outcome"].gap.mean == pytest.approx(-0.05)
    assert lines["critic"].p_holm == pytest.approx(5 * p_of_three(0.06, 0.01), abs=1e-9)
    assert lines["critic"].verdict == "yes" and lines["outcome"].verdict == "undecided"


def test_a_single_agent_with_other_tokens_decides_nothing(monkeypatch):
    def made_up(cell: Cell) -> dict | None:
        values = three_seeds(cell)
        return values and values | ({"tokens": 880.0} if cell.workflow == "single" else {})

    board = board_of(monkeypatch, made_up)
    assert {line.verdict for line in board.against_single} == {"unequal tokens", "unfinished", "not run"}
    assert board_table(board, "accuracy").shown.iloc[-1]["verdict"] == "**unequal tokens**"


def test_the_placebo_is_held_against_the_untrained_workflow(monkeypatch):
    """It ends at 30, 31 and 32 % and starts at 30 %."""
    board = board_of(monkeypatch, three_seeds)
    assert placebo_answer(board).interval.mean == pytest.approx(0.01) and placebo_answer(
        board
    ).interval.p == pytest.approx(p_of_three(0.01, 0.01))


def test_answers_by_hand(monkeypatch):
    study_boards = all_boards(monkeypatch, three_seeds)
    by_question = {(answer.question, answer.place): answer for answer in answers(study_boards, None)}
    beats = "Does any estimator beat `outcome` in accuracy?"
    assert {place: answer.verdict for (question, place), answer in by_question.items() if question == beats} == {
        "Voting-SP, math": "yes", "Eval-Opt-SP, math": "yes", "all workflows": "yes",
    }  # fmt: skip
    assert by_question[beats, "Voting-SP, math"].text.startswith("critic +11.0 [+8.5, +13.5], p = 0.0")
    trains = by_question["Does the placebo train at all (end minus untrained)?", "Voting-SP, math"]
    assert (trains.verdict, trains.text) == ("no", "+1.0 [−1.5, +3.5], p = 0.225, 3 runs")  # equivalent: t = 2 / .577
    above = by_question["Is any arm above the single agent with the same tokens and steps?", "Voting-SP, math"]
    assert above.verdict == "yes" and above.text.startswith("critic +6.0 [")
    order = "Does the order of the estimators follow the share of the exact effect (rank correlation)?"
    assert by_question[order, "Voting-SP, math"].verdict == "not measured"


def test_no_needs_a_verdict_on_every_estimator(monkeypatch):
    """Every run but one ends 20 points below `outcome`, within a point."""

    def made_up(cell: Cell) -> dict | None:
        is_reference = cell.workflow == "single" or cell.credit == "outcome"
        return {"end": 0.6 if is_reference else 0.4 + 0.01 * (cell.seed % 2)} if cell.seed < 203 else None

    def verdicts(made_up: Callable[[Cell], dict | None]) -> set[str]:
        study_boards = all_boards(monkeypatch, made_up)
        return {answer.verdict for answer in answers(study_boards, None) if "in accuracy" in answer.question}

    assert verdicts(made_up) == {"no"}
    assert verdicts(lambda cell: None if cell.credit == "critic" else made_up(cell)) == {"undecided"}


@pytest.mark.parametrize(
    ("y", "rho", "p"),
    [([1, 2, 3, 4], 1.0, 2 / 24), ([4, 3, 2, 1], -1.0, 2 / 24), ([1, 2, 4, 3], 0.8, 8 / 24)],
)
def test_the_permutation_test_by_hand(y, rho, p):
    """Of 24 orders of four arms one has rho 1 and three have .8 (a swap of neighbours), and as many are negative."""
    assert rank_correlation([0.1, 0.2, 0.3, 0.7], y) == (pytest.approx(rho), pytest.approx(p))


def test_the_order_is_held_against_the_measured_shares(monkeypatch):
    """Arms that end in the order of the committed shares at iteration 60: two of 5,040 orders of seven arms are as extreme."""
    measured = pack.read_measurement(ROOT / "results/tiny-r", "credit_accuracy")
    empty = board_of(monkeypatch, lambda cell: None)
    shares = shares_of_effect(measured, empty)[60]
    credits = ["outcome", *(arm.credit for arm in empty.arms)]
    ranks = shares[credits].rank()

    def made_up(cell: Cell) -> dict | None:
        return {"end": 0.5 + 0.02 * ranks[cell.credit]} if cell.workflow == "voting" else None

    order = [answer for answer in answers([board_of(monkeypatch, made_up)], measured) if "share" in answer.question]
    assert len(order) == 1 and "1.00 at iteration 60, p < 0.001, 7 arms" in order[0].text


def test_names_and_order_of_the_arms_are_those_of_the_study(monkeypatch):
    """Renamed variants in reverse order; a workflow lists those that are declared for it."""
    variants = {f"{name} ({i})": about for i, (name, about) in enumerate(reversed(ABOUT["variants"].items()))}
    for workflow, single in (("voting", "Voting"), ("eval_opt", "Eval-Opt")):
        cell = f"{workflow} sp math"
        table = board_table(board_of(monkeypatch, three_seeds, workflow, variants=variants, order=[]), "accuracy")
        arms = [name for name, about in variants.items() if cell in about["cells"]]
        (beside,) = [name for name in variants if name.startswith(f"single agent, {single}'s tokens")]
        assert list(table.shown["arm"]) == ["outcome", *arms, beside] == list(table.values["arm"])


def test_without_runs_every_line_says_so(monkeypatch):
    study_boards = all_boards(monkeypatch, lambda cell: None)
    assert set(answer_table(study_boards, None).values["verdict"]) == {"not run"}
    tables = [board_table(board, score) for board in study_boards for score in SCORES]
    assert [table.name for table in tables] == [
        f"leaderboard_{workflow}_sp_math_{score}" for workflow in ("voting", "eval_opt") for score in SCORES
    ]
    for table in tables:
        assert set(table.shown["verdict"]) == {"not run"} and set(table.shown["n"]) == {"0"}
        assert "nan" not in table.shown.to_string().lower()


def test_the_figure_shows_differences_in_points(monkeypatch):
    """A diamond for the placebo, a hollow mark for unequal tokens, and the single agent's line 5 points above `outcome`."""
    panel, *_ = leaderboard_figure(all_boards(monkeypatch, three_seeds), "tiny-r").figure.axes
    drawn = {
        line.get_label(): (line.get_marker(), line.get_markerfacecolor(), line.get_xdata()[0]) for line in panel.lines
    }
    assert drawn["placebo"][0] == "D" and drawn["placebo"][2] == pytest.approx(-21)
    assert drawn["estimator with unequal tokens"][1] == "white"
    assert drawn["estimator with unequal tokens"][2] == pytest.approx(38)
    assert drawn["single agent with equal tokens"][2] == pytest.approx(5)
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names[1] == "leave_one_out in Voting" and names[-1] == "shapley (not run)"


@pytest.mark.slow
def test_the_notebook_writes_tables_and_a_figure(monkeypatch, tmp_path):
    all_boards(monkeypatch, three_seeds)
    declared().write(tmp_path)
    folder = tmp_path / "tiny-r"
    assert read_declaration(folder, "leaderboard") == declared()
    made = computed("credit", folder, measured=str(ROOT / "results/tiny-r"))
    verdicts = made["leaderboard_answers"].values.set_index(["question", "place"])["verdict"]
    assert verdicts["Does any estimator beat `outcome` in accuracy?", "Voting-SP, math"] == "yes"
    shown = (folder / "tables/leaderboard_voting_sp_math_accuracy.md").read_text()
    assert "| 3   | 1.10     |" in shown and "**unequal tokens**" in shown
    assert (folder / "figures/leaderboard.png").stat().st_size > 10_000
    assert "Voting-SP, math +1.0 [−1.5, +3.5]; Eval-Opt-SP" in (folder / "figures/leaderboard.md").read_text()


def test_a_folder_of_another_study_is_refused():
    for folder, command in (("results/tiny-r", "clock"), ("results/clock/tiny-r", "leaderboard"), ("nowhere", "clock")):
        with pytest.raises(ValueError, match="records no study like studies/"):
            read_declaration(ROOT / folder, command)
    with pytest.raises(ValueError, match="such as results/credit/tiny-r. The first lines of studies/credit.yaml say"):
        computed("credit", ROOT / "results/tiny-r")


def test_measurements_of_another_base_answer_nothing():
    folder = ROOT / "results/tiny-r"
    assert measured_in(folder, Grid("tiny-r")) is not None and measured_in(folder, Grid("smollm2")) is None
