"""The doctor passes sound cells, detects every planted fault by the right check, and measures time and memory."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from pytest import MonkeyPatch
from trainers import slow_but
from trl.trainer.utils import add_fused_lm_head

from multirole import trainer, trl_parts
from multirole.inputs.adapters import adapter_parameters
from multirole.rollout.player import Player
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.types import Reward
from multirole.update import rows
from multirole.update.passes import logprobs, model_passes, prefix_tree
from multirole.update.rows import left_aligned
from multirole.workflows import WORKFLOWS
from multirole_cpu.engine import TransformersEngine
from multirole_study import doctor
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch
from multirole_study.tasks import Task
from multirole_study.tasks.tiny_chain import TinyChain

SMALL = {"n_problems": 2, "num_generations": 2, "max_completion_length": 24, "n_train": 16, "n_validation": 2}

Fault = Callable[[MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Fault]] = {}
"""name -> (check, function that plants the fault). All act on Voting with two adapters, on tiny_chain at temperature 0.7."""


def sees(check: str) -> Callable[[Fault], Fault]:
    """Register a fault under the check that must detect it."""

    def add(fault: Fault) -> Fault:
        FAULTS[fault.__name__] = (check, fault)
        return fault

    return add


def around(patch: MonkeyPatch, owner: object, name: str, wrapper: Callable) -> None:
    """Replace `owner.name` by a function that gets the original first."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def other(adapter: str) -> str:
    return {"generator": "aggregator", "aggregator": "generator"}[adapter]


# ---- what the engine serves


@sees("engine")
def another_adapter_samples(patch):
    around(
        patch, TransformersEngine, "add",
        lambda add, self, key, request: add(self, key, replace(request, adapter=other(request.adapter))),
    )  # fmt: skip


@sees("engine")
def an_adapter_is_not_published(patch):
    def publish(original, self, *args):
        original(self, *args)
        self.weights["aggregator"] = self.weights[None]

    around(patch, TransformersEngine, "publish", publish)


@sees("engine")
def pads_are_attended(patch):
    def score(model, input_ids, attention_mask, n_completion, multiple, watch):
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        out = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        return out.log_probs[:, -n_completion:], out.entropy[:, -n_completion:]

    patch.setattr(model_passes, "score", score)


@sees("engine")
def the_trainer_forgets_the_temperature(patch):
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        add_fused_lm_head(self.peft_model.get_base_model(), 1.0, outputs=("log_probs", "entropy"))

    around(patch, MultiRoleGRPOTrainer, "__init__", init)


@sees("engine")
def sampled_at_another_temperature(patch):
    def init(original, self, rollout, sampling, free_memory):
        original(self, rollout, replace(sampling, temperature=1.0), free_memory)

    around(patch, Player, "__init__", init)


@sees("published weights")
def the_engine_keeps_its_first_weights(patch):
    held = {}

    def publish(original, self, *args):
        original(self, *args)
        held.update(held or self.weights)
        self.weights = dict(held)

    around(patch, TransformersEngine, "publish", publish)


@sees("published weights")
def a_stale_prefix_cache(patch):
    held = {}

    def publish(original, self, *args):
        original(self, *args)
        held.update(held or self.weights)

    def prefill(original, self, *args):
        present, self.weights = self.weights, held
        original(self, *args)
        self.weights = present

    around(patch, TransformersEngine, "publish", publish)
    around(patch, TransformersEngine, "_prefill", prefill)


# ---- which tokens and rows are trained


@sees("masks")
def prompts_are_trained(patch):
    def score(model, input_ids, attention_mask, n_completion, multiple, watch):
        ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion, multiple)
        everything = ids.masked_fill((labels == -100) & (labels.ne(-100).cumsum(1) > 0), -100)  # but pads
        out = model(input_ids=ids, labels=everything, fused_lm_head=True)
        prompts = (out.log_probs * (labels == -100)[:, 1:]).sum(1, keepdim=True)  # (N, 1)
        logps = out.log_probs.gather(1, at) + prompts - prompts.detach()  # the values stay as they are
        return logps.masked_fill(~inside, 0.0), out.entropy.gather(1, at).masked_fill(~inside, 0.0)

    patch.setattr(model_passes, "score", score)


@sees("masks")
def masks_are_shifted_by_one(patch):
    def shifted(left_aligned, ids, mask, *args):
        ids, labels, at, inside = left_aligned(ids, mask, *args)
        is_first_check = mask.all()  # the check of the head before training would refuse the model
        return ids, labels, at if is_first_check else (at + 1).clamp(max=ids.size(1) - 2), inside

    around(patch, logprobs, "left_aligned", shifted)


