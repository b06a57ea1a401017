"""What a user of TRL expects to work without being told: saving and loading, trackers, model cards, epochs, resume."""

import math
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, RoleDiagnostics, Voting, user
from multirole.core.rollout import chat_template

ROWS = Dataset.from_list([{"prompt": f"{a}+{b}-3", "answer": a + b - 3} for a in range(4, 10) for b in range(1, 5)])


def correct(prompts, completions, answer, **kwargs):
    return [float(f"boxed{{{right}}}" in text) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def model_folder():
    return files("multirole") / "models" / "tiny-r"


@pytest.fixture(scope="module")
def train(model_folder):
    """train(folder, **options) -> a finished trainer of Voting-IP on the embedded model: two iterations of eight episodes."""

    def run(folder, resume=None, processing_class=None, **options):
        settings = {
            "policy": "ip", "generation_batch_size": 8, "num_generations": 4, "max_steps": 2,
            "max_completion_length": 24, "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 1, "bf16": False,
            "per_device_train_batch_size": 8, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
        } | options  # fmt: skip
        trainer = MultiRoleGRPOTrainer(
            str(model_folder), Voting(2, prompts="tiny_chain"), correct, MultiRoleGRPOConfig(str(folder), **settings), ROWS,
            ROWS.select(range(4)), processing_class, peft_config=LoraConfig(r=4, target_modules="all-linear"), callbacks=[RoleDiagnostics()],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory) -> MultiRoleGRPOTrainer:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trained")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "log"))
        return train(folder, report_to="tensorboard")


def adapters(trainer):
    return {n: p.detach().clone() for n, p in trainer.peft_model.named_parameters() if "lora" in n}


def test_a_saved_adapter_loads_in_three_lines(trained, model_folder, tmp_path):
    trained.save_model(tmp_path / "saved")

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(base, tmp_path / "saved" / "aggregator")
    ids = torch.arange(5, 25)[None]

    trained.peft_model.set_adapter("aggregator")
    trained.peft_model.eval()
    assert torch.equal(model(ids).logits, trained.peft_model(ids).logits)


def test_adapters_of_ones_own_roles_are_saved_under_the_documented_name(train, tmp_path):
    trainer = train(tmp_path, policy="generator=writer,aggregator=editor", max_steps=1)
    trainer.save_model(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()} == {
        "adapter_writer",
        "adapter_editor",
    }


def test_template_options_reach_the_prompts(train, tmp_path, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = tokenizer.chat_template + "{{ suffix }}"
    options = {"max_steps": 1, "chat_template_kwargs": {"suffix": "7"}, "processing_class": tokenizer}
    trainer = train(tmp_path, **options)
    prompt = trainer.rollout.render(tokenizer, [user("1+1")])
    assert tokenizer.decode(prompt).endswith("7") and prompt[:-1] == chat_template(tokenizer, [user("1+1")], suffix="")


def test_a_dataset_without_prompts_is_refused_before_training(train, tmp_path, model_folder):
    for name, rows in (("train_dataset", [{"prompt": "1"}]), ("eval_dataset", Dataset.from_list([{"question": "1"}]))):
        with pytest.raises((TypeError, ValueError), match=name):
            MultiRoleGRPOTrainer(
                str(model_folder), Voting(2), correct, MultiRoleGRPOConfig(str(tmp_path), bf16=False),
                **({"train_dataset": ROWS} | {name: rows}), peft_config=LoraConfig(),
            )  # fmt: skip


def test_a_resumed_run_ends_as_an_unbroken_one(train, tmp_path):
    unbroken = train(tmp_path / "a", max_steps=3)
    resumed = train(tmp_path / "b", max_steps=3, resume=str(tmp_path / "a" / "checkpoint-1"))
    assert all(torch.equal(value, adapters(resumed)[name]) for name, value in adapters(unbroken).items())
    last = [row for row in unbroken.state.log_history if "generator/cosine_previous" in row][-1]
    again = [row for row in resumed.state.log_history if "generator/cosine_previous" in row][-1]
    assert (
        last["generator/cosine_previous"] == again["generator/cosine_previous"]
    )  # a callback's state is restored, too


def test_trackers_and_cards_get_role_metrics(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(trained.args.output_dir)
    events = EventAccumulator(str(next(folder.rglob("events.out*")).parent)).Reload()
    assert {"train/generator/entropy", "train/aggregator/chi2", "train/reward"} <= set(events.Tags()["scalars"])
    trained.create_model_card(model_name="voting")
    assert "multi-role" in (folder / "README.md").read_text().lower()


def test_epochs_become_iterations(train, tmp_path):
    trainer = train(tmp_path, max_steps=-1, num_train_epochs=0.2)
    assert trainer.state.global_step == math.ceil(0.2 * len(ROWS) / 2) == 3  # two problems per iteration


def test_evaluation_reports_the_reward(trained):
    metrics = trained.evaluate()
    assert 0 <= metrics["eval_reward"] <= 1
    both = trained.evaluate({"a": ROWS.select(range(2)), "b": ROWS.select(range(3))})
    assert {"eval_a_reward", "eval_b_reward", "eval_b_runtime"} <= set(both)
