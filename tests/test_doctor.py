"""The doctor passes every healthy cell, sees every injected fault by the right check, and leaves no trace."""

import random

import pandas as pd
import pytest
import torch
from faults import FAULTS, sandbox_stops_nothing
from safetensors.torch import load_file
from toy_qwen3 import toy_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from multirole import doctor
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.doctor import command
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import staging
from multirole.experiment.record import Recorder, open_folder
from multirole.experiment.run import load_model, load_problems, make_engine
from multirole.inspector.report import load
from multirole.workflows import WORKFLOWS

SMALL = {
    "n_problems": 2, "n_episodes": 2, "max_response_tokens": 24, "n_train": 16, "n_validation": 2, "warmup_iterations": 2,
    "iterations": 3, "eval_every": 3, "save_every": 3,
}  # fmt: skip


def build(cell, folder, recorder=None):
    model, tokenizer = load_model(cell)
    problems, validation, _ = load_problems(cell, tokenizer)
    engine = make_engine(cell, tokenizer)
    return MultiRoleGRPOTrainer(cell, model, tokenizer, engine, problems, validation, str(folder), recorder=recorder)


def failed(trainer):
    return {finding.check: finding.proof for finding in doctor.examine(trainer) if not finding.holds}


@pytest.mark.parametrize("task", ["math", "code"])
@pytest.mark.parametrize("policy", ["sp", "ip"])
@pytest.mark.parametrize("workflow", list(WORKFLOWS))
def test_a_healthy_cell_passes(workflow, policy, task, tmp_path):
    findings = doctor.examine(build(Cell(workflow, policy, task, **SMALL), tmp_path))
    assert {finding.check: finding.proof for finding in findings if not finding.holds} == {}
    assert len(findings) == (16 if task == "code" else 15)


@pytest.mark.parametrize("changes", [
    {"preset": "released_code", "old_logprobs": "recomputed"},
    {"updates": "one", "temperature": 0.7, "n_episodes": 5},
    {"updates": "tokens", "step_tokens": 100, "loss_aggregation": "token", "advantage_norm": "leave_one_out"},
    {"loss_aggregation": "dr_grpo", "advantage_norm": "agent", "advantage_group": "role_round", "balance_roles": 1.0},
])  # fmt: skip
def test_other_options_pass(changes, tmp_path):
    assert failed(build(Cell("eval_opt", "ip", **SMALL | changes), tmp_path)) == {}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_seen_by_its_check(name, monkeypatch, tmp_path):
    check, fault = FAULTS[name]
    monkeypatch.setattr(doctor, "CHECKS", {check: doctor.CHECKS[check]})  # the others would take twice the time
    fault(monkeypatch)
    found = failed(build(Cell("voting", "ip", temperature=0.7, **SMALL), tmp_path))
    assert check in found and "Error" not in found[check], found


def test_a_sandbox_that_stops_nothing_is_seen(monkeypatch, tmp_path):
    sandbox_stops_nothing(monkeypatch)
    assert list(failed(build(Cell("single", "sp", "code", **SMALL), tmp_path))) == ["sandbox"]


def test_a_run_is_the_same_with_the_doctor_at_its_start(tmp_path):
    folders = []
    for with_doctor in (False, True):
        cell = Cell("voting", "ip", **SMALL | {"learning_rate": 1e-2})
        folder = open_folder(cell, tmp_path / str(with_doctor))
        trainer = build(cell, staging(folder), Recorder(folder))
        before = trainer.cell, sorted(vars(trainer)), trainer.task, trainer.rollout.engine, trainer.optimizer
        if with_doctor:
            generators = random.getstate(), torch.get_rng_state().tolist()
            assert failed(trainer) == {}
            assert generators == (random.getstate(), torch.get_rng_state().tolist())
        assert before == (trainer.cell, sorted(vars(trainer)), trainer.task, trainer.rollout.engine, trainer.optimizer)
        trainer.train()
        trainer.recorder.flush()
        folders.append(folder)
    for table in ("metrics", "roles", "ledger", "eval"):
        one, other = (load(folder, table) for folder in folders)
        seconds = [name for name in one if name.endswith("seconds")]
        pd.testing.assert_frame_equal(one.drop(columns=seconds), other.drop(columns=seconds))
    names = [path.relative_to(folders[0]) for path in folders[0].glob("adapters/*/*/*.safetensors")]
    assert len(names) == 2
    for name in names:
        one, other = (load_file(folder / name) for folder in folders)
        assert all(one[key].equal(other[key]) for key in one)


def test_a_bfloat16_cell_of_a_paper_scale_passes_and_is_left_as_it_was(tmp_path):
    tokenizer = toy_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=40960,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "What is {n} + {n}?", "solution": "{2 * n}"}}\n' for n in range(40)))
    cell = Cell("voting", "ip", "math", "0.6b", model=str(tmp_path / "toy"), data=str(rows), n_problems=2, n_episodes=2,
                lora_rank=4, max_response_tokens=16, max_prompt_tokens=3000)  # fmt: skip
    trainer = build(cell, tmp_path / "out")
    model = trainer.model
    before = {name: (p.clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    doctor.admit(trainer)
    for name, parameter in model.named_parameters():
        assert parameter.equal(before[name][0]) and (parameter.requires_grad, parameter.grad) == before[name][1:]
    assert not model.get_base_model().is_gradient_checkpointing


def test_the_command_names_the_check_and_fails(monkeypatch, capsys):
    FAULTS["schedule_ignored"][1](monkeypatch)
    small = [word for name, value in SMALL.items() for word in ("-p", name, str(value))]
    assert command.main(small) == 1
    said = capsys.readouterr().out
    assert "workflow=voting, policy=ip, task=math, scale=tiny-s by default" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("FAIL")] == ["optimizer"]
    assert command.main(["-p", "workflow", "votng"]) == 2


def test_a_run_that_would_train_wrongly_is_not_admitted(monkeypatch, tmp_path):
    FAULTS["wrong_adapter_at_update"][1](monkeypatch)
    with pytest.raises(RuntimeError, match="adapter isolation"):
        doctor.admit(build(Cell("voting", "ip", **SMALL), tmp_path))
