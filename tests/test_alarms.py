"""Alarms: each rings on its own trouble, none on healthy noise, once per episode of trouble, the same after a resume."""

import json
import logging
import math
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from transformers import TrainerControl, TrainerState

from multirole.core.hooks import Iteration
from multirole.diagnostics.alarm_rules import BASELINE, CAP, NEEDS, SMOOTH, TESTS, THRESHOLDS
from multirole.diagnostics.alarms import REARM, AlarmCallback, Alarms
from multirole.experiment.cell import Cell
from multirole.experiment.folders import write_done
from multirole.experiment.storage import write_table
from multirole.paper import pack

ROOT = Path(__file__).parents[1]
SHARED = {"worker": "shared", "judge": "shared"}
OWN = {"worker": "worker", "judge": "judge"}
SLOTS = {"worker": 3, "judge": 1}
ONE_SLOT = {"worker": 1, "judge": 1}
HEALTHY = {
    "worker": {
        "rows": 384, "tokens": 384 * 24, "reward": 0.5, "entropy": 0.2, "chi2": 0.0003, "chi2_after": 0.003,
        "grad_norm": 0.03, "coherence": 0.1, "grad_share": 0.6, "length_mean": 24.0, "truncated_rate": 0.0,
        "unparsed_rate": 0.08, "boxed_rate": 0.9, "verdict_rate": 0.0, "hedging_rate": 0.3, "terse_rate": 0.5,
        "code_fence_rate": 0.8, "bare_stamp_rate": 0.0,
    },
    "judge": {
        "rows": 128, "tokens": 128 * 8, "reward": 0.5, "entropy": 0.25, "chi2": 0.001, "chi2_after": 0.004,
        "grad_norm": 0.02, "coherence": math.nan, "grad_share": 0.4, "length_mean": 8.0, "truncated_rate": 0.0,
        "unparsed_rate": 0.01, "boxed_rate": 1.0, "verdict_rate": 0.98, "hedging_rate": 0.0, "terse_rate": 1.0,
        "code_fence_rate": 0.03, "bare_stamp_rate": 0.98,
    },
}  # fmt: skip
# alarm -> (policy, role that it names, metrics of the trouble, role -> values)
TROUBLE = {
    "gradient_amplification": (OWN, "worker", {"worker": {"chi2": 0.006}}),
    "policy_drift": (OWN, "judge", {"judge": {"chi2": 0.04}}),
    "sp_role_capture_tokens": (SHARED, "judge", {"judge": {"length_mean": 17.0, "tokens": 128 * 17}}),
    "sp_role_capture_frequency": (SHARED, "worker", {"worker": {"chi2": 0.006}}),
    "entropy_collapse": (OWN, "worker", {"worker": {"entropy": 0.05}}),
    "length_inflation": (OWN, "judge", {"judge": {"length_mean": 21.0}}),
    "verdict_or_box_loss": (OWN, "judge", {"judge": {"unparsed_rate": 0.12}}),
    "format_drift": (OWN, "judge", {"judge": {"code_fence_rate": 0.3}}),
}


def rows(changes=None, only=None):
    """One iteration: healthy values with changes; `only` these metrics."""
    changed = {role: values | (changes or {}).get(role, {}) for role, values in HEALTHY.items()}
    return {r: {m: v for m, v in values.items() if only is None or m in only} for r, values in changed.items()}


def play(alarms, iterations, changes=None, only=None):
    """So many more iterations; returns [(iteration, alarm, role)] of what they announced."""
    start = len(alarms.history.iterations)
    announced = [alarms.update(start + i + 1, rows(changes, only)) for i in range(iterations)]
    return [(row["iteration"], row["alarm"], row["role"]) for new in announced for row in new]


