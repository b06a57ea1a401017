"""`num_iterations`: the mini-batches of an iteration are trained on several times, against one set of old log-probs."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_base
from trainers import SUMS, diagnostics_of, episodes_of

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, RoleDiagnostics
from multirole.workflows import Voting

STEPS = {"generator": 2, "aggregator": 1}  # of one pass: one per slot


class Seen(MultiRoleCallback):
    def __init__(self):
        self.batches, self.old, self.rollouts = [], [], 0

    def on_rollout_end(self, trainer, episodes):
        self.rollouts += 1

    def on_adapter_step(self, trainer, step):
        self.batches.append((step.adapter, [id(row) for row in step.rows], step.lr))

    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        self.old.append({id(row): old.clone() for row, old in zip(rows, batch["old_per_token_logps"], strict=True)})


def test_passes_repeat_the_mini_batches_of_each_adapter(make_library_trainer):
    seen = Seen()
    trainer = make_library_trainer(
        Voting(2, prompts=SUMS), callbacks=[RoleDiagnostics(), seen], policy="ip", num_iterations=3, micro_batch_tokens=10**6
    )  # fmt: skip
    steps, _ = trainer.update(trainer.model, trainer.prepare_rows(episodes_of(trainer.workflow.roles)))
    assert len(steps) == 3 * sum(STEPS.values()) == len(diagnostics_of(trainer).ledger)
    for adapter, n in STEPS.items():
        batches = [rows for name, rows, _ in seen.batches if name == adapter]
        assert batches == 3 * batches[:n]
        counts = [entry["tokens"] for entry in diagnostics_of(trainer).ledger if entry["adapter"] == adapter]
        assert counts == 3 * counts[:n]
    assert len({lr for *_, lr in seen.batches}) == 1
    old: dict[int, torch.Tensor] = {}
    for batch in seen.old:
        for row, logps in batch.items():
            assert torch.equal(old.setdefault(row, logps), logps)


def test_schedule_logs_and_rollouts_count_iterations(tmp_path):
    """Resumed in the middle, the run ends as an unbroken one does, adaptive entropy included."""

    def train(folder, resume=None):
        seen = Seen()
        args = MultiRoleGRPOConfig(
            str(folder), policy="ip", generation_batch_size=8, num_generations=4, max_steps=4, max_completion_length=12,
            num_iterations=2, learning_rate=1e-3, lr_scheduler_type="linear", logging_steps=1, save_steps=2, bf16=False, use_cpu=True,
            gradient_checkpointing=False, report_to="none", disable_tqdm=True, use_adaptive_entropy=True, entropy_coef=0.1,
            entropy_target=4.95, entropy_coef_delta=0.05, top_entropy_quantile=0.9,
        )  # fmt: skip
        trainer = MultiRoleGRPOTrainer(
            toy_base(), Voting(2, prompts=SUMS),
            lambda completions, **_: [float(len(text) % 5) for text in completions], args,
            Dataset.from_dict({"prompt": [f"{i}+1" for i in range(8)]}), callbacks=[seen],
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer, seen

    whole, seen = train(tmp_path / "a")
    assert seen.rollouts == whole.state.global_step == 4
    rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([1e-3 * (1 - i / 4) for i in range(4)])
    assert len(seen.batches) == 4 * 2 * sum(STEPS.values())
    assert len({coef for coef in whole.entropy_coef.values()}) == 2  # the adapters' went apart
    resumed, _ = train(tmp_path / "b", str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.entropy_coef == whole.entropy_coef
    for (name, value), other in zip(whole.peft_model.named_parameters(), resumed.peft_model.parameters(), strict=True):
        assert torch.equal(value, other), name
