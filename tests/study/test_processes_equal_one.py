"""Two processes, data-parallel or sharded by FSDP2, train what one process trains, and stop together if the run diverges."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import processes
import pytest
import torch
from cells import compare_runs, run_sharded
from trainers import table

from multirole.trainer import MultiRoleGRPOTrainer
from multirole.update.passes.model_passes import ModelPasses
from multirole_study import __main__ as command_line
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import Launch, spawn
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done, outcome_of

FIELDS = {  # ragged numbers of turns, and of micro-batches per role and process
    "workflow": "eval_opt", "policy": "ip", "task": "math", "max_steps": 3, "n_problems": 2, "num_generations": 5,
    "n_validation": 3, "n_train": 4, "eval_steps": 3, "save_steps": 1, "warmup_steps": 1, "learning_rate": 5e-3,
    "old_logprobs": "recomputed", "max_completion_length": 40,
}  # fmt: skip
SMALL_PASSES = {"micro_batch_tokens": 512}


def compare(one: Path, other: Path) -> None:
    """Compare two runs up to the rounding of float additions in another order, and check that their adapters were trained."""
    compare_runs(one, other, atol=1e-4)
    assert (table(one, "ledger")["grad_norm"] > 0).sum() >= 4
    assert len(list(one.glob("adapters/step_00003/*/*.safetensors"))) == 2


@pytest.fixture(scope="module")
def run_of_one_process(tmp_path_factory) -> Path:
    return run_cell(Cell(**FIELDS), Launch(results_dir=str(tmp_path_factory.mktemp("alone")), **SMALL_PASSES))


def torchrun(command: list[str]) -> None:
    """Run a launcher's command in forked processes."""
    _, _, launcher, _, n_processes, patience, *rest = command
    assert launcher == "torch.distributed.run" and rest[:3] == ["-m", "multirole_study", "train"]
    assert patience == "--shutdown-timeout=900"  # an iteration takes longer than torchrun's 30 s after a signal
    log = Path(rest[-1]).with_name("log")
    codes = processes.run_together(int(n_processes.rpartition("=")[2]), log, command_line.train, rest[3:])
    assert set(codes) == {0}, Path(f"{log}.0").read_text()[-3000:]


def test_two_processes(run_of_one_process, tmp_path):
    spawn(Cell(**FIELDS).parameters(), Launch(results_dir=str(tmp_path), n_processes=2, **SMALL_PASSES), torchrun)
    other = tmp_path / "tiny-r" / run_of_one_process.name
    assert is_done(other) and json.loads((other / "provenance.json").read_text())["processes"] == 2
    compare(run_of_one_process, other)


@pytest.mark.slow
def test_two_processes_continue_a_nearly_finished_run(run_of_one_process, tmp_path):
    launch = Launch(results_dir=str(tmp_path), n_processes=2, **SMALL_PASSES)
    spawn(Cell(**FIELDS).parameters(), launch, torchrun)
    folder = tmp_path / "tiny-r" / run_of_one_process.name
    for lost, start in ((), "checkpoint-3"), (("checkpoints/checkpoint-3", "adapters/step_00003"), "checkpoint-2"):
        for name in lost:
            shutil.rmtree(folder / name)
        (folder / "DONE").unlink()
        spawn(Cell(**FIELDS).parameters(), launch, torchrun)
        assert json.loads((folder / "provenance.json").read_text())["resumed"][-1]["from"] == start
        compare(run_of_one_process, folder)


def under_fsdp2(parameters: dict, folder: Path) -> None:
    log = folder / "log"
    fields = parameters | SMALL_PASSES | {"results_dir": str(folder), "sharding": "fsdp2"}
    assert processes.run_together(2, log, run_sharded, fields) == [0, 0], Path(f"{log}.0").read_text()[-3000:]


@pytest.mark.slow
def test_two_processes_sharded_by_fsdp2_and_resumed(run_of_one_process, tmp_path):
    under_fsdp2(FIELDS, tmp_path)
    folder = tmp_path / "tiny-r" / run_of_one_process.name
    compare(run_of_one_process, folder)
    (folder / "DONE").unlink()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-3")
    shutil.rmtree(folder / "adapters" / "step_00003")
    under_fsdp2(FIELDS, tmp_path)  # from checkpoint-2
    assert is_done(folder)
    compare(run_of_one_process, folder)


