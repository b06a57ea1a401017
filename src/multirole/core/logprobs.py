"""The trainer's own log-probs: TRL's fused head over rows that lie at the left edge.

The fused head works in tiles, so that a vocabulary of 152k words never makes whole logits, and gathers a head that FSDP2 has
sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from peft import PeftModel
from torch import Tensor
from trl.trainer import utils

from multirole.core.rows import left_aligned


@contextmanager
def compact_head() -> Iterator[None]:
    """Within it, TRL's fused head scores completion tokens alone on a CPU, too, as it does where it can use Triton."""
    former, utils._use_triton = utils._use_triton, lambda device: True
    try:
        yield
    finally:
        utils._use_triton = former


def score(
    model: PeftModel, input_ids: Tensor, attention_mask: Tensor, n_completion: int, multiple: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probs and entropies (N, C) of the last C = `n_completion` of ids and mask (N, P + C), padded as TRL pads them.

    Causal attention over rows at the left edge needs no mask and no position ids. The model is given a multiple of `multiple` tokens.
    """
    ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion, multiple)
    with compact_head():
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    logps = outputs.log_probs.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    entropies = outputs.entropy.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    return logps, entropies
