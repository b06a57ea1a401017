"""The protocol between rollouts and whatever turns prompts into tokens.

An engine serves many adapters at once and is driven by `add` and `step`, so that the rollout decides what runs next.
`multirole.engines` has those that have a name.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from peft import PeftModel


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

    def publish(self, model: "PeftModel", version: int) -> None:
        """Serve the weights that `model`'s adapters hold now; nothing computed under older weights is reused.

        Must not be called while requests are running (RuntimeError).
        """

    def sleep(self) -> None:
        """Make room for training: free what the next `publish` makes again. RuntimeError while requests are running."""

    def close(self) -> None:
        """Free memory and temporary files; idempotent."""
