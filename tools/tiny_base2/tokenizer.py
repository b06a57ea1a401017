"""The tokenizer of the second generation: that of the first with an operation (`+27`, `*3`) as one token."""

from tiny_base.tokenizer import PROMPT_STRINGS, build
from transformers import PreTrainedTokenizerFast

from multirole.tasks.tiny_chain import PRODUCTS, SUMS

VOCAB_SIZE = 544
OPERATIONS = (
    *(f"{op}{n}" for op, n in (*SUMS, *PRODUCTS)),
    *(f"{op}{n}" for op in "+-" for n in range(10, 40)),
)
REPLY_STRINGS = (
    "\\boxed{", "\n\\boxed{", "\n=", "\n==", "==", "\n>", "\nwait=", "hmm ", "hmm wait ",
    "```python\nx=", "\nx=x", "\nprint(x)\n```", "\n```", "```python\n",
    "Correct", "Incorrect", "Line ", " is wrong. ", " is wrong. \n", " ok. ", " No box. ", "No box. ",
    "Every line is right. ", "The result is wrong. ", "\nSolution ", "Solution ", " is right. ",
    "STRATEGY 1: ", "\nSTRATEGY 2: ", "\nSTRATEGY 3: ",
    "one step per line", "split every number", "two steps per line", "guess the result",
)  # fmt: skip
MATH_PROMPTS = tuple(text for text in PROMPT_STRINGS if "f(xs)" not in text and "write it" not in text)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Deterministic; 256 bytes, numbers to 99, operations, prompts and phrases."""
    numbers = map(str, range(10, 100))
    return build((*numbers, *OPERATIONS, *MATH_PROMPTS, *REPLY_STRINGS), (*MATH_PROMPTS, *REPLY_STRINGS), VOCAB_SIZE)
