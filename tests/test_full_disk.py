"""A full disk costs a checkpoint, not the run; where a table cannot be written the run stops, and goes on exactly."""

import errno
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kill_run import same

from multirole.experiment import checkpoints as module
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import NotSaved, Saving, checkpoints, newest_whole
from multirole.experiment.folders import folder_of, is_done
from multirole.experiment.run import run_cell
from multirole.experiment.storage import NotWritten, write_table, write_text

FIELDS = {
    "workflow": "voting", "policy": "ip", "iterations": 5, "n_problems": 2, "n_episodes": 2, "n_validation": 4, "n_train": 8,
    "save_every": 1, "eval_every": 5, "max_response_tokens": 24, "learning_rate": 5e-3,
}  # fmt: skip
CELL = Cell(**FIELDS)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    return run_cell(CELL, tmp_path_factory.mktemp("unbroken"))


def fail_at(monkeypatch, name: str, *steps: int) -> None:
    """Let a function of `checkpoints` find the disk full when it saves one of these iterations."""
    real = getattr(module, name)
    monkeypatch.setattr(
        f"multirole.experiment.record.{name}", lambda folder, step, *rest: (full if step in steps else real)(folder, step, *rest)
    )


def test_a_failed_checkpoint_leaves_the_old_one_and_the_next_is_tried(unbroken, tmp_path, monkeypatch, caplog):
    fail_at(monkeypatch, "seal", 2, 3)
    folder = run_cell(CELL, tmp_path)
    assert "iteration 2 could not be saved" in caplog.text and "Training continues without it" in caplog.text
    assert not list(folder.glob("adapters/step_0000[23]")) and is_done(folder)
    for step in (2, 3):  # all that is missing
        shutil.copytree(unbroken / "adapters" / f"step_0000{step}", folder / "adapters" / f"step_0000{step}")
    assert same(unbroken, folder) == ""


def test_three_failures_in_a_row_stop_the_run_and_it_resumes_exactly(unbroken, tmp_path, monkeypatch):
    folder = folder_of(CELL, tmp_path)
    with monkeypatch.context() as patch:
        fail_at(patch, "seal", 2, 3, 4)
        with pytest.raises(NotSaved, match="nor could the 2 before it.*Free some space"):
            run_cell(CELL, tmp_path)
    assert newest_whole(folder).name == "checkpoint-1" and not list(folder.glob("checkpoints/staging/checkpoint-*"))
    assert same(unbroken, run_cell(CELL, tmp_path)) == ""


def test_a_run_whose_last_checkpoint_failed_is_not_done(unbroken, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fail_at(patch, "seal", 5)
        with pytest.raises(NotSaved, match="The last checkpoint could not be saved"):
            run_cell(CELL, tmp_path)
    assert not (folder_of(CELL, tmp_path) / "DONE").exists()
    assert same(unbroken, run_cell(CELL, tmp_path)) == ""


def test_a_table_that_cannot_be_written_stops_the_run_and_it_resumes_exactly(unbroken, tmp_path, monkeypatch):
    folder = folder_of(CELL, tmp_path)
    with monkeypatch.context() as patch:
        flushes, sync = itertools.count(1), os.fsync

        def fsync(descriptor: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/roles.parquet.tmp") and next(flushes) == 3:
                full()  # the metrics are ahead by then
            sync(descriptor)

        patch.setattr(os, "fsync", fsync)
        with pytest.raises(NotWritten, match=r"parquet could not be written.*Free some space.*same command"):
            run_cell(CELL, tmp_path)
    assert newest_whole(folder).name == "checkpoint-2" and not list(folder.glob("*.tmp"))
    assert same(unbroken, run_cell(CELL, tmp_path)) == ""


def test_an_error_that_no_process_of_several_may_keep_to_itself(tmp_path):
    saving = Saving(tmp_path)
    assert not saving.attempt(1, [full]) and not saving.attempt(2, [full]) and saving.attempt(3, [lambda: None])
    saving.require()
    assert saving.failures == 0
    with pytest.raises(KeyError):  # a bug is no full disk
        saving.attempt(4, [lambda: {}["x"]])


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


def test_a_disk_that_is_really_full(small_disk, unbroken, tmp_path, caplog, monkeypatch):
    folder = folder_of(CELL, small_disk)
    try:  # 8 MB hold the record, and two checkpoints but not their successor
        run_cell(CELL, small_disk)
    except (NotSaved, NotWritten) as error:
        assert "Free some space" in str(error)
    else:
        pytest.fail("the disk was not full")
    assert "could not be saved" in caplog.text and " MB free)" in caplog.text
    assert newest_whole(folder) == checkpoints(folder)[0] and not (folder / "DONE").exists()
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    assert same(unbroken, run_cell(CELL, small_disk)) == ""


def test_what_was_there_stays_and_nothing_half_written_does(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: write_text(tmp_path / "a.json", "new"), lambda: write_table(tmp_path / "a.json", [{"x": 1}])):
        with pytest.raises(NotWritten, match=r"a.json could not be written: .*No space left on device"):
            write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]
