"""What a user of TRL expects to work without being told: saving and loading, trackers, model cards, epochs, resume."""

import math
from importlib.resources import files

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, RoleDiagnostics, Voting

ROWS = Dataset.from_list([{"prompt": f"{a}+{b}-3", "answer": a + b - 3} for a in range(4, 10) for b in range(1, 5)])


def correct(prompts, completions, answer, **kwargs):
    return [float(f"boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture
def model_folder():
    return files("multirole") / "models" / "tiny-s"


@pytest.fixture
def train(model_folder, tmp_path):
    """train(**options) -> a finished trainer of Voting-IP on the embedded model: two iterations of eight episodes."""

    def run(resume=None, callbacks=(), **options):
        settings = {
            "output_dir": str(tmp_path / "out"), "policy": "ip", "generation_batch_size": 8, "num_generations": 4, "max_steps": 2,
            "max_completion_length": 24, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 1, "bf16": False,
            "per_device_train_batch_size": 8, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
        } | options  # fmt: skip
        trainer = MultiRoleGRPOTrainer(
            str(model_folder), Voting(2, prompts="tiny_math"), correct, MultiRoleGRPOConfig(**settings), ROWS, ROWS.select(range(4)),
            peft_config=LoraConfig(r=4, target_modules="all-linear"), callbacks=[RoleDiagnostics(), *callbacks],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def adapters(trainer):
    return {n: p.detach().clone() for n, p in trainer.peft_model.named_parameters() if "lora" in n}


def test_a_saved_adapter_loads_in_three_lines(train, model_folder, tmp_path):
    trainer = train()
    trainer.save_model(tmp_path / "saved")

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(base, tmp_path / "saved" / "aggregator")
    ids = torch.arange(5, 25)[None]

    trainer.peft_model.set_adapter("aggregator")
    trainer.peft_model.eval()
    assert torch.equal(model(ids).logits, trainer.peft_model(ids).logits)


def test_a_resumed_run_ends_as_an_unbroken_one(train, tmp_path):
    unbroken = train(max_steps=3, output_dir=str(tmp_path / "a"))
    train(max_steps=3, output_dir=str(tmp_path / "b"))
    resumed = train(max_steps=3, output_dir=str(tmp_path / "b"), resume=str(tmp_path / "b" / "checkpoint-1"))
    assert all(torch.equal(value, adapters(resumed)[name]) for name, value in adapters(unbroken).items())
    last = [row for row in unbroken.state.log_history if "generator/cosine_previous" in row][-1]
    again = [row for row in resumed.state.log_history if "generator/cosine_previous" in row][-1]
    assert (
        last["generator/cosine_previous"] == again["generator/cosine_previous"]
    )  # a callback's state is restored, too


def test_trackers_and_cards_get_role_metrics(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    trainer = train(report_to="tensorboard", max_steps=1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent)).Reload()
    assert {"train/generator/entropy", "train/aggregator/chi2", "train/reward"} <= set(events.Tags()["scalars"])
    trainer.create_model_card(model_name="voting")
    assert "multi-role" in (tmp_path / "out" / "README.md").read_text().lower()


def test_epochs_become_iterations(train):
    trainer = train(max_steps=-1, num_train_epochs=1)
    assert trainer.state.global_step == math.ceil(len(ROWS) / 2)  # two problems per iteration


def test_evaluation_reports_the_reward(train):
    trainer = train(max_steps=1)
    metrics = trainer.evaluate()
    assert 0 <= metrics["eval_reward"] <= 1
    both = trainer.evaluate({"a": ROWS.select(range(2)), "b": ROWS.select(range(3))})
    assert {"eval_a_reward", "eval_b_reward", "eval_b_runtime"} <= set(both)
