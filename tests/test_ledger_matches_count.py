"""The ledger of optimizer steps equals an analytic count for every workflow and policy."""

import math
from pathlib import Path

import pytest
from conftest import make_episodes

from multirole.core.engine import ScriptedEngine
from multirole.core.rows import steps_by_adapter
from multirole.core.schedule import lr_factor
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.experiment.cell import Cell
from multirole.experiment.record import Recorder

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


UPDATES = {"per_batch": {}, "one": {}, "tokens": {"step_tokens": 100}}


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize(("workflow", "policy"), STEPS)
def test_steps_rows_and_tokens_by_adapter(make_trainer, workflow, policy, updates):
    cell = Cell(workflow, policy, n_problems=2, n_episodes=4, updates=updates, **UPDATES[updates])
    trainer, episodes = make_trainer(cell), make_episodes(cell, n_problems=2)
    rows = trainer._rows(episodes)
    diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
    for adapter, batches in steps_by_adapter(rows, trainer.adapters, cell).items():
        for batch, divisor in batches:
            trainer.optimizer_step(trainer.model, adapter, batch, divisor, 1e-4, diagnostics)
    slots = cell.make_workflow().roles
    for adapter, steps in STEPS[workflow, policy].items():
        entries = [entry for entry in diagnostics.ledger if entry["adapter"] == adapter]
        roles = [role for role, name in cell.policy.items() if name == adapter]
        assert steps == math.ceil(sum(slots[role] for role in roles))
        n_rows = 8 * sum(slots[role] for role in roles)
        n_tokens = sum(len(t.completion_ids) for e in episodes for t in e.turns if t.role in roles)
        expected = {"per_batch": steps, "one": 1, "tokens": min(n_rows, math.ceil(n_tokens / 100))}[updates]
        assert len(entries) == expected == cell.n_steps(n_rows, n_tokens)
        assert sum(entry["rows"] for entry in entries) == n_rows
        assert sum(entry["tokens"] for entry in entries) == n_tokens
        assert not any(entry["duplicated_rows"] for entry in entries)
        if updates == "tokens":  # within a row of each end
            assert all(abs(entry["tokens"] - n_tokens / expected) <= 20 for entry in entries)


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


CLOSED = {  # k: tick, w: warm-up, t: horizon, all in ticks
    "constant": lambda k, w, t: min(1.0, k / w),
    "cosine": lambda k, w, t: k / w if k < w else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (k - w) / (t - w))),
    "cosine_wrap": lambda k, w, t: k / w if k < w else 0.5 + 0.5 * math.cos(math.pi * (k - w) / (t - w)),
}


@pytest.mark.parametrize("schedule", CLOSED)
@pytest.mark.parametrize("clock", ["iteration", "update_call"])
def test_every_trace_is_its_closed_form(schedule, clock):
    """The released code's is "constant" per update call (facts sec 5.5): Orch-Workers-IP is warm after a third of its iterations."""
    cell = Cell("orch_workers", "ip", iterations=40, warmup_iterations=15, lr_schedule=schedule, lr_clock=clock)
    for iteration in range(40):
        for call in range(3):
            tick = iteration if clock == "iteration" else 3 * iteration + call
            assert abs(lr_factor(cell, iteration, call, 3) - CLOSED[schedule](tick, 15, 40)) <= 1e-12


def expected_ledger(cell: Cell, rows: dict[str, int], reply: int, iteration: int) -> list[tuple]:
    """(adapter, rows, tokens, lr) of every optimizer step of one iteration whose replies all have `reply` tokens.

    `rows` are each role's. A frozen role's rows are in none; an adapter without rows takes no step.
    """
    found = []
    adapters = list(dict.fromkeys(cell.policy.values()))
    for call, adapter in enumerate(adapters):
        starts = cell.train_starts
        n = sum(k for role, k in rows.items() if cell.policy[role] == adapter and iteration >= starts[role])
        size = cell.n_problems * cell.n_episodes
        steps = {
            "per_batch": math.ceil(n / size), "one": min(n, 1),
            "tokens": min(n, math.ceil(n * reply / (cell.step_tokens or 1))),
        }[cell.updates]  # fmt: skip
        lr = cell.learning_rate * lr_factor(cell, iteration, call, len(adapters))
        found += [(adapter, n // steps, n // steps * reply, pytest.approx(lr, rel=1e-12)) for _ in range(steps)]
    return found


ROWS = {  # rows per episode when no verdict ever parses: Eval-Opt on math then plays 3 rounds; one strategy, one worker
    "single": {"generator": 1},
    "voting": {"generator": 3, "aggregator": 1},
    "eval_opt": {"generator": 3, "evaluator": 3},
    "orch_workers": {"orchestrator": 1, "worker": 1, "synthesizer": 1},
}


@pytest.mark.parametrize("workflow", ROWS)
@pytest.mark.parametrize("policy", ["sp", "ip"])
@pytest.mark.parametrize("clock", ["iteration", "update_call"])
@pytest.mark.parametrize("updates", UPDATES)
def test_a_whole_training_step_keeps_the_count(make_trainer, tokenizer, workflow, policy, clock, updates):
    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    options = {"step_tokens": 4 * len(reply)} if updates == "tokens" else {}  # four rows a step
    last = list(ROWS[workflow])[-1]
    if len(ROWS[workflow]) > 1:
        options["train_after"] = f"{last}=1"
    cell = Cell(
        workflow, policy, n_problems=2, n_episodes=4, lr_clock=clock, warmup_iterations=7, updates=updates, **options
    )
    recorder = Recorder(Path("unused"))
    trainer = make_trainer(cell, ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id), recorder=recorder)
    for iteration in range(2):
        trainer.state.global_step = iteration
        trainer.training_step(trainer.model, [{"prompt": "", "index": i // 4} for i in range(8)])
    for iteration in range(2):
        ledger = [entry for entry in recorder.tables["ledger"] if entry["iteration"] == iteration + 1]
        expected = expected_ledger(cell, {role: 8 * n for role, n in ROWS[workflow].items()}, len(reply), iteration)
        assert [(e["adapter"], e["rows"], e["tokens"], e["lr"]) for e in ledger] == expected
        assert expected
