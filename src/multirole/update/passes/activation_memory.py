"""Estimate the memory of activations, and cut micro-batches on a GPU so that it suffices. Imports no torch: `multirole plan` uses it."""

KEPT_FRACTION = 0.5
"""Fraction of the GPU memory left by model and optimizer that a micro-batch may fill. The rest is for an engine that sleeps."""
MIN_KEPT_TOKENS = 4096
"""Smallest micro-batch that keeps a GPU busy (not measured). Where less would fit, larger ones are recomputed."""


def bytes_per_token(hidden: int, intermediate: int, n_layers: int, is_half: bool) -> int:
    """Estimate the bytes of activations that a forward pass keeps per token for its backward pass.

    A layer keeps about 14 vectors of the hidden size and 6 of the intermediate size: 30 GB for 8,192 tokens of a Qwen3 of 1.7B
    parameters in bfloat16, where fake tensors count 27 GB.
    """
    return n_layers * (14 * hidden + 6 * intermediate) * (2 if is_half else 4)


def kept_tokens(gpu_bytes: int, base_bytes: int, adapter_bytes: int, per_token: int, largest: int) -> int:
    """Return the largest micro-batch with a gradient on a GPU: as many tokens as fit, or `largest` if too few do.

    It does not depend on the memory that happens to be free, so that a resumed run has the same micro-batches. The base counts
    twice, for its layers with the adapter joined, and the adapters five times: with both moments, and gradients.
    """
    n_tokens = int(KEPT_FRACTION * (gpu_bytes - 2 * base_bytes - 5 * adapter_bytes) / per_token)
    return min(n_tokens, largest) if n_tokens >= MIN_KEPT_TOKENS else largest
