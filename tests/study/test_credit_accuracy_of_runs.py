"""`multirole credit` measures a run's checkpoints and continues after a kill; its table answers the declared questions."""

import numpy as np
import pandas as pd
import pytest
from trainers import table

from multirole_study.measurements import credit_of_run as measurement
from multirole_study.measurements.credit_accuracy import MEASURED, Sizes
from multirole_study.measurements.credit_moments import PARTS
from multirole_study.paper.credit_accuracy_table import (
    DECLARED,
    EVERY,
    accuracy_figure,
    accuracy_table,
    answers,
    statistics,
)
from multirole_study.paper.output import Table, write_figure

SMALL = Sizes(replies=2, tails=4, branches=2, episodes=2)


@pytest.mark.slow
def test_a_run_is_measured_and_existing_rows_are_kept(run_folder, monkeypatch):
    monkeypatch.setattr(measurement, "CHUNK", 1)
    measurement.measure_run(run_folder, [4], 2, SMALL)
    first = table(run_folder, "credit_accuracy")
    assert first["problem"].nunique() == 2 and set(first["step"]) == {4} and set(first["estimator"]) == set(MEASURED)
    assert len(first) == 2 * 4 * len(MEASURED)  # a turn of each of three generators and an aggregator
    monkeypatch.setattr(measurement, "CHUNK", 8)
    measurement.measure_run(run_folder, [4], 3, SMALL)
    both = table(run_folder, "credit_accuracy")
    monkeypatch.setattr(measurement, "CHUNK", 1)
    measurement.measure_run(run_folder, [4, 0], 3, SMALL)  # the untrained adapters again after each chunk at 4
    later = table(run_folder, "credit_accuracy")
    pd.testing.assert_frame_equal(later[later["step"] == 4], both)
    assert later[later["step"] == 0]["problem"].nunique() == 3
    pd.testing.assert_frame_equal(both.iloc[: len(first)], first)
    assert both["problem"].nunique() == 3
    with pytest.raises(ValueError, match=r"`--at` must name 0 or saved steps of .*, got \[999\]"):
        measurement.measure_run(run_folder, [999], 2)
    with pytest.raises(ValueError, match="`--problems` must be at least 2"):
        measurement.measure_run(run_folder, [4], 1)


@pytest.fixture(scope="module")
def rows():
    """Forty problems with one turn each, whose moments are those of X = 2 A + noise for `outcome`, and of X = A for `leave_one_out`."""
    made = []
    where = {"run": "r", "workflow": "voting", "policy": "sp", "task": "math", "seed": 100, "step": 30, "role": "judge", "slot": 0, "round": 0}  # fmt: skip
    exact = {
        "outcome": (1.0, 2.0, 4.0, 0.0, 8.0, 10.0),
        "leave_one_out": (1.0, 1.0, 1.0, 0.0, 1.0, 20.0),
        "permuted": (1.0, 0.0, 0.0, 0.0, 1.0, 10.0),
    }
    for i in range(40):
        for name, (*values, tokens) in exact.items():
            noisy = np.add(values, 0.1 * (-1) ** i * np.array([0, 1, 1, 1, 0]))
            moments = dict(zip(("effect", "shared", "within", "between", "square"), noisy, strict=True))
            made.append(where | {"problem": f"p{i}", "estimator": name, "tokens_per_row": tokens} | moments)
    return pd.DataFrame(made)


def test_parts_and_gains_by_hand(rows):
    values = statistics(rows).set_index(["role", "estimator", "statistic"])
    assert values.loc[(EVERY, "outcome", "effect"), "value"] == pytest.approx(0.5, abs=0.02)
    assert values.loc[(EVERY, "leave_one_out", "effect"), "value"] == pytest.approx(1.0, abs=0.04)
    assert values.loc[(EVERY, "leave_one_out", "effect_gain"), "value"] == pytest.approx(0.5, abs=0.04)
    assert values.loc[(EVERY, "leave_one_out", "effect_gain_per_token"), "value"] == pytest.approx(0.0, abs=0.04)
    assert values.loc[(EVERY, "leave_one_out", "tokens"), "value"] == 2.0
    for name in ("outcome", "leave_one_out", "permuted"):
        assert sum(values.loc[(EVERY, name, part), "value"] for part in PARTS) == pytest.approx(1.0)
    spread = values.loc[(EVERY, "outcome", "effect")]
    assert spread["low"] < 0.5 < spread["high"] and spread["high"] - spread["low"] < 0.05


def table_of(rows: pd.DataFrame) -> Table:
    """The table of these rows, as the notebook calls it."""
    values = statistics(rows)
    return accuracy_table(rows, values, answers(values))


def test_questions_are_answered_and_unmeasured_cells_are_named(rows, tmp_path):
    table = table_of(rows)
    every = table.shown[table.shown["turns"] == EVERY]
    verdicts = dict(zip(every["estimator"], every["verdicts"], strict=True))
    assert "finds_credit yes" in verdicts["outcome"] and "biased no" in verdicts["outcome"]
    assert "finds_credit undecided" in verdicts["permuted"] and "beats_outcome no" in verdicts["permuted"]
    assert "beats_outcome yes" in verdicts["leave_one_out"]
    assert "beats_outcome_per_token undecided" in verdicts["leave_one_out"]
    assert "voting sp, iteration 60" in table.caption and "voting sp, iteration 30" not in table.caption
    assert set(table.values["question"].dropna()) == set(DECLARED["questions"])
    write_figure(accuracy_figure(rows, statistics(rows)), tmp_path)
    assert (tmp_path / "credit_accuracy.png").exists()


def test_captions_have_the_problems_of_every_measurement(rows):
    """The second one was stopped after 8 of 40 problems."""
    stopped = rows[rows["problem"].isin([f"p{i}" for i in range(8)])].assign(step=60)
    for rows_of_both, expected in ((rows, "40"), (pd.concat([rows, stopped]), "8 to 40")):
        assert f"of each of {expected} training problems" in table_of(rows_of_both).caption
        assert (
            f"over {expected} problems of one seed" in accuracy_figure(rows_of_both, statistics(rows_of_both)).caption
        )


def test_cells_of_two_tasks_are_not_pooled(rows):
    both = pd.concat([rows, rows.assign(task="code", effect=2.0)])
    one = statistics(rows)
    values = statistics(both)
    assert len(values) == 2 * len(one) and values[values["task"] == "math"]["value"].tolist() == one["value"].tolist()
    assert "task" in table_of(both).shown and "task" not in table_of(rows).shown
