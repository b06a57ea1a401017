"""The study of the learning-rate clock: its declaration, its verdicts from hand-made runs, and the schedules that its figure draws."""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from paper_results import made_up_results
from scipy.stats import fisher_exact, ttest_rel
from statsmodels.stats.multitest import multipletests

from multirole.schedule import ScheduleClock
from multirole_study.compare.intervals import chance_to_decide
from multirole_study.compare.measures import MEASURES
from multirole_study.compare.rules import ALPHA
from multirole_study.experiment.cell import Cell
from multirole_study.labels import WORKFLOW_NAMES
from multirole_study.paper.clock_figure import clock_figure, figures, learning_rates
from multirole_study.paper.clock_study import ClockStudy
from multirole_study.paper.clock_tables import (
    DECLARED,
    LEVEL,
    answers,
    calibrated_rate,
    fall_table,
    picture,
    places,
    power_table,
    verdict_table,
)
from multirole_study.paper.declarations import read_declaration
from multirole_study.paper.grid import Grid
from multirole_study.paper.pages import Line
from multirole_study.paper.results import Results, Run

ROOT = Path(__file__).parents[2]
ABOUT = yaml.safe_load((ROOT / "studies/clock.yaml").read_text())
FALLS = [0.3, 0.6, 0.7, 0.7, 0.65, 0.6, 0.5]
"""Rises to 70 %, is 5 points below it at iteration 40, and ends 20 points below."""
STAYS = [0.3, 0.5, 0.6, 0.65, 0.7, 0.7, 0.7]
FALLS_EARLY = [0.3, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6]


def committed(table: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"results/clock/tiny-r/tables/{table}.csv", dtype={"rate": str})


def declared(**changed: object) -> ClockStudy:
    scales = yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"]
    fields = {name: value for name, value in (scales["default"] | scales["tiny-r"]).items() if name != "gpus"}
    return ClockStudy(Grid("tiny-r", **fields), **ABOUT | changed)


class MadeUp(Run):
    """A run with these validation accuracies of 100 problems; the generator's chi2 peaks at an iteration, the aggregator's is flat."""

    def __init__(self, cell: Cell, accuracies: list[float], chi2_peak: int) -> None:
        super().__init__(cell, ROOT)
        right = np.arange(100)[:, None] < np.round(100 * np.array(accuracies))
        self.correct = pd.DataFrame(right.astype(float), columns=range(0, 10 * len(accuracies), 10))
        self.chi2_peak = chi2_peak

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        return self.series(name).to_frame()

    def series(self, metric: str, role: str | None = None) -> pd.Series:
        values = pd.Series(0.01, range(1, 61))
        if role == "generator":
            values[self.chi2_peak - 1 : self.chi2_peak + 1] = [0.5, 0.6]
        return values


def results_of(monkeypatch, made_up) -> Results:
    """Results whose run of a cell has the accuracies `made_up(cell)`, or is missing."""
    return made_up_results(monkeypatch, made_up, partial(MadeUp, chi2_peak=36))


def arm_of(cell: Cell) -> str:
    names = {(arm["policy"], arm["lr_clock"]): name for name, arm in ABOUT["arms"].items()}
    return names[cell.policy_name, cell.lr_clock]


def of_line_one(cell: Cell, seeds: range) -> bool:
    return (cell.workflow, cell.task, cell.learning_rate) == ("voting", "math", 0.006) and cell.seed in seeds


@pytest.fixture
def five_seeds(monkeypatch) -> Results:
    """Line 1 with the pilot's outcome: 4 of 5 wrapping runs fall late, none with one clock, and SP falls in seeds 10 to 12."""

    def made_up(cell: Cell) -> list[float] | None:
        if not of_line_one(cell, range(10, 15)) or arm_of(cell) == "ip, ended":
            return None
        falls = {"ip, wrapping": cell.seed != 14, "sp": cell.seed < 13, "ip, one clock": False}[arm_of(cell)]
        return FALLS if falls else STAYS

    return results_of(monkeypatch, made_up)


# ---- the declaration


