"""SP with one role = IP with one role = stock `GRPOTrainer` on the same rows: same loss, gradients and weights."""

import pytest
import torch
from datasets import Dataset
from trainers import episodes_of, no_reward, rows_of
from trl import GRPOConfig

from multirole.trl_parts import GRPOTrainer
from multirole.update.rows import collate
from multirole.workflows import Single

OPTIONS = {
    "epsilon_high": 0.28, "max_completion_length": 96, "max_grad_norm": 1.0, "weight_decay": 0.01, "bf16": False,
    "adam_epsilon": 1e-4,  # or Adam would divide gradients that are rounding noise by themselves
}  # fmt: skip


def stock_step(model, tokenizer, rows, tmp_path, loss_type):
    """One step of stock TRL: its loss on its own padding, its clip, its AdamW."""
    args = GRPOConfig(
        str(tmp_path / "stock"),
        use_cpu=True,
        report_to="none",
        loss_type=loss_type,
        gradient_checkpointing=False,
        **OPTIONS,
    )
    trainer = GRPOTrainer(model, no_reward, args, Dataset.from_dict({"prompt": ["a"]}), processing_class=tokenizer)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    batch = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    loss = trainer.compute_loss(model.train(), batch)
    loss.backward()
    trainer._clip_grad_norm(model)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    trainer.optimizer.step()
    return loss.item(), grads, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("policy", "loss_type"), [("sp", "grpo"), ("ip", "grpo"), ("sp", "dapo"), ("sp", "dr_grpo")])
def test_one_step_equals_stock_trl(make_library_trainer, make_model, tokenizer, tmp_path, policy, loss_type):
    trainer = make_library_trainer(Single(), policy=policy, loss_type=loss_type, **OPTIONS)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    loss, grads, weights = stock_step(make_model(trainer.policy), tokenizer, rows, tmp_path, loss_type)
    seen, step = [], trainer.optimizer.step

    def spy():
        seen.extend(p.grad.clone() for p in trainer.model.parameters() if p.grad is not None)
        step()

    trainer.optimizer.step = spy
    _, ours = trainer.optimizer_step(trainer.model, trainer.adapters[0], rows, len(rows), 1e-2)
    assert ours.item() == pytest.approx(loss, abs=1e-6)
    assert len(seen) == len(grads)
    for mine, theirs in zip(seen, grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    for mine, theirs in zip(trainer.model.parameters(), weights, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
