"""lora_rank=0: every linear layer of the decoder is trained whole, one float32 copy per adapter, under any policy map."""

import shutil
from dataclasses import replace

import pandas as pd
import pytest
import test_processes_equal_one as sharded
import torch
from conftest import make_episodes
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.lora import LoraLayer
from test_engine_matches_trainer import gaps
from test_resume_equals_unbroken import FIELDS, compare
from test_updates_stay_in_their_adapter import moved, snapshot
from transformers import TrainerCallback

from multirole import doctor
from multirole.core.policy import adapter_names
from multirole.core.rows import Row
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.diagnostics.remedies import load_adapters
from multirole.engines.qwen3 import PROJECTIONS
from multirole.experiment.cell import Cell
from multirole.experiment.evaluate import Evaluation, run_evaluation
from multirole.experiment.models import shape_of
from multirole.experiment.run import load_model, load_problems, make_engine, preflight, run_cell
from multirole.plan import plan
from multirole.plan_memory import GIB

MIXED = "orchestrator=x,worker=y,synthesizer=x"
SMALL = {"n_problems": 2, "n_episodes": 4, "n_train": 16, "n_validation": 4, "warmup_iterations": 0}


def build(cell: Cell, folder) -> MultiRoleGRPOTrainer:
    model, tokenizer = load_model(cell)
    problems, validation, _ = load_problems(cell, tokenizer)
    engine = make_engine(cell, tokenizer)
    return MultiRoleGRPOTrainer(cell, model, tokenizer, engine, problems, validation, str(folder))


def copies_of(model) -> dict[str, LNTuningLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LNTuningLayer)}


@pytest.mark.parametrize(("dtype", "policy"), [("float32", MIXED), ("bfloat16", "ip"), ("float32", "sp")])
def test_adapters_start_as_float32_copies_of_every_layer_that_lora_adapts(dtype, policy):
    cell = Cell("orch_workers", policy, dtype=dtype, lora_rank=0)
    model, tokenizer = load_model(cell)
    names, layers = adapter_names(cell.policy), copies_of(model)
    lora, _ = load_model(Cell("orch_workers", policy, lora_rank=4))
    assert list(layers) == [name for name, module in lora.named_modules() if isinstance(module, LoraLayer)]
    assert {name.rsplit(".", 1)[1] for name in layers} == set(PROJECTIONS)
    for layer in layers.values():
        assert list(layer.ln_tuning_layers) == names and layer.base_layer.weight.dtype == getattr(torch, dtype)
        for name in names:
            weight = layer.ln_tuning_layers[name].weight
            assert weight.dtype == torch.float32 and weight.equal(layer.base_layer.weight.float())
    model.set_requires_grad(names, True)  # as the trainer does
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == len(names) * shape_of(cell).adapter_parameters(0)
    assert len(trained) == len(names) * len(layers)
    ids = tokenizer("How many?", return_tensors="pt").input_ids
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        with model.disable_adapter():
            base = model(ids).logits
        for name in names:
            model.set_adapter(name)
            assert model(ids).logits.equal(base)


