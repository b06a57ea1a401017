"""Results folders: where a run's is, whether it is this cell's, and whether it is done."""

import json
import tempfile
from pathlib import Path

from multirole.experiment.cell import Cell
from multirole.experiment.storage import sha256, write_text


def folder_of(cell: Cell, results_dir: str | Path) -> Path:
    """The run's folder, `<results_dir>/<scale>/<cell id>/`."""
    return Path(results_dir) / cell.scale / cell.id


def make_writable(folder: Path, results_dir: str | Path) -> None:
    """Create a folder below `results_dir`; ValueError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0")
    except OSError as error:
        raise ValueError(
            f"`results_dir` must be a folder that can be written to, got {str(results_dir)!r}: {error}."
        ) from error


def make_folder(folder: Path, results_dir: str | Path, config: dict[str, object]) -> None:
    """Create a folder and its config.json; ValueError if it cannot hold this configuration's results."""
    make_writable(folder, results_dir)
    text, held = json.dumps(config, indent=2, default=str), folder / "config.json"
    # a run from before an option existed ran what is now that option's default
    if held.exists() and json.loads(text) | json.loads(held.read_text()) != json.loads(text):
        raise ValueError(
            f"{folder} holds a run with another configuration. Write another results_dir, or move that folder away."
        )
    write_text(held, text)


def open_folder(cell: Cell, results_dir: str | Path) -> Path:
    """The run's folder, created; ValueError if it cannot be this cell's. For one process only."""
    folder = folder_of(cell, results_dir)
    make_folder(folder, results_dir, cell.to_dict())
    (folder / "turns").mkdir(exist_ok=True)
    return folder


def write_done(folder: Path) -> None:
    """Declare a results folder complete: DONE, with the checksum of every table and of every JSON file."""
    paths = [*folder.glob("*.parquet"), *folder.glob("turns/*.parquet"), *folder.glob("*.json")]
    sums = {str(path.relative_to(folder)): sha256(path) for path in sorted(paths)}
    write_text(folder / "DONE", json.dumps(sums, indent=2))


def is_done(folder: Path) -> bool:
    """Whether the run is complete and its tables are the ones that were recorded."""
    if not (folder / "DONE").exists():
        return False
    sums = json.loads((folder / "DONE").read_text())
    return all((folder / name).exists() and sha256(folder / name) == digest for name, digest in sums.items())
