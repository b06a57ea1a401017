"""Chat messages -> prompt tokens, and completion tokens -> the text that other roles and the task see.

Two renderers (`MultiRoleGRPOConfig.renderer`). Both turn Qwen3's thinking off; they differ in what a model reads:

- "chat_template": the tokenizer's own template. Qwen3's writes the empty think block once, in front of the reply.
- "released_code": what the authors' parser writes. A system turn is put in front of every prompt (Qwen2.5's default
  sentence), and the empty think block stands in front of every past assistant turn, too.
"""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from multirole.core.types import Message

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ASSISTANT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

Renderer = Callable[[PreTrainedTokenizerBase, list[Message]], list[int]]


def chat_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """The prompt's ids by the tokenizer's own template, thinking off."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so messages cannot become a prompt. Use the "
            "tokenizer of an instruction-tuned model, or save a template as chat_template.jinja in its folder."
        )
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
    )


def released_code(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """The prompt's ids as the authors' code builds them (rllm's Qwen parser with `disable_thinking`)."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    parts = []
    for message in messages:
        is_assistant = message["role"] == "assistant"
        head = ASSISTANT if is_assistant else f"<|im_start|>{message['role']}\n"
        parts.append(f"{head}{message['content'].strip() if is_assistant else message['content']}<|im_end|>\n")
    return tokenizer.encode("".join(parts) + ASSISTANT, add_special_tokens=False)


RENDERERS: dict[str, Renderer] = {"chat_template": chat_template, "released_code": released_code}


def reply_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """What a reply says: its text after the reasoning, if it reasoned all the same (exactly one `</think>`)."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    _, think, said = text.partition("</think>")
    return said.strip() if think and "</think>" not in said else text
