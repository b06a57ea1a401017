"""Manage a run's folder: its path, lock, completion marker and atomic checkpoints.

    LOCK                            held while a process writes here
    DONE                            sha256 of every file but checkpoints and measurements: the run is complete
    adapters/step_N/                the adapters of each evaluation; kept when the checkpoint is removed
    checkpoints/staging/            where the trainer writes the next checkpoint; nothing reads it
    checkpoints/checkpoint-N/       everything of iteration N, the tables and turns so far below `record/`; checksums.json, written
                                    last, has the sha256 of each file and of the adapters so far

A checkpoint is staged, hashed, synced and renamed. The newest two are kept in case one is damaged.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.old_names import with_current_names
from multirole_study.experiment.settings import UnfinishedRun, UserError, looked_in
from multirole_study.experiment.storage import checksums_of, damage, publish, remove, write_text

logger = logging.getLogger(__name__)

LOCK = "LOCK"
LOCK_SECONDS = 5.0  # seconds: the previous process may still be saving its last checkpoint
MANIFEST = "checksums.json"
N_KEPT = 2


def folder_of(cell: Cell, results_dir: str | Path) -> Path:
    """Return the run's folder, `<results_dir>/<scale>/<cell id>/`."""
    return Path(results_dir) / cell.scale / cell.id


def read_config(folder: Path, may_be_evaluation: bool = False) -> dict:
    """Read the run's settings, or those of an evaluation if it may be one, by their present names; ValueError for another folder."""
    path = folder / "config.json"
    if not path.is_file():
        why = "it has no config.json" if folder.is_dir() else f"there is no such folder{looked_in(folder)}"
        inside = sorted(path.parent for below in ("*", "*/*") for path in folder.glob(f"{below}/config.json"))
        example = next((run for run in inside if "evaluations" not in run.parts), "runs/tiny-r/voting-sp-math-s0")
        raise ValueError(f"{folder} is not the folder of a run: {why}. Give the folder of one run, such as {example}.")
    config = with_current_names(json.loads(path.read_text(encoding="utf-8")))
    if "cell" in config:
        config["cell"] = with_current_names(config["cell"])
    if "cell" in config and not may_be_evaluation:
        raise ValueError(
            f"{folder} is the folder of an evaluation. Give the folder of its run, such as runs/tiny-r/voting-sp-math-s0."
        )
    return config


def adapters_folder(run: Path, step: int) -> Path:
    """Return the folder of a run's adapters at an evaluated step."""
    return run / "adapters" / f"step_{step:05d}"


def saved_steps(run: Path) -> list[int]:
    """Return the steps whose adapters a run has kept, in ascending order."""
    return sorted(step_of(path) for path in run.glob("adapters/step_*") if path.suffix != ".tmp")


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Create a folder and hold its lock, a `flock` on the file `LOCK`.

    The system releases the lock when its holder dies. A new folder is removed again on UserError, unless it is an `UnfinishedRun`. Raises ValueError if the
    folder is not writable or another process holds the lock.
    """
    lock = FileLock(folder / LOCK, timeout=LOCK_SECONDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=0.1)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another process, and two processes cannot write one run. Wait for that process or end it; "
            "or write another results_dir."
        ) from None
    except OSError as error:
        raise ValueError(f"`results_dir` must be a folder that can be written to: {error}.") from error
    is_new = [path.name for path in folder.iterdir()] == [LOCK]
    try:
        yield
    except UserError as error:
        if is_new and not isinstance(error, UnfinishedRun):
            shutil.rmtree(folder)
        raise
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # while the lock is held, so that no other process's file is removed
        lock.release()
        for level in (folder, folder.parent):
            with suppress(OSError):  # not empty, or already removed
                level.rmdir()


@contextmanager
def open_folder(folder: Path, config: dict[str, object]) -> Iterator[None]:
    """Claim a results folder for this process. Raises ValueError if that fails or it has another configuration."""
    path = folder / "config.json"
    with claim(folder):
        try:
            differing = (
                differing_options(json.loads(path.read_text()), json.loads(json.dumps(config))) if path.exists() else []
            )
        except (ValueError, AttributeError):
            differing = [path.name]
        if differing:
            raise ValueError(
                f"{folder} holds a run with another configuration ({', '.join(differing)}). Write another results_dir, or move that "
                "folder away."
            )
        yield


def differing_options(stored: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    """Return the options, including a cell's, that have different values in two configurations.

    An option that only one of them names was added or removed by a version and has its default: other values would change the
    folder's name.
    """
    if isinstance(stored.get("cell"), dict):  # an evaluation's configuration
        inner = differing_options(stored["cell"], requested["cell"])
        stored, requested = stored | {"cell": None}, requested | {"cell": None}
    else:
        inner = []
    stored, requested = with_current_names(stored), with_current_names(requested)
    return inner + [name for name in requested if name in stored and stored[name] != requested[name]]


SIGNAL_FILE, CREDIT_FILE = "gradient_signal.parquet", "credit_accuracy.parquet"
ROLE_VALUE_FILE, TURN_EFFECTS_FILE = "role_value.parquet", "turn_effects.parquet"
MEASUREMENTS = (SIGNAL_FILE, CREDIT_FILE, ROLE_VALUE_FILE, TURN_EFFECTS_FILE)
"""Files in a run's folder that commands add after training, or change."""


