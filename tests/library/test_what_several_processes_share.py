"""Checkpoints, tables, metrics and devices of several processes: what one of them does alone, and what all must have."""

import os
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import processes
import pytest
import torch
from datasets import Dataset
from fsdp2_on_cpu import be_a_gpus_process
from peft import LoraConfig
from safetensors.torch import load_file
from toy_qwen3 import toy_base
from trainers import SUMS, episodes_of, library_trainer, rows_of

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, trl_parts
from multirole.engines import vllm_colocate as vllm_engine
from multirole.engines.vllm_colocate import VLLMEngine
from multirole.roles.skill import SkillWatch
from multirole.saving.checkpoints import check_checkpoint
from multirole.types import Answer, Episode, Problem, Reward, Turn
from multirole.update.processes import full_tensor
from multirole.workflows import Single, Voting

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # fmt: skip
"""What `accelerate launch` sets for FSDP2; the last one is its default."""


def length(prompts, completions, log_extra, **_):
    log_extra("asked", list(prompts))
    return [float(len(text) % 5) for text in completions]


def build(folder: str | Path, **options) -> MultiRoleGRPOTrainer:
    args = MultiRoleGRPOConfig(
        str(folder), policy="ip", generation_batch_size=8, num_generations=4, max_steps=2, max_completion_length=8, learning_rate=1e-2,
        bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", disable_tqdm=True, save_strategy="steps", save_steps=1,
        **options,
    )  # fmt: skip
    return MultiRoleGRPOTrainer(
        toy_base(), Voting(2, prompts=SUMS), length, args,
        Dataset.from_dict({"prompt": [f"{i}+1" for i in range(8)]}), Dataset.from_dict({"prompt": ["7+2", "8+2", "9+2"]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip


def weights(trainer: MultiRoleGRPOTrainer) -> dict[str, torch.Tensor]:
    named = trainer.peft_model.named_parameters()
    return {name: full_tensor(p.detach()).clone() for name, p in named if "lora" in name}


def train_and_resume(folder: str) -> None:
    """Train, and train again from the first checkpoint: the weights are the same."""
    options = {"log_completions": True, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
    unbroken, resumed = build(folder, **options), build(folder, **options)
    if unbroken.accelerator.process_index:
        trl_parts.save_separately = None  # the first process moves its tables; another one would move them, too
    unbroken.train()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    one, other = weights(unbroken), weights(resumed)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_two_processes_resume_and_the_first_alone_moves_the_tables_of_evaluations(tmp_path):
    codes = processes.run_together(2, tmp_path / "log", train_and_resume, str(tmp_path / "out"))
    assert codes == [0, 0], [Path(f"{tmp_path / 'log'}.{rank}").read_text()[-2000:] for rank in (0, 1)]
    folder = tmp_path / "out" / "completions"
    for step in (1, 2):
        evaluated = pd.read_parquet(folder / f"eval_completions_0000{step}.parquet")
        assert list(evaluated["prompt"]) == list(evaluated["asked"]) == ["7+2", "8+2", "9+2"]
        assert all(pd.read_parquet(folder / f"completions_0000{step}.parquet")["prompt"].str.endswith("+1"))


def train_and_resume_in_shards(folder: str) -> None:
    os.environ.update(FSDP2)
    be_a_gpus_process()
    train_and_resume(folder)


@pytest.mark.slow
def test_checkpoints_under_fsdp2_hold_every_adapter_whatever_its_state_dict(tmp_path):
    codes = processes.run_together(2, tmp_path / "log", train_and_resume_in_shards, str(tmp_path / "out"))
    assert codes == [0, 0], [Path(f"{tmp_path / 'log'}.{rank}").read_text()[-2000:] for rank in (0, 1)]
    for adapter in ("generator", "aggregator"):
        saved = load_file(tmp_path / "out" / "checkpoint-2" / adapter / "adapter_model.safetensors")
        assert any(value.any() for name, value in saved.items() if "lora_B" in name)


def test_a_checkpoint_of_a_sharded_model_is_resumed_by_a_sharded_model(tmp_path):
    for name, is_sharded in (("optimizer.pt", False), ("pytorch_model_fsdp.bin", True), ("pytorch_model_fsdp_0", True)):
        folder = tmp_path / name / "checkpoint-1"
        (folder / "shared").mkdir(parents=True)
        for file in ("shared/adapter_config.json", name):
            (folder / file).touch()
        (folder / "trainer_state.json").write_text('{"stateful_callbacks": {}}')
        check_checkpoint(folder, {"writer": "shared"}, {"shared"}, is_sharded)
        with pytest.raises(ValueError, match="FSDP2, and this run is .* it. Resume it as it was trained"):
            check_checkpoint(folder, {"writer": "shared"}, {"shared"}, not is_sharded)


def test_adapters_of_a_checkpoint_are_read_into_host_memory(tmp_path, monkeypatch):
    """On "cuda", PEFT's default, safetensors would read them into the memory of the first GPU in every process of a node."""
    trainer = build(tmp_path, save_only_model=True)
    trainer.train()
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: "cuda")
    trained = weights(trainer)
    again = build(tmp_path)
    again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, trained[name]) for name, value in weights(again).items())
    assert "load_adapter" not in vars(again.peft_model)


def test_scored_rows_are_sent_without_the_batches_that_they_were_computed_in(tokenizer, tmp_path):
    """pickle stores the whole storage of a view."""
    trainer = library_trainer(Voting(2, prompts=SUMS), tokenizer, tmp_path)
    rows = rows_of(trainer, episodes_of({"generator": 2, "aggregator": 1}, n_episodes=4))
    for values in (*trainer.logprobs_of(rows), *trainer.entropies_of(rows)):
        assert values.untyped_storage().nbytes() == values.nbytes


def test_every_process_has_the_metrics_of_skills():
    """Each compares checkpoints by its own metrics, and stops or saves by them."""

    def right_is_right(episodes):
        for one in episodes:
            one.reward = Reward(1.0, is_correct=one.answer.text == "right")

    turns = [Turn("generator", 0, 0, [1], [2], [0.0], text, "stop") for text in ("right", "right", "right", "wrong")]
    episodes = [
        Episode(Problem(str(i), "", "", None), 0, [turn], Answer(turn.text), Reward(0.0))
        for i, turn in enumerate(turns)
    ]
    for is_first in (True, False):
        metrics: dict[str, float] = {}
        trainer = SimpleNamespace(
            workflow=Single(), score=right_is_right, is_world_process_zero=lambda first=is_first: first
        )
        SkillWatch().on_episodes_evaluated(trainer, episodes, metrics, "eval")
        assert metrics == {"eval_generator_solves": 0.75}


def test_shared_memory_must_hold_the_adapters_of_all_processes_of_a_machine(monkeypatch, tmp_path):
    asked: list[int] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(vllm_engine, "build_llm", lambda *_: SimpleNamespace(llm_engine=SimpleNamespace()))
    monkeypatch.setattr(vllm_engine, "adapter_state", lambda *_: {"a": torch.zeros(5)})
    monkeypatch.setattr(vllm_engine, "folder_with_room", lambda n_bytes: asked.append(n_bytes) or 1 / 0)
    monkeypatch.setitem(__import__("sys").modules, "vllm.lora.request", SimpleNamespace(LoRARequest=None))
    engine = VLLMEngine("unused", ["a"], 8, 64)
    with pytest.raises(ZeroDivisionError):
        engine.publish(None, 0)
    assert asked == [8 * 5 * 4]