def test_the_first_line_is_the_pilot_on_other_seeds():
    first = declared().cells_by_line()[0].values()
    assert {(cell.policy_name, cell.lr_clock) for cell in first} == {
        ("ip", "iteration"), ("ip", "update_call_wrapped"), ("sp", "iteration"),
    }  # fmt: skip
    assert {cell.seed for cell in first} == {10, 11, 12, 13, 14}
    usual = Cell("voting", "ip")
    for cell in first:
        assert (cell.max_steps, cell.warmup_steps, cell.lr_schedule) == (60, 5, usual.lr_schedule)
        assert (cell.learning_rate, cell.n_validation, cell.eval_steps) == (3 * usual.learning_rate, 512, 10)


def test_no_seed_of_the_pilot_or_the_grid_is_used_and_the_calibration_scores_nothing():
    study = declared(middle=0.004)
    scored, calibrating = set(study.seeds("verdicts")), set(study.seeds("calibration"))
    assert scored.isdisjoint(calibrating) and min(scored | calibrating) > max(study.grid.seeds)
    assert {cell.seed for cell in study.cells()} == scored | calibrating
    with pytest.raises(ValueError, match=r"Seeds \[10\] calibrate the rate and score as well"):
        declared(lines=[*ABOUT["lines"], ABOUT["lines"][1] | {"seeds": [10]}])


def test_lines_at_the_middle_rate_train_nothing_before_it_is_known():
    waiting, known = declared(middle=None).cells_by_line(), declared(middle=0.004).cells_by_line()
    for line, before, after in zip(ABOUT["lines"], waiting, known, strict=True):
        assert after and bool(before) == (line["rate"] != "middle")
    assert {cell.learning_rate for cell in declared(middle=0.004).cells()} >= {0.002, 0.004, 0.006}


def test_the_written_middle_rate_is_the_one_that_the_committed_calibration_chooses():
    folder = ROOT / "results/clock/tiny-r"
    if ABOUT["middle"] is not None:
        assert calibrated_rate(Results(folder), read_declaration(folder, "clock"))[0] == ABOUT["middle"]


@pytest.mark.parametrize(("task", "rate"), [("math", "0.006"), ("math", "0.005"), ("code", "0.006"), ("code", "0.005")])
@pytest.mark.parametrize("workflow", ["voting", "orch_workers", "eval_opt"])
def test_the_pages_tables_are_those_of_the_committed_runs(workflow, task, rate):
    """docs/clock_looks.md: a column for each arm, where all arms have reached a declared look."""
    falls = committed("clock_falls").query(
        f"workflow == '{workflow}' and task == '{task}' and rate == '{rate}' and value.notna()"
    )
    runs = falls.query("number == 'runs' and value > 0").set_index("arm")["value"]
    falls = falls.set_index(["number", "arm"])

    def cells(number: str, name: str) -> list[str]:
        lines = [Line(*falls.loc[(number, arm), list(Line._fields[:3])], "accuracy", 0, 0, 0) for arm in runs.index]
        # equal seeds have no interval
        return [name, *(str(line) if math.isnan(line.low) else line.interval for line in lines)]

    names = {"IP, ended": "IP, schedule that ends", "IP, wrapping": "IP, wrapping clock"}
    table = [
        ["", *(names.get(arm, arm) for arm in runs.index)],
        ["---"] * (len(runs) + 1),
        *(
            [number, *(f"{falls.loc[number, arm]['value']:.0f} of {n:.0f}" for arm, n in runs.items())]
            for number in ("end fallen", "fall at any time")
        ),
        cells("best − end", "best − end, points"),
        cells("end", "end, %"),
    ]
    page = (ROOT / "docs/clock_looks.md").read_text()
    assert "\n".join(f"|{'|'.join(row)}|" for row in table) in re.sub(r"(?<=\|) | (?=\|)", "", page)


