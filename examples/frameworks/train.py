"""Train one of this folder's workflows with the embedded model on arithmetic: four iterations, about a minute on a CPU."""

import re
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer

ROOT = Path(__file__).resolve().parents[2]


def correct(prompts, completions, answer, **kwargs):
    """Reward function with TRL's signature: `completions` are the agents' answers, `answer` is a column of the rows."""
    boxes = [re.findall(r"\\boxed\{(-?\d+)\}", text) for text in completions]
    return [float(box[-1:] == [str(right)]) for box, right in zip(boxes, answer, strict=True)]


def train(workflow, max_steps=4, callbacks=(), **options):
    rows = load_dataset("json", data_dir=str(ROOT / "examples" / "data"))["train"]
    settings = {"generation_batch_size": 16, "num_generations": 4, "max_completion_length": 96, "learning_rate": 4e-3}
    args = MultiRoleGRPOConfig(
        f"out/{workflow.name}", policy="ip", max_steps=max_steps, bf16=False, gradient_checkpointing=False,
        report_to="none", logging_steps=1, **settings | options,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    model = str(ROOT / "src/multirole_study/models/tiny-r")
    trainer = MultiRoleGRPOTrainer(model, workflow, correct, args, rows, callbacks=list(callbacks), peft_config=lora)
    trainer.train()
    trainer.save_model()
    return trainer