@pytest.mark.parametrize("name", TROUBLE)
def test_rings_once_the_trouble_holds_and_rearms(name):
    policy, role, changes = TROUBLE[name]
    alarms = Alarms(policy, SLOTS)
    assert play(alarms, 10) == []
    majority = SMOOTH // 2 + 1
    assert play(alarms, 6, changes) == [(10 + majority, name, role)]  # with the median, and only once
    row = alarms.log[-1]
    assert row["adapter"] == policy[role] and role in row["message"] and math.isfinite(row["value"])
    assert play(alarms, SMOOTH + REARM) == []
    assert [(alarm, r) for _, alarm, r in play(alarms, 6, changes)] == [(name, role)]


def test_a_short_lull_is_the_same_episode_of_trouble():
    policy, _, changes = TROUBLE["length_inflation"]
    alarms = Alarms(policy, SLOTS)
    play(alarms, 10)
    assert len(play(alarms, 5, changes)) == 1
    assert play(alarms, REARM - 1) == [] and play(alarms, 5, changes) == []


@pytest.mark.parametrize("name", TROUBLE)
def test_one_bad_iteration_is_not_trouble(name):
    policy, _, changes = TROUBLE[name]
    if "chi2" in changes.get("worker", {}):
        changes = {"worker": {"chi2": 1000.0}}  # one unlikely token
    alarms = Alarms(policy, SLOTS)
    play(alarms, 10)
    assert play(alarms, 1, changes) == [] and play(alarms, 10) == []
    assert CAP < SMOOTH


OTHER_FORMS = [
    ("gradient_amplification", OWN, "worker", {"worker": {"chi2_after": 0.04}}),
    ("gradient_amplification", OWN, "worker", {"worker": {"grad_norm": 0.08}}),
    ("gradient_amplification", OWN, "worker", {"worker": {"coherence": 0.9}}),
    ("gradient_amplification", SHARED, "worker", {"worker": {"coherence": 0.9}}),
    ("policy_drift", SHARED, "judge", {"judge": {"chi2_after": 0.4}}),
    ("sp_role_capture_frequency", SHARED, "worker", {"worker": {"chi2_after": 0.04}}),
    ("sp_role_capture_frequency", SHARED, "worker", {"worker": {"grad_norm": 0.08}}),
    ("length_inflation", OWN, "worker", {"worker": {"truncated_rate": 0.12}}),
    ("verdict_or_box_loss", OWN, "judge", {"judge": {"boxed_rate": 0.75}}),
    ("verdict_or_box_loss", OWN, "judge", {"judge": {"verdict_rate": 0.7}}),
    ("format_drift", OWN, "worker", {"worker": {"hedging_rate": 0.6}}),
    ("format_drift", OWN, "judge", {"judge": {"terse_rate": 0.7}}),
    ("format_drift", OWN, "judge", {"judge": {"bare_stamp_rate": 0.7}}),
]


@pytest.mark.parametrize(("name", "policy", "role", "changes"), OTHER_FORMS)
def test_other_forms_of_the_same_trouble(name, policy, role, changes):
    alarms = Alarms(policy, SLOTS)
    play(alarms, 10)
    assert [(alarm, r) for _, alarm, r in play(alarms, 6, changes)] == [(name, role)]


def test_a_captured_role_that_writes_programs():
    alarms = Alarms(SHARED, SLOTS)
    play(alarms, 10)
    announced = play(alarms, 6, {"judge": {"code_fence_rate": 0.4}})
    assert {name for _, name, _ in announced} == {"sp_role_capture_tokens", "format_drift"}
    assert "programs" in alarms.log[0]["message"] and "60% of the gradient" in alarms.log[0]["message"]


