"""`grpo_stock.py` made multi-role: three voters and an aggregator on one shared adapter. Diff the two."""

import re
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Voting

HERE = Path(__file__).parent


def correct(prompts, completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    boxes = [re.findall(r"\\boxed\{(-?\d+)\}", text) for text in texts]
    return [float(bool(box) and box[-1] == str(right)) for box, right in zip(boxes, answer, strict=True)]


rows = load_dataset("json", data_files=str(HERE / "data/train.jsonl"), split="train")
rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})

trainer = MultiRoleGRPOTrainer(
    model=str(HERE / "../src/multirole_study/models/tiny-r"),
    reward_funcs=correct,
    workflow=Voting(n_voters=3, prompts=str(HERE / "prompts")),
    args=MultiRoleGRPOConfig(
        output_dir="out/multirole",
        policy="sp",
        per_device_train_batch_size=32,
        num_generations=8,
        max_steps=6,
        max_completion_length=272,
        learning_rate=4e-3,
        loss_type="grpo",
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
)
trainer.train()
