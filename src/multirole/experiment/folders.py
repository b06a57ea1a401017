"""Results folders: where a run's is, whether it is this cell's, whether it is done, and who is at work in it."""

import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from multirole.experiment.cell import Cell
from multirole.experiment.settings import Refused
from multirole.experiment.storage import sha256, sums_of, write_text

logger = logging.getLogger(__name__)

LOCK = "LOCK"
PATIENCE = 5.0  # seconds: the former process may be saving its last checkpoint


def folder_of(cell: Cell, results_dir: str | Path) -> Path:
    """The run's folder, `<results_dir>/<scale>/<cell id>/`."""
    return Path(results_dir) / cell.scale / cell.id


@contextmanager
def open_folder(folder: Path, results_dir: str | Path, config: dict[str, object]) -> Iterator[None]:
    """Make a results folder, hold its lock and write its configuration; for one process only.

    ValueError where it cannot be written to, another process holds it, or it is another configuration's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0")
    except OSError as error:
        raise ValueError(
            f"`results_dir` must be a folder that can be written to, got {str(results_dir)!r}: {error}."
        ) from error
    text, path = json.dumps(config, indent=2, default=str), folder / "config.json"
    with claim(folder):
        try:
            held = json.loads(path.read_text()) if path.exists() else {}
            # an option that only one of them names is at its default: the folder's name has a hash of what is not
            known = json.loads(text)
            is_other = any(held[name] != known[name] for name in held.keys() & known.keys())
        except (ValueError, AttributeError):
            is_other = True
        if is_other:
            raise ValueError(
                f"{folder} holds a run with another configuration. Write another results_dir, or move that folder away."
            )
        write_text(path, text)
        yield


def write_done(folder: Path) -> None:
    """Declare a results folder complete: DONE, with the checksum of every table, JSON file and adapter."""
    sums = sums_of(folder, "*.parquet", "turns/*.parquet", "*.json", "adapters/step_*/**/*")
    write_text(folder / "DONE", json.dumps(sums, indent=2))


def is_done(folder: Path) -> bool:
    """Whether the run is complete, and all its files are the ones that DONE lists."""
    try:
        sums = json.loads((folder / "DONE").read_text())
        return "config.json" in sums and all(sha256(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def outcome_of(folder: Path) -> dict[str, object] | None:
    """How a finished run ended, if not as planned: {"state": "diverged", "iteration": ..., "reason": ...}."""
    path = folder / "provenance.json"
    return json.loads(path.read_text()).get("outcome") if path.exists() else None


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, `flock` on the file `LOCK`, which names the holder; ValueError if another process holds it.

    The system releases it when its holder dies; a `LOCK` that stays is taken over. A folder that was empty is removed where the
    run is refused.
    """
    path = folder / LOCK
    lock = FileLock(path, timeout=PATIENCE)
    try:
        lock.acquire(poll_interval=0.1)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by {path.read_text() or 'another process'}, and two processes cannot write one run. Wait for that "
            "process or end it; or write another results_dir."
        ) from None
    is_new = set(folder.iterdir()) == {path}
    try:
        if holder := path.read_text():
            logger.warning("%s is stale: %s does not run any more. It is taken over.", path, holder)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, started {started}")
        yield
    except Refused:
        if is_new:
            shutil.rmtree(folder)
        raise
    finally:
        path.unlink(missing_ok=True)  # while it is held, so that nobody else's goes
        lock.release()
