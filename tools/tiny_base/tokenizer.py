"""The tiny scales' tokenizer: byte-level BPE of 512 tokens in which the strings of the tiny tasks are single tokens.

All 256 bytes are in the alphabet, so any text survives a round trip. Numbers 0-99, prompt phrases and code fragments
are added tokens (longest match first), which keeps prompts at 15-110 tokens. The chat template writes every message as
`<|role|>content<|end|>`, in any order: consecutive assistant messages, as in Eval-Opt's history, are ordinary.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, END = "<|endoftext|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PROMPT_STRINGS = (
    "Compute left to right: ",
    "Write f(xs) in Python: ",
    "Check every line above. Reply \\boxed{Correct} or \\boxed{Incorrect}.",
    "Use the review and compute it again.",
    "Use the review and write it again.",
    "\nWhich solution is right? Reply \\boxed{N}.",
    "Name three strategies to compute left to right: ",
    "Name three strategies to write f(xs) in Python: ",
    "\nUse the solutions to give one final answer.",
    "\nStrategy: ",
    ") ---\n",
    *(f"\n--- Solution {i} ---\n" for i in (1, 2, 3, 4, 5)),
    *(f"\n--- Solution {i} (Strategy: " for i in (1, 2, 3)),
)
REPLY_STRINGS = (
    "\\boxed{",
    "\n\\boxed{",
    "\n=",
    "Correct",
    "Incorrect",
    "Line ",
    " ok. ",
    " is wrong. ",
    "Every line is right. ",
    "The result is wrong. ",
    "No box. ",
    "No fence. ",
    "Solution ",
    " is right. ",
    "STRATEGY 1: ",
    "\nSTRATEGY 2: ",
    "\nSTRATEGY 3: ",
    "one step per line",
    "two steps per line",
    "write every step",
    "guess the result",
    "work quickly",
    "one line per step",
    "guard the empty list",
    "one expression",
    "skip edge cases",
)
CODE_STRINGS = (
    "keep even", "keep odd", "keep above ", "keep below ", "add ", "subtract ", "times ", "square", "negate",
    "drop first ", "drop last ", "take first ", "every second", "reverse", "sort", ", ",
    "sum", "count", "max or 0", "min or 0", "first or 0", "last or 0",
    "```python\ndef f(xs):\n", "def f(xs):\n", "\n```", "    return ", "    xs = [x for x in xs if x", "    xs = [x",
    "    xs = [-x", "    xs = xs[", "    xs = xs[:", "    xs = xs[:-", "    xs = xs[::2]\n", "    xs = xs[::-1]\n",
    "    xs = sorted(xs)\n", " % 2 == 0", " % 2 == 1", " > ", " < ", " + ", " - ", " * ", "]\n", ":]\n",
    " for x in xs]\n", "[x for x in ", "[x", "[-x", " for x in ", " if x", "xs", "sorted(", "max(", "min(", "sum(",
    "len(", " if xs else 0", "[0]", "[-1]", "next(iter(", "next(reversed(", ", default=0)", ", 0)", "[::2]",
    "[::-1]", "[:-", "[:", ":]",
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of tiny-s."""
    strings = (*PROMPT_STRINGS, *REPLY_STRINGS, *CODE_STRINGS)
    return build((*map(str, range(10, 100)), *strings), strings, VOCAB_SIZE)


def build(added: tuple[str, ...], corpus: tuple[str, ...], size: int) -> PreTrainedTokenizerFast:
    """Learn the few merges left beside the added strings, from a corpus of some strings; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(added),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