def test_the_pages_one_table_has_every_place_that_has_reached_a_look():
    """docs/clock.md, "In one table": the runs of three arms that end fallen, and two verdicts. SP has no look in one place."""
    place = ["workflow", "task", "rate"]
    falls = committed("clock_falls").set_index([*place, "arm", "number"])["value"]
    verdicts = committed("clock_verdicts").set_index([*place, "question"])

    def row(*at: str) -> tuple[str, ...]:
        workflow, task, rate = at
        name = f"{WORKFLOW_NAMES[workflow]}, {task.replace('code', 'programs')}, {float(rate) * 1000:.0f}e-3"
        runs = {arm: falls[*at, arm, "runs"] for arm in ("IP, one clock", "IP, wrapping", "SP")}
        fallen = [f"{falls[*at, arm, 'end fallen']:.0f} of {n:.0f}" if n else "not read" for arm, n in runs.items()]
        return (
            name,
            *fallen,
            *(verdicts.loc[(*at, question), "verdict"] for question in ("clock_makes_falls", "picture")),
        )

    reached = verdicts.query("question == 'clock_makes_falls' and seeds >= 5").index.droplevel("question")
    section = (ROOT / "docs/clock.md").read_text().split("## In one table")[1].split("\n## ")[0]
    lines = [tuple(line.strip("| ").split(" | ")) for line in section.splitlines() if line.startswith("| ")]
    assert len(lines) == len(reached) + 1 and set(lines[1:]) == {row(*at) for at in reached}


def test_the_page_counts_the_answers_to_every_question():
    """docs/clock_looks.md, "sentence by sentence": of the verdicts that are read, how many are what."""
    verdicts = committed("clock_verdicts").query("seeds >= 5")
    counts = verdicts.groupby("question")["verdict"].value_counts().unstack(fill_value=0)
    kinds = ["yes", "no", "equivalent", "undecided"]
    section = (ROOT / "docs/clock_looks.md").read_text().split("sentence by sentence")[1].split("\n## ")[0]
    said = dict(re.findall(r"`(\w+)` \| (\d+ \| \d+ \| \d+ \| \d+) \|", section))
    assert said == {name: " | ".join(map(str, row)) for name, row in zip(counts.index, counts[kinds].to_numpy())}


def test_every_interval_that_the_page_states_is_one_of_the_verdicts():
    """docs/clock_looks.md, outside its tables: in points, of a difference or of its negative."""
    verdicts = committed("clock_verdicts").dropna(subset="low")
    limits = [(100 * low, 100 * high) for low, high in zip(verdicts["low"], verdicts["high"], strict=True)]
    known = {
        f"[{low:.{digits}f}, {high:.{digits}f}]".replace("-", "−")
        for below, above in limits
        for low, high in ((below, above), (-above, -below))
        for digits in (0, 1)
    }
    lines = (ROOT / "docs/clock_looks.md").read_text().splitlines()
    text = " ".join(line for line in lines if not line.startswith("|"))
    stated = set(re.findall(r"\[−?\d[\d.]*, −?\d[\d.]*\]", text))
    assert stated and not stated - known


