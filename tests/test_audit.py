"""The audit: numbers of training's own first iteration, risks that follow from hand-made ones, and nothing left behind."""

import re

import pandas as pd
import pytest
import torch
from conftest import make_episodes

from multirole import audit as module
from multirole.alarm_rules import THRESHOLDS
from multirole.audit import FIRST_LOOK, Audit, audit, main, silent_groups
from multirole.batching import Row
from multirole.cells import Cell
from multirole.episodes import Answer, Reward, user
from multirole.gradients import GradientParts
from multirole.report import load
from multirole.run import run_cell

FIELDS = {"workflow": "voting", "task": "math", "n_problems": 4, "n_episodes": 4, "n_validation": 4, "n_train": 64}


def by_hand(workflow="voting", policy="ip", updates="per_batch", **roles) -> Audit:
    """role=(rows, mean tokens, [gradient of slot 0, of slot 1, ...]) over 10 episodes."""
    gradient = GradientParts()
    parts = [(role, slot) for role, (_, _, slots) in roles.items() for slot in range(len(slots))]
    gradient.add_step(parts, torch.tensor([vector for _, _, slots in roles.values() for vector in slots]))
    rows = [(role, n, n * mean, mean, mean, 0.5) for role, (n, mean, _) in roles.items()]
    frame = pd.DataFrame(rows, columns=["role", "rows", "tokens", "mean", "p95", "silent"]).set_index("role")
    return Audit(Cell(workflow, policy, updates=updates), 10, frame, gradient)


def said(found: Audit, name: str) -> str:
    """What the verdict says of one policy map."""
    return next(text for text in found.verdict().split("\n\n") if text.startswith(f"{name}:"))


def test_agreeing_voters_and_a_terse_aggregator():
    found = by_hand(generator=(30, 24.0, [[1.0, 0.0]] * 3), aggregator=(10, 6.0, [[0.0, 3.0]]))
    table = found.table()
    assert table.loc["generator", "turns per episode"] == 3 and table.loc["aggregator", "row mass"] == 0.25
    assert table.loc["generator", "token mass"] == pytest.approx(720 / 780)
    assert table["gradient share"].to_dict() == pytest.approx({"generator": 0.5, "aggregator": 0.5})  # 9 of 9 + 9
    assert table.loc["generator", "amplification"] == pytest.approx(3.0)
    assert table["optimizer steps, ip"].to_dict() == {"generator": 3, "aggregator": 1}
    assert set(table["optimizer steps, sp"]) == {4} and found.maps.keys() == {"ip", "sp"}
    ip, sp = said(found, "ip"), said(found, "sp")
    assert "generator fills 3 slots" in ip and "3 optimizer steps per iteration; with one slot it would take 1" in ip
    assert (
        f"cosine of 1.00: they agree (from {THRESHOLDS['coherence'].value:g} on)" in ip
        and "aggregator has one slot" in ip
    )
    assert "rows from the generator (75%)" in sp and "gradient from the generator and the aggregator (50% each)" in sp
    assert "Token-distribution surface of sp_role_capture: open" in sp and "the aggregator (6 tokens)" in sp
    assert "frequency surface of sp_role_capture: open" in sp and "3 slots, 75% of the rows" in sp
    assert found.verdict().endswith(FIRST_LOOK) and "first look, not a forecast" in FIRST_LOOK


def test_equal_roles_with_one_slot_carry_no_risk():
    found = by_hand("eval_opt", generator=(30, 12.0, [[1.0, 0.0]]), evaluator=(30, 12.0, [[0.0, 1.0]]))
    text = found.verdict()
    assert "gradient_amplification" not in text and text.count("nothing to amplify") == 2
    assert ": open" not in text and text.count("not on the base") == 2
    assert "its own (3 optimizer steps per iteration)" in text  # three rounds
    assert "rows from the generator and the evaluator (50% each)" in text


@pytest.mark.parametrize(("name", "value"), [("asymmetry", 5.0), ("length_rise", 19.0), ("tokens", 0.95)])
def test_the_words_follow_the_alarms_thresholds(monkeypatch, name, value):
    """24 tokens against 6 and 92 % of the tokens: no longer enough once a threshold is above that."""
    found = by_hand(generator=(30, 24.0, [[1.0]] * 3), aggregator=(10, 6.0, [[1.0]]))
    assert "Token-distribution surface of sp_role_capture: open" in said(found, "sp")
    changed = type(THRESHOLDS[name])("", "", value, "")
    monkeypatch.setattr(module, "THRESHOLDS", THRESHOLDS | {name: changed})
    assert "Token-distribution surface of sp_role_capture: not on the base" in said(found, "sp")


def test_a_map_of_ones_own_is_judged_adapter_by_adapter():
    found = by_hand(
        "orch_workers", "orchestrator=x,worker=y,synthesizer=x", orchestrator=(10, 7.0, [[2.0, 0.0]]),
        worker=(25, 20.0, [[0.0, 1.0], [0.0, -1.0], [1.0, 0.0]]), synthesizer=(10, 30.0, [[1.0, 0.0]]),
    )  # fmt: skip
    name = found.cell.policy_name
    assert list(found.maps) == ["ip", "sp", name]
    steps = found.table()[f"optimizer steps, {name}"].to_dict()
    assert steps == {"orchestrator": 2, "worker": 3, "synthesizer": 2}  # 2.5 turns an episode are 3 steps
    text = said(found, name)
    # without the worker, x is the orchestrator's (2, 0) and the synthesizer's (1, 0): 6 of 9 and 3 of 9
    assert "gradient from the orchestrator (67%)" in text and "gradient_amplification" in text
    assert "cosine of -0.33: they hardly agree yet" in text and "the orchestrator (7 tokens)" in text


