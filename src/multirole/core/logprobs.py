"""The trainer's own log-probs: TRL's fused head over rows that lie at the left edge, at the sampling temperature or another.

The fused head works in tiles, so that a vocabulary of 152k words never makes whole logits, and gathers a head that FSDP2 has
sharded.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from multirole.core.distributed import gather_objects
from multirole.core.rows import Row, collate, left_aligned


def score(model: PeftModel, input_ids: Tensor, attention_mask: Tensor, n_completion: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, C) of the last C = `n_completion` of ids and mask (N, P + C), padded as TRL pads them.

    Causal attention over rows at the left edge needs no mask and positions no ids.
    """
    ids, labels, at, inside = left_aligned(input_ids, attention_mask, n_completion)
    outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    logps = outputs.log_probs.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    entropies = outputs.entropy.gather(1, at).masked_fill(~inside, 0.0)  # (N, C)
    return logps, entropies


@torch.no_grad()
def logprobs_of(
    model: PeftModel, rows: list[Row], share: Callable[[list[Row]], list[tuple[list[Row], float]]], pad_id: int,
    accelerator: Accelerator, temperature: float | None = None,
) -> dict[int, Tensor]:  # fmt: skip
    """The log-probs of the rows' completions under their adapters' present weights: id(turn) -> (C,), on the host.

    `share` deals an adapter's rows out to this process, in micro-batches; every process gets all values. They are at the sampling
    temperature, or at the one given. Leaves one adapter active.
    """
    computed, place = {}, {id(row.turn): i for i, row in enumerate(rows)}  # the same in every process
    with nullcontext() if temperature is None else head_at(model, temperature):
        for adapter in dict.fromkeys(row.adapter for row in rows):
            model.set_adapter(adapter)
            for micro, _ in share([row for row in rows if row.adapter == adapter]):
                batch = collate(micro, pad_id, accelerator.device)
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (N, P + C)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (N, P + C)
                with accelerator.autocast():
                    logps, _ = score(model, ids, mask, batch["completion_ids"].size(1))  # (N, C)
                for row, values in zip(micro, logps, strict=True):
                    computed[place[id(row.turn)]] = values[: len(row.turn.completion_ids)].cpu()
    everyones = {i: values for part in gather_objects(computed) for i, values in part.items()}
    return {id(row.turn): everyones[i] for i, row in enumerate(rows)}


def padded(logprobs: dict[int, Tensor], rows: list[Row]) -> Tensor:
    """The rows' log-probs (N, C), 0 after each row's end; NaN in rows that have none."""
    lines = [logprobs.get(id(row.turn), torch.full((len(row.turn.completion_ids),), math.nan)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)


@contextmanager
def head_at(model: PeftModel, temperature: float) -> Iterator[None]:
    """Within it, the fused head divides logits by `temperature` instead of the trainer's."""
    base = model.get_base_model()
    usual = base.forward
    add_fused_lm_head(base, temperature, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        base.forward = usual
