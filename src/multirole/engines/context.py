"""Know how many tokens a base takes: where its positions end, and where they begin to depend on the other rows of a batch."""

import logging
import re
from typing import Any

from peft import PeftModel
from transformers import PretrainedConfig, PreTrainedModel

from multirole.engines.protocol import Request, RequestRefused

logger = logging.getLogger(__name__)

POSITIONS = re.compile(r"\bwpe\b|posit")
"""Names of tables of learned positions: GPT-2's `wpe`, and `embed_positions`."""
LARGEST_OFFSET = 2
"""Rows that such a table may have besides its positions, as OPT's has."""


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a text model, one for each type of layer that has its own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return (
        [parameters] if "rope_type" in parameters else [part for part in parameters.values() if isinstance(part, dict)]
    )


class Context:
    """The largest number of tokens, `tokens`, of a prompt and its reply for which a base is made."""

    def __init__(self, tokens: int, is_learned: bool) -> None:
        self.tokens, self.is_learned, self.has_warned = tokens, is_learned, False

    @classmethod
    def of(cls, model: PeftModel | PreTrainedModel) -> "Context | None":
        """Return the context of a base; None if it names none, or has no positions that end."""
        config = model.config.get_text_config()
        tokens = getattr(config, "max_position_embeddings", None)
        if not isinstance(tokens, int):
            return None
        tensors = [*model.named_parameters(), *model.named_buffers()]
        if any(POSITIONS.search(name) and x.dim() and 0 <= len(x) - tokens <= LARGEST_OFFSET for name, x in tensors):
            return cls(tokens, is_learned=True)
        if ropes := _ropes(config):
            scaled = ((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or 0) for rope in ropes)
            return cls(max(tokens, *map(int, scaled)), is_learned=False)
        return None

    def check(self, request: Request) -> None:
        """Raise RequestRefused for a prompt and reply that the base has no positions for; warn, once, of one longer than it is made for."""
        n_prompt, n_reply = len(request.prompt_ids), request.max_tokens
        if n_prompt + n_reply <= self.tokens or self.has_warned:
            return
        said = f"A prompt of {n_prompt} tokens and a reply of up to {n_reply} (`max_completion_length`) are more than the {self.tokens} tokens"
        advice = f"Lower `max_prompt_tokens` and `max_completion_length` to {self.tokens} together"
        if self.is_learned:
            raise RequestRefused(f"{said} for which this base has positions. {advice}, or use another model.")
        self.has_warned = True
        logger.warning(
            "%s for which this base is made (`max_position_embeddings`): replies may get worse beyond. %s.",
            said,
            advice,
        )


def check_rope(config: PretrainedConfig, max_length: int) -> None:
    """Raise ValueError if positions of rows of up to `max_length` tokens depend on the longest row of their batch, which sampling and training do not share."""
    config = config.get_text_config()
    for rope in _ropes(config):
        kind = rope.get("rope_type", "")
        unscaled = (
            rope.get("original_max_position_embeddings") if kind == "longrope" else config.max_position_embeddings
        )
        if ("dynamic" in kind or kind == "longrope") and unscaled is not None and max_length > unscaled:
            raise ValueError(
                f"A prompt and its reply may have {max_length} tokens (`max_prompt_tokens` + `max_completion_length`), and in a batch with a row of "
                f"more than {unscaled} this base computes other positions for all rows (`rope_type={kind!r}`): replies would be sampled by other "
                f"log-probs than those that are trained. Lower the two to {unscaled} together, or use another model."
            )