@pytest.mark.parametrize(
    ("policy", "slots", "changes"),
    [
        (OWN, ONE_SLOT, {"worker": {"grad_norm": 0.3}}),  # a larger gradient, but no two slots and no drift
        (OWN, SLOTS, {"judge": {"grad_norm": 0.3}}),  # the role with one slot
        (OWN, SLOTS, {"worker": {"coherence": 0.2}}),  # slots agree a little, as they do on an easy problem
        (OWN, SLOTS, {"worker": {"entropy": 0.02, "reward": 0.9}}),  # certain because right
        (OWN, SLOTS, {"worker": {"code_fence_rate": 1.0, "terse_rate": 0.1}}),  # its own format, learned
        (OWN, SLOTS, {"judge": {"length_mean": 18.0}}),  # more than twice as long, and still short
        (SHARED, SLOTS, {"judge": {"length_mean": 13.0}}),  # a third of the way
    ],
)
def test_what_is_no_trouble(policy, slots, changes):
    alarms = Alarms(policy, slots)
    assert play(alarms, 10) + play(alarms, 20, changes) == []


def noisy(rng, iteration):
    """Healthy learning: reward up, entropy down, lengths up by half, noise on everything, heavy tails on chi2."""
    progress, roles = min(1.0, iteration / 60), {}
    for role, values in HEALTHY.items():
        row = {m: v * math.exp(rng.gauss(0, 0.08)) for m, v in values.items() if not m.endswith("_rate")}
        rates = {m: v + rng.gauss(0, 0.03) for m, v in values.items() if m.endswith("_rate")}
        row |= {m: min(1.0, max(0.0, v)) for m, v in rates.items()}
        row["reward"] = 0.5 + 0.45 * progress + rng.gauss(0, 0.04)
        row["entropy"] *= 1 - 0.9 * progress if role == "worker" else 1.0
        row["length_mean"] *= 1 + 0.5 * progress
        row["chi2"] = rng.gauss(0, 0.0003) + (rng.paretovariate(1.5) * 0.0003 if rng.random() < 0.1 else 0)
        row["grad_norm"] = values["grad_norm"] * (1 - 0.5 * progress) * math.exp(rng.gauss(0, 0.3))
        roles[role] = row
    return roles


@pytest.mark.parametrize("policy", [OWN, SHARED], ids=["ip", "sp"])
def test_silent_on_healthy_noise(policy):
    announced = []
    for seed in range(10):
        alarms, rng = Alarms(policy, SLOTS), random.Random(seed)
        for iteration in range(1, 101):
            announced += alarms.update(iteration, noisy(rng, iteration))
    assert announced == []


def test_each_sufficient_set_of_metrics_is_sufficient():
    """What NEEDS promises: with only these metrics the alarm is evaluated, and rings where the trouble is in them."""
    troubles = [(name, *trouble) for name, trouble in TROUBLE.items()] + OTHER_FORMS
    extra = {"sp_role_capture_tokens": [(SHARED, "judge", {"judge": {"code_fence_rate": 0.4}})]}
    for name, sets in NEEDS.items():
        mine = [(p, r, c) for n, p, r, c in troubles if n == name] + extra.get(name, [])
        for metrics in sets:
            only = {*metrics, "tokens", "rows"}  # the masses are derived
            heard = []
            for policy, _, changes in mine:
                alarms = Alarms(policy, SLOTS)
                play(alarms, 10, only=only)
                heard += [alarm for _, alarm, _ in play(alarms, 6, changes, only=only)]
                assert name not in alarms.not_evaluated()
            assert name in heard, (name, metrics)


def test_missing_metrics_are_silent_and_said():
    alarms = Alarms(OWN, SLOTS)
    play(alarms, 10, only={"rows", "tokens", "length_mean"})
    assert play(alarms, 6, {"worker": {"chi2": 1.0}, "judge": {"unparsed_rate": 1.0}}, only={"length_mean"}) == []
    reasons = alarms.not_evaluated()
    assert set(reasons) == set(TESTS) - {"length_inflation"}
    assert reasons["entropy_collapse"] == "no entropy with reward"
    assert reasons["sp_role_capture_tokens"] == "no adapter serves several roles"
    one = Alarms(OWN, ONE_SLOT)
    play(one, 8)
    assert one.not_evaluated()["gradient_amplification"] == "no role has several slots"


