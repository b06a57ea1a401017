"""What the paper's scales combine and the embedded scale does not: bfloat16, vLLM, several processes, the doctor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from trainers import table

from multirole.doctor.checks import CHECKS
from multirole.experiment.cell import Cell
from multirole.experiment.folders import is_done
from multirole.experiment.launch import Launch, spawn
from multirole.experiment.run import run_cell

HERE = Path(__file__).parent
FIELDS = {
    "workflow": "eval_opt", "policy": "ip", "task": "math", "iterations": 2, "n_problems": 2, "n_episodes": 4, "n_validation": 3,
    "n_train": 8, "eval_every": 2, "save_every": 2, "warmup_iterations": 1, "learning_rate": 5e-3, "old_logprobs": "recomputed",
}  # fmt: skip

pytestmark = pytest.mark.slow


def torchrun(script: str, parameters: dict, folder: Path) -> str:
    """Two processes on this machine; their standard output."""
    path = folder / "parameters.json"
    path.write_text(json.dumps(parameters))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(HERE / script),
        str(path),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def same_rollouts(one: Path, other: Path, logprobs: float) -> None:
    """The first iteration's texts are equal and its perplexities nearly: processes add floats in another order."""
    a, b = (table(folder, "roles").query("iteration == 1").reset_index() for folder in (one, other))
    pd.testing.assert_series_equal(a["tokens"], b["tokens"])
    assert (a["perplexity"] - b["perplexity"]).abs().max() < logprobs


def test_two_processes_with_vllm(tmp_path):
    pytest.importorskip("vllm")
    fields = FIELDS | {"engine": "vllm"}
    one = run_cell(Cell(**fields), tmp_path / "one")
    spawn(Cell(**fields).parameters(), Launch(results_dir=str(tmp_path), n_processes=2))
    other = tmp_path / "tiny-s" / one.name
    assert is_done(other) and json.loads((other / "provenance.json").read_text())["processes"] == 2
    same_rollouts(one, other, 1e-3)


def test_the_doctor_examines_two_processes(tmp_path):
    found = [
        json.loads(line) for line in torchrun("examine_here.py", FIELDS, tmp_path).splitlines() if line.startswith("{")
    ]
    assert {(one["rank"], one["check"]) for one in found} == {(rank, check) for rank in (0, 1) for check in CHECKS}
    assert [one for one in found if not one["holds"]] == []


def test_the_doctor_passes_vllm_in_bfloat16(tmp_path):
    """The first sight of its margins where engine and trainer round apart from each other, as on a GPU."""
    pytest.importorskip("vllm")
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(FIELDS | {"engine": "vllm", "dtype": "bfloat16", "temperature": 0.7}))
    done = subprocess.run(
        [sys.executable, str(HERE / "examine_here.py"), str(path)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(CHECKS), done.stderr[-3000:]
    assert [one for one in found if not one["holds"]] == []
