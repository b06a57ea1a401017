"""Random Qwen3 models of a toy shape, and a tokenizer over bytes with the special tokens and the chat format of Qwen3."""

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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


def save_toy_base(folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, **other: object) -> str:
    """Save a random base of three narrow layers, up to `other` sizes, and the tokenizer; return the folder."""
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3}
    toy_model(tokenizer, **shape | other, max_position_embeddings=max_length).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@cache
def toy_base() -> str:
    """Return the folder of a random base and its tokenizer, which all processes of this machine share.

    The weights are larger than a fresh model's, so that its log-probs are far from flat, and a reply may end at any token.
    """
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"multirole-toy-{os.getuid()}-{version}"
    if not folder.exists():
        made, tokenizer = Path(tempfile.mkdtemp(dir=folder.parent)), toy_tokenizer()
        model = toy_model(tokenizer, max_position_embeddings=2048, initializer_range=0.2)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(made)  # `model.save_pretrained` writes nothing in a later process of several
        weights = model.state_dict()
        del weights["lm_head.weight"]  # tied: vLLM reads the embedding's name
        save_file(weights, made / "model.safetensors", {"format": "pt"})
        tokenizer.save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return str(folder)
