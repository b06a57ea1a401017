"""Six iterations of one role end with the weights that stock TRL ends with on the same completions."""

import pytest
import torch
from datasets import Dataset
from stock_trl import FOLDER, Tape, assert_equal_weights, fresh_model, logged, options, train_stock, weights
from transformers import AutoTokenizer
from trl.trainer import grpo_trainer

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
from multirole import trainer as our_trainer

ROWS = Dataset.from_list(
    [
        {"prompt": f"Compute left to right: {a}+{b}-3+2-1", "answer": a + b - 2}
        for a in range(3, 11)
        for b in range(1, 5)
    ]
)
# AdamW's usual epsilon of 1e-8 would amplify float rounding where a gradient is almost 0 (seen: 2e-5 on one weight)
SETTINGS = {"max_completion_length": 24, "learning_rate": 1e-3, "adam_epsilon": 1e-5}


def parity(prompts, completions, answer, **kwargs):
    """Stands in for a grade: a random model gets both values."""
    return [float((len(text) + right) % 2) for text, right in zip(completions, answer, strict=True)]


def test_weights_equal_stock_trl(tmp_path):
    tokenizer, tape = AutoTokenizer.from_pretrained(FOLDER), Tape()
    args = MultiRoleGRPOConfig(**options(tmp_path / "ours", **SETTINGS), max_steps=6)
    ours = MultiRoleGRPOTrainer(
        fresh_model("shared"), Single(), parity, args, ROWS, processing_class=tokenizer, callbacks=[tape]
    )
    start = weights(ours.peft_model, "shared")
    ours.train()
    stock = train_stock(tape, tokenizer, **options(tmp_path / "stock", **SETTINGS))
    assert_equal_weights(ours, stock, start)
    torch.testing.assert_close(logged(ours, "loss"), logged(stock, "loss"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_optimizer_steps_per_generation_equal_stock_trls(accumulated, tmp_path, monkeypatch):
    """TRL's `steps_per_generation`; both shuffle the rows of a rollout before they cut them, each in its own way."""
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    monkeypatch.setattr(our_trainer, "shuffled", lambda rows, seed: rows)
    sizes = {
        "per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated,
        "steps_per_generation": 2 * accumulated, "lr_scheduler_type": "constant",
    }  # fmt: skip
    tokenizer, tape = AutoTokenizer.from_pretrained(FOLDER), Tape()
    args = MultiRoleGRPOConfig(**options(tmp_path / "ours", **SETTINGS | sizes), max_steps=3, old_logprobs="recomputed")
    assert (args.generation_batch_size, args.step_rows) == (16, 8)
    ours = MultiRoleGRPOTrainer(
        fresh_model("shared"), Single(), parity, args, ROWS, processing_class=tokenizer, callbacks=[tape]
    )
    start = weights(ours.peft_model, "shared")
    ours.train()
    stock = train_stock(tape, tokenizer, passes=2, **options(tmp_path / "stock", **SETTINGS | sizes))
    assert ours._n_steps == stock.state.global_step == 6
    assert_equal_weights(ours, stock, start)
