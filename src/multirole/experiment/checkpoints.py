"""Checkpoints that are whole or absent, and which one a run continues from.

    checkpoints/staging/            where the trainer writes the next one; nothing reads it
    checkpoints/checkpoint-N/       everything of iteration N; manifest.json, written last, names each file with its
                                    sha256, the cell's configuration, the rows of each table and the sha256 of each `turns` file
    adapters/step_N/                the adapters alone; they stay when the checkpoint goes

A checkpoint is staged, hashed, synced and renamed. The newest two stay, so that a damaged one has another behind it.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from multirole.core.distributed import gather_objects, processes
from multirole.experiment.storage import AGAIN, move, remove, sha256, sync_tree, write_text

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
KEPT = 2
PATIENCE = 3  # failures in a row


class NotSaved(OSError):
    """Checkpoints cannot be saved any more; the newest one is whole."""


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


class Saving:
    """Tries to write a checkpoint. A full disk costs that checkpoint only, until `PATIENCE` have failed in a row."""

    def __init__(self, staged: Path) -> None:
        self.staged, self.failures = staged, 0

    def attempt(self, step: int, phases: list[Callable[[], object]]) -> bool:
        """Run the phases on every process, each once all are through the one before; whether all went well everywhere."""
        for phase in phases:
            error = None
            try:
                phase()
            except (OSError, RuntimeError, SafetensorError) as caught:  # torch and safetensors wrap the system's errors
                error = caught
            if problems := [one for one in gather_objects(error and f"{type(error).__name__}: {error}") if one]:
                self._failed(step, problems[0].splitlines()[0], error)
                return False
        self.failures = 0
        return True

    def require(self) -> None:
        """Refuse to end a run whose last checkpoint was not saved (`NotSaved`)."""
        if self.failures:
            raise NotSaved(
                f"The last checkpoint could not be saved in {self.staged.parent}, so the run is not finished. {AGAIN}: it "
                "continues from the newest checkpoint, which is whole."
            )

    def _failed(self, step: int, problem: str, error: Exception | None) -> None:
        self.failures += 1
        free = shutil.disk_usage(self.staged.parent).free // 2**20  # torch's own error does not name a full disk
        if processes().is_main_process:
            remove(self.staged / f"checkpoint-{step}")
            remove(self.staged / "adapters")
        what = (
            f"The checkpoint of iteration {step} could not be saved in {self.staged.parent} ({problem}; {free} MB free)"
        )
        if self.failures == PATIENCE:
            raise NotSaved(
                f"{what}, nor could the {PATIENCE - 1} before it, so the run stops. {AGAIN}: it continues from the newest "
                "checkpoint, which is whole."
            ) from error
        logger.warning("%s. Training continues without it. The run stops after %d failures in a row.", what, PATIENCE)


def seal(folder: Path, step: int, rows: dict[str, int]) -> None:
    """Sync the staged files, then write the manifest of what they are."""
    staged = staging(folder) / f"checkpoint-{step}"
    sync_tree(staging(folder))
    files = {str(path.relative_to(staged)): path for path in sorted(staged.rglob("*")) if path.is_file()}
    manifest = {
        "step": step,
        "config": json.loads((folder / "config.json").read_text()),
        "rows": rows,
        "turns": {path.name: sha256(path) for path in sorted(folder.glob("turns/step_*.parquet"))},
        "files": {name: sha256(path) for name, path in files.items()},
    }
    write_text(staged / MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))


def publish(folder: Path, step: int) -> None:
    """Give a sealed checkpoint and its adapters their names, then remove the oldest."""
    (folder / "adapters").mkdir(exist_ok=True)
    for source, target in (
        (staging(folder) / "adapters", folder / "adapters" / f"step_{step:05d}"),
        (staging(folder) / f"checkpoint-{step}", folder / "checkpoints" / f"checkpoint-{step}"),
    ):
        if target.exists():
            remove(target)
        move(source, target)
    prune(folder)


def prune(folder: Path) -> None:
    """Keep the newest checkpoints. The end of a run does so too: the last save may have been killed before it did."""
    for old in checkpoints(folder)[KEPT:]:
        remove(old)


def read_manifest(checkpoint: Path) -> dict:
    """What `seal` wrote; ValueError or OSError where it is something else."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    if manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError("it is not what was written")
    return manifest


def _digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def damage(checkpoint: Path, config: dict[str, object]) -> str | None:
    """What makes a checkpoint unfit for this configuration: the first file that is not as it was written; None if it is fit."""
    try:
        manifest = read_manifest(checkpoint)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    held = manifest["config"]
    # an option that came after this checkpoint has its default there
    if others := [f"{name}={held[name]!r}" for name in held if held[name] != config.get(name)]:
        return f"it is of another configuration, with {', '.join(others)}"
    for name, digest in manifest["files"].items():
        path = checkpoint / name
        if not path.exists():
            return f"{name} is missing"
        if sha256(path) != digest:
            return f"{name} is not as it was written ({path.stat().st_size} bytes)"
    return None


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
