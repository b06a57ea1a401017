"""Random decoders of two narrow layers over bytes, of any class of transformers."""

from pathlib import Path

import torch
from torch import nn
from toy_qwen3 import toy_tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def small(model: type, config: type, **fields) -> PreTrainedModel:
    """A random-weight model of two narrow layers over bytes."""
    tokenizer = toy_tokenizer()
    torch.manual_seed(0)
    if (
        config is not Qwen2Config
    ):  # which has no such field; its layers divide the hidden size by the heads, to the same number
        fields = {"head_dim": 16} | fields
    made = config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, bos_token_id=None, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **fields,
    )  # fmt: skip
    return model(made)


def with_biases(model: nn.Module) -> nn.Module:
    """Give biases and norms, which begin as 0 and 1, values that a wrong pass would show."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


BIASED = {
    "qwen2": lambda: with_biases(small(Qwen2ForCausalLM, Qwen2Config)),
    "mistral": lambda: with_biases(small(MistralForCausalLM, MistralConfig, sliding_window=None)),
    "llama with biases": lambda: with_biases(small(LlamaForCausalLM, LlamaConfig, attention_bias=True, mlp_bias=True)),
}
"""Makers of models that differ from Qwen3 and from plain Llama, by name."""


def saved(folder: Path, model: type, config: type, **fields) -> Path:
    """A folder with a `small` model and its tokenizer."""
    small(model, config, **fields).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder
