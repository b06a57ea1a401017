"""If a file cannot be written the run stops with a message, and the same command continues it exactly."""

import errno
import itertools
import os
import re
import shutil
import subprocess

import pytest
from cells import SMALL_RUN
from kill_run import same
from trainers import slow_but

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import checkpoints, folder_of, is_done, newest_intact
from multirole_study.experiment.storage import NotWritten, write_table, write_text

FIELDS = {
    "workflow": "voting", "policy": "ip", "max_steps": 5, "n_problems": 2, "num_generations": 2, "n_validation": 4, "n_train": 8,
    "save_steps": 1, "eval_steps": 5, "max_completion_length": 24, "learning_rate": 5e-3,
}  # fmt: skip
CELL = Cell(**FIELDS)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FILES = ("optimizer.pt", "record/roles.parquet.tmp", "checksums.json.tmp", "roles.parquet.tmp")


@pytest.mark.parametrize("name", slow_but(("optimizer.pt",), FILES))
def test_a_file_that_cannot_be_written_stops_the_run_and_it_resumes_exactly(name, finished, tmp_path, monkeypatch):
    folder = folder_of(SMALL_RUN, tmp_path)
    with monkeypatch.context() as patch:
        times, sync = itertools.count(1), os.fsync

        def fsync(descriptor: int) -> None:
            path = re.sub(r"\.[0-9a-f]{8}\.tmp$", ".tmp", os.readlink(f"/proc/self/fd/{descriptor}"))
            suffix = f"/{name}" if "/" in name or "parquet" not in name else f"{folder.name}/{name}"
            if path.endswith(suffix) and next(times) == 2:
                full()
            sync(descriptor)

        patch.setattr(os, "fsync", fsync)
        with pytest.raises(
            NotWritten, match=r"could not be written \(.*No space left .* MB free.*Free some space.*same command"
        ):
            run_cell(SMALL_RUN, tmp_path)
    assert newest_intact(folder) == checkpoints(folder)[0] and not is_done(folder)
    assert same(finished, run_cell(SMALL_RUN, tmp_path)) == ""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root mounts a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=False, capture_output=True
    ).returncode:
        pytest.skip("no file system may be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full(small_disk, tmp_path):
    unbroken = run_cell(CELL, tmp_path / "unbroken")
    folder = folder_of(CELL, small_disk)
    with pytest.raises(NotWritten, match=r"could not be written .* MB free\), so the run stops. Free some space"):
        run_cell(CELL, small_disk)  # 8 MB hold the record, and two checkpoints but not their successor
    assert newest_intact(folder) == checkpoints(folder)[0] and not (folder / "DONE").exists()
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    assert same(unbroken, run_cell(CELL, small_disk)) == ""


def test_an_existing_file_stays_and_no_partial_file_does(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: write_text(tmp_path / "a.json", "new"), lambda: write_table(tmp_path / "a.json", [{"x": 1}])):
        with pytest.raises(NotWritten, match=r"a.json could not be written \(.*No space left on device"):
            write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]
    with pytest.raises(NotWritten, match=r"b.json could not be written .* MB free"):
        write_text(tmp_path / "no" / "folder" / "b.json", "new")
