"""The ledger of optimizer steps equals an analytic count for every workflow and policy, and learning rates a closed form."""

import math
from itertools import repeat

import pytest
from ledgers import expected_ledger
from scripted_engine import ScriptedEngine
from trainers import diagnostics_of, episodes_of, slow_but

from multirole.inputs.problems import INDEX
from multirole.workflows import WORKFLOWS

STEPS = {  # optimizer steps per iteration when every role fills its slots once (paper sec 5.1), adapter by adapter
    ("single", "sp"): {"shared": 1},
    ("voting", "sp"): {"shared": 4},
    ("voting", "ip"): {"generator": 3, "aggregator": 1},
    ("eval_opt", "ip"): {"generator": 1, "evaluator": 1},
    ("orch_workers", "ip"): {"orchestrator": 1, "worker": 3, "synthesizer": 1},
    ("orch_workers", "orchestrator=x,worker=y,synthesizer=x"): {"adapter_x": 2, "adapter_y": 3},
}
UPDATES = {"per_batch": {}, "one": {}, "tokens": {"step_tokens": 100}}
SMALL = {"num_generations": 4, "generation_batch_size": 8}


@pytest.mark.parametrize(
    ("workflow", "policy"),
    slow_but([case for case in STEPS if case not in (("voting", "sp"), ("eval_opt", "ip"))], STEPS),
)
def test_steps_rows_and_tokens_by_adapter(make_diagnosed_trainer, workflow, policy):
    for updates, options in UPDATES.items():
        trainer = make_diagnosed_trainer(WORKFLOWS[workflow](), policy=policy, updates=updates, **SMALL, **options)
        slots = trainer.workflow.roles
        episodes = episodes_of(slots, n_episodes=4)
        optimizer_steps, _ = trainer.update(trainer.model, trainer.prepare_rows(episodes))
        ledger = diagnostics_of(trainer).ledger
        assert len(optimizer_steps) == len(ledger)
        assert trainer._last_grad_norm == pytest.approx(max(step.grad_norm for step in optimizer_steps)), "docs/trl.md"
        for adapter, steps in STEPS[workflow, policy].items():
            entries = [entry for entry in ledger if entry["adapter"] == adapter]
            roles = [role for role, name in trainer.policy.items() if name == adapter]
            assert steps == sum(slots[role] for role in roles)
            n_rows = 8 * steps
            n_tokens = sum(len(t.completion_ids) for e in episodes for t in e.turns if t.role in roles)
            expected = {"per_batch": steps, "one": 1, "tokens": min(n_rows, math.ceil(n_tokens / 100))}[updates]
            assert len(entries) == expected
            assert sum(entry["rows"] for entry in entries) == n_rows
            assert sum(entry["tokens"] for entry in entries) == n_tokens
            assert not any(entry["duplicated_rows"] for entry in entries)
            if updates == "tokens":  # within one row of each end
                assert all(abs(entry["tokens"] - n_tokens / expected) <= 20 for entry in entries)


@pytest.mark.parametrize(
    ("workflow", "policy", "updates"),
    [
        ("single", "sp", "per_batch"),
        ("voting", "ip", "per_batch"),
        pytest.param("voting", "sp", "one", marks=pytest.mark.slow),
        ("eval_opt", "sp", "tokens"),
        pytest.param("eval_opt", "ip", "per_batch", marks=pytest.mark.slow),
        ("orch_workers", "ip", "one"),
    ],
)
def test_a_whole_training_step_keeps_the_count(make_diagnosed_trainer, tokenizer, workflow, policy, updates):
    reply = [*tokenizer.encode("hm"), tokenizer.eos_token_id]
    options = {"step_tokens": 4 * len(reply)} if updates == "tokens" else {}  # four rows a step
    engine = ScriptedEngine(lambda key, r: (reply, 1), tokenizer.eos_token_id)
    trainer = make_diagnosed_trainer(
        WORKFLOWS[workflow](), engine, policy=policy, updates=updates, warmup_steps=7, **SMALL, **options
    )
    for iteration in range(2):
        trainer.state.global_step = iteration
        trainer.training_step(trainer.model, [{"prompt": "", INDEX: i // 4} for i in range(8)])
        trainer.lr_scheduler.step()  # as HF's loop does
        ledger = diagnostics_of(trainer).ledger
        rate = trainer.args.learning_rate * iteration / trainer.args.warmup_steps  # still warming up
        expected = expected_ledger(trainer.args, trainer.policy, workflow, len(reply), repeat(rate))
        assert [(e["adapter"], e["rows"], e["tokens"], e["lr"]) for e in ledger] == expected
        assert expected
    assert engine.versions == [0, None, 1, None]  # published once per iteration; asleep during the updates
