"""The one protocol between rollouts and whatever turns prompts into tokens, and its scripted implementation for tests.

`engine_torch.TransformersEngine` is the CPU default, `engine_vllm.VLLMEngine` the CUDA default. All three serve many
adapters at once and are driven by `add` and `step`, so that the rollout decides what runs next, not the engine.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from peft import PeftModel


@dataclass(frozen=True)
class Request:
    """One model call. `adapter` None means the base model; `seed` alone decides the sampled tokens (temperature > 0).

    `top_k` 0 and `top_p` 1 sample from the whole distribution, as training must: its log-probs know no truncation.
    """

    prompt_ids: list[int]
    adapter: str | None
    seed: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Completion:
    """At least one token. `logprobs` are processed ones, of the sampled tokens: log-softmax of logits / temperature, over
    the tokens that top_k and top_p leave.

    `finish_reason` is "stop" when the last token is the end-of-turn token, else "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Engine(Protocol):
    """Continuous batching over requests of several adapters."""

    def add(self, key: int, request: Request) -> None:
        """Queue one request under the caller's own `key`."""

    def step(self) -> list[tuple[int, Completion]]:
        """Advance every running request by at least one token; return those that finished, in any order."""

    def publish(self, model: PeftModel, version: int) -> None:
        """Serve the weights that `model`'s adapters hold now; nothing computed under older weights is reused.

        Must not be called while requests are running (RuntimeError).
        """

    def sleep(self) -> None:
        """Make room for training: free what the next `publish` makes again. RuntimeError while requests are running."""

    def close(self) -> None:
        """Free memory and temporary files; idempotent."""


def check_request(request: Request, served: Collection[str | None], max_length: int) -> None:
    """Refuse a request that no engine could run: an adapter that is not `served`, or too many tokens (ValueError)."""
    if request.adapter not in served:
        raise ValueError(
            f"adapter {request.adapter!r} is not published; the engine can only serve weights that it holds; "
            f"use one of {list(served)}, where None is the base"
        )
    length = len(request.prompt_ids) + request.max_tokens
    if not request.prompt_ids or request.max_tokens < 1 or length > max_length:
        raise ValueError(
            f"a request of {len(request.prompt_ids)} prompt tokens and max_tokens={request.max_tokens}; both must "
            f"be at least 1 and together at most max_length={max_length}; shorten it or raise max_length"
        )


class ScriptedEngine:
    """Answers from `reply(key, request) -> (token_ids, n_steps)`: a completion that takes `n_steps` steps. For tests."""

    def __init__(self, reply: Callable[[int, Request], tuple[list[int], int]], eos_id: int) -> None:
        self.reply, self.eos_id = reply, eos_id
        self.running: dict[int, tuple[list[int], int]] = {}
        self.requests: list[Request] = []
        self.versions: list[int] = []
        self.steps = 0

    def add(self, key: int, request: Request) -> None:
        self.requests.append(request)
        self.running[key] = self.reply(key, request)

    def step(self) -> list[tuple[int, Completion]]:
        self.steps += 1
        self.running = {key: (ids, left - 1) for key, (ids, left) in self.running.items()}
        done = [(key, ids) for key, (ids, left) in self.running.items() if left <= 0]
        for key, _ in done:
            del self.running[key]
        return [(k, Completion(i, [0.0] * len(i), "stop" if i[-1] == self.eos_id else "length")) for k, i in done]

    def publish(self, model: PeftModel, version: int) -> None:
        self.versions.append(version)

    def sleep(self) -> None:
        self.versions.append(None)

    def close(self) -> None:
        self.running.clear()
