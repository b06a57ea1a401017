"""`multirole role_value` plays a run's checkpoints as its validation did, and reports the run's own shares."""

import math
from pathlib import Path

import pandas as pd
import pytest
from cells import SMALL_RUN
from trainers import table

from multirole.roles.value import RoleEffect
from multirole.types import Episode, Problem, Turn
from multirole_study.__main__ import role_value
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run_folder import TURN_EFFECTS_FILE
from multirole_study.experiment.settings import UserError
from multirole_study.inspector import collect
from multirole_study.measurements.role_value_of_run import (
    N_TURN_DRAWS,
    as_recorded,
    measure_roles,
    row_of,
    shares_of,
)
from multirole_study.paper import pack
from multirole_study.paper.role_value_table import as_text, plot, value_figure, value_table

INTERVENTIONS = [
    ("generator", "resample"), ("generator", "base"), ("aggregator", "resample"), ("aggregator", "base"), ("aggregator", "twin"),
]  # fmt: skip


@pytest.fixture(scope="module")
def measured(run_folder):
    return measure_roles(
        Evaluation(SMALL_RUN, checkpoints="0,4"), Launch(results_dir=str(run_folder.parents[1])), 4, 2, 2
    )


def test_every_role_and_intervention_of_each_checkpoint(run_folder, measured):
    assert list(zip(measured["role"], measured["how"], strict=True)) == INTERVENTIONS * 2
    assert measured["step"].tolist() == [0] * 5 + [4] * 5 and set(measured["problems"]) == {4}
    assert measured["replays"].tolist() == [8, 8, 8, 8, 4] * 2
    recorded = table(run_folder, "eval").groupby("step")["correct"].mean()
    assert [row.before == recorded[row.step] for row in measured.itertuples()] == [True] * 10  # the same seeds


def test_untrained_roles_are_worth_what_the_base_is(measured):
    """At step 0 the adapters equal the base, and the first of two draws keeps every seed, so it repeats the episode."""
    start = measured[(measured["step"] == 0) & (measured["how"] == "base")]
    assert (start["moved"] <= 0.5).all()


def test_intervals_are_students_over_problems():
    """Values 0, .5, .25 and 1: mean .4375, SD sqrt(.546875 / 3); the 97.5 % quantile of t with 3 degrees of freedom is 3.182446."""
    row = row_of(RoleEffect("judge", "base", 8, 0.5, 0.75, (0.0, 0.5, 0.25, 1.0), (1.0, 1.0, 1.0, 1.0)))
    half = 3.182446 * (0.546875 / 3) ** 0.5 / 2
    assert row == {
        "role": "judge", "how": "base", "problems": 4, "replays": 8, "before": 0.5, "after": 0.75, "change": 0.4375,
        "change_low": pytest.approx(0.4375 - half), "change_high": pytest.approx(0.4375 + half),
        "moved": 1.0, "moved_low": pytest.approx(math.nan, nan_ok=True), "moved_high": pytest.approx(math.nan, nan_ok=True),
    }  # fmt: skip
    assert math.isnan(row_of(RoleEffect("judge", "base", 1, 0.0, 1.0, (1.0,), (1.0,)))["change_low"])


def test_shares_are_the_runs(run_folder, measured):
    roles = table(run_folder, "roles")
    tokens = roles.groupby("role")["tokens"].sum() / roles["tokens"].sum()
    for row in measured.itertuples():
        assert row.token_share == pytest.approx(tokens[row.role])
    assert shares_of(run_folder)["generator"]["grad_share"] == pytest.approx(1.0)  # an adapter of its own


def test_the_page_has_the_effect_of_every_turn(run_folder, measured):
    """It covers the first two problems at both checkpoints: 4 turns, each redrawn and played by the base, and one replaced by its twin."""
    effects = table(run_folder, TURN_EFFECTS_FILE.removesuffix(".parquet"))
    assert len(effects) == 2 * 2 * (4 * 2 + 1) and set(effects["replays"]) == {1, N_TURN_DRAWS}
    outcomes = table(run_folder, "eval").set_index(["step", "problem"])["correct"]
    assert all(row.before == outcomes[row.step, row.problem] for row in effects.itertuples())
    changes = effects[effects["how"] == "twin"]
    assert ((changes["after"] != changes["before"]) == (changes["changed"] == 1)).all()
    page = collect(run_folder)
    assert page["episodes"]["forked"] == [0, 4] and len(page["role_values"]) == len(measured)