def test_the_pages_corrected_p_values():
    """docs/clock.md, "After correction": Fisher's exact test of the counts, with Holm's correction over all rows but the primary one."""
    primary = DECLARED["primary"]
    rows = committed("clock_verdicts").query("question == 'clock_makes_falls' and seeds >= 5")
    counts = rows["text"].str.extract(r"(\d+) of (\d+) against (\d+) of (\d+)").astype(int).to_numpy()
    p = np.array([fisher_exact([[a, n - a], [b, m - b]], alternative="greater").pvalue for a, n, b, m in counts])
    is_primary = np.array(
        (rows["workflow"] == primary["workflow"])
        & (rows["task"] == primary["task"])
        & (rows["rate"].astype(float) == float(primary["rate"]))
    )
    others, corrected = rows[~is_primary], multipletests(p[~is_primary], method="holm")[1]
    expected = {
        f"{WORKFLOW_NAMES[row.workflow]}, {row.task.replace('code', 'programs')}, {float(row.rate) * 1000:.0f}e-3": (
            f"{alone:.3f}" if alone >= 0.001 else "< 0.001",
            f"{holm:.3f}",
        )
        for row, alone, holm in zip(others.itertuples(), p[~is_primary], corrected, strict=True)
        if row.verdict == "yes"
    }
    section = (ROOT / "docs/clock.md").read_text().split("## After correction")[1].split("\n## ")[0]
    said = {
        cells[0]: tuple(cells[1:])
        for cells in (line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| "))
    }
    assert {name: values for name, values in said.items() if name in expected} == expected and len(said) == len(
        expected
    ) + 1
    assert f"p = {p[is_primary].item():.3f}" in section
    assert (p[~is_primary][others["verdict"] != "yes"] > 0.2).all()


def test_a_run_has_the_parameters_of_its_arm():
    study = declared(middle=0.004)
    for cell in study.cells()[::25]:
        assert Cell(**study.parameters_of(cell)) == cell


def test_an_arm_that_is_not_declared_is_refused():
    with pytest.raises(ValueError, match=r"Lines name the arms \['ip, two clocks'\], which `arms` does not have"):
        declared(lines=[ABOUT["lines"][0] | {"arms": ["ip, two clocks"]}])


def test_every_question_names_arms_and_measures_that_exist():
    study = declared()
    for about in DECLARED["questions"]:
        assert about["measure"] in MEASURES and {about["arm"], about.get("minus", about["arm"])} <= set(study.arms)
        assert about["sign"] in (1, -1)
    names = {about["name"] for about in DECLARED["questions"]}
    assert {*DECLARED["picture"]["needs"], *DECLARED["picture"]["lacks"], DECLARED["primary"]["question"]} <= names
    primary = DECLARED["primary"]
    assert any(
        (p.workflow, p.task, p.rate) == (primary["workflow"], primary["task"], primary["rate"]) for p in places(study)
    )
    assert 2 * LEVEL == ALPHA  # a one-sided test at this level and the interval of `t_interval` agree


# ---- power


def test_the_declared_power_is_that_of_the_test():
    declared_chances = [about["chances"] for about in DECLARED["power"]]
    table = power_table()
    for n in DECLARED["looks"]:
        assert list(table[f"{n} seeds"]) == [chances[n] for chances in declared_chances]


def test_the_chance_of_five_seeds_by_hand():
    """4 against 0 of 5 and 5 against 1 have p = 5 / 210 = .0238, 5 against 0 has 1 / 252, and 4 against 1 has 26 / 252."""
    none, one = 0.9**5, 5 * 0.1 * 0.9**4  # of 5 at 10 %
    four, five = 5 * 0.9**4 * 0.1, 0.9**5  # of 5 at 90 %
    assert chance_to_decide(0.1, 0.9, 5, LEVEL) == pytest.approx(none * (four + five) + one * five)


# ---- verdicts from hand-made runs


def test_line_one_by_hand(five_seeds):
    """Fisher's p of 4 against 0 of 5 is 5 / 210 = .0238; 4 against 3 of 5 decides nothing."""
    study = declared()
    place = places(study)[0]
    by_name = answers(five_seeds, study, place)
    assert by_name["clock_makes_falls"].verdict == "yes"
    assert by_name["clock_makes_falls"].text.startswith("4 of 5 against 0 of 5, +80.0 [")
    assert by_name["ip_falls_more_than_sp_where_it_wraps"].verdict == "undecided"
    assert by_name["ended_clock_makes_falls"].verdict == "not run"
    assert by_name["falls_are_late"].text.startswith("4 of 4 [") and by_name["falls_are_late"].verdict == "undecided"
    # the generator's chi2 peaks at 36, and accuracy falls at 40
    assert by_name["clock_makes_chi2_before_cliff"].verdict == "yes"
    assert by_name["sp_plateaus"].text.startswith("3 of 5") and by_name["sp_plateaus"].verdict == "undecided"
    assert picture(five_seeds, study, place, by_name) == "within IP only"
    deepens = by_name["clock_deepens_falls"]  # 20 points in four of five pairs
    assert deepens.value == pytest.approx(0.16)
    assert (deepens.verdict == "yes") == (ttest_rel([0.2] * 4 + [0.0], [0.0] * 5, alternative="greater").pvalue < LEVEL)


def test_a_difference_the_other_way_is_no(monkeypatch):
    def made_up(cell: Cell) -> list[float] | None:
        if not of_line_one(cell, range(10, 15)):
            return None
        accuracies = FALLS if arm_of(cell) == "ip, one clock" else STAYS
        spread = {"ip, one clock": 0.02, "sp": 0.01}.get(arm_of(cell), 0.0)
        return [*accuracies[:-1], accuracies[-1] + spread * (cell.seed % 2)]

    study = declared()
    by_name = answers(results_of(monkeypatch, made_up), study, places(study)[0])
    assert by_name["clock_makes_falls"].verdict == by_name["clock_lowers_floor"].verdict == "no"
    assert (
        by_name["floor_with_one_clock"].verdict == "yes"
        and by_name["ip_falls_more_than_sp_with_one_clock"].verdict == "yes"
    )
    assert by_name["floor_where_it_wraps"].verdict == "equivalent"  # at most a point


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        (range(10, 12), "2 of 5 seeds"),
        (range(10, 17), "5 of 5 against 0 of 5"),
        (range(10, 20), "10 of 10 against 0 of 10"),
    ],
)
def test_a_verdict_is_of_the_last_look_that_is_reached(monkeypatch, seeds, expected):
    def made_up(cell: Cell) -> list[float] | None:
        return (FALLS if arm_of(cell) == "ip, wrapping" else STAYS) if of_line_one(cell, seeds) else None

    study = declared()
    by_name = answers(results_of(monkeypatch, made_up), study, places(study)[0])["clock_makes_falls"]
    assert by_name.text.startswith(expected)
    assert by_name.verdict == ("undecided" if len(seeds) < 5 else "yes")


