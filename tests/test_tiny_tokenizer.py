"""The tiny tokenizer loses nothing, keeps domain strings whole, and its template is a plain concatenation of turns."""

import random

import pytest
from tiny_base.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


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


def test_vocabulary_is_about_512_tokens(tokenizer):
    assert 480 <= len(tokenizer) <= 512


def test_domain_strings_are_single_tokens(tokenizer):
    assert tokens(tokenizer, "=12*2-9\n\\boxed{15}") == ["=", "12", "*", "2", "-", "9", "\n\\boxed{", "15", "}"]
    assert tokens(tokenizer, "```python\ndef f(xs):\n    xs = xs[2:]\n") == [
        "```python\ndef f(xs):\n",
        "    xs = xs[",
        "2",
        ":]\n",
    ]
    assert tokens(tokenizer, "STRATEGY 1: work quickly") == ["STRATEGY 1: ", "work quickly"]


def test_template_concatenates_turns_also_consecutive_assistant_ones(tokenizer):
    messages = [
        {"role": "user", "content": "7+5"},
        {"role": "assistant", "content": "12"},
        {"role": "assistant", "content": "Correct"},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = [
        "<|user|>",
        "7",
        "+",
        "5",
        "<|end|>",
        "<|assistant|>",
        "12",
        "<|end|>",
        "<|assistant|>",
        "Correct",
        "<|end|>",
    ]
    assert [tokenizer.decode([i]) for i in ids] == [*expected, "<|assistant|>"]
    assert ids[:5] == tokenizer.apply_chat_template(messages[:1], tokenize=True, return_dict=False)


def test_end_of_turn_is_eos_and_differs_from_pad(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|endoftext|>")
    assert tokenizer.decode(tokenizer("12<|end|>")["input_ids"], skip_special_tokens=True) == "12"
