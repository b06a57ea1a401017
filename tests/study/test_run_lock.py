"""A second process is refused within seconds, and the lock of a dead process is free."""

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multirole_study.experiment import run_folder
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.run import run_cell, run_evaluation
from multirole_study.experiment.run_folder import LOCK, claim, folder_of
from multirole_study.experiment.settings import UserError

HOLD = """
import sys, time
from pathlib import Path
from multirole_study.experiment.run_folder import claim

with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.3)


@pytest.fixture
def hold():
    """hold(folder) -> a process that holds its lock."""
    started = []

    def start(folder: Path) -> subprocess.Popen:
        folder.mkdir(parents=True, exist_ok=True)
        started.append(subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_second_run_and_a_second_evaluation_are_refused(tmp_path, hold):
    cell = Cell("single", "sp", max_steps=1)
    evaluation = Evaluation(cell, "base")
    for folder, start in (
        (folder_of(cell, tmp_path), lambda: run_cell(cell, tmp_path)),
        (evaluation.folder(tmp_path), lambda: run_evaluation(evaluation, tmp_path)),
    ):
        hold(folder)
        began = time.monotonic()
        with pytest.raises(UserError, match="is in use by another process.*another results_dir"):
            start()
        assert time.monotonic() - began < 5, "before anything is loaded"
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_the_lock_of_a_killed_process_is_free(tmp_path, hold):
    first = hold(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (tmp_path / LOCK).exists()
    (tmp_path / "eval.parquet").touch()
    with claim(tmp_path):
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_a_waiting_process_gets_the_lock_when_the_holder_ends(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 60.0)
    first = hold(tmp_path)
    subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({first.pid}, 9)"])
    with claim(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock((tmp_path / LOCK).open(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_error_releases_the_lock(tmp_path):
    with pytest.raises(KeyError), claim(tmp_path):
        raise KeyError
    with claim(tmp_path):
        pass


def test_a_new_folder_of_a_refused_run_is_removed(tmp_path):
    with pytest.raises(UserError), claim(tmp_path / "tiny-r" / "new"):
        (tmp_path / "tiny-r" / "new" / "turns").mkdir()
        (tmp_path / "tiny-r" / "new" / "config.json").touch()
        raise UserError("no")
    assert not list(tmp_path.iterdir())


def test_only_an_empty_folder_is_removed(tmp_path):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "eval.parquet").touch()  # of a run whose config.json is lost
    for name in ("empty", "held"):
        with pytest.raises(UserError), claim(tmp_path / name):
            raise UserError("no")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["eval.parquet", "held"]
