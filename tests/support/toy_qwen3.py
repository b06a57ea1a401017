"""Random Qwen3 models of a toy shape, and a tokenizer over bytes with the special tokens and the chat format of Qwen3."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from multirole_study.experiment.presets import Shape

QWEN3_CHAT = (  # the structure of Qwen3's own template: thinking off writes an empty think block in front of the reply
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte and Qwen3's special tokens."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(alphabet, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = QWEN3_CHAT
    return tokenizer


def toy_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0, **shape: object) -> Qwen3ForCausalLM:
    """Build the smallest useful Qwen3 with random weights; the same seed gives the same weights."""
    usual = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 40960,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**usual | shape))


def config_of(s: Shape) -> Qwen3Config:
    """Return the configuration of a Qwen3 of this shape."""
    return Qwen3Config(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, tie_word_embeddings=True,
        max_position_embeddings=40960,
    )  # fmt: skip


def adapter_of(s: Shape) -> PeftModel:
    """A rank-64 adapter "a" in memory, on a Qwen3 of this shape without any."""
    with torch.device("meta"):
        lora = LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(Qwen3ForCausalLM(config_of(s)), lora, adapter_name="a")
    for name, module in model.named_modules():
        if name.endswith((".lora_A.a", ".lora_B.a")):
            module.to_empty(device="cpu")
    return model


def save_toy_base(folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, **other: object) -> str:
    """Save a random base of the tiny-r shape, up to `other` sizes, and the tokenizer; return the folder."""
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3}
    toy_model(tokenizer, **shape | other, max_position_embeddings=max_length).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