@pytest.mark.parametrize("policy", ["ip", "sp", MIXED])
def test_a_step_moves_the_copies_of_its_adapter_and_nothing_else(tmp_path, policy):
    cell = Cell("orch_workers", policy, lora_rank=0, **SMALL)
    trainer = build(cell, tmp_path)
    trainer.create_optimizer_and_scheduler(2)
    rows, start = trainer._rows(make_episodes(cell)), snapshot(trainer.model)
    for _ in range(2):  # the second step meets momentum of every adapter
        for adapter in trainer.adapters:
            owned, before = [row for row in rows if row.adapter == adapter], snapshot(trainer.model)
            trainer.optimizer_step(
                trainer.model, adapter, owned, len(owned), 1e-3, IterationDiagnostics(rows, 0.2, 0.28)
            )
            own = {f"{name}.ln_tuning_layers.{adapter}.weight" for name in copies_of(trainer.model)}
            assert moved(before, trainer.model) == own
    changed = moved(start, trainer.model)
    assert len(changed) == len(trainer.adapters) * len(copies_of(trainer.model))
    decayed = {id(p) for group in trainer.optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    assert decayed == {id(p) for name, p in trainer.model.named_parameters() if name in changed}


def test_the_engine_samples_with_the_copies_before_and_after_updates(tmp_path):
    cell = Cell("voting", "generator=x,aggregator=y", "math", lora_rank=0, temperature=0.8, **SMALL)
    trainer = build(cell, tmp_path)
    trainer.create_optimizer_and_scheduler(3)
    attempts, texts = [(problem, i) for problem in trainer.problems[:2] for i in range(4)], []
    for version in range(3):
        trainer.state.global_step = version
        episodes = trainer.play(attempts, 0)  # the same seeds at every version
        texts.append([turn.text for episode in episodes for turn in episode.turns])
        rows = [
            Row(row.episode, row.turn, row.adapter, 1.0 - i % 2 * 2.0) for i, row in enumerate(trainer._rows(episodes))
        ]
        mean, largest = gaps(trainer, rows)
        assert mean < 1e-6 and largest < 5e-5, f"version {version}: mean {mean:.1e}, max {largest:.1e}"
        for adapter in trainer.adapters:
            owned = [row for row in rows if row.adapter == adapter]
            trainer.optimizer_step(
                trainer.model, adapter, owned, len(owned), 1e-3, IterationDiagnostics(rows, 0.2, 0.28)
            )
        assert gaps(trainer, rows)[1] > 1e-3, "the update changed nothing"
    assert texts[0] != texts[1] != texts[2]


def test_the_gradient_of_a_layer_is_what_lora_sees_of_it(tmp_path):
    """y = W x + s B A x: at B = 0, dL/dB = s dL/dW A^T and dL/dA = 0, in every layer of the decoder."""
    found = {}
    for rank in (0, 4):
        cell = Cell("voting", "sp", lora_rank=rank, lora_alpha=12, **SMALL)
        trainer = build(cell, tmp_path / str(rank))
        trainer.create_optimizer_and_scheduler(1)
        rows = trainer._rows(make_episodes(cell))
        trainer.accumulate(trainer.model, "shared", rows, len(rows), IterationDiagnostics(rows, 0.2, 0.28))
        found[rank] = dict(trainer.model.named_modules())
    whole, lora = found[0], found[4]
    names = [name for name, module in lora.items() if isinstance(module, LoraLayer)]
    assert len(names) == 3 * len(PROJECTIONS)
    for name in names:
        gradient, a = whole[name].ln_tuning_layers["shared"].weight.grad, lora[name].lora_A["shared"].weight
        expected = 3.0 * gradient @ a.detach().T  # (out, r); s = alpha / r
        given = lora[name].lora_B["shared"].weight.grad
        assert (given - expected).norm() <= 1e-5 * expected.norm() and expected.norm() > 0
        assert not a.grad.any()


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_resumed_run_equals_an_unbroken_one_and_its_copies_are_evaluated(tmp_path):
    cell = Cell(**FIELDS | {"lora_rank": 0, "learning_rate": 1e-3})
    unbroken = run_cell(cell, tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, tmp_path / "broken", callbacks=[Interrupt()])
    folder = tmp_path / "broken" / "tiny-s" / cell.id
    assert {path.name for path in folder.glob("checkpoints/checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert run_cell(cell, tmp_path / "broken") == folder
    compare(unbroken, folder)
    played = pd.read_parquet(run_evaluation(Evaluation(cell, "own", "0,6"), tmp_path / "unbroken") / "eval.parquet")
    validated = pd.read_parquet(unbroken / "eval.parquet")
    index, columns = ["step", "problem"], ["correct", "answer"]
    played, validated = (table[table["step"].isin([0, 6])].set_index(index)[columns] for table in (played, validated))
    pd.testing.assert_frame_equal(played.loc[validated.index], validated)
    assert played.loc[0, "answer"].tolist() != played.loc[6, "answer"].tolist()


def test_saved_copies_are_read_back_and_lora_is_refused_for_them_and_they_for_lora(tmp_path):
    model, _ = load_model(Cell("voting", "ip", lora_rank=0))
    lora, _ = load_model(Cell("voting", "ip", lora_rank=4, lora_alpha=4))
    with torch.no_grad():
        for i, layer in enumerate(copies_of(model).values()):
            for name, own in layer.ln_tuning_layers.items():
                own.weight.add_(0.01 * (i + 1) * (1 if name == "generator" else -1))
    model.save_pretrained(tmp_path / "whole")
    lora.save_pretrained(tmp_path / "lora")
    other, _ = load_model(Cell("voting", "ip", lora_rank=0))
    assert len(moved(snapshot(model), other)) == 2 * len(copies_of(model))
    load_adapters(other, tmp_path / "whole")
    assert not moved(snapshot(model), other)
    with pytest.raises(ValueError, match="was trained with lora_rank 4, and this cell has 0"):
        load_adapters(other, tmp_path / "lora")
    with pytest.raises(ValueError, match="was trained with lora_rank 0, and this cell has 4"):
        load_adapters(lora, tmp_path / "whole")


def test_the_doctor_examines_it(tmp_path):
    cell = Cell("voting", "ip", lora_rank=0, max_response_tokens=24, **SMALL)
    findings = doctor.examine(build(cell, tmp_path))
    assert {finding.check: finding.proof for finding in findings if not finding.holds} == {}


def test_the_plan_counts_copies_by_hand():
    """Qwen3-0.6B: 28 layers of 15,728,640 weights, all of them trained; twice the arithmetic of LoRA's frozen layers backward."""
    cell = Cell("voting", "ip", scale="0.6b", lora_rank=0, engine="transformers", n_problems=1, n_episodes=2)
    found, n, low_rank = plan(cell, device_bytes=80 * GIB, mean_response=60), 28 * 15_728_640, 28 * 64 * 22_528
    assert found.parts["adapters, float32"] == (2 * 4 * n,) * 2
    assert found.parts["AdamW moments, float32"] == (4 * 4 * n,) * 2
    assert found.parts["gradients, float32"] == (0, 4 * 4 * n)  # three generators, and what is being accumulated
    blind = plan(replace(cell, diagnostics=False), device_bytes=80 * GIB)
    assert blind.parts["gradients, float32"] == (0, 2 * 4 * n)  # their sum alone
    lora = plan(Cell("voting", "ip", scale="0.6b", engine="transformers", n_problems=1, n_episodes=2),
                device_bytes=80 * GIB, mean_response=60)  # fmt: skip
    tokens = 2 * (3 * (160 + 60) + 160 + 3 * 60 + 60)
    # three passes forward at 2 and one backward at 4 are what LoRA's products cost besides
    assert found.operations["update"] - lora.operations["update"] == tokens * (2 * n - 10 * low_rank)


def test_an_engine_of_lora_adapters_is_refused(monkeypatch):
    for fields, given, instead in (
        ({"lora_rank": 0, "engine": "vllm"}, "vLLM serves LoRA", "engine='transformers'"),
        ({"lora_rank": -1}, "lora_rank=-1", "at least 0"),
    ):
        with pytest.raises(ValueError, match=given) as error:
            Cell("voting", "ip", **fields)
        assert instead in str(error.value)
    cell = Cell("voting", "ip", scale="0.6b", lora_rank=0)
    with pytest.raises(ValueError, match="engine='transformers'"):
        plan(cell, device_bytes=80 * GIB)  # "auto" is vLLM there
    plan(Cell("voting", "ip", scale="0.6b", lora_rank=0, engine="transformers"), device_bytes=80 * GIB)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match="engine='transformers'"):
        preflight(cell)


@pytest.mark.slow  # FSDP2 itself is tested with LoRA (test_processes_equal_one)
def test_fsdp2_trains_and_resumes_sharded_copies(tmp_path):
    fields = sharded.FIELDS | {"lora_rank": 0, "learning_rate": 1e-3}
    alone = run_cell(Cell(**fields), tmp_path / "alone")
    sharded.under_fsdp2(fields, tmp_path)
    folder = tmp_path / "tiny-s" / alone.name
    sharded.compare(alone, folder)
    (folder / "DONE").unlink()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-3")
    shutil.rmtree(folder / "adapters" / "step_00003")
    sharded.under_fsdp2(fields, tmp_path)  # from checkpoint-2
    sharded.compare(alone, folder)
