"""The prompt of a conversation with consecutive assistant turns, to the character, and the text that is read from a reply."""

import pytest
from toy_qwen3 import toy_tokenizer

from multirole.chat.templates import chat_template
from multirole.rollout.replies import reply_text
from multirole.types import assistant, user

CHAT = [user("solve it"), assistant(" draft \n"), assistant("\\boxed{Incorrect}"), user("again")]


def test_the_chat_template_writes_one_empty_think_block(tokenizer):
    assert tokenizer.decode(chat_template(tokenizer, CHAT)) == (
        "<|im_start|>user\nsolve it<|im_end|>\n<|im_start|>assistant\n draft \n<|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{Incorrect}<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_special_tokens_are_tokens_and_not_text(tokenizer):
    ids = chat_template(tokenizer, CHAT)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == len(CHAT)
    assert ids[:1] == [tokenizer.convert_tokens_to_ids("<|im_start|>")]


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    bare = toy_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_template(bare, CHAT)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("the answer<|im_end|>", "the answer"),
        ("<think>hm, wait</think>\n\nthe answer<|im_end|>", "the answer"),
        ("before <think>a thought that is cut off", "before"),
        ("<think>a thought that is cut off \\boxed{7}", ""),
        ("a</think>b</think>c", "c"),
    ],
)
def test_what_a_reply_says(tokenizer, written, said):
    assert reply_text(tokenizer, tokenizer.encode(written, add_special_tokens=False)) == said
