"""The trainer's own log-probs: TRL's fused head over rows that lie at the left edge.

The fused head works in tiles, so that a vocabulary of 152k words never makes whole logits, and gathers a head that FSDP2 has
sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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


@torch.no_grad()
def check_head(model: PeftModel, temperature: float, tolerance: float) -> None:
    """Refuse a model whose log-probs, by its own logits, are not those of TRL's fused head to `tolerance` nats (ValueError).

    TRL knows the caps and scales of logits by the names that most configurations give them.
    """
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