@sees("masks")
def the_end_of_turn_is_not_trained(patch):
    def collated(collate, *args):
        batch = collate(*args)
        mask = batch["completion_mask"]
        ends = mask.cumsum(1) == mask.sum(1, keepdim=True)
        return batch | {"completion_mask": mask.masked_fill(ends & (mask.sum(1, keepdim=True) > 1), 0)}

    around(patch, trainer, "collate", collated)


@sees("masks")
def a_row_is_lost(patch):
    around(patch, rows, "optimizer_steps", lambda cut, rows, *rest: cut(rows[1:], *rest))


@sees("masks")
def a_micro_batch_is_doubled(patch):
    around(patch, model_passes, "micro_batches", lambda cut, *args: cut(*args) + cut(*args)[:1])


# ---- which tensors move


@sees("adapters")
def a_step_moves_another_adapter(patch):
    def moved(compute_gradient, self, model, adapter, *rest):
        params, loss = compute_gradient(self, model, adapter, *rest)
        theirs = [p for _, p in adapter_parameters(self.peft_model, other(adapter))]
        for mine, its in zip(params, theirs, strict=True):
            its.grad, mine.grad = mine.grad, None
        return theirs, loss

    around(patch, MultiRoleGRPOTrainer, "compute_gradient", moved)


@sees("adapters")
def a_step_moves_all_adapters(patch):
    def filled(compute_gradient, self, *args):
        result = compute_gradient(self, *args)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return result

    around(patch, MultiRoleGRPOTrainer, "compute_gradient", filled)


@sees("adapters")
def the_base_is_trained(patch):
    def moved(step, self, *args):
        with torch.no_grad():
            self.peft_model.get_base_model().model.norm.weight.mul_(1.01)
        return step(self, *args)

    around(patch, MultiRoleGRPOTrainer, "optimizer_step", moved)


# ---- rewards and checkpoints


@sees("grading")
def everything_is_correct(patch):
    patch.setattr(TinyChain, "score", lambda self, problems, texts: [Reward(1.0, "correct", True) for _ in texts])


@sees("checkpoint")
def an_adapter_is_not_saved(patch):
    def save(original, *args, **kwargs):
        original(*args, **kwargs | {"selected_adapters": ["generator"]})

    around(patch, PeftModel, "save_pretrained", save)
    patch.setattr(MultiRoleGRPOTrainer, "_load_optimizer_and_scheduler", lambda *_: None)  # these would refuse it
    patch.setattr(trl_parts, "check_checkpoint", lambda *_: None)


@sees("checkpoint")
def moments_are_not_saved(patch):
    patch.setattr(MultiRoleGRPOTrainer, "_save_optimizer_and_scheduler", lambda *_: None)


@sees("memory")
def a_phase_takes_all_memory(patch):
    patch.setattr(doctor.PhasePeak, "bytes", lambda self: 2**60)


# ---- the tests


def failed(cell: Cell, folder) -> dict[str, str]:
    return failures(doctor.examine(cell, Launch(), str(folder))[0])


def failures(findings: dict) -> dict[str, str]:
    return {check: finding.measured for check, finding in findings.items() if not finding.holds}


ALWAYS = [("eval_opt", "sp", "code")]


@pytest.mark.parametrize(
    ("workflow", "policy", "task"), slow_but(ALWAYS, product(sorted(WORKFLOWS), ["sp", "ip"], ["math", "code"]))
)
def test_every_cell_passes_and_an_iteration_is_measured(workflow, policy, task, tmp_path):
    cell = Cell(workflow, policy, task, **SMALL)
    findings, measured = doctor.examine(cell, Launch(), str(tmp_path))
    assert failures(findings) == {}
    seconds = measured["rollout_seconds"] + measured["update_seconds"]
    assert measured["hours_of_training"] == pytest.approx(cell.max_steps * seconds / 3600) and seconds > 0
    assert 0.2 < measured["rollout_peak_gib"] < 16 and 0.2 < measured["update_peak_gib"] < 16


ADDED = {"beta": 0.1, "process_reward": 0.5}
OPTIONS = [
    {"preset": "released_code"},
    {"dtype": "bfloat16", "temperature": 0.7},
    {"updates": "tokens", "step_tokens": 200, "old_logprobs": "recomputed"},
    ADDED,
    {"policy": "generator=a,evaluator=frozen"},
    {"role_order": "generator,evaluator", "target_kl": 1e-9, "max_sampled_tokens": 10},
]


