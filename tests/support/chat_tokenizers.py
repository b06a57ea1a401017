"""Tokenizers of model families: their control tokens, pre-tokenization and chat templates, over small vocabularies trained here.

The templates are those that TRL ships. SmolLM2 has its whole vocabulary: `data/smollm2_tokenizer.txt.xz` (180 kB, Apache-2.0) holds
the 252 first tokens and the merges of SmolLM2-135M-Instruct, so that these tests need neither the model nor the Hub.
"""

import lzma
from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

DATA = Path(__file__).parents[1] / "data"
LICENSE = Path(__file__).parents[2] / "LICENSE"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
N_SMOLLM2_SPECIAL = 17
SMOLLM2_CHAT = (  # the template in its GGUF file and on the Hub
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern by which Llama 3 splits text into words; Qwen also splits numbers into digits."""


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def byte_level(words: str, special: list[str], others: tuple[str, ...] = (), **options: object) -> Tokenizer:
    """Train a byte-level BPE tokenizer on this repository's licence."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(LICENSE)], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in others])
    return tokenizer


def sentence_pieces(prefix: bool, special: list[AddedToken]) -> Tokenizer:
    """Train a BPE tokenizer over characters with byte fallback, like Gemma's, or with Llama 2's space in front of every part (`prefix`)."""
    control = [token.content for token in special]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    pieces = [*control, *(f"<0x{i:02X}>" for i in range(256))]  # in the vocabulary: Gemma's control tokens are
    tokenizer.train(
        [str(LICENSE)],
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=pieces,
            initial_alphabet=[chr(i) for i in range(33, 127)],
            show_progress=False,
        ),
    )
    import json

    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = []  # the bytes are no added tokens
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_special_tokens(special)
    return tokenizer


def wrap(tokenizer: Tokenizer, chat: str, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat, **special)


def smollm2() -> PreTrainedTokenizerFast:
    lines = lzma.decompress((DATA / "smollm2_tokenizer.txt.xz").read_bytes()).decode().split("\n")
    first, merges = lines[: lines.index("")], lines[lines.index("") + 1 : -1]
    tokens = [*first, *(pair.replace(" ", "") for pair in merges)]
    raw = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(pair.split(" ")) for pair in merges])
    )
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    special = tokens[:N_SMOLLM2_SPECIAL]
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    end, start, pad = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
    return wrap(raw, SMOLLM2_CHAT, bos_token=start, eos_token=end, pad_token=pad, unk_token=pad)


def qwen3() -> PreTrainedTokenizerFast:
    raw = byte_level(
        WORDS.replace("{1,3}", ""),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"],
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    )
    raw.normalizer = normalizers.NFC()
    return wrap(raw, template("qwen3"), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama3() -> PreTrainedTokenizerFast:
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    raw = byte_level(WORDS, [*control, *(f"<|reserved_special_token_{i}|>" for i in range(5))], ignore_merges=True)
    return wrap(raw, template("llama3"), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def gemma() -> PreTrainedTokenizerFast:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    raw = sentence_pieces(False, [AddedToken(token, normalized=False, special=True) for token in control])
    raw.add_tokens([AddedToken(blank, normalized=False, special=False) for blank in ("\n\n", "\n\n\n", "▁▁")])
    return wrap(
        raw, template("gemma"), bos_token="<bos>", eos_token="<end_of_turn>", pad_token="<pad>", unk_token="<unk>"
    )


def phi3() -> PreTrainedTokenizerFast:
    """Llama 2's vocabulary: a space in front of every part, and control tokens that swallow the white space behind them."""
    control = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    tokens = [AddedToken(t, normalized=False, special=True, rstrip=t.startswith("<|")) for t in control]
    return wrap(
        sentence_pieces(True, tokens), template("phi3"), bos_token="<s>", eos_token="<|end|>", unk_token="<unk>"
    )


def deepseekv3() -> PreTrainedTokenizerFast:
    """Its turn markers are added tokens, but the tokenizer does not call them special."""
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    raw = byte_level(WORDS, [begin, end], ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"))
    return wrap(raw, template("deepseekv3"), bos_token=begin, eos_token=end)


def gptoss() -> PreTrainedTokenizerFast:
    control = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"]
    return wrap(byte_level(WORDS, control), template("gptoss"), eos_token="<|return|>", pad_token="<|endoftext|>")


def cohere2() -> PreTrainedTokenizerFast:
    names = ("START_OF_TURN", "END_OF_TURN", "USER", "CHATBOT", "SYSTEM", "START_RESPONSE", "END_RESPONSE")
    others = tuple(
        f"<|{name}_TOKEN|>" if "RESPONSE" not in name and "TURN" not in name else f"<|{name}|>" for name in names
    )
    turns = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
    raw = byte_level(WORDS, ["<BOS_TOKEN>", "<PAD>", turns[1]], (*others, turns[0]))
    return wrap(raw, template("cohere2"), bos_token="<BOS_TOKEN>", eos_token=turns[1], pad_token="<PAD>")


def unigram() -> PreTrainedTokenizerFast:
    """A unigram model with the control tokens as likely pieces, so that their letters are encoded to them."""
    control = ["<unk>", "<|im_start|>", "<|im_end|>"]
    pieces = [(chr(i), -5.0) for i in range(32, 127)] + [("\n", -5.0), ("▁", -4.0)]
    raw = Tokenizer(models.Unigram([*((token, 0.0) for token in control), *pieces], 0, False))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return wrap(raw, SMOLLM2_CHAT, eos_token="<|im_end|>", unk_token="<unk>")


def slow() -> PreTrainedTokenizerBase:
    """A tokenizer in Python: its control tokens cannot be renamed."""
    made = ByT5Tokenizer(extra_ids=0, chat_template=SMOLLM2_CHAT)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.eos_token = "<|im_end|>"
    return made


FAMILIES = {
    f.__name__: cache(f) for f in (smollm2, qwen3, llama3, gemma, phi3, deepseekv3, gptoss, cohere2, unigram, slow)
}
"""name -> makes its tokenizer, once."""
