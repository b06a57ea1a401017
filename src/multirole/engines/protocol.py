"""Define the protocol between rollouts and the engine that samples tokens.

An engine serves several adapters at once. The rollout calls `add` and `step`, and so decides what runs next.
`multirole.engines` finds an engine by its name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from multirole.engines.endpoint import Endpoint

    Model: TypeAlias = PeftModel | PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of training. There is no top-k or top-p; `max_tokens` caps each reply."""

    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Request:
    """One model call. `adapter=None` means the base model; only `seed` decides the sampled tokens (temperature > 0).

    Requests with the same `problem` share prompt prefixes; an engine with several replicas sends them to the same one.

    `top_p` and `is_whole` are for serving, and no rollout sets them. `top_p` samples from the likeliest tokens whose probabilities sum to it. `is_whole`
    is called with the tokens so far, and True may end the reply early, as a "stop"; the caller cuts the reply where an engine does not.

    `endpoint` is set for a role that a server plays (`engines.endpoint`), which gets `messages`; no other engine sees such a request.
    """

    prompt_ids: list[int]
    adapter: str | None
    seed: int
    max_tokens: int
    temperature: float
    problem: str = ""
    top_p: float = 1.0
    is_whole: Callable[[list[int]], bool] | None = None
    endpoint: "Endpoint | None" = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """The reply to a request, of at least one token. `logprobs` are those of the sampled tokens in the distribution that was sampled from,
    log-softmax(logits / temperature), or NaN for a token that the engine could not score.

    `finish_reason` is "stop" when the last token is the end-of-turn token, else "length". The reply of an endpoint has no tokens: it has its `text`,
    and the tokens of prompt and reply that the server counted in `billed`. Where the conversation is too long for the server, the reason is
    `types.OVERFLOW`, and the text says so.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str | None = None
    billed: tuple[int, int] | None = None


class EngineError(RuntimeError):
    """An engine cannot go on, for a reason outside of this process. The message is complete, so the traceback is hidden."""


class RequestRefused(RuntimeError):
    """An engine cannot take a request, such as one that is too long or whose adapter has not been published."""


class Engine(Protocol):
    """An engine with continuous batching over requests of several adapters.

    An engine that samples undisturbed while the trainer computes may have an attribute `plays_during_update = True`, which
    `max_staleness` needs. Then its methods are called in a background thread, and `publish` gets a copy of the trainer's model.
    """

    @classmethod
    def from_trainer(cls, trainer: Any) -> "Engine":
        """Build the engine that samples for a `MultiRoleGRPOTrainer`, whose model and tokenizer are loaded."""
        ...

    def add(self, key: int, request: Request) -> None:
        """Queue one request under a `key` that the caller chooses."""

    def step(self) -> list[tuple[int, Completion]]:
        """Advance every running request by at least one token; return those that finished, in any order."""
        ...

    def publish(self, model: "PeftModel", version: int) -> None:
        """Serve the current weights of `model`'s adapters; nothing computed with older weights is reused.

        Must not be called while requests are running (RuntimeError).
        """

    def sleep(self) -> None:
        """Free the memory that the next `publish` allocates again, for training. RuntimeError while requests are running."""

    def close(self) -> None:
        """Free memory and temporary files; idempotent."""


class ModelEngine(Engine, Protocol):
    """An engine that computes with a loaded model in this process. Both that `engine="auto"` has without a GPU are of this kind."""

    @classmethod
    def unsupported(cls, model: "Model") -> str | None:
        """Return what the engine does not implement of a model and its adapters, such as "it has sliding windows"; None if it can run it."""

    @classmethod
    def from_model(cls, model: "Model", eos_ids: Sequence[int], pad_id: int, max_length: int) -> "ModelEngine":
        """Build the engine for a model that is not trained, such as one that is served, and publish the model.

        Args:
            eos_ids: tokens that end a reply.
            pad_id: a token for padding.
            max_length: largest prompt + reply, in tokens.
        """
        ...
