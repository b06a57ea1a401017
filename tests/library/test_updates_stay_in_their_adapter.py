"""An update on one role's rows moves that role's adapter only, bit for bit; the frozen base never moves."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from toy_qwen3 import toy_model
from trainers import episodes_of, no_reward, rows_of

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer
from multirole.inputs.adapters import add_adapters
from multirole.workflows import OrchWorkers, Single, Voting


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before, model):
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


@pytest.mark.parametrize("policy", ["ip", "sp", "orchestrator=x,worker=y,synthesizer=x"])
def test_a_step_moves_only_the_tensors_of_its_adapter(make_library_trainer, policy):
    trainer = make_library_trainer(OrchWorkers(), policy=policy)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    for _ in range(2):  # the second step meets an optimizer that holds momentum for every adapter
        for adapter in trainer.adapters:
            adapter_rows = [row for row in rows if row.adapter == adapter]
            before = snapshot(trainer.model)
            trainer.optimizer_step(trainer.model, adapter, adapter_rows, len(adapter_rows), 1e-2)
            changed = moved(before, trainer.model)
            assert changed, "the step moved nothing"
            assert all(f".{adapter}." in name and "lora_" in name for name in changed)


def test_hf_closing_step_moves_nothing(make_library_trainer):
    """HF steps the optimizer once more at the end of `training_step`; it must find no gradient."""
    trainer = make_library_trainer(Voting(), policy="ip")
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    trainer.optimizer_step(trainer.model, "generator", [r for r in rows if r.adapter == "generator"], 6, 1e-2)
    before = snapshot(trainer.model)
    trainer.optimizer.step()
    assert not moved(before, trainer.model)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_each_adapter_counts_its_own_optimizer_steps(make_library_trainer):
    """Bias correction of Adam is per adapter: three generator steps and one aggregator step count 3 and 1."""
    trainer = make_library_trainer(Voting(), policy="ip")
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    for adapter, steps in (("generator", 3), ("aggregator", 1)):
        for _ in range(steps):
            adapter_rows = [row for row in rows if row.adapter == adapter]
            trainer.optimizer_step(trainer.model, adapter, adapter_rows, 9, 1e-3)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    assert trainer.optimizer.state
    for parameter, state in trainer.optimizer.state.items():
        assert state["step"] == (3 if ".generator." in names[id(parameter)] else 1)


def test_an_adapter_of_the_model_that_is_not_trained_stays_as_it_is(tokenizer, tmp_path):
    """Its `modules_to_save`, for which PEFT leaves `requires_grad` on, must not be decayed."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = add_adapters(toy_model(tokenizer), lora, ["shared", "other"])
    model.set_requires_grad(["other"], True)  # as `load_adapter(..., is_trainable=True)` does
    args = MultiRoleGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", generation_batch_size=4, num_generations=2, max_steps=1,
        max_completion_length=4, weight_decay=0.1, learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        model, Single(), lambda completions, **_: [float(i) for i in range(len(completions))], args,
        Dataset.from_dict({"prompt": ["one", "two"]}), processing_class=tokenizer,
    )  # fmt: skip
    before = snapshot(model)
    trainer.train()
    changed = moved(before, model)
    assert any("lm_head.modules_to_save.shared" in name for name in changed)
    assert all(".shared." in name for name in changed)


@pytest.mark.parametrize("active", ["teacher", "generator"])
def test_an_adapter_outside_the_map_is_not_in_the_optimizer(make_model, tokenizer, tmp_path, active):
    """huggingface/peft#3580: PEFT requires a gradient of the adapter that is active, whichever the policy map names."""
    model = make_model({"generator": "generator", "aggregator": "aggregator", "teacher": "teacher"})
    model.set_adapter(active)
    args = MultiRoleGRPOConfig(
        str(tmp_path),
        policy="ip",
        bf16=False,
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=8,
        max_steps=1,
    )
    trainer = MultiRoleGRPOTrainer(
        model, Voting(), no_reward, args, Dataset.from_dict({"prompt": ["1"]}), processing_class=tokenizer
    )
    held = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if ".generator." in name or ".aggregator." in name}