def test_a_metric_that_begins_late_gets_its_own_baseline():
    """A resumed older run starts to record signatures half way."""
    alarms = Alarms(OWN, SLOTS)
    play(alarms, 20, only={"length_mean"})
    assert play(alarms, BASELINE + 1) == []
    assert [name for _, name, _ in play(alarms, 6, {"judge": {"terse_rate": 0.7}})] == ["format_drift"]


def test_a_role_may_be_absent():
    alarms = Alarms(OWN, SLOTS)
    play(alarms, 10)
    assert alarms.update(11, {"worker": HEALTHY["worker"]}) == []  # its prompts were all too long
    assert play(alarms, 2, TROUBLE["length_inflation"][2]) == []  # not three values in a row yet
    assert len(play(alarms, 2, TROUBLE["length_inflation"][2])) == 1


def test_resume_equals_unbroken_and_replay_equals_both(tmp_path):
    rng = random.Random(0)
    changes = [c for _, _, c in TROUBLE.values()]
    series = [rows(changes[i // 8 % len(changes)] if i % 8 > 4 and i > 9 else None) for i in range(60)]
    for roles in series:  # a little noise, so that equality is of floats, not of constants
        for values in roles.values():
            values.update({m: v * (1 + 0.01 * rng.random()) for m, v in values.items()})
    unbroken = Alarms(SHARED, SLOTS)
    for i, roles in enumerate(series, start=1):
        unbroken.update(i, roles)
    assert len({row["alarm"] for row in unbroken.log}) > 4
    table = [{"iteration": i, "role": r} | v for i, roles in enumerate(series, start=1) for r, v in roles.items()]
    write_table(tmp_path / "roles.parquet", table)
    record = pd.read_parquet(tmp_path / "roles.parquet").to_dict("records")
    for cut in (3, 12, 17, 31, 46, 60):
        resumed = Alarms(SHARED, SLOTS)
        resumed.replay(row for row in record if row["iteration"] <= cut)
        for i, roles in enumerate(series[cut:], start=cut + 1):
            resumed.update(i, roles)
        assert resumed.log == unbroken.log


def test_iterations_ascend():
    alarms = Alarms(OWN, SLOTS)
    alarms.update(5, rows())
    with pytest.raises(ValueError, match="must ascend, got 5 after 5"):
        alarms.update(5, rows())


@pytest.mark.parametrize(("action", "saves", "stops"), [("log", False, False), ("checkpoint", True, False), ("stop", True, True)])  # fmt: skip
def test_the_callback_acts_once(caplog, action, saves, stops):
    alarms = Alarms(OWN, SLOTS)
    callback, state, acted = AlarmCallback(alarms, action), TrainerState(), []
    trainer = SimpleNamespace(is_world_process_zero=lambda: True)
    for i in range(1, 21):
        roles = rows(TROUBLE["length_inflation"][2] if i > 10 else None)
        control, state.global_step = TrainerControl(), i
        with caplog.at_level(logging.WARNING, logger="multirole.diagnostics.alarms"):
            callback.on_iteration_end(trainer, Iteration(i, [], [], [], {}, roles))
            callback.on_step_end(None, state, control)
        if caplog.records:
            acted.append((i, control.should_save, control.should_training_stop, caplog.text))
            caplog.clear()
        else:
            assert not control.should_save and not control.should_training_stop
    assert [row[:3] for row in acted] == [(12, saves, stops)]
    assert "length_inflation" in acted[0][3] and "the judge writes 21 tokens where it wrote 8" in acted[0][3]


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="'log', 'checkpoint', 'stop'"):
        AlarmCallback(Alarms(OWN, SLOTS), "abort")


def test_every_threshold_is_used_and_explained():
    source = (ROOT / "src/multirole/diagnostics/alarm_rules.py").read_text()
    for name, threshold in THRESHOLDS.items():
        assert f'_limit("{name}")' in source or name.removesuffix("_one") in (
            "chi2",
            "chi2_after",
            "unparsed",
            "lost_format",
        )
        assert threshold.value > 0 and threshold.how and threshold.watches


BENCHMARK = runpy.run_path(str(ROOT / "benchmarks/alarms.py"))


def run_folder(folder, accuracies, changes=None, at=10, **config):
    """A finished run of `rows`, evaluated every fifth iteration: its generator is the worker, its aggregator the judge."""
    folder.mkdir()
    names = {"worker": "generator", "judge": "aggregator"}
    (folder / "config.json").write_text(json.dumps(Cell("voting", "ip", **config).to_dict()))
    (folder / "provenance.json").write_text("{}")
    table = [
        {"iteration": i, "role": names[role]} | values
        for i in range(1, 5 * len(accuracies) - 4)
        for role, values in rows(changes if i >= at else None).items()
    ]
    write_table(folder / "roles.parquet", table)
    steps = [{"step": 5 * i, "correct": j < a * 100} for i, a in enumerate(accuracies) for j in range(100)]
    write_table(folder / "eval.parquet", steps)
    write_done(folder)
    return folder


def test_the_benchmark_counts_by_hand(tmp_path):
    trouble = TROUBLE["length_inflation"][2]
    run_folder(tmp_path / "dip", [0.5, 0.8, 0.76, 0.8, 0.9])  # by 4 points: healthy
    run_folder(tmp_path / "false", [0.5, 0.8, 0.8, 0.8, 0.8], trouble)
    run_folder(tmp_path / "strained", [0.5, 0.8, 0.8, 0.8, 0.8], trouble, learning_rate=0.006)
    run_folder(tmp_path / "warned", [0.5, 0.8, 0.8, 0.7, 0.7], trouble)  # rings at 11, falls at 15
    run_folder(tmp_path / "late", [0.5, 0.8, 0.7, 0.6, 0.5], trouble)  # falls at 10
    (run_folder(tmp_path / "unfinished", [0.5, 0.8, 0.7]) / "DONE").unlink()
    pack.pack(tmp_path)
    found = BENCHMARK["find_runs"](tmp_path, ["*"])
    runs = {name: BENCHMARK["examine"](tmp_path, name, cell) for name, cell in found.items()}
    assert {name: run["fall"] for name, run in runs.items()} == {
        "dip": None, "false": None, "strained": None, "warned": [10, 15], "late": [5, 10],
    }  # fmt: skip
    assert runs["warned"]["warning"] == [-1, 4] and runs["late"]["warning"] is None
    numbers = BENCHMARK["summarise"](list(runs.values()))
    assert (numbers["falls"], numbers["announced"]) == (2, 0.5)
    assert (numbers["healthy_iterations"], numbers["false_alarms"], numbers["false_alarms_per_1000"]) == (40, 1, 25.0)
    assert (numbers["strained_runs"], numbers["strained_runs_with_alarms"]) == (1, 1)
    assert (numbers["median_warning"], numbers["median_warning_to_evaluation_before"]) == (4, -1)


def test_the_committed_numbers_are_what_the_rules_say_today():
    """results/bench/alarms.json is of the grid's runs and of the healthy ones."""
    recorded, folder = json.loads((ROOT / "results/bench/alarms.json").read_text()), ROOT / "results/tiny-s"
    found = BENCHMARK["find_runs"](folder, [run["run"] for run in recorded["runs"]])
    runs = [BENCHMARK["examine"](folder, run["run"], found[run["run"]]) for run in recorded["runs"]]
    assert json.loads(json.dumps(runs)) == recorded["runs"], "run benchmarks/alarms.py again, see results/README.md"
    assert json.loads(json.dumps(BENCHMARK["summarise"](runs))) == recorded["summary"]
