"""A second process is refused within seconds and told whose folder it is; a dead process's lock holds nothing."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multirole.experiment import folders
from multirole.experiment.cell import Cell
from multirole.experiment.evaluate import run_evaluation
from multirole.experiment.evaluation import Evaluation
from multirole.experiment.folders import LOCK, claim, folder_of
from multirole.experiment.run import run_cell
from multirole.experiment.settings import Refused

HOLD = """
import sys, time
from pathlib import Path
from multirole.experiment.folders import claim

with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr(folders, "PATIENCE", 0.3)


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


def test_a_second_run_and_a_second_evaluation_are_refused_and_told_by_whom(tmp_path, hold):
    cell = Cell("single", "sp", iterations=1)
    evaluation = Evaluation(cell, "base")
    for folder, start in (
        (folder_of(cell, tmp_path), lambda: run_cell(cell, tmp_path)),
        (evaluation.folder(tmp_path), lambda: run_evaluation(evaluation, tmp_path)),
    ):
        first = hold(folder)
        started = (folder / LOCK).read_text().split()[-1]
        began = time.monotonic()
        with pytest.raises(ValueError, match="is in use by") as error:
            start()
        assert time.monotonic() - began < 5, "before anything is loaded"
        for word in (f"process {first.pid} on {socket.gethostname()}", started, "another results_dir"):
            assert word in str(error.value)
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_a_killed_process_holds_nothing_and_is_named(tmp_path, hold, caplog):
    first = hold(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (tmp_path / LOCK).exists()
    with claim(tmp_path):
        assert f"process {os.getpid()} on {socket.gethostname()}" in (tmp_path / LOCK).read_text()
    assert f"process {first.pid}" in caplog.text and "is stale" in caplog.text
    assert not (tmp_path / LOCK).exists()


def test_who_waits_gets_it_when_the_holder_is_done(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(folders, "PATIENCE", 60.0)
    first = hold(tmp_path)
    subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({first.pid}, 9)"])
    with claim(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock((tmp_path / LOCK).open(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_error_lets_go(tmp_path):
    with pytest.raises(KeyError), claim(tmp_path):
        raise KeyError
    with claim(tmp_path):
        pass


def test_a_refused_run_takes_its_empty_folder_along_and_nothing_else(tmp_path):
    for folder in (tmp_path / "empty", tmp_path / "held"):
        folder.mkdir()
    (tmp_path / "held" / "eval.parquet").touch()  # of a run whose config.json is lost
    for folder in (tmp_path / "empty", tmp_path / "held"):
        with pytest.raises(Refused), claim(folder):
            (folder / "config.json").touch()
            raise Refused("no")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "eval.parquet", "held"]
