"""The ledger of optimizer steps equals an analytic count for every workflow and policy."""

import math
from pathlib import Path

import pytest
from conftest import make_episodes

from multirole.batching import mini_batches
from multirole.cells import Cell
from multirole.diagnostics import IterationDiagnostics
from multirole.engine import ScriptedEngine
from multirole.record import Recorder
from multirole.schedule import lr_factor

STEPS = {  # optimizer steps per iteration when every role fills its slots once (facts sec 5.1), adapter by adapter
    ("single", "sp"): {"shared": 1},
    ("single", "ip"): {"generator": 1},
    ("voting", "sp"): {"shared": 4},
    ("voting", "ip"): {"generator": 3, "aggregator": 1},
    ("eval_opt", "sp"): {"shared": 2},
    ("eval_opt", "ip"): {"generator": 1, "evaluator": 1},
    ("orch_workers", "sp"): {"shared": 5},
    ("orch_workers", "ip"): {"orchestrator": 1, "worker": 3, "synthesizer": 1},
    ("orch_workers", "orchestrator=x,worker=y,synthesizer=x"): {"adapter_x": 2, "adapter_y": 3},
}


@pytest.mark.parametrize("updates", ["per_batch", "one"])
@pytest.mark.parametrize(("workflow", "policy"), STEPS)
def test_steps_rows_and_tokens_by_adapter(make_trainer, workflow, policy, updates):
    cell = Cell(workflow, policy, n_problems=2, n_episodes=4, updates=updates)
    trainer, episodes = make_trainer(cell), make_episodes(cell, n_problems=2)
    rows = trainer._rows(episodes)
    diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
    for adapter in trainer.adapters:
        owned = [row for row in rows if row.adapter == adapter]
        for batch, divisor in mini_batches(owned, cell.step_rows(len(owned)), cell.minibatch_split):
            trainer.optimizer_step(trainer.model, adapter, batch, divisor, 1e-4, diagnostics)
    slots = cell.make_workflow().roles
    for adapter, steps in STEPS[workflow, policy].items():
        entries = [entry for entry in diagnostics.ledger if entry["adapter"] == adapter]
        roles = [role for role, name in cell.policy.items() if name == adapter]
        assert steps == math.ceil(sum(slots[role] for role in roles))
        assert len(entries) == (steps if updates == "per_batch" else 1)
        assert sum(entry["rows"] for entry in entries) == 8 * sum(slots[role] for role in roles)
        turns = [turn for episode in episodes for turn in episode.turns if turn.role in roles]
        assert sum(entry["tokens"] for entry in entries) == sum(len(turn.completion_ids) for turn in turns)


def test_iteration_clock_gives_sp_and_ip_the_same_learning_rates():
    cell = Cell("voting", "ip", iterations=25, warmup_iterations=5)
    for iteration, expected in ((0, 0.0), (1, 0.2), (5, 1.0), (15, 0.5), (25, 0.0)):
        for call in range(2):
            assert lr_factor(cell, iteration, call, 2) == pytest.approx(expected)
            assert lr_factor(cell, iteration, 0, 1) == pytest.approx(expected)


def test_update_call_clock_warms_up_twice_as_fast_with_two_adapters():
    cell = Cell("voting", "ip", warmup_iterations=4, lr_clock="update_call", lr_schedule="constant")
    assert [lr_factor(cell, it, call, 2) for it in range(3) for call in range(2)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert [lr_factor(cell, it, 0, 1) for it in range(5)] == [0, 0.25, 0.5, 0.75, 1]


def test_wrapping_cosine_rises_again_past_its_horizon():
    cell = Cell("voting", "ip", iterations=10, warmup_iterations=0, lr_clock="update_call", lr_schedule="cosine_wrap")
    assert lr_factor(cell, 5, 0, 2) == pytest.approx(0.0)
    assert lr_factor(cell, 9, 1, 2) > 0.9


ROWS = {  # rows per episode when no verdict ever parses: Eval-Opt on math then plays 3 rounds; one strategy, one worker
    "single": {"generator": 1},
    "voting": {"generator": 3, "aggregator": 1},
    "eval_opt": {"generator": 3, "evaluator": 3},
    "orch_workers": {"orchestrator": 1, "worker": 1, "synthesizer": 1},
}


@pytest.mark.parametrize("workflow", ROWS)
@pytest.mark.parametrize("policy", ["sp", "ip"])
@pytest.mark.parametrize("clock", ["iteration", "update_call"])
def test_a_whole_training_step_keeps_the_count(make_trainer, tokenizer, workflow, policy, clock):
    cell = Cell(workflow, policy, n_problems=2, n_episodes=4, lr_clock=clock, warmup_iterations=7)
    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    recorder = Recorder(Path("unused"))
    trainer = make_trainer(cell, ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id), recorder=recorder)
    for iteration in range(2):
        trainer.state.global_step = iteration
        trainer.training_step(trainer.model, [{"prompt": "", "index": i // 4} for i in range(8)])
    for iteration in range(2):
        ledger = [entry for entry in recorder.tables["ledger"] if entry["iteration"] == iteration + 1]
        expected = []
        for call, adapter in enumerate(trainer.adapters):
            rows = 8 * sum(n for role, n in ROWS[workflow].items() if cell.policy[role] == adapter)
            lr = cell.learning_rate * lr_factor(cell, iteration, call, len(trainer.adapters))
            expected += [(adapter, 8, 8 * len(reply), pytest.approx(lr))] * (rows // 8)
        assert [(e["adapter"], e["rows"], e["tokens"], e["lr"]) for e in ledger] == expected
