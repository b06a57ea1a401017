"""Helpers of the engine tests: run an engine to the end, and compute the log-probs of HF + PEFT for the same tokens."""

import random

import torch
from peft import PeftModel

from multirole.engines.protocol import Completion, Engine, Request

POLICY = {"generator": "generator", "aggregator": "aggregator"}
ADAPTERS = [None, "generator", "aggregator"]
TOLERANCE = 1e-5


def make_requests(n: int, vocab: int, seed: int = 0, max_prompt: int = 150) -> list[Request]:
    """Return `n` requests over all adapters, with temperatures 1, 0.7 and 0 and prompts of 1 to `max_prompt` tokens, some of them shared."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, max_prompt))] for _ in range(max(1, n // 3))]
    return [
        Request(prompts[i % len(prompts)], ADAPTERS[i % 3], rng.getrandbits(64), rng.randint(1, 40), [1.0, 0.7, 0.0][i % 5 % 3])
        for i in range(n)
    ]  # fmt: skip


def run_all(engine: Engine, requests: list[Request], keys: list[int] | None = None) -> list[Completion]:
    """Return completions in the order of `requests`, which are added in the order of `keys`."""
    for key in keys or range(len(requests)):
        engine.add(key, requests[key])
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        done.update(engine.step())
    return [done[key] for key in range(len(requests))]


@torch.no_grad()
def reference_logprobs(model: PeftModel, request: Request, token_ids: list[int]) -> torch.Tensor:
    """Return the teacher-forced log-probs (T,) of `token_ids` by HF + PEFT, after temperature (1 for a greedy request)."""
    ids = torch.tensor([request.prompt_ids + token_ids])  # (1, P + T)
    if request.adapter is None:
        with model.disable_adapter():
            logits = model(ids).logits
    else:
        model.set_adapter(request.adapter)
        logits = model(ids).logits
    logits = logits[0, len(request.prompt_ids) - 1 : -1] / (request.temperature or 1.0)  # (T, V)
    return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]  # (T,)


def max_error(model: PeftModel, requests: list[Request], completions: list[Completion]) -> float:
    """Return the largest |engine - reference| over all tokens."""
    return max(
        (reference_logprobs(model, request, done.token_ids) - torch.tensor(done.logprobs)).abs().max().item()
        for request, done in zip(requests, completions, strict=True)
    )


def change_adapters(model: PeftModel, seed: int = 0, std: float = 0.05) -> None:
    """Move every LoRA tensor, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += std * torch.randn(parameter.shape, generator=generator)
