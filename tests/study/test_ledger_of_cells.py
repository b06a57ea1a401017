"""The recorded ledger of a cell equals an analytic count, and its learning rates a closed form under each clock."""

import math
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine

from multirole.inputs.problems import INDEX
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.record import Recorder


def expected_ledger(cell: Cell, rows: dict[str, int], reply: int, iteration: int) -> list[tuple]:
    """(adapter, rows, tokens, lr) of every optimizer step of one iteration whose replies all have `reply` tokens.

    `rows` are each role's. The clock ticks per iteration, or per adapter and iteration.
    """
    ledger = []
    adapters = list(dict.fromkeys(cell.policy.values()))
    for call, adapter in enumerate(adapters):
        n = sum(k for role, k in rows.items() if cell.policy[role] == adapter)
        steps = {
            "per_batch": math.ceil(n / (cell.n_problems * cell.num_generations)),
            "one": 1,
            "tokens": min(n, math.ceil(n * reply / (cell.step_tokens or 1))),
        }[cell.updates]
        tick = iteration if cell.lr_clock == "iteration" else iteration * len(adapters) + call
        lr = cell.learning_rate * tick / cell.warmup_steps  # still warming up
        ledger += [(adapter, n // steps, n // steps * reply, pytest.approx(lr, rel=1e-12)) for _ in range(steps)]
    return ledger


ROWS = {  # rows per episode when no verdict ever parses: Eval-Opt on math then plays 3 rounds; one strategy, one worker
    "single": {"generator": 1},
    "voting": {"generator": 3, "aggregator": 1},
    "eval_opt": {"generator": 3, "evaluator": 3},
    "orch_workers": {"orchestrator": 1, "worker": 1, "synthesizer": 1},
}


@pytest.mark.parametrize(
    ("workflow", "policy", "clock", "updates"),
    [
        ("voting", "ip", "update_call", "per_batch"),
        ("eval_opt", "sp", "update_call", "tokens"),
        ("eval_opt", "ip", "iteration", "per_batch"),
        ("orch_workers", "ip", "update_call", "one"),
    ],
)
def test_a_whole_training_step_keeps_the_count(make_trainer, tokenizer, workflow, policy, clock, updates):
    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    options = {"step_tokens": 4 * len(reply)} if updates == "tokens" else {}  # four rows a step
    cell = Cell(
        workflow, policy, n_problems=2, num_generations=4, lr_clock=clock, warmup_steps=7, updates=updates, **options
    )
    recorder = Recorder(Path("unused"))
    engine = ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id)
    trainer = make_trainer(cell, engine, recorder=recorder)
    for iteration in range(2):
        trainer.state.global_step = iteration
        trainer.training_step(trainer.model, [{"prompt": "", INDEX: i // 4} for i in range(8)])
        trainer.lr_scheduler.step()  # as HF's loop does
    for iteration in range(2):
        ledger = [entry for entry in recorder.tables["ledger"] if entry["iteration"] == iteration + 1]
        expected = expected_ledger(cell, {role: 8 * n for role, n in ROWS[workflow].items()}, len(reply), iteration)
        assert [(e["adapter"], e["rows"], e["tokens"], e["lr"]) for e in ledger] == expected
        assert expected
    assert engine.versions == [0, None, 1, None]  # published once per iteration; asleep during the updates
