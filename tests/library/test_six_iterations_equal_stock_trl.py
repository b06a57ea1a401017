"""Six iterations of one role end with the weights that stock TRL ends with on the same completions."""

from importlib.resources import files

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
from multirole.core.stock import GRPOTrainer

FOLDER = files("multirole_study") / "models" / "tiny-r"
ROWS = Dataset.from_list(
    [
        {"prompt": f"Compute left to right: {a}+{b}-3+2-1", "answer": a + b - 2}
        for a in range(3, 11)
        for b in range(1, 5)
    ]
)
ITERATIONS, EPISODES, GROUP = 6, 16, 4


def correct(prompts, completions, answer, **kwargs):
    return [float(f"boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]


def fresh_model():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(FOLDER)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"), adapter_name="shared")


def options(tmp_path, name):
    # AdamW's usual epsilon of 1e-8 would amplify float rounding where a gradient is almost 0 (seen: 2e-5 on one weight)
    return {
        "output_dir": str(tmp_path / name), "per_device_train_batch_size": EPISODES, "num_generations": GROUP,
        "max_steps": ITERATIONS, "max_completion_length": 48, "learning_rate": 1e-3, "adam_epsilon": 1e-5, "loss_type": "grpo", "save_strategy": "no",
        "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip


class Tape(MultiRoleCallback):
    """The rollouts of every iteration, and the rewards of their answers."""

    def __init__(self):
        self.iterations = []

    def on_rollout_end(self, trainer, episodes):
        self.iterations.append([(e.problem.question, e.turns[0], e.reward.value) for e in episodes])


def adapters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}


def test_weights_equal_stock_trl(tmp_path):
    tokenizer, tape = AutoTokenizer.from_pretrained(FOLDER), Tape()
    ours = MultiRoleGRPOTrainer(
        fresh_model(), Single(), correct, MultiRoleGRPOConfig(**options(tmp_path, "ours")), ROWS, processing_class=tokenizer,
        callbacks=[tape],
    )  # fmt: skip
    start = adapters(ours.peft_model)
    ours.train()

    def replay(prompts, trainer):
        turns = [turn for _, turn, _ in tape.iterations[trainer.state.global_step]]
        return {
            "prompt_ids": [turn.prompt_ids for turn in turns],
            "completion_ids": [turn.completion_ids for turn in turns],
            "logprobs": None,
            "reward": [reward for *_, reward in tape.iterations[trainer.state.global_step]],
        }

    played = [question for iteration in tape.iterations for question, *_ in iteration[::GROUP]]
    stock = GRPOTrainer(
        fresh_model(), lambda prompts, completions, reward, **_: reward,
        GRPOConfig(**options(tmp_path, "stock"), shuffle_dataset=False), Dataset.from_dict({"prompt": played}),
        processing_class=tokenizer, rollout_func=replay,
    )  # fmt: skip
    stock.train()

    theirs, moved = adapters(stock.model), 0.0
    for name, value in adapters(ours.peft_model).items():
        assert (value - theirs[name]).abs().max() < 1e-5, name
        moved = max(moved, (value - start[name]).abs().max().item())
    assert moved > 1e-3  # otherwise nothing was compared
    logged = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (ours, stock)]
    torch.testing.assert_close(torch.tensor(logged[0]), torch.tensor(logged[1]), atol=1e-5, rtol=0)
