"""Build the tokenizer of a GGUF file, with the tokens that end a turn and pad a batch.

transformers' own reading of these files splits Llama's numbers by GPT-2's rule, swaps the beginning and the end of text, and takes the end
of text for the end of a turn. Here words are split by the rule that the file names, and the end of a turn is what the chat template
writes after a reply.
"""

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multirole.bases.gguf_header import Header

CONTROL, USER_DEFINED = 3, 4
"""GGUF's types of tokens that are never part of a text, and of those that are never split."""
PADDING = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]")
"""Names of special tokens for padding, where a file names none that can be used."""
REPLY = "Yes, of course."
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern of Llama 3 and of Qwen2 (`Qwen2Converter` of transformers), which differ in how many digits are one word."""


def pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    """Return how text is split before byte pairs are merged, by llama.cpp's name of the rule (`gguf_header.SPLITS`)."""
    if rule in ("gpt-2", "smollm"):
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return words if rule == "gpt-2" else pre_tokenizers.Sequence([digits, words])
    pattern = WORDS.format(digits="{1,3}" if rule == "llama-bpe" else "")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def backend(header: Header) -> Tokenizer:
    """Build the byte-level BPE tokenizer from vocabulary, merges and kinds of tokens."""
    tokens, rule = header.fields["tokenizer.ggml.tokens"], header.fields["tokenizer.ggml.pre"]
    kinds = header.fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(pair.split(" ")) for pair in header.fields.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 has words in its vocabulary that no merges lead to
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(rule), decoders.ByteLevel()
    added = {CONTROL: tokenizer.add_special_tokens, USER_DEFINED: tokenizer.add_tokens}
    for kind, add in added.items():
        add(
            [
                AddedToken(token, normalized=False, special=kind == CONTROL)
                for token, other in zip(tokens, kinds, strict=True)
                if other == kind
            ]
        )
    return tokenizer


def build_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """Build the tokenizer with its special tokens and chat template."""
    tokens, fields = header.fields["tokenizer.ggml.tokens"], header.fields

    def named(*names: str) -> str | None:
        ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        return next((tokens[i] for i in ids if i is not None and i < len(tokens)), None)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend(header), bos_token=named("bos"), unk_token=named("unknown"),
        model_max_length=header.field("context_length"), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    end = named("eos")
    tokenizer.eos_token = end_of_turn(tokenizer) or end
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    candidates = (named("padding"), named("unknown"), *PADDING, end)
    usable = (token for token in candidates if token in special - {tokenizer.eos_token})
    tokenizer.pad_token = next(usable, tokenizer.eos_token)
    return tokenizer


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the special token that the chat template writes after a reply, or None."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "Can you?"}, {"role": "assistant", "content": REPLY}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except jinja2.TemplateError:  # the checks of chats report it
        return None
    ids = tokenizer.encode(str(text).rpartition(REPLY)[2], add_special_tokens=False)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i in special), None)
