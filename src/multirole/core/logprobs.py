"""The trainer's own log-probs: TRL's fused head over rows that lie at the left edge.

The fused head works in tiles, so that a vocabulary of 152k words never makes whole logits, and gathers a head that FSDP2 has
sharded.
"""

from peft import PeftModel
from torch import Tensor

from multirole.core.rows import left_aligned


def score(model: PeftModel, input_ids: Tensor, attention_mask: Tensor, n_completion: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, C) of the last C = `n_completion` of ids and mask (N, P + C), padded as TRL pads them.

    Causal attention over rows at the left edge needs no mask and no position ids.
    """
    ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion)
    outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    logps = outputs.log_probs.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    entropies = outputs.entropy.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    return logps, entropies
