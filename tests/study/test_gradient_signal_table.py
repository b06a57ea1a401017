"""The table of signal and noise answers the declared questions by their bounds, and names what was not measured."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

from multirole_study.measurements.gradient_signal import AdapterGradients, Estimate
from multirole_study.measurements.runs import adapters_of, cell_of
from multirole_study.measurements.signal_of_run import measure_run, rows_of, with_interval
from multirole_study.paper.gradient_signal_table import (
    DECLARED,
    answers,
    missing,
    ordered,
    reliability,
    signal_figure,
    signal_table,
    verdict,
)
from multirole_study.paper.output import Table, write_figure, write_tables

PARTS = [("aggregator", 0), ("generator", 0), ("generator", 1), ("generator", 2)]
WHERE = {"run": "r", "workflow": "voting", "policy": "sp", "task": "math", "seed": 100, "step": 0, "batches": 16,
         "adapter": "shared", "other": ""}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """Sixteen batches: the aggregator's mean gradient is large, the generators' slots share half of their noise and have no mean."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(16, 4, 300))
    values[:, 1:] = (values[:, 1:] + rng.normal(size=(16, 1, 300))) / math.sqrt(2)
    values[:, 0] += 3.0
    counts = [dict.fromkeys(PARTS, 10), dict.fromkeys(PARTS, 50)]
    made = AdapterGradients(PARTS, torch.tensor(values), *(Counter(count) for count in counts))
    return pd.DataFrame([WHERE | row for row in rows_of(made)])


def test_a_role_has_its_rows_signal_and_noise(rows):
    value = rows[rows["role"] == "generator"].set_index("statistic")
    assert value.loc["row_share", "value"] == 0.75
    assert value.loc["noise", "value"] == pytest.approx(300 * (3 + 6 * 0.5), rel=0.05)
    share, scale = value.loc["signal_share"], value.loc["noise_scale"]
    assert share["low"] < 0 < share["high"] and scale["high"] == math.inf
    aggregator = rows[rows["role"] == "aggregator"].set_index("statistic")
    assert aggregator.loc["noise_scale", "value"] == pytest.approx(1 / 9, rel=0.1)
    assert math.isnan(aggregator.loc["coherence", "value"])


def test_questions_are_answered_by_their_bounds(rows):
    decided = {(row["role"], row["question"]): row["verdict"] for row in answers(rows)}
    assert decided["aggregator", "detected"] == "yes" and decided["generator", "detected"] == "undecided"
    assert decided["aggregator", "dominates"] == "yes" and decided["generator", "dominates"] == "no"
    assert (
        decided["generator", "coherent"]
        == decided["generator", "shares_push"]
        == decided["generator", "amplified"]
        == "yes"
    )
    assert decided.get(("aggregator", "agree"), "not read (unreliable)") == "not read (unreliable)"
    assert reliability(rows, "aggregator") > 0.9 > DECLARED["reliable"] > reliability(rows, "generator")
    assert [verdict(*limits, 0.1) for limits in ((0.2, 0.3), (0.0, 0.05), (0.0, 0.2), (math.nan, math.nan))] == [
        "yes", "no", "undecided", "–",
    ]  # fmt: skip


def test_shares_of_a_mean_gradient_that_may_be_zero_are_not_read(rows):
    none = rows.assign(low=rows["low"].where(rows["statistic"] != "signal_share", -0.01))
    decided = {(row["role"], row["question"]): row["verdict"] for row in answers(none)}
    assert decided["aggregator", "dominates"] == decided["generator", "dominates"] == "not read (no signal)"
    assert decided["aggregator", "detected"] == "undecided" and decided["generator", "coherent"] == "yes"


def test_an_adapter_of_one_role_is_not_asked_which_role_dominates(rows):
    alone = rows[rows["role"] == "generator"].assign(policy="ip")
    assert {row["question"] for row in answers(alone)} == {"detected", "coherent", "shares_push", "amplified"}


def table_of(rows: pd.DataFrame) -> Table:
    """The table of these rows, as the notebook calls it."""
    in_order = ordered(rows, "tiny-r")
    return signal_table(in_order, pd.DataFrame(answers(in_order)), "tiny-r")


def test_the_table_says_what_was_not_measured(rows, tmp_path):
    table, plate = table_of(rows), signal_figure(ordered(rows, "tiny-r"), "tiny-r")
    assert (
        "iteration 30, all cells" in table.caption
        and "voting sp" not in missing(rows, "tiny-r").partition("iteration 30")[0]
    )
    write_tables([table], tmp_path / "tables")
    write_figure(plate, tmp_path / "figures")
    assert "∞" in (tmp_path / "tables" / "gradient_signal.md").read_text()
    assert (tmp_path / "figures" / "gradient_signal.png").exists()


def test_captions_have_the_batches_of_every_measurement(rows):
    later = rows.assign(step=30, batches=8)
    for rows_of_both, expected in ((rows, "16"), (pd.concat([rows, later]), "8 to 16")):
        assert f"Gradients of {expected} independent batches" in table_of(rows_of_both).caption
        assert f"intervals over {expected} batches" in signal_figure(ordered(rows_of_both, "tiny-r"), "tiny-r").caption


def test_cells_are_shown_in_declared_order_and_an_adapter_of_one_role_has_no_share(rows):
    alone = rows[rows["role"] == "generator"].assign(run="other", policy="ip", adapter="generator")
    shown = table_of(pd.concat([alone, rows])).shown
    assert shown["policy"].tolist()[:3] == ["SP", "SP", "IP"]
    assert shown["share of the mean gradient"].tolist()[2] == "–" != shown["share of the mean gradient"].tolist()[0]


def test_intervals_are_students():
    assert with_interval(Estimate(1.0, 0.1), 16) == pytest.approx(
        {"value": 1.0, "low": 1 - 0.21314, "high": 1 + 0.21314}, rel=1e-4
    )


def test_a_folder_without_the_steps_is_refused(finished, tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run"):
        cell_of(tmp_path)
    with pytest.raises(ValueError, match="has saved no adapters yet.* write --at 0"):
        adapters_of(tmp_path, None)
    assert adapters_of(tmp_path, [0]) == {0: None}
    with pytest.raises(ValueError, match=r"`--at` must name 0 or saved steps of .*, got \[999\]"):
        measure_run(finished, [999], 4)


def test_two_tasks_have_lines_of_their_own(rows):
    one, both = (table_of(part) for part in (rows, pd.concat([rows, rows.assign(run="other", task="code")])))
    assert "task" not in one.shown and "task" not in one.values
    assert both.shown["task"].value_counts().to_dict() == {"math": len(one.shown), "code": len(one.shown)}
    assert "math and code" in both.caption


def test_cells_and_scales_that_were_not_declared_come_last(rows):
    policy = "aggregator=frozen,generator=solver"
    both = pd.concat([rows.assign(run="other", policy=policy), rows])
    assert table_of(both).shown["policy"].tolist()[0] == "SP" and policy in set(table_of(both).shown["policy"])
    assert policy in {
        text.get_text() for text in signal_figure(ordered(both, "tiny-r"), "tiny-r").figure.legends[0].get_texts()
    }
    assert missing(ordered(rows, "1.7b"), "1.7b") == "nothing"
