"""The tokenizer of tiny-r-code, in which a move (`+27`) and the fragments of tiny_pipe's programs are one token."""

from transformers import PreTrainedTokenizerFast

from multirole_study.tasks.tiny_pipe import FOLDS, REST, START, TAUGHT_MOVE
from tiny_base.tokenizer import build, prompt_strings

MOVES = tuple(f"{sign}{n}" for sign in "+-" for n in range(1, TAUGHT_MOVE + 1))
HEAD = "```python\ndef f(xs):\n    r = xs["
STRINGS = (
    f"{START} ", *(f", {word} " for word in (*FOLDS, REST)),
    HEAD, "def f(xs):\n    r = xs[", "```python\ndef f(xs):\n", "    return sum(xs)\n```",
    "]\n    # ", "]\n    ## ", " \n    # ",
    *(f"\n    r {sign}= xs[" for sign in FOLDS.values()), *(f"]\n    r {sign}= xs[" for sign in FOLDS.values()),
    "\n    return r + sum(xs[", "]\n    return r + sum(xs[", ":])\n```", ":])", "\n```",
    "\\boxed{", "\n\\boxed{", "\n=", "hmm ", "hmm wait ", " wait ",
    "Correct", "Incorrect", "Line ", " is wrong. ", " ok. ", " No fence. ", "No fence. ", " No steps. ", "No steps. ",
    "Every line is right. ", "The result is wrong. ", "\nSolution ", "Solution ", " is right. ",
    "STRATEGY 1: ", "\nSTRATEGY 2: ", "\nSTRATEGY 3: ",
    "comment every move", "split every move", "no comments", "skip the steps",
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, deterministically, from 256 bytes, numbers to 99, moves, prompts and phrases."""
    return build(MOVES, (*prompt_strings("write f(xs) in Python", "write"), *STRINGS))
