"""Train stock TRL on the completions that a trainer of ours has sampled, to compare the weights."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from toy_qwen3 import toy_base
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from multirole import MultiRoleCallback
from multirole.trl_parts import GRPOTrainer

FOLDER = toy_base()
EPISODES, GROUP = 16, 4


class Tape(MultiRoleCallback):
    """The rollouts of every iteration, and the rewards of their answers."""

    def __init__(self):
        self.iterations = []

    def on_rollout_end(self, trainer, episodes):
        self.iterations.append([(e.problem.question, e.turns[0], e.reward.value) for e in episodes])


def options(folder, **changed):
    """Return the arguments of both trainers."""
    return {
        "output_dir": str(folder), "per_device_train_batch_size": EPISODES, "num_generations": GROUP, "loss_type": "grpo",
        "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1,
    } | changed  # fmt: skip


def fresh_model(adapter):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(FOLDER)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"), adapter_name=adapter)


def weights(model, adapter):
    """Return copies of an adapter's weights by names without the adapter's."""
    return {
        path.replace(f".{adapter}.", "."): p.detach().clone() for path, p in model.named_parameters() if "lora" in path
    }


def train_stock(tape, tokenizer, passes=1, **arguments):
    """Train stock TRL on the tape's completions, each iteration's in so many passes, and return its trainer."""

    def replay(prompts, trainer):
        played = tape.iterations[trainer.state.global_step // passes]
        return {
            "prompt_ids": [turn.prompt_ids for _, turn, _ in played],
            "completion_ids": [turn.completion_ids for _, turn, _ in played],
            "logprobs": None,
            "reward": [reward for *_, reward in played],
        }

    questions = [question for iteration in tape.iterations for question, *_ in iteration[::GROUP]]
    args = GRPOConfig(**arguments, max_steps=len(tape.iterations) * passes, shuffle_dataset=False)
    trainer = GRPOTrainer(
        fresh_model("default"), lambda prompts, completions, reward, **_: reward, args, Dataset.from_dict({"prompt": questions}),
        processing_class=tokenizer, rollout_func=replay,
    )  # fmt: skip
    trainer.train()
    return trainer


def logged(trainer, name):
    return torch.tensor([row[name] for row in trainer.state.log_history if name in row], dtype=torch.float64)


def assert_equal_weights(ours, stock, start, atol=1e-5):
    """`ours` has one adapter, "shared"; `start` are its weights before the training."""
    theirs, moved = weights(stock.model, "default"), 0.0
    for name, value in weights(ours.peft_model, "shared").items():
        torch.testing.assert_close(value, theirs[name], atol=atol, rtol=0, msg=name)
        moved = max(moved, (value - start[name]).abs().max().item())
    assert moved > 1e-3  # otherwise nothing was compared
