"""Run a single turn of a workflow: the messages that a role gets after given replies, and a base's answers."""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from multirole.engines.protocol import Engine, Request
from multirole.types import Message, Problem, Turn, Workflow
from multirole_cpu.engine import TransformersEngine
from tiny_base.tokenizer import LONGEST

T = TypeVar("T")
Where = tuple[str, int, int]
"""(role, slot, round)."""


def serve(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> TransformersEngine:
    """Build an engine with the model's current weights."""
    engine = TransformersEngine(tokenizer.eos_token_id, max_length=LONGEST)
    engine.publish(model, version=0)
    return engine


class Asked(Exception):
    """Raised when the wanted turn is reached."""


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a new thread, because a notebook's thread already has an event loop."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()


def asked(workflow: Workflow, problem: Problem, replies: dict[Where, str], position: Where) -> list[Message]:
    """Return the messages that the turn at `position` gets after the turns in `replies` have given these replies."""

    async def call(role: str, messages: list[Message], slot: int = 0, round: int = 0) -> Turn:
        if (role, slot, round) == position:
            messages_found.extend(messages)
            raise Asked
        return Turn(role, slot, round, [], [], [], replies[role, slot, round], "stop")

    messages_found: list[Message] = []
    try:
        finish(workflow.run(problem, call))
    except Asked:
        return messages_found
    raise ValueError(f"{workflow.name} never asks {position} after these replies.")


class Reply(str):
    """A reply's text, including its forced beginning."""

    n_tokens: int
    is_cut: bool


def complete(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    asks: Sequence[list[Message]],
    forced: str | Sequence[str],
    max_tokens: int,
    seed: int,
) -> list[Reply]:
    """Sample one reply to each list of messages at temperature 1; each reply begins with its `forced` text."""
    starts = [forced] * len(asks) if isinstance(forced, str) else list(forced)
    for key, (messages, start) in enumerate(zip(asks, starts, strict=True)):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + start
        engine.add(
            key, Request(tokenizer(prompt)["input_ids"], None, seed * 1_000_003 + key, max_tokens, temperature=1.0)
        )
    replies: dict[int, Reply] = {}
    while len(replies) < len(starts):
        for key, completion in engine.step():
            reply = Reply(starts[key] + tokenizer.decode(completion.token_ids, skip_special_tokens=True))
            reply.n_tokens, reply.is_cut = len(completion.token_ids), completion.finish_reason == "length"
            replies[key] = reply
    return [replies[key] for key in range(len(starts))]