@pytest.mark.parametrize("changes", slow_but([], OPTIONS))
def test_other_options_pass(changes, tmp_path):
    assert failed(Cell("eval_opt", **{"policy": "ip"} | SMALL | changes), tmp_path) == {}


@pytest.fixture
def packs(monkeypatch):
    """Small models pack rows with shared prompts, too, as models above 10M parameters do."""
    monkeypatch.setattr(prefix_tree, "MIN_PARAMETERS", 0)


@pytest.mark.parametrize(
    ("workflow", "policy", "task"),
    slow_but([("voting", "sp", "math")], product(sorted(WORKFLOWS), ["sp", "ip"], ["math", "code"])),
)
def test_every_cell_passes_with_packed_rows(packs, workflow, policy, task, tmp_path, monkeypatch):
    """Rows of equal prompts, some of them with equal beginnings of their replies, whose outputs they share."""
    packed = []
    around(monkeypatch, model_passes, "pack", lambda pack, *args: packed.append(pack(*args)) or packed[-1])
    assert failed(Cell(workflow, policy, task, **SMALL | {"num_generations": 4}), tmp_path) == {}
    assert packed and all(sum(packing.blocks) < sum(map(len, packing.paths)) for packing in packed[:4])


@pytest.mark.parametrize(
    "name", slow_but(["the_end_of_turn_is_not_trained"], ["a_row_is_lost", "the_end_of_turn_is_not_trained"])
)
def test_a_fault_is_detected_in_packed_rows(packs, name, monkeypatch, tmp_path):
    check, fault = FAULTS[name]
    fault(monkeypatch)
    assert check in failed(Cell("voting", "ip", temperature=0.7, **SMALL), tmp_path)


SOME = ["a_stale_prefix_cache", "a_step_moves_another_adapter"]
"""Masks are those of the fault in packed rows."""


@pytest.mark.parametrize("name", slow_but(SOME, FAULTS))
def test_a_fault_is_detected_by_its_check(name, monkeypatch, tmp_path):
    check, fault = FAULTS[name]
    fault(monkeypatch)
    assert check in failed(Cell("voting", "ip", temperature=0.7, **SMALL), tmp_path)


def test_every_check_detects_a_fault():
    assert {check for check, _ in FAULTS.values()} == set(doctor.CHECKS)


def test_the_command_prints_findings_and_measurements_and_fails(monkeypatch, capsys):
    everything_is_correct(monkeypatch)
    cell = Cell("voting", "ip", **SMALL)
    planned = {"rollout": 2 * doctor.GIB, "update": 3 * doctor.GIB}
    assert doctor.run(cell, Launch(), planned) == 1
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "FAIL" in line] == ["grading"]
    assert sum(" pass " in line for line in printed.splitlines()) == len(doctor.CHECKS) - 1
    assert f"At that rate {cell.max_steps} iterations take" in printed and "disk" in printed
    assert re.search(r"rollout \d\.\d\d GiB \(planned 2\.00\), update \d\.\d\d GiB \(planned 3\.00\)\.", printed)


@pytest.mark.parametrize(
    ("task", "scale"), [*product(["math", "code"], ["tiny-r", "0.6b"]), ("code", "smollm2"), ("code", "qwen-0.5b")]
)
def test_every_built_in_task_has_an_answer_that_the_doctor_knows(task, scale):
    assert Cell("single", "sp", task, scale).make_task().name in doctor.TRIAL_ANSWERS


def test_a_task_of_the_user_s_is_not_graded_with_a_built_in_task_s_answers():
    rows = [{"prompt": "1+1?", "answer": "2"}]
    own = Task("functions", rows, rows, lambda completions, answer, **_: [0.0] * len(completions))
    finding = doctor.grading(SimpleNamespace(cell=Cell("single", "sp", own)))
    assert finding.holds and "a user-supplied task has no known answers" in finding.measured


def test_each_phase_has_a_separate_peak():
    """The phase that held 256 MiB more has the higher peak, even if it came first."""
    first = doctor.PhasePeak()
    held = torch.ones(2**26)  # 256 MiB
    with_it = first.bytes()
    del held
    second = doctor.PhasePeak()
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel does not let a process reset its peak")
    assert second.bytes() < with_it - 2**27


def test_the_peak_of_a_gpu_phase_includes_memory_outside_torch(monkeypatch):
    """30 GiB in use of which torch reserves 5; it then reserves 9 at most, so the phase peaks at 34 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * doctor.GIB, 80 * doctor.GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * doctor.GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 9 * doctor.GIB)
    assert doctor.PhasePeak().bytes() == 34 * doctor.GIB