def test_episodes_that_play_otherwise_than_recorded_are_left_out(run_folder):
    turn = Turn("generator", 0, 0, [1], [2], [0.0], "no such text", "stop")
    problem = table(run_folder, "eval")["problem"][0]
    strange = Episode(Problem(problem, "", "", None), 0, [turn])
    assert as_recorded(run_folder, 4, [strange]) == [] == as_recorded(run_folder, 3, [strange])


def test_the_figure_has_a_row_of_panels_per_checkpoint(measured):
    figure = plot(measured)
    assert len(figure.axes) == 6
    drawn = figure.axes[0].lines[0].get_xdata()
    rows = measured[(measured["step"] == 0) & (measured["how"] == "resample")]
    assert list(drawn) == [100 * value for value in rows["change"]]


def test_the_caption_has_the_problems_of_every_run(measured):
    other = measured.assign(run="other", problems=64)
    assert "intervals over 4 to 64 problems" in value_figure(pd.concat([measured, other]), "tiny-r").caption


def test_measured_runs_are_packed_into_a_table_and_a_figure(run_folder, measured, tmp_path):
    """With another run of two roles: one line per run, checkpoint, role and intervention, and one row of panels per run and checkpoint."""
    (path,) = pack.add_measurements(tmp_path, run_folder.parent)
    rows = pd.read_parquet(path)
    both = pd.concat([rows, rows.assign(run="other", policy="sp")])
    shown = value_table(both, "tiny-r").shown
    assert len(shown) == 2 * len(measured) and list(shown.columns[:4]) == ["workflow", "policy", "seed", "step"]
    assert len(value_figure(both, "tiny-r").figure.axes) == 3 * 4


def test_the_table_is_in_percent_with_intervals():
    row = {
        "step": 4, "role": "judge", "how": "base", "problems": 3, "replays": 6, "before": 0.5, "after": 0.25, "change": -0.25,
        "change_low": -0.5, "change_high": 0.0, "moved": 1 / 3, "moved_low": 0.1, "moved_high": 0.6, "token_share": 0.25, "grad_share": float("nan"),
    }  # fmt: skip
    cells = [cell.strip() for cell in as_text(pd.DataFrame([row])).splitlines()[-1].strip("|").split("|")]
    assert cells == ["4", "judge", "base", "3", "6", "50.0", "25.0", "−25.0 [−50.0, +0.0]", "33.3 [10.0, 60.0]", "25.0", ""]  # fmt: skip


def test_other_checkpoints_stay_in_the_file(run_folder, measured):
    before = table(run_folder, "role_value")
    again = measure_roles(Evaluation(SMALL_RUN, checkpoints="4"), Launch(results_dir=str(run_folder.parents[1])), 4, 2)
    pd.testing.assert_frame_equal(again, measured[measured["step"] == 4].reset_index(drop=True))
    pd.testing.assert_frame_equal(table(run_folder, "role_value"), before)


def test_what_cannot_work_is_refused(run_folder):
    launch = Launch(results_dir=str(run_folder.parents[1]))
    with pytest.raises(ValueError, match="`adapters` must be 'own'"):
        measure_roles(Evaluation(SMALL_RUN, adapters="base"), launch, 4, 1)
    with pytest.raises(ValueError, match="`--problems` must be at least 2"):
        measure_roles(Evaluation(SMALL_RUN), launch, 1, 1)
    with pytest.raises(ValueError, match="is not finished. Train it first"):
        role_value(["-p", "results_dir", "nowhere"])


def test_files_that_cannot_be_written_are_refused_before_the_measurement(run_folder, tmp_path):
    words = ["-p", "results_dir", str(run_folder.parents[1])]
    for name, setting in dict(SMALL_RUN).items():
        if name in SMALL_RUN.model_fields_set and name != "policy":
            words += ["-p", name, str(setting)]
    words += ["-p", "policy", "ip"]
    with pytest.raises(UserError, match="The folder of .*missing/table.csv does not exist. Make it first: mkdir -p"):
        role_value([*words, "--out", str(tmp_path / "missing" / "table.csv")])
    with pytest.raises(UserError, match="--figure must end in .png, .pdf or .svg, got"):
        role_value([*words, "--figure", str(tmp_path / "figure.txt")])


def test_a_figure_of_two_workflows_has_the_roles_of_both():
    rows = pd.read_parquet(Path(__file__).parents[2] / "results/smollm2/role_value.parquet")
    other = rows.assign(run="other", workflow="eval_opt", role=rows["role"].replace({"aggregator": "evaluator"}))
    figure = plot(pd.concat([rows, other], ignore_index=True))
    assert {"aggregator", "evaluator"} <= {label.get_text() for label in figure.axes[0].get_yticklabels()}
