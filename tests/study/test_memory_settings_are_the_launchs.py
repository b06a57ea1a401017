"""Memory settings belong to a launch: they change no run's name, may change on resume, and stand in the record."""

import json
from pathlib import Path

import pandas as pd
import pytest

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import MEMORY_SETTINGS, Launch
from multirole_study.experiment.run import run_cell
from multirole_study.paper.grid import Grid, Study

ROOT = Path(__file__).parents[2]
PACKED = sorted((ROOT / "results").rglob("runs.parquet"))


def test_no_memory_setting_is_a_field_of_a_cell():
    assert not set(MEMORY_SETTINGS) & set(Cell.model_fields)
    values = {
        "micro_batch_tokens": 512,
        "gradient_checkpointing": True,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_num_seqs": 8,
    }
    cell, launch = Cell.from_parameters({"workflow": "voting", "policy": "ip"} | values)
    assert cell.id == Cell("voting", "ip").id == "voting-ip-math-s0"
    assert launch.memory("tiny-r") == values | {"vllm_max_num_batched_tokens": None}
    assert [Launch().pass_tokens(scale) for scale in ("tiny-r", "smollm2", "4b")] == [1024, 4096, 40960]


@pytest.mark.parametrize("path", PACKED, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_committed_runs_keep_their_names_and_stay_apart(path):
    """Those of before the move, whose records have `micro_batch_tokens`, included."""
    runs = pd.read_parquet(path, columns=["run", "settings"])
    settings = [json.loads(text) for text in runs["settings"]]
    ids = [Cell.from_record(record.get("cell", record)).id for record in settings]
    assert ids == [run.rpartition("/")[2] for run in runs["run"]] and runs["run"].is_unique


def test_the_a_a_arm_resolves_to_its_committed_runs():
    """The variant's treatment is a launch setting: it is in the names of its runs, and in what their notebooks get."""
    study = Study.read(ROOT / "results" / "tiny-r")
    arm = [cell for name, _, cell in study.runs("aa")]
    assert arm and {cell.id for cell in arm} <= set(pd.read_parquet(ROOT / "results/tiny-r/runs.parquet")["run"])
    for cell in arm:
        rebuilt, launch = Cell.from_parameters(study.parameters_of(cell))
        assert rebuilt.id == cell.id != study.grid.cell("voting", "ip", "math", cell.seed).id
        assert rebuilt.launched(launch).micro_batch_tokens == 512 != launch.micro_batch_tokens
        assert cell.to_dict()["micro_batch_tokens"] == 512


def test_a_grid_with_other_memory_has_the_same_runs():
    grid = Grid("tiny-r", parameters={"micro_batch_tokens": 256})
    assert [cell.id for cell in grid.cells()] == [cell.id for cell in Grid("tiny-r").cells()]
    assert Cell.from_parameters(grid.parameters_of(grid.cells()[0]))[1].micro_batch_tokens == 256


def test_a_treatment_must_be_a_memory_setting():
    with pytest.raises(ValueError, match=r"`fixed_launch` must set some of micro_batch_tokens, .*got 'seed=1'"):
        Cell("voting", "ip", fixed_launch="seed=1")
    assert Cell("voting", "ip", fixed_launch="micro_batch_tokens=512").sibling("eval_opt", "sp").treatment == {
        "micro_batch_tokens": 512
    }


def test_a_resumed_run_may_have_other_memory_settings_and_records_both(tmp_path):
    """test_processes_equal_one resumes one after it ran out of memory."""
    cell = Cell(
        "single", "sp", max_steps=1, n_problems=2, num_generations=2, n_validation=2, n_train=4, max_completion_length=8
    )
    folder = run_cell(cell, Launch(results_dir=str(tmp_path), micro_batch_tokens=300))
    assert folder.name == cell.id and "micro_batch_tokens" not in json.loads((folder / "config.json").read_text())
    assert json.loads((folder / "provenance.json").read_text())["memory"]["micro_batch_tokens"] == 300
