"""Random decoders of many families, small enough to train, with logits that are far from flat."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
HEADS = SMALL | {"head_dim": 16}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
WINDOW = 8
"""Window of sliding attention in tokens, shorter than the tests' prompts."""
FAMILIES: dict[str, dict] = {
    "qwen2": SMALL,
    "qwen2-window": SMALL | {"type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": HEADS | {"sliding_window": WINDOW},
    "gemma": HEADS,
    "gemma2": HEADS | {"sliding_window": WINDOW, "final_logit_softcapping": 5.0, "num_hidden_layers": 4},
    "gemma3_text": HEADS | {"sliding_window": WINDOW, "num_hidden_layers": 6},
    "cohere2": SMALL | {"sliding_window": WINDOW, "num_hidden_layers": 4},
    "phi": SMALL,
    "phi3": SMALL | {"sliding_window": WINDOW},
    "gpt2": GPT,
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_neox": SMALL,
    "gptj": GPT | {"rotary_dim": 8},
    "opt": SMALL | {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 512},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 512},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "stablelm": SMALL,
    "olmo2": SMALL,
    "granite": SMALL,
    "smollm3": SMALL,
    "starcoder2": SMALL,
    "mixtral": SMALL | {"num_local_experts": 4},
    "qwen3_moe": HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "lfm2": SMALL | {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": HEADS | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon_h1": HEADS | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "bamba": SMALL | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1], "mamba_chunk_size": 8},
    "jamba": SMALL | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "recurrent_gemma": SMALL | {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 32},
}  # fmt: skip

WRONG = {
    # its state mixes the rows of a batch
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 64},
}
"""Families whose code in transformers computes a token's log-probs from other rows."""


def decoder(family: str, vocab: int, eos: int = 1, pad: int = 0) -> PreTrainedModel:
    """Build a model of the family; every call gives the same one."""
    options = dict((FAMILIES | WRONG)[family])
    kind = options.pop("type", family)
    config = AutoConfig.for_model(
        kind, vocab_size=vocab, bos_token_id=None, eos_token_id=eos, pad_token_id=pad, **options
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "conv" not in name:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.float()
