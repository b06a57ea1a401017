"""The tokenizers of the bases lose nothing, encode a task's strings as single tokens, and have a template that concatenates turns."""

import random

import pytest
from tiny_base import code_habits, code_tokenizer, math_tokenizer
from tiny_base.habits import Steady
from tiny_base.tokenizer import VOCAB_SIZE

from multirole_study.tasks.tiny_pipe import to_problem

TOKENIZERS = {"math": math_tokenizer.build_tokenizer(), "code": code_tokenizer.build_tokenizer()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def tokens(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]]


def test_any_text_survives_a_round_trip(tokenizer):
    rng = random.Random(0)
    texts = [
        "h\u00e9 \u65e5\u672c \U0001f600 \x00 \t\r\n 123 1005 \\boxed{7}",
        "",
        " leading and trailing \n\n",
        "\\boxed{Cor",
        "xs[::-1]]\n",
    ]
    texts += [
        "".join(chr(rng.choice([rng.randint(0, 127), rng.randint(160, 50000)])) for _ in range(40)) for _ in range(200)
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_is_full(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE


def test_operations_are_single_tokens():
    text = ">23+8-29*3+17-1\n>31-29\nwait=2\n\\boxed{2}"
    assert tokens(TOKENIZERS["math"], text) == [
        ">", "23", "+8", "-29", "*3", "+17", "-1", "\n>", "31", "-29", "\nwait=", "2", "\n\\boxed{", "2", "}",
    ]  # fmt: skip


def test_moves_and_fragments_of_programs_are_single_tokens():
    text = code_habits.write(to_problem("at 3, add +28, rest -9"), "split", Steady()).text
    assert tokens(TOKENIZERS["code"], text)[:9] == [
        code_tokenizer.HEAD, "3", "]\n    ## ", "+28", "+20", "=", "23", "+8", "\n    r += xs[",
    ]  # fmt: skip


def test_strategies_and_prompts_are_single_tokens():
    for task, strategy, request in (
        ("math", "split every number", "Compute left to right: "),
        ("code", "split every move", "Write f(xs) in Python: "),
    ):
        assert tokens(TOKENIZERS[task], f"STRATEGY 1: {strategy}") == ["STRATEGY 1: ", strategy]
        assert tokens(TOKENIZERS[task], f"{request}7\nStrategy: {strategy}") == [request, "7", "\nStrategy: ", strategy]


def test_template_concatenates_turns_also_consecutive_assistant_ones(tokenizer):
    messages = [
        {"role": "user", "content": "7"},
        {"role": "assistant", "content": "12"},
        {"role": "assistant", "content": "Correct"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert [tokenizer.decode([i]) for i in ids] == [
        "<|user|>", "7", "<|end|>", "<|assistant|>", "12", "<|end|>", "<|assistant|>", "Correct", "<|end|>", "<|assistant|>",
    ]  # fmt: skip
    assert ids[:3] == tokenizer.apply_chat_template(messages[:1], tokenize=True, return_dict=False)


def test_end_of_turn_is_eos_and_differs_from_pad(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|endoftext|>")
    assert tokenizer.decode(tokenizer("12<|end|>")["input_ids"], skip_special_tokens=True) == "12"
