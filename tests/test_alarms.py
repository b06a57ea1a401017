"""Alarms: each rings on its own trouble, none on healthy noise, once per episode of trouble, the same after a resume."""

import json
import logging
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from multirole.core.hooks import Iteration
from multirole.diagnostics.alarm_callback import AlarmCallback
from multirole.diagnostics.alarms import ADVICE, REARM, RULES, SMOOTH, Alarms, change_of

POLICY = {"worker": "shared", "judge": "judge"}
HEALTHY = {
    "worker": {"reward": 0.5, "max_logprob_gap": 0.5, "correct_verdict_rate": 0.0, "unparsed_rate": 0.08},
    "judge": {"reward": 0.5, "max_logprob_gap": math.nan, "correct_verdict_rate": 0.5, "unparsed_rate": 0.01},
}  # fmt: skip
TROUBLE = [  # alarm, role that it names, metrics of the trouble
    ("one_verdict", "judge", {"judge": {"correct_verdict_rate": 0.01}}),
    ("format_loss", "judge", {"judge": {"unparsed_rate": 0.12}}),
]


def play(alarms, iterations, changes=None):
    """So many more iterations; returns [(iteration, alarm, role)] of what they announced."""
    rows, start = {role: values | (changes or {}).get(role, {}) for role, values in HEALTHY.items()}, alarms.last
    announced = [alarms.update(start + i + 1, rows) for i in range(iterations)]
    return [(row["iteration"], row["alarm"], row["role"]) for new in announced for row in new]


@pytest.mark.parametrize(("name", "role", "changes"), TROUBLE)
def test_rings_once_the_trouble_holds_and_rearms(name, role, changes):
    alarms = Alarms(POLICY)
    assert play(alarms, 10) == []
    assert play(alarms, 6, changes) == [(10 + SMOOTH // 2 + 1, name, role)]  # with the median, and only once
    row = alarms.log[-1]
    assert row["adapter"] == POLICY.get(role, "") and role in row["message"] and row["value"] >= row["threshold"]
    assert play(alarms, SMOOTH + REARM) == []
    assert [(alarm, r) for _, alarm, r in play(alarms, 6, changes)] == [(name, role)]


@pytest.mark.parametrize(("name", "role", "changes"), TROUBLE)
def test_one_bad_iteration_is_not_trouble(name, role, changes):
    alarms = Alarms(POLICY)
    play(alarms, 10)
    assert play(alarms, 1, changes) == [] and play(alarms, 10) == []


def test_a_drift_rings_by_its_mean():
    alarms = Alarms(POLICY)
    play(alarms, 10)
    assert play(alarms, 1, {"worker": {"max_logprob_gap": 20.0}}) == [(11, "policy_drift", "worker")]


def test_a_short_lull_is_the_same_episode_of_trouble():
    alarms, changes = Alarms(POLICY), TROUBLE[0][2]
    play(alarms, 10)
    assert len(play(alarms, 5, changes)) == 1
    assert play(alarms, REARM - 1) == [] and play(alarms, 5, changes) == []


def test_changes_by_hand():
    values = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 2.0, 2.0, 2.0]
    assert [change_of(kind, values) for kind in ("rise", "share lost", "level")] == [1, -1, 2]
    assert change_of("rise", values[:5]) is None


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_nothing_rings_in_healthy_learning(noise):
    rng, alarms = random.Random(0), Alarms(POLICY)
    for iteration in range(1, 200):
        done = iteration / 200
        rows = {
            role: values | {"reward": 0.3 + 0.6 * done + rng.gauss(0, noise),
                            "correct_verdict_rate": values["correct_verdict_rate"] * (1 + done / 2)}
            for role, values in HEALTHY.items()
        }  # fmt: skip
        assert alarms.update(iteration, rows) == []


def test_a_resumed_run_has_the_same_alarms():
    whole, resumed = Alarms(POLICY), Alarms(POLICY)
    changes = [None] * 9 + [TROUBLE[0][2]] * 4 + [None] * 9 + [TROUBLE[0][2]] * 4
    for change in changes:
        play(whole, 1, change)
    rows = [
        {"iteration": i + 1, "role": role} | values | (change or {}).get(role, {})
        for i, change in enumerate(changes[:11]) for role, values in HEALTHY.items()
    ]  # fmt: skip
    resumed.replay(rows)
    for change in changes[11:]:
        play(resumed, 1, change)
    assert resumed.log == whole.log and len(whole.log) == 2
    with pytest.raises(ValueError, match="must ascend, got 3 after 26"):
        whole.update(3, HEALTHY)


def test_every_alarm_says_what_to_do():
    assert {rule.alarm for rule in RULES} == set(ADVICE)


@pytest.mark.parametrize(
    ("action", "saves", "stops"), [("log", False, False), ("checkpoint", True, False), ("stop", True, True)]
)
def test_the_callback_acts_once_on_every_new_alarm(action, saves, stops, caplog):
    callback, trainer = AlarmCallback(Alarms(POLICY), action), SimpleNamespace(is_world_process_zero=lambda: True)
    acted = []
    with caplog.at_level(logging.WARNING, logger="multirole"):
        for number in range(1, 14):
            rows = {
                role: values | (TROUBLE[0][2].get(role, {}) if number > 10 else {}) for role, values in HEALTHY.items()
            }
            callback.on_iteration_end(trainer, Iteration(number, [], [], [], {}, rows))
            control, state = TrainerControl(), TrainerState(global_step=number)
            callback.on_step_end(None, state, control)
            acted += [(number, control.should_save, control.should_training_stop)] if callback.alarms.new else []
    assert acted == [(12, saves, stops)] and "iteration 12, one_verdict" in caplog.text
    with pytest.raises(ValueError, match="`action` must be one of"):
        AlarmCallback(Alarms(POLICY), "shout")


def test_what_metrics_says_of_their_worth_was_measured():
    root = Path(__file__).parents[1]
    scores = json.loads((root / "results" / "bench" / "alarms.json").read_text())["scores"]
    found = {(line["target"], line["score"]): line for line in scores}
    alarms = [
        line for line in scores if line["target"] == "ahead" and not line["score"].startswith(("baseline", "removed"))
    ]
    known, drift = "baseline: rate x steps", "policy_drift: max_logprob_gap, level"
    expected = [
        found["ahead", known]["j"], found["ahead", drift]["j"],
        found["ahead", known]["j, stress"], found["ahead", drift]["j, stress"], found["ahead", drift]["j, rule"],
        found["seen", drift]["j, rule"], found["seen", known]["j"],
        found["seen", "removed: chi2_after"]["j"], found["ahead", "removed: chi2_after"]["j"],
    ]  # fmt: skip
    said = re.search(
        r"known before training, has J N, the best alarm N\. Both tell regimes apart: within the stressed one they have N and N, and with "
        r"the threshold that it rings at, that alarm has N\. .* `policy_drift` has J N at its own threshold, and "
        r"learning rate × steps N\. χ² after the update, which is no alarm, has N there, and N ahead\.".replace(
            "N", r"(\d\.\d\d)"
        ),
        re.sub(r"\s+", " ", (root / "METRICS.md").read_text(encoding="utf-8")),
    )
    assert said and [float(one) for one in said.groups()] == [round(value, 2) for value in expected]
    assert max(line["j"] for line in alarms) == found["ahead", drift]["j"], "another alarm is the best one"
    assert expected[1] < expected[0] + 0.1, "an alarm is a forecast after all"
