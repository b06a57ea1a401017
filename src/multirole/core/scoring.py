"""Log-probs and entropies of rows under current weights or under the reference of KL, without gradient."""

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from multirole.core.distributed import gather_objects
from multirole.core.model_passes import ModelPasses, no_key
from multirole.core.reference import Reference
from multirole.core.rows import Row, collate


@torch.no_grad()
def score_rows(
    passes: ModelPasses, rows: list[Row], pad_id: int, quantity: Literal["logprobs", "entropies"], reference: Reference | None = None
) -> list[Tensor]:  # fmt: skip
    """Return the log-probs or the entropies (C,), in nats, of each row's completion under its adapter; on the host.

    With `reference`, under the weights that KL is measured from. Each process computes a shard, and all of them get all rows.
    """
    computed: dict[int, Tensor] = {}
    place = {id(row): i for i, row in enumerate(rows)}
    with nullcontext() if reference is None else reference.applied():
        for adapter in dict.fromkeys(row.adapter for row in rows):
            _, layers = passes.set_active_adapter(adapter)
            adapter_rows = [row for row in rows if row.adapter == adapter]
            loads = [0.0] * passes.accelerator.num_processes
            with passes.scoring_layers(layers, None if reference is not None and reference.is_base else adapter):
                for micro in passes.micro_batches(adapter_rows, no_key, loads):
                    batch = collate(micro.rows, pad_id, passes.accelerator.device)
                    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (N, P + C)
                    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (N, P + C)
                    with passes.pass_over(micro, keeps_activations=False):
                        logps, entropies = passes.score(ids, mask, batch["completion_ids"].size(1))  # (N, C)
                    values_N = logps if quantity == "logprobs" else entropies
                    for row, values in zip(micro.rows, values_N, strict=True):
                        # a copy on a CPU, too: to gather a view, pickle would send the whole batch for each of its rows
                        computed[place[id(row)]] = values[: len(row.turn.completion_ids)].to("cpu", copy=True)
    passes.model.set_requires_grad(passes.adapters, True)
    gathered = {i: values for part in gather_objects(computed) for i, values in part.items()}
    return [gathered[i] for i in range(len(rows))]
