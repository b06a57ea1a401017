"""The doctor passes sound trainers, sees every injected fault by the right check, and leaves no trace."""

import random
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from faults import FAULTS
from peft import LoraConfig
from toy_qwen3 import toy_model, toy_tokenizer
from trainers import slow_but

from multirole import doctor
from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.doctor.bench import rate_at
from multirole.doctor.checks import CHECKS
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.experiment.trainer import make_trainer, to_dataset
from multirole.tasks.tiny_chain import TinyChain
from multirole.workflows import WORKFLOWS, Voting

SMALL = {
    "n_problems": 2, "n_episodes": 2, "max_response_tokens": 64, "n_train": 16, "n_validation": 2, "warmup_iterations": 2,
    "iterations": 3, "eval_every": 3, "save_every": 3,
}  # fmt: skip


def failed(cell: Cell, folder) -> dict[str, str]:
    findings = doctor.examine(make_trainer(cell, str(folder)), cell.make_task())
    return {finding.check: finding.measured for finding in findings if not finding.holds}


@pytest.mark.parametrize(
    ("kind", "options", "last"),
    [("linear", None, 0.0), ("cosine_with_min_lr", {"min_lr_rate": 0.1}, 0.1), ("reduce_lr_on_plateau", None, 1.0)],
)
def test_it_knows_the_rate_of_every_schedule_of_transformers(kind, options, last, tmp_path):
    args = MultiRoleGRPOConfig(
        str(tmp_path), lr_scheduler_type=kind, lr_scheduler_kwargs=options, max_steps=10, learning_rate=1.0, eval_strategy="steps",
        eval_steps=1, warmup_steps=0, bf16=False,
    )  # fmt: skip
    assert rate_at(args, 10) == pytest.approx(last, abs=1e-12)


ALWAYS = [("eval_opt", "sp", "code")]


@pytest.mark.parametrize(
    ("workflow", "policy", "task"), slow_but(ALWAYS, product(sorted(WORKFLOWS), ["sp", "ip"], ["math", "code"]))
)
def test_every_cell_passes(workflow, policy, task, tmp_path):
    assert failed(Cell(workflow, policy, task, **SMALL), tmp_path) == {}


ADDED = {"kl_anchor": 0.1, "process_reward": 0.5}
OPTIONS = [
    {"preset": "released_code"},
    {"dtype": "bfloat16", "temperature": 0.7},
    {"updates": "tokens", "step_tokens": 200, "old_logprobs": "recomputed"},
    ADDED,
]


@pytest.mark.parametrize("changes", slow_but([ADDED], OPTIONS))
def test_other_options_pass(changes, tmp_path):
    assert failed(Cell("eval_opt", "ip", **SMALL | changes), tmp_path) == {}


# one fault of the masks, the adapters, the engine and the loss; each takes 3 CPU-seconds
SOME = ["train_on_prompts", "wrong_adapter_at_update", "stale_prefix_cache", "kl_with_the_wrong_sign"]


@pytest.mark.parametrize("name", slow_but(SOME, FAULTS))
def test_a_fault_is_seen_by_its_check(name, monkeypatch, tmp_path):
    check, fault = FAULTS[name]
    monkeypatch.setattr(doctor, "CHECKS", {check: CHECKS[check]})
    fault(monkeypatch)
    assert list(failed(Cell("voting", "ip", temperature=0.7, **SMALL), tmp_path)) == [check]


def test_every_check_sees_a_fault():
    assert {check for check, _ in FAULTS.values()} == set(CHECKS)


def test_training_is_the_same_after_an_examination(tmp_path):
    weights = []
    for is_examined in (False, True):
        cell = Cell("voting", "ip", **SMALL | {"learning_rate": 1e-2})
        trainer = make_trainer(cell, str(tmp_path / str(is_examined)))
        before, generators = sorted(vars(trainer)), (random.getstate(), torch.get_rng_state().tolist())
        if is_examined:
            doctor.admit(trainer, cell.make_task())
            assert generators == (random.getstate(), torch.get_rng_state().tolist())
        assert sorted(vars(trainer)) == before
        trainer.train()
        weights.append({name: p.detach().clone() for name, p in trainer.peft_model.named_parameters()})
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_trainer_in_bfloat16_passes_and_is_left_as_it_was(tmp_path):
    """A stock trainer without a cell, at half precision with gradient checkpointing."""
    tokenizer = toy_tokenizer()
    trainer = MultiRoleGRPOTrainer(
        model=toy_model(tokenizer).to(torch.bfloat16),
        workflow=Voting(2),
        reward_funcs=lambda prompts, completions, **_: [float(len(text)) for text in completions],
        args=MultiRoleGRPOConfig(
            str(tmp_path), policy="ip", num_generations=2, generation_batch_size=4, per_device_train_batch_size=4,
            max_completion_length=16, max_steps=2, bf16=True, use_cpu=True, gradient_checkpointing=True, report_to="none",
        ),
        train_dataset=to_dataset(TinyChain().problems("train", 8)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )  # fmt: skip
    before = {name: (p.clone(), p.requires_grad, p.grad) for name, p in trainer.peft_model.named_parameters()}
    doctor.admit(trainer)
    for name, parameter in trainer.peft_model.named_parameters():
        assert parameter.equal(before[name][0]) and (parameter.requires_grad, parameter.grad) == before[name][1:]


def test_the_command_prints_a_table_and_fails(monkeypatch, capsys):
    FAULTS["moments_not_saved"][1](monkeypatch)
    given = SMALL | {"workflow": "voting", "policy": "ip"}
    assert doctor.run(*Cell.from_parameters(given)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "FAIL" in line] == ["resume"]
    assert sum(" pass " in line for line in lines) == len(CHECKS) - 1


def test_faults_are_refused_or_only_warned_of(monkeypatch, caplog):
    found = [doctor.Finding("adapters", False, "3 tensors of others", "0")]
    monkeypatch.setattr(doctor, "examine", lambda trainer, task: found)
    trainer = SimpleNamespace(is_sharded=False)
    with pytest.raises(RuntimeError, match="FAIL"):
        doctor.admit(trainer)
    doctor.admit(trainer, refuses=False)
    assert "The doctor found faults" in caplog.text and "FAIL" in caplog.text


def test_only_cells_of_the_papers_scales_are_examined_before_training():
    assert doctor.examiner(Cell("voting", "ip")) is None
    assert doctor.examiner(Cell("voting", "ip", scale="0.6b")) is not None
    assert doctor.examiner(Cell("voting", "ip", scale="0.6b"), Launch(doctor="off")) is None
