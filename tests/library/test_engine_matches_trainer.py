"""The adapter that samples is the adapter that trains: log-probs match before and after every sync; updates are served."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trainers import SUMS, library_trainer, no_reward, ready, rows_of, slow_but

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
from multirole.workflows import WORKFLOWS, Voting
from multirole_cpu.engine import TransformersEngine


def gaps(trainer, rows):
    """Mean and max of |trainer log-prob - engine log-prob| over every sampled token of the rows."""
    differences = [
        (logps - torch.tensor(row.turn.logprobs)).abs()
        for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True)
    ]
    flat = torch.cat(differences)
    return flat.mean().item(), flat.max().item()


@pytest.mark.parametrize(
    ("workflow", "policy"),
    slow_but([("voting", "ip"), ("eval_opt", "sp")], [("voting", "ip"), ("eval_opt", "sp"), ("orch_workers", "ip")]),
)
def test_log_probs_agree_before_and_after_a_sync(base, tmp_path, workflow, policy):
    args = MultiRoleGRPOConfig(
        str(tmp_path), policy=policy, generation_batch_size=8, num_generations=4, temperature=0.8, max_completion_length=16, max_steps=4,
        use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        base, WORKFLOWS[workflow](prompts=SUMS), no_reward, args, Dataset.from_dict({"prompt": [f"{i}+7" for i in range(8)]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    ready(trainer)
    assert isinstance(trainer.engine, TransformersEngine)
    attempts = [(problem, index) for problem in trainer.problems[:2] for index in range(4)]
    texts = []
    for version in range(3):
        trainer.state.global_step = version
        episodes = trainer.play(attempts, 0)  # the same seeds at every version
        texts.append([turn.text for episode in episodes for turn in episode.turns])
        rows = rows_of(trainer, episodes)
        mean, largest = gaps(trainer, rows)
        assert mean < 1e-6 and largest < 5e-5, f"version {version}: mean {mean:.1e}, max {largest:.1e}"
        for i, row in enumerate(rows):
            row.advantage = 1.0 - 2.0 * (i % 2)
        for adapter in trainer.adapters:
            adapter_rows = [row for row in rows if row.adapter == adapter]
            trainer.optimizer_step(trainer.model, adapter, adapter_rows, len(adapter_rows), 5e-3)
        assert gaps(trainer, rows)[1] > 1e-3, "the update changed nothing"
    assert texts[0] != texts[1] != texts[2], "an update must change the next rollout"


def test_a_callback_that_plays_after_an_update_gets_the_updated_adapters(tokenizer, tmp_path):
    """Also in an iteration in which episodes were played before the update: both have one global step."""
    trainer = library_trainer(Voting(), tokenizer, tmp_path, policy="ip", learning_rate=1e-2)
    attempts = [(trainer.problems[0], index) for index in range(4)]
    rows = rows_of(trainer, trainer.play(attempts, 0))
    for i, row in enumerate(rows):
        row.advantage = 1.0 - 2.0 * (i % 2)
    trainer.update(trainer.model, rows)
    assert gaps(trainer, rows)[1] > 1e-3, "the update changed nothing"
    assert gaps(trainer, rows_of(trainer, trainer.play(attempts, 0)))[1] < 5e-5
