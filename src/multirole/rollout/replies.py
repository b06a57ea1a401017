"""Read replies: a turn's text from its tokens, an answer's tokens, and what TRL and a person are shown of an episode."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from multirole.chat.replies import THOUGHT_TAGS, opens_thought, text_outside_thoughts
from multirole.chat.templates import control_tokens, reply_form
from multirole.chat.tool_calls import ToolForm
from multirole.types import Episode, Turn

PROMPT_TAIL = 16
"""Last tokens of a prompt that are searched for the tag that opens a thought."""


def reply_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], prompt_ids: Sequence[int] | None = None,
    form: ToolForm | None = None,
) -> str:  # fmt: skip
    """Return the text of a reply outside thoughts; "" for a thought that the token limit cut off.

    Some templates open the thought in the prompt, so `prompt_ids` tells whether the reply starts inside one. `form` says how the model replies, by
    default as the tokenizer's chat template writes it.
    """
    in_channels = (form or reply_form(tokenizer)).text_in_channels(tokenizer, token_ids)
    if in_channels is not None:
        return in_channels
    text = decode_reply(tokenizer, token_ids)
    if prompt_ids is None:
        return text_outside_thoughts(text)
    prompt_end = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False)
    return text_outside_thoughts(text, is_thinking=opens_thought(prompt_end))


def decode_reply(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode a whole reply without special tokens, except those that open or close a thought (Magistral's are special)."""
    special, tags = _special_ids(tokenizer, len(tokenizer))
    if not tags:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    return tokenizer.decode([i for i in token_ids if i in tags or i not in special], skip_special_tokens=False)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of all special tokens, and of those that are tags of thoughts; of a tokenizer that is not a transformers one, none."""
    if not isinstance(tokenizer.added_tokens_decoder, dict):  # mistral-common's
        return frozenset(), frozenset()
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tags = frozenset(i for text, i in ids.items() if any(tag.startswith(text) for pair in THOUGHT_TAGS for tag in pair))
    return frozenset({*ids.values(), *tokenizer.all_special_ids}), tags


def answer_ids(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[int]:
    """Return the tokens of an episode's answer: those of the last turn with this text, or else of its text."""
    text = episode.answer.text if episode.answer else ""
    ids = next((turn.completion_ids for turn in reversed(episode.turns) if turn.text == text), None)
    return control_tokens(tokenizer).encode_text(text) if ids is None else ids


def last_turns(episodes: list[Episode], eos: int) -> dict[str, list]:
    """Return one row per episode for TRL's `rollout_func`: its last turn, and the episode for the reward functions."""
    nothing = Turn("", 0, 0, [eos], [eos], [0.0], "", "stop")  # an episode whose first prompt was too long
    turns = [episode.turns[-1] if episode.turns else nothing for episode in episodes]
    return {
        "prompt_ids": [turn.prompt_ids for turn in turns],
        "completion_ids": [turn.completion_ids for turn in turns],
        "logprobs": [turn.logprobs for turn in turns],
        "episodes": episodes,
    }


def transcript(episode: Episode) -> str:
    """Return all turns of an episode as text for a person."""
    return "\n".join(f"[{turn.role} {turn.slot}.{turn.round}] {turn.text}" for turn in episode.turns)
