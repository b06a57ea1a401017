"""Two processes take an optimizer step's entropy and its quantile of tokens over the rows of both, and sample by `generate`."""

from pathlib import Path

import processes
import torch
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_base
from trainers import SUMS

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
from multirole.workflows import Voting


def length_reward(completions, **_):
    return [float(len(text) % 5) for text in completions]


def train(folder: str) -> None:
    args = MultiRoleGRPOConfig(
        str(folder), policy="ip", generation_batch_size=8, num_generations=4, max_steps=3, max_completion_length=12, num_iterations=2,
        learning_rate=1e-3, lr_scheduler_type="constant", adam_epsilon=1e-4, bf16=False, use_cpu=True, gradient_checkpointing=False,
        report_to="none", disable_tqdm=True, save_strategy="no", use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=1e9,
        entropy_coef_delta=0.05, top_entropy_quantile=0.6, mask_truncated_completions=True, micro_batch_tokens=200, engine="generate",
        loss_type="dapo",  # TRL divides its token count by the number of processes
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        toy_base(), Voting(2, prompts=SUMS), length_reward, args,
        Dataset.from_dict({"prompt": [f"{i}+1" for i in range(8)]}), peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.peft_model.named_parameters() if "lora" in name}
    torch.save((weights, trainer.entropy_coef), Path(folder) / f"rank{trainer.accelerator.process_index}.pt")


def test_two_processes_train_what_one_trains(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for n, folder in enumerate(folders, start=1):
        folder.mkdir()
        assert processes.run_together(n, folder / "log", train, str(folder)) == [0] * n, (folder / "log.0").read_text()
    one, *two = [torch.load(path) for folder in folders for path in sorted(folder.glob("rank*.pt"))]
    assert len(two) == 2
    for weights, coefs in two:
        assert coefs == one[1] and len(set(coefs.values())) == 2
        for name, value in weights.items():
            torch.testing.assert_close(value, one[0][name], atol=1e-5, rtol=0, msg=name)