@pytest.mark.slow
def test_fsdp2_in_bfloat16_with_checkpointing_scores_what_one_process_scores(tmp_path):
    """A cell at a paper scale combines these options."""
    fields = FIELDS | {"dtype": "bfloat16", "max_steps": 2, "eval_steps": 2, "save_steps": 2}
    one = run_cell(Cell(**fields), Launch(results_dir=str(tmp_path / "one"), **SMALL_PASSES))
    under_fsdp2(fields | {"gradient_checkpointing": True}, tmp_path)
    other = tmp_path / "tiny-r" / one.name
    a, b = table(one, "roles"), table(other, "roles")
    # the first iteration's rollouts are the same; one process rounds less, as its residual stream is float32
    first = a["iteration"] == 1
    pd.testing.assert_series_equal(a[first]["tokens"], b[first]["tokens"])
    assert b[first]["perplexity"].to_numpy() == pytest.approx(a[first]["perplexity"].to_numpy(), rel=0.02)


@pytest.mark.slow
def test_a_failing_process_ends_the_run_and_says_why(tmp_path, capfd):
    """The real torchrun."""
    cell = Cell(**FIELDS)
    broken = cell.parameters() | {"n_problems": 3}  # cannot be shared by two
    with pytest.raises(subprocess.CalledProcessError):
        spawn(broken, Launch(results_dir=str(tmp_path), n_processes=2))
    assert "`n_problems` must be a multiple of the 2 processes" in capfd.readouterr().err


def run_with_a_bad_row(parameters: dict) -> None:
    """A run in which one row of the second iteration has the advantage NaN: one process computes that row."""
    prepare = MultiRoleGRPOTrainer.prepare_rows

    def prepare_rows(trainer, episodes):
        rows = prepare(trainer, episodes)
        if trainer.state.global_step == 1:
            rows[0].advantage = float("nan")
        return rows

    MultiRoleGRPOTrainer.prepare_rows = prepare_rows
    if parameters["sharding"] == "fsdp2":
        run_sharded(parameters)
    else:
        run_cell(*Cell.from_parameters(parameters))


@pytest.mark.parametrize("sharding", ["none", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_on_one_process_ends_all(sharding, tmp_path):
    cell = Cell(**FIELDS | {"old_logprobs": "sampled", "beta": 0.0})
    fields = cell.parameters() | SMALL_PASSES | {"results_dir": str(tmp_path), "sharding": sharding}
    log = tmp_path / "log"
    assert processes.run_together(2, log, run_with_a_bad_row, fields) == [0, 0], Path(f"{log}.0").read_text()[-3000:]
    (folder,) = (tmp_path / "tiny-r").iterdir()
    outcome = outcome_of(folder)
    assert is_done(folder) and outcome["state"] == "diverged" and outcome["iteration"] == 2
    assert "The loss is nan" in outcome["reason"] and "'generator'" in outcome["reason"]
    assert all("diverged" in Path(f"{log}.{rank}").read_text() for rank in (0, 1))


def run_with_too_little_memory(parameters: dict) -> None:
    """A run whose second process runs out of memory once in the first iteration, and with every row in the second one."""
    score, failed = ModelPasses.score, []

    def scored(passes, *args):
        is_second = os.environ["RANK"] == "1" and torch.is_grad_enabled()
        if is_second and (passes.iteration == 1 or not failed):
            failed.append(len(passes.last.rows))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return score(passes, *args)

    update = MultiRoleGRPOTrainer.update

    def counted(trainer, *args):
        trainer.passes.iteration = trainer.state.global_step
        return update(trainer, *args)

    ModelPasses.score, MultiRoleGRPOTrainer.update = scored, counted
    run_cell(*Cell.from_parameters(parameters))


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_recovers_or_ends_all_with_what_to_change(run_of_one_process, tmp_path):
    """The run is not finished: the same command continues it, with other memory settings if it must."""
    cell, log = Cell(**FIELDS), tmp_path / "log"
    fields = cell.parameters() | SMALL_PASSES | {"results_dir": str(tmp_path)}
    assert processes.run_together(2, log, run_with_too_little_memory, fields) != [0, 0]
    texts = [Path(f"{log}.{rank}").read_text() for rank in (0, 1)]
    assert (
        "are computed again with gradient checkpointing" in texts[1]
        and "Memory did not suffice for a pass" not in texts[0]
    )
    assert any("Process 1: Memory did not suffice for a single row" in text for text in texts)
    folder = tmp_path / "tiny-r" / run_of_one_process.name
    assert not is_done(folder) and len(list(folder.glob("checkpoints/checkpoint-1"))) == 1
    run_cell(cell, Launch(results_dir=str(tmp_path), micro_batch_tokens=256))
    record = json.loads((folder / "provenance.json").read_text())
    assert record["memory"]["micro_batch_tokens"] == 512 and record["resumed"][0]["memory"]["micro_batch_tokens"] == 256
    metrics = table(folder, "metrics")
    assert metrics["passes_out_of_memory"].fillna(0).tolist() == [1, 0, 0]
    metrics.drop(columns="passes_out_of_memory").to_parquet(folder / "metrics.parquet")
    compare(run_of_one_process, folder)
