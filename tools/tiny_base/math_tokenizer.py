"""The tokenizer of tiny-r, in which an operation (`+27`, `*3`) is one token."""

from transformers import PreTrainedTokenizerFast

from multirole_study.tasks.tiny_chain import PRODUCTS, SUMS
from tiny_base.tokenizer import build, prompt_strings

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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, deterministically, from 256 bytes, numbers to 99, operations, prompts and phrases."""
    return build(OPERATIONS, (*prompt_strings("compute left to right", "compute"), *REPLY_STRINGS))
