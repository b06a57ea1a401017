"""The study of each arm's own learning rate (`studies/rates.yaml`): its declaration, the choice of rates, and its verdicts from hand-made runs."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from notebook_cells import computed
from paper_results import made_up_results

from multirole_study.experiment.cell import Cell
from multirole_study.paper.declarations import declare, read_declaration
from multirole_study.paper.grid import Grid
from multirole_study.paper.rate_figure import rate_figure
from multirole_study.paper.rate_study import RateStudy
from multirole_study.paper.rate_tables import (
    answer_table,
    arm_table,
    compared,
    costs_of,
    runs_of,
    scored_problems,
    tuned,
    tuning_sentences,
)
from multirole_study.paper.results import Results, Run

ROOT = Path(__file__).parents[2]
ABOUT = yaml.safe_load((ROOT / "studies/rates.yaml").read_text())
TUNED = [name for name, arm in ABOUT["arms"].items() if "rate" not in arm]
PRESET = dict.fromkeys(TUNED, ABOUT["preset"])


def declared(**changed: object) -> RateStudy:
    """Declare the study with three scoring seeds, so that hand-made runs can finish it."""
    scoring = ABOUT["scoring"] | {"seeds": [310, 311, 312]}
    return declare(Grid("tiny-r", seeds=[0]), ABOUT | {"scoring": scoring} | changed)


class MadeUp(Run):
    """A run that is right in `end` of the tuning problems and in `scored` of the others; its aggregator's replies grow from 10 to 10 (1 + growth)."""

    def __init__(self, cell: Cell, end: float, scored: float = 0.0, growth: float = 0.0) -> None:
        super().__init__(cell, ROOT)
        names = [problem.id for problem in cell.make_task().problems("validation", cell.n_validation)]
        is_right = np.arange(512) < round(512 * end)
        if len(names) > 512:
            is_right = np.concatenate([is_right, np.arange(512) < round(512 * scored)])
        self.correct = pd.DataFrame({0: 0.0, cell.max_steps: is_right.astype(float)}, names).sort_index()
        self.lengths = pd.Series(np.linspace(10, 10, 60), range(1, 61))
        self.lengths.iloc[-5:] *= 1 + growth

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        assert name == "metrics"
        counts = {"optimizer_steps": 4, "completion_tokens": 50 * self.cell.seed, "prompt_tokens": 70}
        return pd.DataFrame(counts, range(1, 61))

    def series(self, metric: str, role: str | None = None) -> pd.Series:
        assert (metric, role) == ("length_mean", "aggregator")
        return self.lengths


def results_of(monkeypatch, made_up: Callable[[Cell], dict | None]) -> Results:
    """Results whose run of a cell is `MadeUp(cell, **made_up(cell))`, or missing."""
    return made_up_results(monkeypatch, made_up, lambda cell, values: MadeUp(cell, **values))


# ---- the declaration


def test_no_seed_tunes_and_scores_or_is_used_by_another_study():
    study = declare(Grid("tiny-r", seeds=[0]), ABOUT)
    seeds = [*study.tuning.seeds, *study.scoring.seeds]
    grid = yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"]["tiny-r"]["seeds"]
    clock = [
        seed for line in yaml.safe_load((ROOT / "studies/clock.yaml").read_text())["lines"] for seed in line["seeds"]
    ]
    credit = yaml.safe_load((ROOT / "studies/credit.yaml").read_text())["seeds"]
    assert len(set(seeds)) == len(seeds) and not set(seeds) & {*grid, *clock, *credit}
    with pytest.raises(ValueError, match=r"Seeds \[310\] tune the rate and score as well"):
        declared(tuning=ABOUT["tuning"] | {"seeds": [310]})


def test_an_arm_is_tuned_at_every_rate_and_scored_when_its_rate_is_chosen():
    """A line waits for all lines above it, and so for the choice of their rates."""
    first, second = TUNED[:5], TUNED[5:7]
    chosen = ({}, {"Voting-IP": 0.004}, dict.fromkeys(first, 0.004), dict.fromkeys(first + second, 0.004))
    waiting, one, known, more = (declared(chosen=rates).cells_by_line() for rates in chosen)
    n_tuned = 4 * 3  # rates and seeds
    assert [len(line) for line in waiting] == [5 * n_tuned, 0, 0, 0, 0, 0, 0]
    assert [len(line) for line in one] == [5 * n_tuned, 3, 0, 0, 0, 0, 0]
    assert [len(line) for line in known] == [5 * n_tuned, 5 * 3, 2 * 3, 2 * n_tuned, 0, 0, 0]
    assert [len(line) for line in more] == [5 * n_tuned, 5 * 3, 2 * 3, 2 * n_tuned, 2 * 3, 2 * n_tuned, 0]
    for cell in one[1].values():
        assert (cell.workflow, cell.policy_name, cell.learning_rate, cell.n_validation) == ("voting", "ip", 0.004, 1024)
    for cell in known[2].values():
        assert (cell.max_steps, cell.updates, cell.learning_rate, cell.eval_steps) == (240, "one", 0.002, 120)


