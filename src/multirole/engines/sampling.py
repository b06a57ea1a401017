"""Sample with a counter-based generator: a row's tokens depend only on its seed and logits, not on its batch or the order of calls."""

import torch
import torch.nn.functional as F
from torch import Tensor

SUM_BLOCK = 256
"""Tokens per block in `_sample_by_blocks`."""
MANY_TOKENS = 4096
"""Smallest vocabulary for which `_sample_by_blocks` is used."""


def signed(seed: int) -> int:
    """Return the int64 with the same 64 bits as `seed` modulo 2**64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Hash (seed, index), both int64 (N,), by splitmix64 to uniform float64 numbers (N,) in [0, 1)."""
    return (_mix(_mix(seed) + index * -7046029254386353131) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64; the masks turn arithmetic right shifts into logical ones."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)


def sample(logits: Tensor, temperature: Tensor, u: Tensor, top_p: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sample tokens (N,) and their log-probs (N,) by inverse CDF from float32 logits (N, V), which may be overwritten.

    `temperature` is (N,); rows at temperature 0 are greedy, and their log-probs are those of the temperature-1
    distribution. `top_p` is (N,), or None if it is 1 for all.
    """
    greedy = temperature == 0
    temperature = torch.where(greedy, 1.0, temperature)[:, None]
    if top_p is not None:
        logits = nucleus(logits / temperature, top_p)
        temperature = torch.ones_like(temperature)
    if logits.shape[1] < MANY_TOKENS:
        return _sample_at_once(logits / temperature, greedy, u)
    return _sample_by_blocks(logits.div_(temperature), greedy, u)


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return logits (N, V) with -inf for all but the likeliest tokens, the fewest whose probabilities sum to `top_p` (N,)."""
    ordered, order = logits.sort(descending=True, stable=True)  # (N, V)
    probs = ordered.softmax(-1, dtype=torch.float64)
    is_left_out = (probs.cumsum(-1) - probs) >= top_p[:, None]  # the sum before a token; 0 for the first
    is_left_out[:, 0] = False
    is_left_out &= (top_p < 1)[:, None]
    return logits.masked_fill(torch.zeros_like(is_left_out).scatter(1, order, is_left_out), -torch.inf)


def _sample_at_once(logits: Tensor, greedy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Search for u in the cumulative sum over the vocabulary."""
    logprobs = logits.log_softmax(-1)  # (N, V)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)  # (N, V)
    tokens = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0].clamp_max(logits.shape[1] - 1)  # (N,)
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]  # (N,), (N,)


def _sample_by_blocks(logits: Tensor, greedy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Search for u in the cumulative sum over blocks of the vocabulary, then within that block. Overwrites `logits`."""
    n, size = logits.shape
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()  # (N, V)
    if size % SUM_BLOCK:
        weights = F.pad(weights, (0, -size % SUM_BLOCK))
    blocks = weights.view(n, -1, SUM_BLOCK)  # (N, blocks, SUM_BLOCK)
    cdf = blocks.sum(-1).cumsum(-1, dtype=torch.float64)  # (N, blocks)
    target = u[:, None] * cdf[:, -1:]  # (N, 1)
    block = torch.searchsorted(cdf, target, right=True).clamp_max(cdf.shape[1] - 1)  # (N, 1)
    after = cdf.gather(1, block)
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_min(0)), 0.0)
    inner = blocks[torch.arange(n, device=u.device), block[:, 0]].cumsum(-1, dtype=torch.float64)  # (N, SUM_BLOCK)
    target = (
        (target - before) / (after - before) * inner[:, -1:]
    )  # the sum of a block and the sum inside it round differently
    inside = torch.searchsorted(inner, target, right=True).clamp_max(SUM_BLOCK - 1)  # (N, 1)
    tokens = (block * SUM_BLOCK + inside).clamp_max(size - 1)[:, 0]  # (N,)
    if greedy.any():
        tokens = torch.where(greedy, weights.argmax(-1), tokens)
    return tokens, (weights.gather(1, tokens[:, None]).log() - cdf[:, -1:].log())[:, 0].float()
