"""Compute the trainer's log-probs: TRL's fused head over left-aligned rows.

The fused head works in tiles, so that the logits of a vocabulary of 152k tokens are never stored in full, and gathers a head
that FSDP2 has sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from trl.trainer import utils

from multirole.update.passes.prefix_tree import Packing
from multirole.update.rows import left_aligned


@contextmanager
def compact_head() -> Iterator[None]:
    """Context manager: TRL's fused head scores only completion tokens on a CPU, too, as it does with Triton."""
    former = utils._use_triton
    utils._use_triton = lambda device: True
    try:
        yield
    finally:
        utils._use_triton = former


class Head(NamedTuple):
    """The head of a model: `weight` (V, H) and `bias` (V,) map a hidden state to logits, which are then scaled and capped."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


class HeadWatch:
    """Records what TRL's fused head is given in one pass, for a loss of whole distributions.

    Attributes:
        states: hidden states (N, C, H) of which the head computes the distributions of the completion's tokens, with gradient; undefined on padding.
        head: the head.
    """

    states: Tensor
    head: Head

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager of one forward pass."""
        self._former = utils._ChunkedLogProbFunction
        utils._ChunkedLogProbFunction = self
        try:
            yield
        finally:
            utils._ChunkedLogProbFunction = self._former

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Do what TRL's function of this name does, and keep its arguments."""
        self._hidden, self.head = hidden, Head(weight, bias, scale, softcap)  # (tokens, H)
        return self._former.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs)

    def place(self, is_scored: Tensor, rows: Tensor, at: Tensor) -> None:
        """Set `states`: the j-th token of completion i is scored at (rows[i, j], at[i, j]) of the tokens (B, L), of which some are scored."""
        states = self._hidden.new_zeros(*is_scored.shape, self._hidden.size(-1))  # (B, L, H)
        self.states = states.masked_scatter(is_scored[..., None], self._hidden)[rows, at]  # (N, C, H)


def score(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, n_completion: int, multiple: int | None = None,
    watch: HeadWatch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-probs and entropies (N, C) of the last C = `n_completion` tokens; ids and mask (N, P + C) are padded as in TRL.

    Causal attention over left-aligned rows needs no mask and no position ids. Rows are padded to a multiple of `multiple` tokens.
    """
    ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion, multiple)
    with compact_head(), nullcontext() if watch is None else watch.recording():
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    if watch is not None:
        watch.place(outputs.label_mask, torch.arange(len(at), device=at.device)[:, None].expand_as(at), at)
    logps = outputs.log_probs.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    entropies = outputs.entropy.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    return logps, entropies


def score_packed(model: nn.Module, packing: Packing, watch: HeadWatch | None = None) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (R, C) of the completions of R packed rows; call it in `tree_attention.packed_attention`."""
    with compact_head(), nullcontext() if watch is None else watch.recording():
        outputs = model(
            input_ids=packing.ids, position_ids=packing.positions, shift_labels=packing.labels, fused_lm_head=True,
            prefix_tree=packing,
        )  # fmt: skip
    if watch is not None:
        watch.place(outputs.label_mask, torch.zeros_like(packing.scores), packing.scores)
    logps, entropies = (
        values[0][packing.scores].masked_fill(~packing.is_token, 0.0) for values in (outputs.log_probs, outputs.entropy)
    )  # (R, C) each; apart, so that entropies get no gradient of zeros
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
            "with such a head. Leave it out, or use a model whose head has its own weights."
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


@torch.no_grad()
def check_rows(model: PeftModel, tolerance: float) -> None:
    """Raise ValueError if a token's log-probs, without a mask, depend on later tokens or on other rows by more than `tolerance` nats.

    Rows are trained in batches that are padded on the right, or packed, and engines sample token by token.
    """
    vocabulary = model.get_base_model().config.get_text_config().vocab_size
    row = torch.arange(8, device=model.device) % vocabulary  # (8,)
    rows = torch.stack([row, row.flip(0), torch.cat([row[:4], row[:4]])])  # (3, 8)

    def logprobs(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)  # (N, T, V)

    alone, together = logprobs(row[None])[0], logprobs(rows)  # (8, V), (3, 8, V)
    pairs = {"other rows of its batch": (alone, together[0]), "later tokens of its row": (alone[:4], together[2, :4])}
    for what, (one, other) in pairs.items():
        if not (difference := (one - other).abs().max().item()) <= tolerance:
            raise ValueError(
                f"The log-probs that a {type(model.get_base_model()).__name__} computes for a token differ by {difference:.2g} nats with the "
                f"{what}, so what is trained would not be what was sampled. Use another model, or a version of transformers in which this is corrected."
            )
