"""TRL's options of the loss end with the weights that stock TRL ends with on the same completions, one micro-batch per step."""

import pytest
import torch
from datasets import Dataset
from stock_trl import FOLDER, Tape, assert_equal_weights, fresh_model, logged, options, train_stock, weights
from trainers import slow_but
from transformers import AutoTokenizer

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single

PROMPTS = [f"Compute left to right: {a}+{b}-3+2-1" for a in range(3, 7) for b in range(1, 5)]
# AdamW's usual epsilon of 1e-8 would amplify float rounding where a gradient is almost 0
SETTINGS = {
    "max_completion_length": 12, "learning_rate": 2e-3, "lr_scheduler_type": "constant", "adam_epsilon": 1e-4,
    "use_bias_correction_kl": False,
}  # fmt: skip
ADAPTIVE = {  # the target is between the entropies of the iterations: the coefficient goes up and down
    "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.05, "entropy_target": 4.937,
}  # fmt: skip
CASES = [
    {},
    {"num_iterations": 3},
    {"num_iterations": 2, "old_logprobs": "recomputed"},
    {"entropy_coef": 0.1},
    {"entropy_coef": 0.1, "loss_type": "dapo"},
    {"entropy_coef": 0.1, "beta": 0.1},
    {"top_entropy_quantile": 0.2},
    {"top_entropy_quantile": 0.0},
    {"top_entropy_quantile": 0.3, "entropy_coef": 0.1, "num_iterations": 2},
    {"top_entropy_quantile": 0.3, "beta": 0.1, "loss_type": "bnpo"},
    ADAPTIVE,
    ADAPTIVE | {"top_entropy_quantile": 0.5, "num_iterations": 2},
    {"mask_truncated_completions": True},
    {"mask_truncated_completions": True, "loss_type": "dapo"},
    {"mask_truncated_completions": True, "loss_type": "bnpo", "beta": 0.1},
    {"mask_truncated_completions": True, "loss_type": "dr_grpo", "num_iterations": 2},
    {"mask_truncated_completions": True, "top_entropy_quantile": 0.3, "entropy_coef": 0.1},
    {"pad_to_multiple_of": 32, "entropy_coef": 0.1},
]
QUICK = (8, 11, 14, 17)


def length_reward(prompts, completions, **kwargs):
    return [float(len(text) % 7) for text in completions]


@pytest.mark.parametrize(
    "case",
    slow_but([(CASES[i],) for i in QUICK], [(case,) for case in CASES]),
    ids=["-".join(f"{k}={v}" for k, v in case.items()) or "none" for case in CASES],
)
def test_weights_and_losses_equal_stock(case, tmp_path):
    tokenizer, tape = AutoTokenizer.from_pretrained(FOLDER), Tape()
    arguments = SETTINGS | case
    args = MultiRoleGRPOConfig(
        **options(tmp_path / "ours", **arguments), max_steps=3, updates="one", micro_batch_tokens=10**6
    )
    ours = MultiRoleGRPOTrainer(
        fresh_model("shared"), Single(), length_reward, args, Dataset.from_dict({"prompt": PROMPTS}), processing_class=tokenizer,
        callbacks=[tape],
    )  # fmt: skip
    start = weights(ours.peft_model, "shared")
    ours.train()
    reasons = {turn.finish_reason for iteration in tape.iterations for _, turn, _ in iteration}
    assert reasons == {"length", "stop"}  # otherwise masking them would test nothing

    passes = case.get("num_iterations", 1)
    stock_arguments = {name: value for name, value in arguments.items() if name != "old_logprobs"}
    stock = train_stock(tape, tokenizer, passes, **options(tmp_path / "stock", **stock_arguments))
    assert_equal_weights(ours, stock, start)
    for name in ("loss", "policy_loss", "entropy", "clip_ratio/region_mean"):
        by_pass = logged(stock, name)  # which stock TRL logs pass by pass
        expected = by_pass.view(-1, passes).mean(1) if by_pass.numel() else by_pass
        torch.testing.assert_close(logged(ours, name), expected, atol=2e-5, rtol=0, msg=name)
    torch.testing.assert_close(
        logged(ours, "entropy_coef")[-1:], logged(stock, "entropy_coef").view(-1, passes).mean(1)[-1:]
    )
