"""The recorded ledger of a cell equals an analytic count, and its learning rates a closed form under each clock."""

from pathlib import Path

import pytest
from ledgers import expected_ledger
from scripted_engine import ScriptedEngine

from multirole.inputs.problems import INDEX
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.record import Recorder


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
    n = len(set(cell.policy.values()))
    for iteration in range(2):
        ledger = [entry for entry in recorder.tables["ledger"] if entry["iteration"] == iteration + 1]
        ticks = [iteration] * n if clock == "iteration" else range(iteration * n, iteration * n + n)
        rates = [cell.learning_rate * tick / cell.warmup_steps for tick in ticks]  # still warming up
        expected = expected_ledger(cell, cell.policy, workflow, len(reply), rates)
        assert [(e["adapter"], e["rows"], e["tokens"], e["lr"]) for e in ledger] == expected
        assert expected
    assert engine.versions == [0, None, 1, None]  # published once per iteration; asleep during the updates
