"""SP with one role = IP with one role = stock `GRPOTrainer` on the same rows: same loss, gradients and weights."""

import pytest
import torch
from conftest import make_episodes
from datasets import Dataset
from trl import GRPOTrainer

from multirole.core.rows import collate
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.experiment.cell import Cell


def stock_step(cell, model, tokenizer, rows, tmp_path):
    """One step of stock TRL: its loss on its own padding, its clip, its AdamW."""
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda **_: [0.0], args=cell.grpo_config(str(tmp_path / "stock")),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}), eval_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    batch = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
    loss = trainer.compute_loss(model.train(), batch)
    loss.backward()
    trainer._clip_grad_norm(model)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    trainer.optimizer.step()
    return loss.item(), grads, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("policy", ["sp", "ip"])
def test_one_step_equals_stock_trl(make_trainer, make_model, tokenizer, tmp_path, policy):
    cell = Cell("single", policy)
    trainer = make_trainer(cell)
    rows = trainer._rows(make_episodes(cell))
    loss, grads, weights = stock_step(cell, make_model(cell.policy), tokenizer, rows, tmp_path)
    seen, step = [], trainer.optimizer.step

    def spy():
        seen.extend(p.grad.clone() for p in trainer.model.parameters() if p.grad is not None)
        step()

    trainer.optimizer.step = spy
    diagnostics = IterationDiagnostics(rows, cell.clip_low, cell.clip_high)
    ours = trainer.optimizer_step(trainer.model, trainer.adapters[0], rows, len(rows), 1e-2, diagnostics)
    assert ours.item() == pytest.approx(loss, abs=1e-6)
    assert len(seen) == len(grads)
    for mine, theirs in zip(seen, grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    # Adam divides by |g|, so where a gradient is rounding noise the update is too: bound it there by the step size
    for mine, theirs in zip(trainer.model.parameters(), weights, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
