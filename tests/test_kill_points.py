"""SIGKILL right before any file operation of a run, or at any moment: the restarted run ends as one that nobody killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kill_run import spread

SCRIPT = Path(__file__).with_name("kill_run.py")
FIELDS = {
    "workflow": "voting", "policy": "ip", "iterations": 3, "n_problems": 2, "n_episodes": 2, "n_validation": 4, "n_train": 8,
    "save_every": 1, "eval_every": 1, "max_response_tokens": 24, "learning_rate": 5e-3,
}  # fmt: skip


def kill(folder: Path, points: str, moments: int) -> dict:
    fields = folder / "fields.json"
    fields.write_text(json.dumps(FIELDS))
    command = [sys.executable, SCRIPT, fields, folder / "scratch", "--points", points, "--random", str(moments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_some_points_and_moments(tmp_path):
    result = kill(tmp_path, "10", 2)
    assert result["failed"] == {} and result["equal"] == 12
    assert result["file_operations"] > 200, "fewer points than a run has files: they are no longer counted"


@pytest.mark.slow
def test_every_point(tmp_path):
    result = kill(tmp_path, "all", 0)
    assert result["failed"] == {} and result["equal"] == result["file_operations"]


def test_points_are_spread_from_the_first_to_the_last():
    assert spread(5, None) == [1, 2, 3, 4, 5] and spread(100, 4) == [1, 34, 67, 100] and spread(9, 0) == []