def read_provenance(folder: Path, may_be_missing: bool = False) -> dict:
    """Read where a run came from; empty without a record if that may be missing."""
    path = folder / "provenance.json"
    return {} if may_be_missing and not path.is_file() else json.loads(path.read_text(encoding="utf-8"))


def add_provenance(folder: Path, **facts: object) -> None:
    """Add facts to the record of where a run came from."""
    write_text(folder / "provenance.json", json.dumps(read_provenance(folder) | facts, indent=2))


def recorded_start(folder: Path) -> str | None:
    """Return when a run started, the date of its prompts (`StartClock`); None if it has not recorded that."""
    return read_provenance(folder, may_be_missing=True).get("started")


def recorded_kernels(folder: Path) -> dict[str, object] | None:
    """Return the kernels that a run computes with (`FastPasses.kernels`); None if it had no choice."""
    return read_provenance(folder, may_be_missing=True).get("kernels")


def write_done(folder: Path) -> None:
    """Mark a results folder as complete: write DONE with the checksum of every table, JSON file and adapter, without `MEASUREMENTS`."""
    sums = checksums_of(folder, "*.parquet", "turns/*.parquet", "*.json", "adapters/step_*/**/*")
    sums = {name: value for name, value in sums.items() if name not in MEASUREMENTS}
    write_text(folder / "DONE", json.dumps(sums, indent=2))


def is_done(folder: Path) -> bool:
    """Return whether the run is complete and its files match the checksums in DONE."""
    return not damage(folder / "DONE")


def outcome_of(folder: Path) -> dict[str, object] | None:
    """Return how a finished run ended if it diverged: {"state": "diverged", "iteration": ..., "reason": ...}; else None."""
    return read_provenance(folder, may_be_missing=True).get("outcome")


# ---- checkpoints


def staging(folder: Path) -> Path:
    """Return the folder in which a run's next checkpoint is written."""
    return folder / "checkpoints" / "staging"


def step_of(path: Path) -> int:
    """Return the iteration in a name such as checkpoint-12, step_00012 or step_00012.parquet."""
    return int(path.stem.replace("-", "_").split("_")[1])


def checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints, newest first, damaged ones included."""
    named = [path for path in folder.glob("checkpoints/checkpoint-*") if not path.suffix]  # .tmp is being removed
    return sorted(named, key=step_of, reverse=True)


def complete(folder: Path, step: int) -> None:
    """Add checksums to the staged checkpoint, rename it into place, then remove the oldest."""
    target = folder / "checkpoints" / f"checkpoint-{step}"
    staged = staging(folder) / target.name
    adapters = {f"../../{name}": digest for name, digest in checksums_of(folder, "adapters/step_*/**/*").items()}
    write_text(staged / MANIFEST, json.dumps(checksums_of(staged, "**/*") | adapters, indent=1))
    if target.exists():  # it was damaged, so the run went on from the one before
        remove(target)
    publish(staged, target)
    prune(folder)


def prune(folder: Path) -> None:
    """Remove all but the newest checkpoints. Also runs at the end, in case the last save was killed before pruning."""
    for old in checkpoints(folder)[N_KEPT:]:
        remove(old)


def newest_intact(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files match their checksums; None if there are no checkpoints.

    Warns about each damaged newer one. Raises ValueError if all checkpoints are damaged.
    """
    problems: list[str] = []
    for checkpoint in checkpoints(folder):
        problem = damage(checkpoint / MANIFEST)
        if not problem:
            for message in problems:
                logger.warning("%s. It is not used: the run continues from %s.", message, checkpoint.name)
            return checkpoint
        problems.append(f"{checkpoint}: {problem}")
    if problems:
        raise ValueError(
            f"{folder} holds checkpoints and all of them are damaged, so the run cannot continue: {'; '.join(problems)}. "
            "Nothing was overwritten. Restore the files from a copy, or move that folder away to start over."
        )
    return None
