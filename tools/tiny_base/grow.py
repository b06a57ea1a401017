"""Start a larger base from a trained smaller one: the same function, with room to learn more.

The small weights become the leading block of every larger matrix. What is new reads at random and writes zero, so the
grown model's outputs are those of the small one until training moves them; new residual dimensions hold zeros, which
the norm weights make up for.
"""

import torch
from transformers import Qwen3ForCausalLM

RESIDUAL_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
WRITERS = ("o_proj", "down_proj")


@torch.no_grad()
def grow(small: Qwen3ForCausalLM, large: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Put `small`'s function into freshly initialised `large` (more width, heads, or layers; same head size)."""
    a, b = small.config, large.config
    if a.head_dim != b.head_dim or a.num_attention_heads > b.num_attention_heads // b.num_key_value_heads:
        raise ValueError(
            f"got {a.num_attention_heads} heads of size {a.head_dim} to grow into {b.num_attention_heads} of size "
            f"{b.head_dim} over {b.num_key_value_heads} key-value heads: the small heads must fit in the first "
            "key-value group; write sizes with the same head_dim and more heads per group"
        )
    source = small.state_dict()
    for name, weight in large.named_parameters():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in WRITERS or kind == "embed_tokens":
            weight.zero_()
        if name not in source:
            continue  # a layer of its own: it writes zero
        block = source[name]
        if kind in RESIDUAL_NORMS:
            block = block * (a.hidden_size / b.hidden_size) ** 0.5
        weight[tuple(slice(0, size) for size in block.shape)] = block
    return large
