"""Compute the trainer's log-probs: TRL's fused head over left-aligned rows.

The fused head works in tiles, so that the logits of a vocabulary of 152k tokens are never stored in full, and gathers a head
that FSDP2 has sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from trl.kernels import chunked_logprob
from trl.trainer import utils

from multirole.core.prefix_tree import Packing
from multirole.core.rows import left_aligned

TILE = 512, 2048
"""Tokens and words of a tile of logits on a CPU, where a vocabulary is larger than `LARGE`: it stays in the processor's cache."""
LARGE = 8192


@contextmanager
def compact_head(is_tiled: bool = False) -> Iterator[None]:
    """Context manager: TRL's fused head scores only completion tokens on a CPU, too, as it does with Triton.

    With `is_tiled` it works in tiles of `TILE`; the context must then last until `backward` has ended.
    """
    former = utils._use_triton, utils._CHUNKED_LOGPROB_CHUNK_SIZE, chunked_logprob.TOKEN_CHUNK_SIZE
    utils._use_triton = lambda device: True
    if is_tiled:
        chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE
    try:
        yield
    finally:
        utils._use_triton, utils._CHUNKED_LOGPROB_CHUNK_SIZE, chunked_logprob.TOKEN_CHUNK_SIZE = former


def has_large_head(model: nn.Module) -> bool:
    """Return whether logits are computed in tiles of `TILE`: on a CPU, with a vocabulary above `LARGE`."""
    weight = model.get_output_embeddings().weight
    return weight.device.type == "cpu" and weight.size(0) > LARGE


def score(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, n_completion: int, multiple: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-probs and entropies (N, C) of the last C = `n_completion` tokens; ids and mask (N, P + C) are padded as in TRL.

    Causal attention over left-aligned rows needs no mask and no position ids. Rows are padded to a multiple of `multiple` tokens.
    """
    ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion, multiple)
    with compact_head():
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    logps = outputs.log_probs.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    entropies = outputs.entropy.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    return logps, entropies


def score_packed(model: nn.Module, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (R, C) of the completions of R packed rows; call it in `tree_attention.packed_attention`."""
    with compact_head():
        outputs = model(
            input_ids=packing.ids, position_ids=packing.positions, shift_labels=packing.labels, fused_lm_head=True,
            prefix_tree=packing,
        )  # fmt: skip
    values = torch.stack([outputs.log_probs[0], outputs.entropy[0]])[:, packing.scores]  # (2, R, C)
    logps, entropies = values.masked_fill(~packing.is_token, 0.0)
    return logps, entropies


@torch.no_grad()
def check_head(model: PeftModel, temperature: float, tolerance: float) -> None:
    """Raise ValueError if TRL's fused head and the model's own logits give log-probs that differ by more than `tolerance` nats.

    TRL reads the caps and scales of logits under the names that most configurations use; a model may use others.
    """
    trains_tokens = isinstance(model.get_base_model().get_output_embeddings(), TrainableTokensWrapper)
    if trains_tokens:
        raise ValueError(
            "`trainable_token_indices` changes the embedding of tokens that the model's head shares, and TRL's fused head does not compute "
            "with such a head. Leave it out, or use a model whose head has weights of its own."
        )
    ids = torch.arange(8, device=model.device)[None]  # (1, 8)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / temperature  # (1, 7, V)
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]  # (1, 7)
    scored, _ = score(model, ids, torch.ones_like(ids), 7)
    if not (difference := (scored - expected).abs().max().item()) <= tolerance:
        raise ValueError(
            f"TRL's fused head does not compute the log-probs of a {type(model.get_base_model()).__name__}: they differ by "
            f"{difference:.2g} from those of the model's own logits, which replies are sampled from. Its configuration changes logits in a "
            "way that TRL does not know. Use another base model."
        )
