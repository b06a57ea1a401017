"""A thought that was cut off is not an answer and is not quoted to other roles; the text outside thoughts is the reply."""

import asyncio
import os
import re
import sys

import pytest
from chat_tokenizers import TEMPLATES, byte_level, template, wrap

from multirole.chat.replies import ends_in_broken_box, find_boxes, plain_words, text_outside_thoughts
from multirole.chat.tool_calls import parse_reply, tool_form
from multirole.rollout.replies import reply_text
from multirole.types import Problem, Turn, assistant, user
from multirole.workflows import Voting


class Characters:
    """A tokenizer whose ids are characters."""

    added_tokens_decoder, all_special_ids = {}, []

    def __len__(self):
        return sys.maxunicode + 1

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def said(text: str, prompt: str | None = None) -> str:
    prompt_ids = None if prompt is None else list(map(ord, prompt))
    return reply_text(Characters(), list(map(ord, text)), prompt_ids)


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        ("  no thought ", "  no thought "),
        ("<think>a</think> b", "b"),
        ("<think>a</think>", ""),
        ("<think>\nPerhaps \\boxed{7}. Wait, so let me", ""),
        ("<think>The tag </think> ends a thought. 1+1</think>\n\n\\boxed{2}", "\\boxed{2}"),
        ("a thought that the prompt opened</think>b", "b"),
        ("\\boxed{7} <think>or \\boxed{8}", "\\boxed{7}"),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think><think>a</think>b", "b"),
        ("<thinking>a \\boxed{7}", ""),
        ("<thinking>a</thinking>b", "b"),
        ("<thought>a", ""),
        ("<seed:think>a", ""),
        ("[THINK]a", ""),
        ("[THINK]a[/THINK]b", "b"),
        ("◁think▷a◁/think▷b", "b"),
        ("<|begin_of_thought|>a", ""),
    ],
)
def test_text_outside_thoughts(text, outside):
    """jundot/omlx#2607 and huggingface/trl#5308 ("incomplete reasoning"), and kinds of them."""
    assert text_outside_thoughts(text) == said(text) == outside


def test_a_thought_that_the_prompt_opened():
    """The templates of DeepSeek-R1 and QwQ end with `<think>`, so a reply that is cut off has no tag at all."""
    assert said("Perhaps \\boxed{7}. Wait", "assistant\n<think>\n") == ""
    assert said("a</think>b", "assistant\n<think>\n") == "b"
    assert said("b", "assistant\n<think>\n\n</think>\n\n") == "b"
    assert said("b", "What does <think> mean?\nassistant\n") == "b"


THOUGHT, WORDS = "Perhaps 7.", "It is 4."


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer to which the control tokens of every template are special."""
    texts = "".join(template(path.stem) for path in TEMPLATES.glob("*.jinja"))
    special = {
        *re.findall(r"<[|｜][^<>{}'\"\s|]+[|｜]>", texts),
        "<|constrain|>",
        "<eos>",
        "<bos>",
        "<|turn>",
        "<turn|>",
        "<|channel>",
        "<channel|>",
    }
    return wrap(
        byte_level(r"\w+|\W+", sorted(special), ("<think>", "</think>")), "", eos_token="<eos>", bos_token="<bos>"
    )


def written(tokenizer, thinks: bool) -> tuple[str, str]:
    """The prompt, and the reply with a thought that the model has to write for its message to be rendered."""
    asked = user("Ask.")
    head = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True, enable_thinking=thinks)
    message = assistant(WORDS) | {"reasoning_content": THOUGHT}
    conversation = tool_form(tokenizer).adapted([asked, message])
    whole = tokenizer.apply_chat_template(conversation, tokenize=False, enable_thinking=thinks)
    start = len(os.path.commonprefix([head, whole]))
    if whole.rfind("<", 0, start) > whole.rfind(">", 0, start):  # in the middle of a tag
        start = whole.rfind("<", 0, start)
    return whole[:start], whole[start:]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(TEMPLATES.glob("*.jinja")) if "reasoning" in path.read_text() or "thinking" in path.read_text()]
)  # fmt: skip
def test_thoughts_are_cut_out_in_the_form_of_every_template(name, thinks, tokenizer):
    """Those of gpt-oss, Muse Glimmer and Gemma 4 stand in channels."""
    tokenizer.chat_template = template(name)
    parts = written(tokenizer, thinks)
    if THOUGHT not in parts[1]:
        pytest.skip("the template renders no thought of the last reply")
    prompt, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    text = reply_text(tokenizer, ids, prompt)
    assert text.strip() == WORDS
    turn = Turn("solver", 0, 0, prompt, ids, [0.0] * len(ids), text, "stop")
    assert parse_reply(tokenizer, turn, []).text.strip() == WORDS
    cut = tokenizer(parts[1].partition(THOUGHT)[0] + THOUGHT, add_special_tokens=False)["input_ids"]
    assert reply_text(tokenizer, cut, prompt) == ""


def test_channels_of_gptoss(tokenizer):
    """As the model writes them; a call keeps its text, and so does a reply of an untrained model, without channels."""
    tokenizer.chat_template = template("gptoss")
    thought = "<|channel|>analysis<|message|>6 * 7<|end|><|start|>assistant"
    for reply, text in [
        (thought + "<|channel|>final<|message|>42<|return|>", "42"),
        (thought + "<|channel|>final<|message|>42", "42"),
        (thought + "<|channel|>fin", ""),
        (thought + "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{oops<|call|>", "commentary to=functions.add json{oops"),
        ("42<|return|>", "42"),
    ]:  # fmt: skip
        assert reply_text(tokenizer, tokenizer(reply, add_special_tokens=False)["input_ids"], [0]) == text


def test_a_cut_thought_is_quoted_to_nobody():
    asked = []

    async def call(role, messages, slot=0, round=0):
        asked.append(messages[-1]["content"])
        text = said("<think>secret \\boxed{7}") if role == "generator" else "\\boxed{2}"
        return type("Turn", (), {"text": text, "outcome": None})()

    answer = asyncio.run(Voting(3).run(Problem("0", "math", "1+1", None), call))
    assert answer.text == "" and "secret" not in "".join(asked)


def test_boxes():
    text = r"\boxed{1} \fbox{\frac{2}{3}} \boxed {\boxed{4}} \boxed[b]{5} \framebox{6} \boxedeq{7} \boxed{8"
    assert [box.content for box in find_boxes(text)] == ["1", r"\frac{2}{3}", r"\boxed{4}", "5", "6"]
    assert next(text[box.start : box.end] for box in find_boxes(text)) == r"\boxed{1}"
    assert ends_in_broken_box(text, find_boxes(text)[-1].end)
    assert not ends_in_broken_box(r"put it in \boxed.", 0) and ends_in_broken_box(r"\boxed 5", 0)


def test_megabytes_of_boxes():
    n = 200_000
    assert find_boxes("\\boxed{" * n) == []
    assert [box.end for box in find_boxes("\\boxed{" * n + "}" * n)] == [8 * n]
    assert len(find_boxes("\\boxed{1}" * n)) == n
    assert not ends_in_broken_box("\\boxed" + " " * n, 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (r"\text{ Correct. }", "correct"), (r"\mathbf{Yes}!", "yes"), ("**a_b**", "a b"), (r"\textcolor{red}{\text{no}}", "no"),
        ("-2", "-2"), ("1.5", "1.5"), (r"\frac{1}{2}", r"\frac 1  2"), ("", ""),
    ],
)  # fmt: skip
def test_plain_words(content, words):
    assert plain_words(content) == words
