"""Write tiny GGUF files, as llama.cpp's converter does, from random models of transformers."""

import json
from pathlib import Path

import numpy as np
import torch
from chat_tokenizers import FAMILIES as TOKENIZERS
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from toy_families import with_biases
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from multirole.bases.gguf_header import BIASES, HEAD, LAYER, OUTSIDE, QK_NORMS

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, "llama3", "llama-bpe"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, "qwen3", "qwen2"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, "qwen3", "qwen2"),
}
"""Architecture -> model, configuration, its tokenizer in `chat_tokenizers`, and llama.cpp's name of how that splits words."""


def random_model(architecture: str, **fields) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model of two layers with visible biases and norms, and its family's tokenizer over a small vocabulary."""
    model, config, tokenizer_name, _ = FAMILIES[architecture]
    tokenizer = TOKENIZERS[tokenizer_name]()
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "bos_token_id": None,
    }  # fmt: skip
    if architecture == "qwen3":
        shape["head_dim"] = 32
    return with_biases(model(config(**shape | fields))).eval(), tokenizer


def halves_to_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As `permute` of llama.cpp's converter."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, architecture: str, *, stores_head: bool = False,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32, extra: dict[str, np.ndarray] | None = None, **ids: int | None,
) -> Path:  # fmt: skip
    """Write model and tokenizer. Matrices are rounded to a type; `ids` replace those of special tokens, as wrong files have them."""
    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if matrices == GGMLQuantizationType.Q8_0 else LlamaFileType.ALL_F32)
    add_tokenizer(writer, tokenizer, FAMILIES[architecture][3], ids)
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    layer = LAYER | {"attn_output.bias": "self_attn.o_proj.bias"} | BIASES | QK_NORMS
    names = OUTSIDE | (HEAD if stores_head or not config.tie_word_embeddings else {})
    names |= {
        f"blk.{i}.{n}": f"model.layers.{i}.{o}" for i in range(config.num_hidden_layers) for n, o in layer.items()
    }
    for name, other in names.items():
        if other not in state:
            continue
        weight, part = state[other], name.split(".")[-2]
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            weight = halves_to_interleaved(weight, heads)
        kind = matrices if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


def add_tokenizer(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, rule: str, ids: dict[str, int | None]
) -> None:
    """Write vocabulary, merges, kinds of tokens, the chat template, and special tokens by `ids` or as the tokenizer has them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = {token["content"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    special = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id} | ids
    for name, add in (
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
        ("bos", writer.add_bos_token_id),
    ):
        if special[name] is not None:
            add(special[name])
    writer.add_chat_template(tokenizer.chat_template)
