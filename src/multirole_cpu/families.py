"""The models that this package computes: decoders of one structure, which differ in biases and in norms of q and k."""

from typing import Any, TypeAlias

from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

Served: TypeAlias = LlamaForCausalLM | MistralForCausalLM | Qwen2ForCausalLM | Qwen3ForCausalLM
CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Their classes; `SERVED` has the names. A subclass may have other layers, so it is not served."""


def head_dim(model: Any) -> int:
    """Return the size of an attention head. Not every configuration has it."""
    return model.model.layers[0].self_attn.head_dim