def test_one_update_per_iteration_is_one_step_of_every_adapter():
    found = by_hand(updates="one", generator=(30, 24.0, [[1.0]] * 3), aggregator=(10, 6.0, [[1.0]]))
    assert all(set(found.table()[f"optimizer steps, {name}"]) == {1} for name in ("ip", "sp"))
    assert "1 optimizer step per iteration; with one slot it would take 1" in said(found, "ip")


def test_a_role_that_never_spoke_is_not_judged():
    text = by_hand(generator=(30, 24.0, [[1.0]] * 3)).verdict()
    assert "Not judged, since it never spoke: aggregator." in text and "the aggregator" not in text


def test_a_gradient_of_zero_is_said():
    found = by_hand(generator=(30, 24.0, [[0.0]] * 3), aggregator=(10, 6.0, [[0.0]]))
    found.roles["silent"] = 1.0
    text = found.verdict()
    assert "No group's rewards differ" in text and "its slots' gradients cannot be compared" in text
    assert "of its gradient from nobody, since it is zero" in text and "nothing of the gradient" in text
    assert "nan" not in text


def test_groups_that_teach_nothing():
    """Two problems: one all right, the other half right, its first voter's turns only where the reward is 1."""
    for advantage_group, generator in (("episode", 1 / 2), ("role", 1 / 2), ("slot", 4 / 6)):
        cell = Cell("voting", "sp", n_episodes=4, advantage_group=advantage_group)
        episodes = make_episodes(cell, n_problems=2)
        for i, episode in enumerate(episodes):
            value = 1.0 if i < 4 or i % 2 else 0.0
            episode.reward = Reward(value, "", bool(value))
            if not value:
                episode.turns = [turn for turn in episode.turns if (turn.role, turn.slot) != ("generator", 0)]
        rows = [Row(e, t, "shared", 0.0) for e in episodes for t in e.turns]
        silent = silent_groups(cell, episodes, rows)
        assert silent == pytest.approx({"generator": generator, "aggregator": 1 / 2})


def test_it_sees_what_trainings_first_iteration_sees_and_leaves_nothing(tmp_path, monkeypatch):
    cell = Cell(policy="ip", iterations=1, eval_every=1, **FIELDS)
    folder = run_cell(cell, tmp_path)
    for name in ("cwd", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    found, trained = audit(cell, cell.n_problems), load(folder, "roles").set_index("role")
    assert [*tmp_path.glob("cwd/*"), *tmp_path.glob("tmp/*")] == []
    assert list(found.roles.index) == ["generator", "aggregator"]
    for ours, theirs in (("rows", "rows"), ("tokens", "tokens"), ("mean", "length_mean"), ("p95", "length_p95")):
        assert found.roles[ours].to_dict() == pytest.approx(trained[theirs].to_dict())
    table = found.table()
    assert set(table["zero-variance groups"]) == {load(folder, "metrics").loc[0, "zero_variance_groups"]}
    assert (
        table["optimizer steps, ip"].to_dict()
        == trained["optimizer_steps"].to_dict()
        == {"generator": 3, "aggregator": 1}
    )
    assert table["gradient share"].sum() == pytest.approx(1.0) and (table["gradient share"] != 0).all()
    assert sorted(found.gradient.parts) == [("aggregator", 0), *(("generator", slot) for slot in range(3))]


class Pair:
    """Two writers, one editor."""

    name = "pair"

    def __init__(self) -> None:
        self.roles = {"writer": 2, "editor": 1}

    async def run(self, problem, call):
        texts = [(await call("writer", [user(problem.question)], slot=slot)).text for slot in range(2)]
        return Answer((await call("editor", [user(" ".join(texts))])).text)


def test_a_workflow_of_ones_own():
    cell = Cell(policy="writer=a,editor=b", **FIELDS | {"workflow": Pair()})
    found = audit(cell, 2)
    assert found.n_episodes == 8 and found.roles["rows"].to_dict() == {"writer": 16, "editor": 8}
    assert "writer fills 2 slots on an adapter of its own" in said(found, "ip")


def test_the_command_line(capsys):
    cell = ["-p", "workflow", "voting", "-p", "policy", "ip", "-p", "task", "math", "-p", "n_train", "64"]
    assert main([*cell, "--problems", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"slots +3 +1\n", out) and "\nip:\n" in out and "\nsp:\n" in out and FIRST_LOOK in out
    assert main([*cell, "--problems", "0"]) == 2
    assert "n_problems=0" in capsys.readouterr().err
    assert main([*cell, "-p", "n_processes", "2"]) == 2
    assert "n_processes=2 cannot share an audit" in capsys.readouterr().err
    assert main(["-p", "worklow", "voting"]) == 2
