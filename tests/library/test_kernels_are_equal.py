"""Kernels that are chosen by their time are equal up to rounding, and a run computes with the choice that it was started with."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from engine_checks import POLICY, TOLERANCE, make_requests, max_error, run_all
from torch import nn
from toy_qwen3 import toy_model

from multirole import trainer as trainer_module
from multirole.workflows import Voting
from multirole_cpu import kernels
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.kernels import Kernels, choose, choose_once, fastest, kernels_of, use

CHOICES = [
    Kernels(attention="groups", layers="packed", head="packed", n_logits=1000),
    Kernels(attention="heads"),
]


@pytest.mark.parametrize("chosen", CHOICES)
def test_every_kernel_samples_with_the_log_probs_of_transformers(make_model, tokenizer, chosen):
    """Groups of rows share prompts, and others do not; all adapters are served together."""
    model = make_model(POLICY)
    requests = [request for request in make_requests(24, len(tokenizer)) for _ in range(2)] * 2
    replies = []
    for each in (Kernels(), chosen):
        use(model.get_base_model(), each)
        engine = TransformersEngine(tokenizer.eos_token_id, max_rows=40)
        engine.publish(model, 0)
        replies.append(run_all(engine, requests))
    assert max_error(model, requests, replies[1]) <= TOLERANCE
    same = [one.token_ids == other.token_ids for one, other in zip(*replies, strict=True)]
    assert sum(same) >= len(same) - 1  # a uniform number may lie on a boundary


def large(tokenizer) -> nn.Module:
    """A model whose kernels are chosen, by the test's threshold."""
    return toy_model(tokenizer, 0, head_dim=16, max_position_embeddings=256)


@pytest.fixture
def any_size(monkeypatch, tmp_path) -> None:
    """Choose the kernels of the tests' small models, too, and keep no choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "MIN_PARAMETERS", 0)


def test_a_choice_is_timed_for_large_models_alone_and_draws_no_random_number(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, timed = large(tokenizer), []
    monkeypatch.setattr(kernels, "fastest", lambda candidates: timed.append(list(candidates)) or list(candidates)[-1])
    assert kernels_of(model) == Kernels() and not timed
    monkeypatch.setattr(kernels, "MIN_PARAMETERS", 0)
    state = torch.get_rng_state()
    chosen = kernels_of(large(tokenizer))
    assert torch.equal(torch.get_rng_state(), state)
    assert (chosen.attention, chosen.layers, chosen.head) == ("heads", "packed", "packed")
    assert ["products", "groups", "heads"] in timed


def test_a_machine_makes_a_choice_once(tokenizer, monkeypatch, tmp_path):
    """So that two runs of one seed on one machine are equal, whatever its load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choices = iter(CHOICES)
    monkeypatch.setattr(kernels, "choose", lambda base, is_half: next(choices))
    model = large(tokenizer)
    assert choose_once(model) == choose_once(model) == CHOICES[0]
    for damage, choice in zip(("{", "[]"), CHOICES[1:], strict=False):  # a damaged file is replaced
        (tmp_path / "multirole" / "kernels.json").write_text(damage)
        assert choose_once(model) == choose_once(model) == choice


def test_a_kernel_is_replaced_only_by_one_that_is_clearly_faster(monkeypatch):
    monkeypatch.setattr(kernels, "_seconds", lambda work: work())
    repeats = iter([9.0, 5.0, 1.0, 4.0, 9.0, 4.6])
    assert fastest({"first": lambda: next(repeats), "second": lambda: next(repeats)}) == "first"  # 1.0 against 4.6
    assert fastest({"first": lambda: 1.0, "second": lambda: 0.95}) == "first"
    assert fastest({"first": lambda: 1.0, "second": lambda: 0.85, "third": lambda: 0.8}) == "third"


def test_a_resumed_run_computes_with_the_kernels_of_its_checkpoint(any_size, make_library_trainer, monkeypatch):
    """Another choice of the machine at the second start changes nothing."""
    options = {"max_steps": 2, "save_steps": 1, "max_completion_length": 4, "generation_batch_size": 8}
    at_start, later = replace(CHOICES[0], scoring_head="tiles"), CHOICES[1]
    monkeypatch.setattr("multirole_cpu.passes.choose_once", lambda base, is_half: at_start)
    trainer = make_library_trainer(Voting(2), **options)
    trainer.train()
    expected = {name: value.clone() for name, value in trainer.peft_model.state_dict().items() if "lora" in name}
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["PolicyMap"]["args"]
    assert saved["kernels"] == asdict(at_start)
    monkeypatch.setattr("multirole_cpu.passes.choose_once", lambda base, is_half: later)
    resumed = make_library_trainer(Voting(2), **options)
    assert kernels_of(resumed.passes.base) == later
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert kernels_of(resumed.passes.base) == resumed.engine.kernels == at_start
    assert resumed.run_state.kernels == asdict(at_start)
    for name, value in expected.items():
        assert torch.equal(value, resumed.peft_model.state_dict()[name]), name


def test_every_process_computes_with_the_choice_of_the_first(any_size, make_library_trainer, monkeypatch):
    first = asdict(CHOICES[0])
    monkeypatch.setattr("multirole_cpu.passes.choose_once", lambda base, is_half: CHOICES[1])
    gather = trainer_module.gather_objects
    monkeypatch.setattr(
        trainer_module, "gather_objects", lambda value: [first] if isinstance(value, dict) and "attention" in value else gather(value)
    )  # fmt: skip
    trainer = make_library_trainer(Voting(2))
    assert kernels_of(trainer.passes.base) == CHOICES[0]
    assert trainer.run_state.kernels == first


def test_kernels_of_another_dtype_are_chosen_again_with_a_warning(any_size, tokenizer, caplog):
    """As on a processor without bfloat16, where a run continues that was started on one with it."""
    model = large(tokenizer)
    recorded = asdict(Kernels(dtype="bfloat16", attention="heads", layers="packed", head="bfloat16"))
    with caplog.at_level(logging.WARNING):
        used = kernels.from_record(recorded, model)
    assert used.dtype == "float32" and used.head != "bfloat16"
    assert "computes this model in bfloat16, and this one computes it in float32" in caplog.text
    assert kernels.from_record(asdict(CHOICES[0]) | {"of_a_later_version": 1}, model) == CHOICES[0]


def test_the_choice_is_one_of_the_kernels_that_there_are(tokenizer):
    """The real timing, once."""
    chosen = choose(large(tokenizer))
    assert chosen.attention in ("products", "groups", "heads") and chosen.head in ("plain", "packed")
    assert chosen.dtype == "float32" and (chosen.training_head, chosen.scoring_head) == ("attention", "attention")
