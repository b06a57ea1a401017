"""Jobs of the grid on a node of several GPUs: each sees its own, and a job of two never waits forever."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPUS = str(ROOT / "profiles" / "gpus.sh")


@pytest.fixture
def env(tmp_path):
    rest = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    return rest | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,3"}


def test_each_job_has_its_own_gpus(env, tmp_path):
    """A GPU is a folder that only one job can make at a time."""
    work = 'for g in ${CUDA_VISIBLE_DEVICES//,/ }; do mkdir "$TMPDIR/used$g" || exit 9; done; sleep 0.2; rmdir "$TMPDIR"/used*'
    one, two = (
        ["bash", GPUS, count, "bash", "-c", script] for count, script in (("1", work.replace("*", "$g")), ("2", work))
    )
    jobs = [subprocess.Popen(job, env=env) for job in (one, two, one, one, two, one)]
    assert [job.wait(60) for job in jobs] == [0] * 6
    assert not list(tmp_path.glob("used*"))


@pytest.mark.parametrize(("count", "shown"), [("1", "0"), ("2", "0,3")])
@pytest.mark.parametrize("changes", [{}, {"SLURM_JOB_ID": "7"}])
def test_a_job_sees_as_many_gpus_as_it_asked_for(env, changes, count, shown):
    job = ["bash", GPUS, count, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert subprocess.run(job, env=env | changes, capture_output=True, text=True, check=True).stdout == f"{shown}\n"


def test_gpus_that_slurm_has_assigned_to_the_job_are_not_locked(env, tmp_path):
    """With cgroups two jobs on one node both see a GPU 0, which is another one for each."""
    env |= {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"}
    subprocess.run(["bash", GPUS, "1", "true"], env=env, check=True)
    assert not list(tmp_path.glob("multirole-gpus-*"))


def test_too_many_gpus_are_refused(env):
    done = subprocess.run(["bash", GPUS, "3", "true"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "needs 3 GPUs, and 2 are visible" in done.stderr


@pytest.mark.slow
def test_the_grid_requests_gpus(tmp_path):
    """A training job takes `gpus`, an evaluation one; the embedded scale none."""
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--printshellcmds", "--nolock", "--snakefile", str(ROOT / "Snakefile"),
               "--configfile", str(ROOT / "grid.yaml"), "--directory", str(tmp_path), "--config", "scale=0.6b", "gpus=2"]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    asked = re.findall(r"exec (?:profiles/gpus.sh (\d) )?flock .*notebooks/(train|eval)_cell", done.stdout)
    assert set(asked) == {("2", "train"), ("1", "eval")}, done.stderr[-2000:]
