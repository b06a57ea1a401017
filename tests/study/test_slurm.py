"""Two cells of the grid under a real SLURM on this machine: one is requeued half way and ends as if it had not been."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cells import compare_runs

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done

ROOT = Path(__file__).parents[2]
FIELDS = {
    "max_steps": 6, "n_problems": 2, "num_generations": 4, "save_steps": 2, "eval_steps": 3, "n_validation": 8, "n_train": 12,
    "warmup_steps": 1, "learning_rate": 5e-3,
}  # fmt: skip


SCRIPT = ROOT / "tests" / "support" / "two_cells_on_slurm.py"


def test_the_script_exists():
    """The test under SLURM is skipped on most machines."""
    assert SCRIPT.is_file()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons need root")
@pytest.mark.skipif(shutil.which("slurmctld") is None, reason="SLURM is not installed; docker/slurm.sh says how")
def test_a_requeued_cell_ends_as_an_unbroken_one(tmp_path):
    cells = [Cell("voting", policy, "math", **FIELDS) for policy in ("ip", "sp")]
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("Snakefile", "grid.yaml", "profiles", "notebooks"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, checkout / name)
    parameters = ", ".join(f"{name}: {value}" for name, value in FIELDS.items())
    config = ["seeds=[0]", "workflows=[voting]", "tasks=[math]", f"parameters={{{parameters}}}"]
    done = subprocess.run(
        [str(ROOT / "docker" / "slurm.sh"), sys.executable, str(SCRIPT), str(checkout), *(cell.id for cell in cells), "--",
         "--config", *config],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert "COMPLETED, restarts 1" in done.stdout and "COMPLETED, restarts 0" in done.stdout, done.stdout[-2000:]
    for cell in cells:
        folder = checkout / "runs" / "tiny-r" / cell.id
        assert is_done(folder)
        whole = run_cell(cell, tmp_path / "unbroken")
        assert (whole / "adapters" / "step_00006").is_dir()
        compare_runs(whole, folder)