def test_a_run_s_parameters_are_those_of_its_cell():
    study = declared(chosen=PRESET)
    for cell in study.cells():
        assert Cell(**study.parameters_of(cell)) == cell


ASKED = {"name": "q", "question": "?", "arms": ["Voting-IP"], "minus": "Voting-SP"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chosen": {"Voting": 0.002}}, r"name the arms \['Voting'\], which `arms` does not have"),
        ({"chosen": {"Voting-IP": 0.003}}, r"`chosen` must be one of `rates`.*'Voting-IP': 0.003"),
        ({"preset": 0.003}, r"`preset` must be one of `rates`"),
        (
            {"tuning": ABOUT["tuning"] | {"parameters": {"n_validation": 1024}}},
            "is 1024 in tuning and 1024 in scoring, so that no problem is left",
        ),
        (
            {
                "arms": ABOUT["arms"]
                | {"Voting-IP": {"workflow": "voting", "policy": "ip", "parameters": {"task": "code"}}}
            },
            r"`parameters` cannot set \['task'\]",
        ),
        ({"questions": [ABOUT["questions"][0]] * 2}, "The names of `questions` must not repeat"),
        ({"questions": [ASKED | {"measure": "growth"}]}, "needs .'role'."),
        (
            {"questions": [ASKED | {"measure": "growth", "role": "agregator"}]},
            "the role 'agregator', which voting does not have",
        ),
        ({"questions": [ASKED | {"measure": "end", "role": "generator"}]}, "has no .'role'.. Leave it out"),
        ({"questions": [ASKED | {"measure": "grows", "role": "generator"}]}, "needs .'flat'."),
        (
            {"questions": [ASKED | {"measure": "end", "minus": []}]},
            "`minus` of the question 'q' must be one arm, or one for each",
        ),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        declared(**changed)


# ---- tuning


def test_the_rate_with_the_best_end_is_chosen_and_of_equal_ones_the_smaller(monkeypatch):
    ends = {0.001: 0.25, 0.002: 0.5, 0.004: 0.5, 0.008: 0.375}
    study, results = declared(), results_of(monkeypatch, lambda cell: {"end": ends[cell.learning_rate]})
    chosen = tuned(results, study, "Voting-SP")
    assert (chosen.rate, chosen.is_at_edge) == (0.002, False)
    assert chosen.means == pytest.approx(ends) and set(chosen.runs.values()) == {3}
    ends[0.008] = 0.75
    assert tuned(results, study, "Voting-SP").rate == 0.008 and tuned(results, study, "Voting-SP").is_at_edge


def test_no_rate_is_chosen_before_the_last_tuning_run(monkeypatch):
    is_missing = {"learning_rate": 0.001, "seed": 302}
    results = results_of(
        monkeypatch, lambda cell: None if all(getattr(cell, k) == v for k, v in is_missing.items()) else {"end": 0.5}
    )
    chosen = tuned(results, declared(), "Voting-SP")
    assert chosen.rate is None and sum(chosen.runs.values()) == 11


def test_the_problems_that_score_tune_nothing():
    study = declared()
    scored = scored_problems(study)
    tuning = study.cell("Voting-IP", 0.002, 300, "tuning")
    tuned_on = {problem.id for problem in tuning.make_task().problems("validation", tuning.n_validation)}
    assert len(set(scored)) == len(scored) == len(tuned_on) == 512 and tuned_on.isdisjoint(scored)


# ---- verdicts


def three_seeds(cell: Cell) -> dict | None:
    """Voting-IP ends 12, 13 and 14 of 64 problems above the single agents, which end at 16 of 64; no other workflow has a run."""
    i = cell.seed - 310
    if cell.workflow == "single":
        return {"end": 1.0, "scored": 0.25}
    if cell.workflow == "voting" and cell.policy_name == "ip":
        return {"end": 0.0, "scored": (28 + i) / 64, "growth": 0.5}
    if cell.workflow == "voting" and i < 2:
        return {"end": 0.0, "scored": 0.25, "growth": 0.5}
    return None


def test_verdicts_by_hand(monkeypatch):
    """A mean of 13 of 64 with sd 1 of 64 and 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2), six times after Holm's correction."""
    study, results = declared(chosen=PRESET), results_of(monkeypatch, three_seeds)
    problems = scored_problems(study)
    step, *_, talk = (compared(results, study, question, problems) for question in study.questions)
    assert [line.verdict for line in step] == ["yes", "unfinished", *["not run"] * 4]
    t = 13 * math.sqrt(3)
    assert step[0].interval.mean == pytest.approx(13 / 64) and step[0].p == pytest.approx(
        6 * (1 - t / math.sqrt(t**2 + 2))
    )
    assert step[1].interval.mean == pytest.approx(0) and math.isnan(step[1].p)
    assert [line.verdict for line in talk] == ["unfinished", "unfinished"]


def test_replies_that_grow_alike_are_undecided_and_not_equivalent(monkeypatch):
    """The margin of equivalence is in points of accuracy."""
    study = declared(chosen=PRESET)

    def made_up(cell: Cell) -> dict:
        i = cell.seed % 2 if cell.policy_name == "sp" else 0
        return {"end": 0.5, "scored": 0.5 + i / 512, "growth": 0.5 + 1e-4 * i}

    results = results_of(monkeypatch, made_up)
    by_name = {
        question.name: compared(results, study, question, scored_problems(study)) for question in study.questions
    }
    assert {line.verdict for line in by_name["talk"]} == {"undecided"}
    assert {line.verdict for line in by_name["sharing"]} == {"equivalent"}


def test_the_command_writes_tables_and_says_which_rates_are_chosen(monkeypatch, tmp_path, capsys):
    study = declared(chosen=PRESET)
    study.write(tmp_path)
    folder = tmp_path / "tiny-r"
    assert read_declaration(folder, "rates") == study
    ends = {0.001: 0.25, 0.002: 0.5, 0.004: 0.5, 0.008: 0.75}
    results_of(
        monkeypatch,
        lambda cell: {"end": ends[cell.learning_rate]} if cell.seed < 310 and cell.workflow == "voting" else None,
    )
    computed("rates", folder, "rates_tuning")
    printed = capsys.readouterr().out
    assert "Voting-IP: 0.008; a better one may lie beyond.\n" in printed
    assert "Eval-Opt-SP: 0 of 12 tuning runs are there.\n" in printed
    assert "Voting-IP is scored at 0.002, which its tuning did not choose: correct `chosen`.\n" in printed
    tuning = (folder / "tables/rates_tuning.md").read_text()
    assert "| **50.0 (3)** | 50.0 (3) " in tuning and "nan" not in tuning.lower()


def test_the_figure_has_the_tuning_and_the_scores(monkeypatch):
    study, rises = declared(chosen=PRESET), {0.001: 0.25, 0.002: 0.5, 0.004: 0.75, 0.008: 0.375}
    results = results_of(monkeypatch, lambda c: {"end": rises[c.learning_rate]} if c.seed < 310 else three_seeds(c))
    tuning, scores = rate_figure(results, study).figure.axes
    labels = [" ".join(label.get_text().split()) for label in tuning.get_yticklabels()]
    assert labels[0] == "Voting-IP (0.002)" and "Voting-SP (0.002, unfinished)" in labels
    assert "Orch-Workers-IP (0.002, not run)" in labels
    row = labels.index("Voting-SP (0.002, unfinished)")
    marks = sorted((m for m in tuning.lines if list(m.get_ydata()) == [row]), key=lambda mark: mark.get_markersize())
    *of_rates, ring = [float(mark.get_xdata()[0]) for mark in marks]
    assert of_rates == [100 * rises[rate] for rate in study.rates], "larger marks for larger rates"
    rings = {float(mark.get_xdata()[0]) for mark in tuning.lines if mark.get_markersize() == marks[-1].get_markersize()}
    assert rings == {ring} == {100 * rises[0.002]}, "around the rate that every arm is scored at"
    points = {line.get_ydata()[0]: line.get_xdata()[0] for line in scores.lines if len(line.get_ydata()) == 1}
    assert points[0] == pytest.approx(100 * 29 / 64) and len(points) == sum(
        arm.startswith(("Voting", "single")) for arm in study.arms
    )


def test_a_written_rate_that_was_chosen_needs_no_correction(monkeypatch):
    study, ends = declared(chosen={"Voting-SP": 0.004}), {0.001: 0.25, 0.002: 0.5, 0.004: 0.75, 0.008: 0.5}
    results = results_of(monkeypatch, lambda cell: {"end": ends[cell.learning_rate]})
    sentences = list(tuning_sentences(results, study))
    assert "Voting-SP: 0.004." in sentences and not any("correct" in sentence for sentence in sentences)


def test_a_rate_is_not_called_wrong_before_its_tuning_is_complete(monkeypatch):
    study = declared(chosen={"Voting-SP": 0.004})
    results = results_of(monkeypatch, lambda cell: {"end": 0.5} if cell.seed == 300 else None)
    assert not any("correct" in sentence for sentence in tuning_sentences(results, study))


def test_without_runs_every_line_says_so(monkeypatch):
    results, study = results_of(monkeypatch, lambda cell: None), declared()
    answers, scores = (build(results, study, scored_problems(study)) for build in (answer_table, arm_table))
    assert set(answers.shown["verdict"]) == {"not run"} and set(scores.shown["accuracy"]) == {"–"}


def test_costs_are_totals_of_a_run_averaged_over_seeds(monkeypatch):
    """60 iterations of 4 steps; seeds 310 to 312 sample 50 tokens per iteration times their number."""
    study, results = declared(chosen=PRESET), results_of(monkeypatch, three_seeds)
    scores = arm_table(results, study, scored_problems(study))
    (voting,) = scores.shown[scores.shown["arm"] == "Voting-IP"].to_dict("records")
    counted = [voting[name] for name in ("iterations", "optimizer steps", "tokens sampled", "tokens read")]
    assert counted == ["60", "240", f"{60 * 50 * 311:,}", "4,200"]


def test_replays_count_where_a_run_counted_them(monkeypatch):
    study, results = declared(chosen=PRESET), results_of(monkeypatch, three_seeds)
    run = runs_of(results, study, "Voting-IP", 0.002, "scoring")[310]
    with_replays = run.table("metrics").assign(sampled_tokens=[100.0] + [math.nan] * 59, read_tokens=300)
    monkeypatch.setattr(run, "table", lambda name: with_replays)
    assert costs_of(run)["tokens sampled"] == 100 + 59 * 50 * 310 and costs_of(run)["tokens read"] == 60 * 300


# ---- arms of several tasks


def test_a_question_pools_arms_of_two_tasks(monkeypatch):
    """IP is 1/4 above SP on math and 1/2, 5/8 and 3/4 on programs: by seed 3/8, 7/16 and 1/2, on the problems that score."""
    arms = {f"{policy}, {task}": {"workflow": "voting", "policy": policy, "task": task, "rate": 0.002}
            for policy in ("ip", "sp") for task in ("math", "code")}  # fmt: skip
    question = {
        "name": "q",
        "question": "?",
        "measure": "end",
        "arms": ["ip, math", "ip, code"],
        "minus": ["sp, math", "sp, code"],
    }
    study = declared(
        arms=arms,
        chosen={},
        lines=[{"purpose": "scoring", "arms": list(arms)}],
        questions=[
            question | {"name": "pooled", "pooled": True},
            question,
            question | {"name": "tasks", "pooled": "by task"},
            question | {"name": "shown", "tested": False},
        ],
    )
    above = {"math": [0.25] * 3, "code": [0.5, 0.625, 0.75]}

    def made_up(cell: Cell) -> dict:
        gap = above[cell.task][cell.seed - 310] if cell.policy_name == "ip" else 0.0
        return {"end": 0.5, "scored": 0.125 + gap}

    results, problems = results_of(monkeypatch, made_up), scored_problems(study)
    assert len(problems) == len(set(problems)) == 2 * 512
    (pooled,) = compared(results, study, study.questions[0], problems)
    assert (pooled.interval.mean, pooled.pairs) == (pytest.approx(7 / 16), 3)
    assert list(pooled.numbers["value"] - pooled.numbers["minus"]) == pytest.approx([3 / 8, 7 / 16, 1 / 2])
    apart = compared(results, study, study.questions[1], problems)
    assert [line.interval.mean for line in apart] == pytest.approx([0.25, 0.625])
    answers = answer_table(results, study, problems)
    by_task = ["1 arm, pooled, math", "1 arm, pooled, code"]
    assert list(answers.shown["arm"]) == ["2 arms, pooled", "ip, math", "ip, code", *by_task, "ip, math", "ip, code"]
    tasks, shown = (compared(results, study, question, problems) for question in study.questions[2:])
    assert [(line.interval.mean, line.p) for line in tasks] == [(line.interval.mean, line.p) for line in apart]
    assert [(line.verdict, line.interval.mean) for line in shown] == [
        ("not tested", line.interval.mean) for line in apart
    ]
    assert all(math.isnan(line.p) for line in shown)
    assert (
        answers.shown["minus"][0] == "2 arms, pooled" and "on 512 validation problems of each task" in answers.caption
    )


def test_an_unknown_measure_is_refused():
    question = {"name": "q", "question": "?", "measure": "ends", "arms": ["Voting-IP"], "minus": "Voting-SP"}
    with pytest.raises(ValueError, match="`measure` of the question 'q' is 'ends', which is none. Did you mean 'end'?"):
        declared(questions=[question])