@pytest.mark.parametrize(("n_seeds", "n_read"), [(4, 0), (7, 5), (10, 10)])
def test_seeds_between_two_looks_are_neither_counted_nor_drawn(monkeypatch, n_seeds, n_read):
    study = declared()
    results = results_of(monkeypatch, lambda cell: FALLS if of_line_one(cell, range(10, 10 + n_seeds)) else None)
    rows = fall_table(results, study).values.query("workflow == 'voting' and task == 'math' and rate == '0.006'")
    counts = rows.query("number in ('runs', 'end fallen')").set_index("arm")["value"]
    assert set(counts) == {n_read} and ("4 arms, fewer than 5 seeds" in counts) == (n_read == 0)
    assert [plate.caption.count(f": {n_read}") for plate in figures(results, study)] == [4] * (n_read > 0)


def test_the_paper_s_picture_is_made_by_the_clock_if_sp_stays(monkeypatch):
    def made_up(cell: Cell) -> list[float] | None:
        return (FALLS if arm_of(cell) == "ip, wrapping" else STAYS) if of_line_one(cell, range(10, 20)) else None

    study = declared()
    results = results_of(monkeypatch, made_up)
    by_name = answers(results, study, places(study)[0])
    assert picture(results, study, places(study)[0], by_name) == "made by the clock"
    assert by_name["sp_plateaus"].verdict == "yes"


def test_without_any_fall_there_is_no_cliff_to_explain(monkeypatch):
    study = declared()
    results = results_of(monkeypatch, lambda cell: STAYS if of_line_one(cell, range(10, 20)) else None)
    assert picture(results, study, places(study)[0], answers(results, study, places(study)[0])) == "no cliff to explain"


@pytest.mark.parametrize(("workflow", "expected"), [("voting", 1.0), ("orch_workers", 1.0)])
def test_a_fall_is_late_after_the_iteration_at_which_the_rate_is_zero(workflow, expected):
    cell = Cell(workflow, "ip", learning_rate=0.006, lr_clock="update_call_wrapped")
    assert MEASURES["late"].of(MadeUp(cell, FALLS, 36)) == expected
    assert MEASURES["late"].of(MadeUp(cell, FALLS_EARLY, 36)) == 0.0  # at iteration 20, when three adapters are at zero
    assert math.isnan(MEASURES["late"].of(MadeUp(cell, STAYS, 36)))


def test_a_run_that_diverged_early_has_no_accuracy_at_iteration_10():
    cell = Cell("voting", "ip", learning_rate=0.006)
    assert math.isnan(MEASURES["early"].of(MadeUp(cell, [0.3], 36)))
    assert MEASURES["early"].of(MadeUp(cell, STAYS, 36)) == STAYS[1]


