"""Log-probs, entropies and hidden states of rows under current weights or under the reference of KL, without gradient."""

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from multirole.update.passes.logprobs import HeadWatch
from multirole.update.passes.model_passes import MicroBatch, ModelPasses, no_key
from multirole.update.processes import gather_objects, raise_out_of_memory
from multirole.update.reference import Reference
from multirole.update.rows import Row, collate


@torch.no_grad()
def score_rows(
    passes: ModelPasses, rows: list[Row], pad_id: int, quantity: Literal["logprobs", "entropies", "states"],
    reference: Reference | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the log-probs or the entropies (C,), in nats, or the head's hidden states (C, H), of each row's completion under its adapter; on the host.

    With `reference`, under the weights that KL is measured from. A row that `rows` repeat is computed once. Each process computes a shard, and all of them get all rows. A row whose
    values are not finite is computed again without fast paths. Every process raises torch.OutOfMemoryError if the memory of one does not
    suffice for a single row.
    """

    def values_of(micro: MicroBatch) -> Tensor:
        batch = collate(micro.rows, pad_id, passes.accelerator.device)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (N, P + C)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (N, P + C)
        micro.watch = watch = HeadWatch() if quantity == "states" else None
        with passes.pass_over(micro, keeps_activations=False):
            logps, entropies = passes.score(ids, mask, batch["completion_ids"].size(1))  # (N, C)
        if watch is not None:
            return watch.states
        return logps if quantity == "logprobs" else entropies

    unique = list({id(row): row for row in rows}.values())
    place = {id(row): i for i, row in enumerate(unique)}

    def scored(places: list[int], is_plain: bool) -> dict[int, Tensor]:
        """Place in `unique` -> the values of the row, of all processes."""
        computed: dict[int, Tensor] = {}
        out_of_memory = ""
        for adapter in dict.fromkeys(unique[i].adapter for i in places):
            _, layers = passes.set_active_adapter(adapter)
            adapter_rows = [unique[i] for i in places if unique[i].adapter == adapter]
            loads = [0.0] * passes.accelerator.num_processes
            name = None if reference is not None and reference.is_base else adapter
            try:
                with nullcontext() if is_plain else passes.scoring_layers(layers, name):
                    for whole in passes.micro_batches(adapter_rows, no_key, loads, is_plain=is_plain):
                        if is_plain:
                            passes.count_not_finite()
                        for micro, values_N in passes.fitting(whole, values_of):
                            for row, values in zip(micro.rows, values_N, strict=True):
                                # a copy on a CPU, too: to gather a view, pickle would send the whole batch for each of its rows
                                computed[place[id(row)]] = values[: len(row.turn.completion_ids)].to("cpu", copy=True)
            except torch.OutOfMemoryError as error:
                if passes.is_sharded:
                    raise
                out_of_memory = str(error)
        parts, messages = zip(*gather_objects((computed, out_of_memory)), strict=True)
        raise_out_of_memory(messages)
        return {i: values for part in parts for i, values in part.items()}

    with nullcontext() if reference is None else reference.applied():
        values = scored(list(range(len(unique))), is_plain=False)
        if bad := [i for i in sorted(values) if not values[i].isfinite().all()]:
            values |= scored(bad, is_plain=True)
    passes.model.set_requires_grad(passes.adapters, True)
    return [values[place[id(row)]] for row in rows]
