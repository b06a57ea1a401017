"""TRL's options of the loss end with the weights that stock TRL ends with on the same completions, one micro-batch per step."""

from importlib.resources import files

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trainers import slow_but
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
from multirole.core.stock import GRPOTrainer

FOLDER = files("multirole_study") / "models" / "tiny-r"
PROMPTS = [f"Compute left to right: {a}+{b}-3+2-1" for a in range(3, 7) for b in range(1, 5)]
EPISODES, GROUP, ITERATIONS = 16, 4, 3
ADAPTIVE = {  # the target is between the entropies of the iterations: the coefficient goes up and down
    "use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.05, "entropy_target": 0.3,
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
    ADAPTIVE | {"top_entropy_quantile": 0.5, "num_iterations": 2, "entropy_target": 1.0},
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


def fresh_model(name):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(FOLDER)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"), adapter_name=name)


def options(tmp_path, name, case):
    # AdamW's usual epsilon of 1e-8 would amplify float rounding where a gradient is almost 0
    return {
        "output_dir": str(tmp_path / name), "per_device_train_batch_size": EPISODES, "num_generations": GROUP, "use_cpu": True,
        "max_completion_length": 12, "learning_rate": 2e-3, "lr_scheduler_type": "constant", "adam_epsilon": 1e-4, "loss_type": "grpo",
        "save_strategy": "no", "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1, "use_bias_correction_kl": False,
    } | case  # fmt: skip


class Tape(MultiRoleCallback):
    """The rollouts of every iteration, and the rewards of their answers."""

    def __init__(self):
        self.iterations = []

    def on_rollout_end(self, trainer, episodes):
        self.iterations.append([(e.problem.question, e.turns[0], e.reward.value) for e in episodes])


def train_stock(tape, case, tmp_path, tokenizer):
    """Stock TRL on the tape's completions."""
    passes = case.get("num_iterations", 1)

    def replay(prompts, trainer):
        played = tape.iterations[trainer.state.global_step // passes]
        return {
            "prompt_ids": [turn.prompt_ids for _, turn, _ in played],
            "completion_ids": [turn.completion_ids for _, turn, _ in played],
            "logprobs": None,
            "reward": [reward for *_, reward in played],
        }

    questions = [question for iteration in tape.iterations for question, *_ in iteration[::GROUP]]
    case = {name: value for name, value in case.items() if name != "old_logprobs"}
    args = GRPOConfig(**options(tmp_path, "stock", case), max_steps=ITERATIONS * passes, shuffle_dataset=False)
    trainer = GRPOTrainer(
        fresh_model("default"), lambda prompts, completions, reward, **_: reward, args, Dataset.from_dict({"prompt": questions}),
        processing_class=tokenizer, rollout_func=replay,
    )  # fmt: skip
    trainer.train()
    return trainer


def weights(model, name):
    return {
        path.replace(f".{name}.", "."): p.detach().clone() for path, p in model.named_parameters() if "lora" in path
    }


def logged(trainer, name):
    return torch.tensor([row[name] for row in trainer.state.log_history if name in row], dtype=torch.float64)


@pytest.mark.parametrize(
    "case",
    slow_but([(CASES[i],) for i in QUICK], [(case,) for case in CASES]),
    ids=["-".join(f"{k}={v}" for k, v in case.items()) or "none" for case in CASES],
)
def test_weights_and_losses_equal_stock(case, tmp_path):
    tokenizer, tape = AutoTokenizer.from_pretrained(FOLDER), Tape()
    args = MultiRoleGRPOConfig(
        **options(tmp_path, "ours", case), max_steps=ITERATIONS, updates="one", micro_batch_tokens=10**6
    )
    ours = MultiRoleGRPOTrainer(
        fresh_model("shared"), Single(), length_reward, args, Dataset.from_dict({"prompt": PROMPTS}), processing_class=tokenizer,
        callbacks=[tape],
    )  # fmt: skip
    start = weights(ours.peft_model, "shared")
    ours.train()
    reasons = {turn.finish_reason for iteration in tape.iterations for _, turn, _ in iteration}
    assert reasons == {"length", "stop"}  # otherwise masking them would test nothing

    stock = train_stock(tape, case, tmp_path, tokenizer)
    theirs, moved = weights(stock.model, "default"), 0.0
    for name, value in weights(ours.peft_model, "shared").items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0, msg=name)
        moved = max(moved, (value - start[name]).abs().max().item())
    assert moved > 1e-3  # otherwise nothing was compared
    passes = case.get("num_iterations", 1)
    for name in ("loss", "policy_loss", "entropy", "clip_ratio/region_mean"):
        by_pass = logged(stock, name)  # which stock TRL logs pass by pass
        expected = by_pass.view(-1, passes).mean(1) if by_pass.numel() else by_pass
        torch.testing.assert_close(logged(ours, name), expected, atol=2e-5, rtol=0, msg=name)
    torch.testing.assert_close(
        logged(ours, "entropy_coef")[-1:], logged(stock, "entropy_coef").view(-1, passes).mean(1)[-1:]
    )
