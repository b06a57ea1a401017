"""Checkpoints that are whole or absent, and which one a run continues from.

    checkpoints/staging/            where the trainer writes the next one; nothing reads it
    checkpoints/checkpoint-N/       everything of iteration N, the tables and turns so far below `record/`; manifest.json, written
                                    last, has the sha256 of each file and of the adapters so far, and the cell's configuration
    adapters/step_N/                the adapters of each evaluation; they stay when the checkpoint goes

A checkpoint is staged, hashed, synced and renamed. The newest two stay, so that a damaged one has another behind it.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path

from multirole.experiment.storage import move, remove, sha256, sums_of, sync, write_table, write_text

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RECORD = "record"
KEPT = 2


def staging(folder: Path) -> Path:
    """Where a run's next checkpoint is written."""
    return folder / "checkpoints" / "staging"


def step_of(path: Path) -> int:
    """The iteration in a name such as checkpoint-12, step_00012 or step_00012.parquet."""
    return int(path.stem.replace("-", "_").split("_")[1])


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, the newest first; whole or not."""
    named = [path for path in folder.glob("checkpoints/checkpoint-*") if not path.suffix]  # .tmp is being removed
    return sorted(named, key=step_of, reverse=True)


def publish(folder: Path, step: int, tables: dict[str, list[dict]]) -> Path:
    """Complete the staged checkpoint with the record and a manifest, give it its name, then remove the oldest."""
    target = folder / "checkpoints" / f"checkpoint-{step}"
    staged = staging(folder) / target.name
    shutil.copytree(folder / "turns", staged / RECORD / "turns", ignore=shutil.ignore_patterns("*.tmp"))
    for name, rows in tables.items():
        if rows:
            write_table(staged / RECORD / f"{name}.parquet", rows)
    for path in [*sorted(staged.rglob("*")), staged]:
        sync(path)
    manifest = {
        "config": json.loads((folder / "config.json").read_text()),
        "files": sums_of(staged, "**/*"),
        "adapters": sums_of(folder, "adapters/step_*/**/*"),
    }
    write_text(staged / MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
    if target.exists():
        remove(target)
    move(staged, target)
    prune(folder)
    return target


def prune(folder: Path) -> None:
    """Keep the newest checkpoints. The end of a run does so too: the last save may have been killed before it did."""
    for old in checkpoints(folder)[KEPT:]:
        remove(old)


def _digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def damage(checkpoint: Path, config: dict[str, object]) -> str | None:
    """What makes a checkpoint unfit for this configuration: the first file that is not as it was written; None if it is fit.

    An adapter that is missing or damaged is copied from the checkpoint of its own step, where that is there.
    """
    folder = checkpoint.parents[1]
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("it is not what was written")
        held, files, adapters = manifest["config"], manifest["files"], manifest["adapters"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error!r}"
    # an option that came after this checkpoint has its default there
    if others := [f"{name}={held[name]!r}" for name in held if held[name] != config.get(name)]:
        return f"it is of another configuration, with {', '.join(others)}"
    for name, digest in adapters.items():
        _, step, file = name.split("/", 2)
        copy = checkpoint.with_name(f"checkpoint-{step_of(Path(step))}") / file
        if _problem(folder / name, digest) and not _problem(copy, digest):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(copy, folder / name)
            logger.warning("%s was damaged or missing. It was copied from %s.", folder / name, copy.parent)
    for top, sums in ((checkpoint, files), (folder, adapters)):
        for name, digest in sums.items():
            if problem := _problem(top / name, digest):
                return f"{name} is {problem}"
    return None


def _problem(path: Path, digest: str) -> str:
    if not path.is_file():
        return "missing"
    return "" if sha256(path) == digest else f"not as it was written ({path.stat().st_size} bytes)"


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint whose every file is as it was written; None where none was ever saved.

    Warns of each newer one. Raises ValueError where there are some and none is whole.
    """
    config, problems = json.loads((folder / "config.json").read_text()), list[str]()
    for checkpoint in checkpoints(folder):
        problem = damage(checkpoint, config)
        if problem is None:
            for one in problems:
                logger.warning("%s. It is not used: the run continues from %s.", one, checkpoint.name)
            return checkpoint
        problems.append(f"{checkpoint}: {problem}")
    if problems:
        raise ValueError(
            f"{folder} holds checkpoints and none of them is whole, so the run cannot continue: {'; '.join(problems)}. "
            "Nothing was overwritten. Put the files back from a copy, or move that folder away to start afresh."
        )
    return None
