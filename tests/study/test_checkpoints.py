"""A checkpoint is used only if every byte is as it was written. A run whose checkpoints cannot be read is never started over."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from multirole_study.experiment.record import Recorder
from multirole_study.experiment.run_folder import checkpoints, is_done, newest_intact, staging, write_done
from multirole_study.experiment.storage import damage, remove, write_table, write_text, writing

FILES = (
    "optimizer.pt",
    "a/adapter_model.safetensors",
    "record/metrics.parquet",
    "record/turns/step_00002.parquet",
    "checksums.json",
)
HARMS = {
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": lambda path: path.unlink(),
}


def iterate(recorder: Recorder, step: int, is_saved: bool = True) -> None:
    """Write one iteration of a made-up run: rows of two tables, an evaluation's turns and adapters, and a checkpoint."""
    folder = recorder.folder
    recorder.tables["metrics"].append({"iteration": step, "reward": step / 10})
    recorder.tables["eval"] += [{"step": step, "problem": name} for name in "ab"]
    write_table(folder / "turns" / f"step_{step:05d}.parquet", [{"step": step, "text": "x" * step}])
    if is_saved:
        for top in (staging(folder) / f"checkpoint-{step}", folder / "adapters" / f"step_{step:05d}"):
            (top / "a").mkdir(parents=True)
            (top / "a" / "adapter_model.safetensors").write_text(f"weights of {step}")
        (staging(folder) / f"checkpoint-{step}" / "optimizer.pt").write_text(f"moments of {step}")
        recorder.save(step)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that has saved iterations 1, 2 and 3."""
    (tmp_path / "turns").mkdir()
    write_text(tmp_path / "config.json", "{}")
    recorder = Recorder(tmp_path)
    for step in (1, 2, 3):
        iterate(recorder, step)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_two_checkpoints_and_all_adapters_are_kept(folder):
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-3", "checkpoint-2"]
    assert sorted(path.name for path in folder.glob("adapters/*")) == ["step_00001", "step_00002", "step_00003"]
    assert newest_intact(folder) == folder / "checkpoints" / "checkpoint-3"
    assert not list(folder.rglob("*.tmp")) and not list(staging(folder).glob("*"))


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(folder, name, harm, caplog):
    HARMS[harm](folder / "checkpoints" / "checkpoint-3" / name)
    before = everything(folder)
    assert newest_intact(folder) == folder / "checkpoints" / "checkpoint-2"
    assert f"checkpoint-3: {name}" in caplog.text and "continues from checkpoint-2" in caplog.text
    assert everything(folder) == before
    recorder = Recorder(folder)
    recorder.rewind(folder / "checkpoints" / "checkpoint-2")
    assert [row["iteration"] for row in recorder.tables["metrics"]] == [1, 2]
    assert [row["step"] for row in recorder.tables["eval"]] == [1, 1, 2, 2]
    iterate(recorder, 3)  # in the place of the damaged one
    assert damage(folder / "checkpoints" / "checkpoint-3" / "checksums.json") == ""


def test_if_all_checkpoints_are_damaged_nothing_is_overwritten(folder):
    for path in checkpoints(folder):
        HARMS["cut"](path / "optimizer.pt")
    before = everything(folder)
    with pytest.raises(
        ValueError, match=r"all of them are damaged.*checkpoint-3: optimizer.pt.*checkpoint-2: optimizer.pt"
    ):
        newest_intact(folder)
    assert everything(folder) == before


def test_an_unmarked_checkpoint_is_not_used(folder, caplog):
    (folder / "checkpoints" / "checkpoint-9").mkdir()
    assert newest_intact(folder).name == "checkpoint-3" and "checkpoint-9: checksums.json" in caplog.text


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["metrics.parquet", "eval.parquet", "turns/step_00002.parquet"])
def test_a_damaged_table_is_restored_from_the_checkpoint(folder, name, harm):
    before = everything(folder)
    HARMS[harm](folder / name)
    recorder = Recorder(folder)
    recorder.rewind(newest_intact(folder))
    assert everything(folder) == before
    assert [row["iteration"] for row in recorder.tables["metrics"]] == [1, 2, 3]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_adapter_is_trained_again_from_the_checkpoint_before_it(folder, harm, caplog):
    HARMS[harm](folder / "adapters" / "step_00003" / "a" / "adapter_model.safetensors")
    assert newest_intact(folder) == folder / "checkpoints" / "checkpoint-2"
    assert "adapters/step_00003/a/adapter_model.safetensors is" in caplog.text


@pytest.mark.parametrize("harm", HARMS)
def test_an_adapter_from_before_every_checkpoint_is_named_and_nothing_overwritten(folder, harm):
    HARMS[harm](folder / "adapters" / "step_00001" / "a" / "adapter_model.safetensors")
    before = everything(folder)
    with pytest.raises(ValueError, match="adapters/step_00001/a/adapter_model.safetensors is .* Restore the files"):
        newest_intact(folder)
    assert everything(folder) == before


def test_a_run_is_done_while_every_file_is_as_it_was(folder):
    write_done(folder)
    assert is_done(folder)
    for path in [
        *folder.glob("*.parquet"),
        *folder.glob("turns/*"),
        *folder.glob("adapters/*/*/*"),
        folder / "config.json",
    ]:
        content = path.read_bytes()
        for harm in HARMS.values():
            harm(path)
            assert not is_done(folder)
            path.write_bytes(content)
    assert is_done(folder)
    for nothing in ("{}", "", "[]", "null", '{"a"', '{"config.json": 3}'):
        (folder / "DONE").write_text(nothing)
        assert not is_done(folder)


def test_everything_later_than_the_checkpoint_is_removed(folder):
    recorder = Recorder(folder)
    recorder.rewind(newest_intact(folder))
    whole = everything(folder)
    iterate(recorder, 4, is_saved=False)
    write_table(folder / "metrics.parquet", recorder.tables["metrics"])
    write_table(folder / "skills.parquet", [{"step": 4}])
    (folder / "adapters" / "step_00004").mkdir()
    (folder / "adapters" / "step_00005.9abb73e6.tmp" / "generator").mkdir(parents=True)  # killed while it was written
    (folder / "ledger.parquet.tmp").write_text("half")
    (staging(folder) / "checkpoint-4").mkdir(parents=True)
    Recorder(folder).rewind(newest_intact(folder))
    assert everything(folder) == whole and not staging(folder).exists()


def test_tables_without_any_checkpoint_are_not_overwritten(folder):
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="holds tables and no checkpoints"):
        Recorder(folder).rewind(newest_intact(folder))
    (folder / "metrics.parquet").unlink()  # killed while the first one was saved
    Recorder(folder).rewind(None)
    assert not list(folder.glob("*.parquet")) and not list(folder.glob("turns/*"))


def test_processes_may_write_one_file_at_once(tmp_path):
    """Two `make study` that start together both write the study's grid.json."""
    path = tmp_path / "grid.json"
    with writing(path) as first:
        with writing(path) as second:
            first.write_text("first")
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_renamed_before_its_files_are_removed(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "file").write_text("")

    def stop(path: Path, **_: object) -> None:
        if path.exists():
            raise InterruptedError

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(InterruptedError):
        remove(tmp_path / "checkpoint-1")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1.tmp"]


def test_a_checkpoint_is_renamed_only_after_its_content_is_synced(folder, monkeypatch):
    synced, moved = set(), []

    def fsync(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").resolve())

    def replace(source: Path, target: Path) -> None:
        if target.parent.name == "checkpoints" and not target.suffix:
            moved.append(target.name)
            assert {path.resolve() for path in source.rglob("*")} <= synced
        source.rename(target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", replace)
    iterate(Recorder(folder), 4)
    assert moved == ["checkpoint-4"]


def test_a_column_that_the_first_row_lacks_is_written(tmp_path):
    """A metric may begin later in a run, and rows of an older version may lack one."""
    write_table(tmp_path / "t.parquet", [{"step": 0}, {"step": 1, "kl": 0.5}])
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == [{"step": 0, "kl": None}, {"step": 1, "kl": 0.5}]
