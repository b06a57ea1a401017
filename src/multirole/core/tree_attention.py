"""Compute attention over packed rows (`prefix_tree`), as an attention function of transformers.

Every block of queries is given the keys of its whole row, gathered from the packed sequence, and goes through PyTorch's
`scaled_dot_product_attention` with a mask, on any device. Not run on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface

from multirole.core.prefix_tree import Packing

ATTENTION_NAME = "multirole_prefix_tree"
PACKABLE_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Models whose attention over a row depends only on positions and causality."""
MAX_SCORES = 2**26
"""Largest matrix of attention scores, in numbers, that a CPU stores in full."""
PACKABLE_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles do not depend on the length of the sequence."""


def can_share_prefixes(model: PreTrainedModel) -> bool:
    """Return whether the model's attention can be replaced: one of `PACKABLE_MODELS`, with full attention in every layer and a static RoPE."""
    if not isinstance(model, PACKABLE_MODELS):
        return False
    config = model.config.to_dict()
    is_full = set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
    has_window = bool(
        config.get("use_sliding_window", isinstance(model, MistralForCausalLM)) and config.get("sliding_window")
    )
    return is_full and not has_window and model.config.rope_parameters["rope_type"] in PACKABLE_ROPES


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, prefix_tree: Packing,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention over one packed sequence: query (1, heads, N, d), key and value (1, n_kv, N, d) -> (1, N, heads, d).

    Heads that share a key are concatenated as queries, so that keys are not copied for each of them. A CPU computes in
    float32, with products as `bfloat16.products_in` sets them.
    """
    dtype = torch.float32 if query.device.type == "cpu" else value.dtype
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # (N, heads or n_kv, d)
    n_kv, head_dim = k.shape[1:]
    n_rep = q.shape[1] // n_kv
    outputs = []
    for group in prefix_tree.groups:
        n_blocks, _, n_queries, n_keys = group.mask.shape
        shape = (n_blocks, n_queries, n_kv, n_rep, head_dim)
        queries = (
            q.index_select(0, group.queries).view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        )  # (S, n_kv, rep * Q, d)
        keys, values = (
            x.index_select(0, group.keys).view(n_blocks, n_keys, n_kv, head_dim).transpose(1, 2) for x in (k, v)
        )  # (S, n_kv, K, d)
        mask = group.mask.repeat(1, 1, n_rep, 1)  # (S, 1, rep * Q, K)
        attended = attend(queries, keys, values, mask, head_dim**-0.5 if scaling is None else scaling)
        attended = attended.unflatten(2, (n_rep, n_queries)).permute(0, 3, 1, 2, 4)  # (S, Q, n_kv, rep, d)
        outputs.append(attended.reshape(-1, n_kv * n_rep, head_dim).index_select(0, group.outputs))
    return torch.cat(outputs).index_select(0, prefix_tree.order)[None].to(value.dtype), None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Compute attention of q (S, n_kv, Q, d) to k and v (S, n_kv, K, d) where mask (S, 1, Q, K) is True -> like q.

    Every query needs at least one key. A CPU stores the matrix of scores if it is not too large: PyTorch's fused kernel takes as
    long in float32, and four times as long within `bfloat16.products_in`, for blocks of some hundred tokens.
    """
    if q.device.type != "cpu" or mask.numel() * k.size(1) > MAX_SCORES:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)  # (S, 1, Q, K)
    scores = ((q * scaling) @ k.transpose(-1, -2)).add_(bias)  # (S, n_kv, Q, K)
    return torch.softmax(scores, -1) @ v


AttentionInterface.register(ATTENTION_NAME, tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda **_: None)


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model computes packed sequences. Run forward and backward pass inside it."""
    former = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        model.config._attn_implementation = former