def test_the_middle_rate_is_the_largest_without_a_fall(monkeypatch):
    study = declared()

    def made_up(cell: Cell) -> list[float] | None:
        return FALLS if cell.learning_rate == 0.005 and cell.seed == 21 else STAYS

    assert calibrated_rate(results_of(monkeypatch, made_up), study)[0] == 0.004
    unfinished = results_of(
        monkeypatch, lambda cell: None if cell.seed == 24 and cell.learning_rate == 0.004 else made_up(cell)
    )
    rate, text = calibrated_rate(unfinished, study)
    assert rate is None and "not yet known: 4 calibration runs at 0.004" in text
    assert calibrated_rate(results_of(monkeypatch, lambda cell: FALLS), study)[0] is None
    lines = [line for line in ABOUT["lines"] if line.get("purpose") != "calibration" and line["rate"] != "middle"]
    assert "has no calibration" in calibrated_rate(Results(ROOT / "results/tiny-r"), declared(lines=lines))[1]


def test_tables_say_what_was_not_run(five_seeds):
    study = declared()
    falls = fall_table(five_seeds, study)
    rows = falls.values.set_index(["workflow", "task", "rate", "arm", "number"])["value"]
    first = rows.sort_index()["voting", "math", "0.006"]
    assert first["IP, wrapping", "end fallen"] == 4 and first["SP", "end fallen"] == 3
    assert first["IP, wrapping", "best − end"] == pytest.approx(0.16) and first["IP, ended", "runs"] == 0
    table = verdict_table(five_seeds, study)
    verdicts = table.values.set_index(["workflow", "task", "rate", "question"])["verdict"]
    assert verdicts["voting", "math", "0.006", "picture"] == "within IP only"
    others = verdicts.drop(index=[key for key in verdicts.index if key[:3] == ("voting", "math", "0.006")])
    assert set(others) == {"not run", "–"} and len(others) > 150
    assert (
        "voting",
        "code",
        "0.006",
        "ended_clock_makes_falls",
    ) not in verdicts.index  # an arm that the study does not have there
    assert "Fisher" in table.caption and "NaN" not in table.shown.to_string() + falls.shown.to_string()


# ---- schedules


@pytest.mark.parametrize("workflow", ["voting", "orch_workers"])
@pytest.mark.parametrize("arm", ABOUT["arms"])
def test_the_drawn_rates_are_those_of_the_trainer(make_trainer, workflow, arm):
    cell = Cell(workflow, max_steps=12, warmup_steps=4, learning_rate=0.006, **ABOUT["arms"][arm])
    trainer, drawn = make_trainer(cell), learning_rates(cell)
    assert list(drawn.columns) == list(trainer.adapters)
    for iteration in range(12):
        trainer.state.global_step = iteration
        while trainer.lr_scheduler.last_epoch < iteration:
            trainer.optimizer._opt_called = True  # otherwise the scheduler warns that it was stepped first
            trainer.lr_scheduler.step()
        for callback in trainer.multirole_callbacks:
            if isinstance(callback, ScheduleClock):
                callback.on_update_begin(trainer, [], {})
        rates = [trainer.adapter_learning_rate(adapter) for adapter in trainer.adapters]
        assert list(drawn.loc[iteration + 1]) == pytest.approx(rates, abs=1e-15)


def test_the_figure_has_a_column_for_each_schedule(five_seeds):
    study = declared()
    on_code = next(place for place in places(study) if place.task == "code")
    plate = clock_figure(five_seeds, study, on_code)
    assert len(plate.figure.axes) == 3 * 2 and "with two clocks" in plate.caption and "ended" not in plate.caption
    plate = clock_figure(five_seeds, study, places(study)[0])
    accuracy = plate.figure.axes[:3]
    assert [len(axes.lines) for axes in accuracy] == [12, 6, 12]  # five seeds and the mean, of IP and of SP
    assert "(not run)" in accuracy[1].get_title() and "IP, ended: 0" in plate.caption
    assert plate.name == "clock_voting_math_0.006"
