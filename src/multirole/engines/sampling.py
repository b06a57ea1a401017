"""Sampling with a seed per request: a token depends on its request's seed, its place in the reply and the logits alone."""

import torch
from torch import Tensor


def signed(seed: int) -> int:
    """The int64 with the same 64 bits as `seed` modulo 2**64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Counter-based uniforms in [0, 1): a splitmix64 hash of (seed, index), both int64 (N,), as float64 (N,)."""
    return (_mix(_mix(seed) + index * -7046029254386353131) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64; the masks turn arithmetic right shifts into logical ones."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)


def sample(logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF tokens (N,) and their log-probs (N,) from logits (N, V); rows at temperature 0 are greedy.

    `temperature` is (N,). The log-probs of greedy rows are those of the temperature-1
    distribution.
    """
    greedy = temperature == 0
    logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = logits.log_softmax(-1)  # (N, V)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)  # (N, V)
    tokens = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0].clamp_max(logits.shape[1] - 1)  # (N,)
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]  # (N,), (N,)
