"""Render the messages of a call into the token ids of its prompt."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from multirole.chat.templates import Renderer, check_tools, control_tokens, reply_form
from multirole.chat.tool_calls import ToolForm
from multirole.types import Message


class Prompts:
    """The prompts of a rollout, each of which is rendered once: same-role slots and the n episodes of a problem share them.

    Args:
        render: turns messages into token ids, as `MultiRoleGRPOTrainer` takes it.
        n_embeddings: of the model; a prompt with another token is refused.
        reads_calls: whether calls of tools are read in the replies, which the chat template must then be able to write.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, render: Renderer, n_embeddings: int | None, reads_calls: bool
    ) -> None:
        self.tokenizer, self.render = tokenizer, render
        self.n_embeddings, self.reads_calls = n_embeddings, reads_calls
        self._rendered: dict[str, list[int]] = {}

    @property
    def form(self) -> ToolForm:
        """How the model replies to the prompts."""
        return reply_form(self.tokenizer, self.render)

    def ids(self, messages: list[Message], tools: list[dict[str, Any]], is_remote: bool = False) -> list[int]:
        """Return the prompt's ids. Raises ValueError or TypeError for messages that cannot be rendered for this model.

        The ids of a prompt for an endpoint (`is_remote`) only seed and count: what the base's template refuses is encoded as JSON.
        """
        key = repr((messages, tools, is_remote))
        if key not in self._rendered:
            self._rendered[key] = self._render(messages, tools, is_remote)
        return self._rendered[key]

    def _render(self, messages: list[Message], tools: list[dict[str, Any]], is_remote: bool) -> list[int]:
        if tools and self.reads_calls:
            check_tools(self.tokenizer, self.render)
        options = {"tools": tools} if tools else {}
        try:
            ids = self.render(self.tokenizer, messages, **options)
        except ValueError:
            if not is_remote:
                raise
            ids = control_tokens(self.tokenizer).encode_text(json.dumps(messages))
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise TypeError(
                f"`render` must return the prompt's token ids as a list of integers, got {type(ids).__name__}. With "
                "`apply_chat_template`, pass `add_generation_prompt=True, return_dict=False`."
            )
        if self.n_embeddings is not None and ids and max(ids) >= self.n_embeddings:
            raise ValueError(
                f"the prompt has the token {self.tokenizer.decode([max(ids)])!r} with id {max(ids)}, but the model has embeddings for only "
                f"{self.n_embeddings} tokens. Call `model.resize_token_embeddings(len(tokenizer))` before training."
            )
        return ids
