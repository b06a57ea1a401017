"""Build byte-level BPE tokenizers of 544 tokens in which the strings of a task are single tokens.

All 256 bytes are in the alphabet, so any text survives a round trip. Numbers 0-99, prompt phrases and fragments of answers are
added tokens (longest match first), which keeps prompts short. The chat template writes every message as `<|role|>content<|end|>`,
in any order: consecutive assistant messages, as in Eval-Opt's history, are ordinary.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 544
LONGEST = 2048
"""Number of a model's positions, and so the largest length of a prompt and its reply; only `train.MAX_LENGTH` are trained."""
PAD, END = "<|endoftext|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def prompt_strings(request: str, again: str) -> tuple[str, ...]:
    """Return the phrases of a task's prompts. `request` is what a solver is asked for, `again` the verb after a review."""
    return (
        f"{request[0].upper()}{request[1:]}: ",
        "Check every line above. Reply \\boxed{Correct} or \\boxed{Incorrect}.",
        f"Use the review and {again} it again.",
        "\nWhich solution is right? Reply \\boxed{N}.",
        f"Name three strategies to {request}: ",
        "\nUse the solutions to give one final answer.",
        "\nStrategy: ",
        ") ---\n",
        *(f"\n--- Solution {i} ---\n" for i in (1, 2, 3, 4, 5)),
        *(f"\n--- Solution {i} (Strategy: " for i in (1, 2, 3)),
    )


def build(units: tuple[str, ...], strings: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Build a tokenizer, deterministically, with numbers, units and strings as tokens; the remaining merges are learned from the strings."""
    added = (*map(str, range(10, 100)), *units, *strings)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(strings, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )
