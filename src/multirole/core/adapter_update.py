"""Accumulate the gradient of one optimizer step of one adapter, by (role, slot).

`MultiRoleGRPOTrainer.compute_gradient` is the loop over groups and micro-batches that uses it.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from multirole.core.distributed import all_reduce, gather_objects, local_shard
from multirole.core.gradients import Part, PartSums, gradient_of, part_of, set_gradient
from multirole.core.model_passes import MicroBatch, ModelPasses, no_key
from multirole.core.rows import Row


def set_optimizer_mode(optimizer: object, mode: str) -> None:
    """Call `optimizer.train()` or `optimizer.eval()`, as HF's loop does: schedule-free optimizers have them."""
    switch = getattr(optimizer, mode, None)
    if callable(switch):
        switch()


@dataclass(frozen=True)
class RowGroup:
    """Rows that are computed together. They share a KL weight `beta` and, if a pass gives one part only, that part (its index).

    Rows without `has_gradient`, whose loss moves nothing, are only scored.
    """

    rows: list[Row]
    beta: float
    has_gradient: bool
    part: int | None


class AdapterGradient:
    """The gradient of one mini-batch of one adapter, a matrix `values` (K, n) with one row per part.

    All parts come from one pass over the rows where the adapter can be merged for it, and otherwise from a pass for each part. Where
    no callback `needs_parts`, there may be one part, ("", 0), for all rows.

    Args:
        passes: the model, whose active adapter becomes `adapter`.
        rows: the mini-batch.
        needs_parts: whether a callback reads or changes the parts.
    """

    def __init__(self, passes: ModelPasses, adapter: str, rows: list[Row], needs_parts: bool) -> None:
        self.passes, self.adapter = passes, adapter
        self.params, self.layers = passes.set_active_adapter(adapter)
        is_one_pass = passes.can_merge_adapters and bool(self.layers)
        # A merged pass has the parts at no cost and always sums them, so that callbacks do not change the order of additions. But
        # where prompts are shared, a tree per part costs tokens.
        has_parts = needs_parts or is_one_pass and not passes.shares_prompts(rows, no_key)
        self.index = {part: i for i, part in enumerate(dict.fromkeys(map(part_of, rows)))} if has_parts else {}
        self.parts: list[Part] = list(self.index) or [("", 0)]
        n = sum(local_shard(p).numel() for p in self.params)
        self.values = torch.zeros(len(self.parts), n, device=passes.accelerator.device)  # (K, n)
        self.sums = PartSums(self.params, self.values) if is_one_pass else None

    def part_index(self, row: Row) -> int:
        """Return the index in `values` of the part that a row of the mini-batch adds to."""
        return self.index[part_of(row)] if self.index else 0

    def groups(self, rows: list[Row], role_betas: dict[str, float], has_bonus: bool) -> list[RowGroup]:
        """Group the rows that are in the loss by what one pass has in common: a KL weight, and whether they have a gradient.

        Args:
            has_bonus: whether an entropy bonus gives a gradient to rows without advantage, too.
        """
        grouped: dict[tuple, list[Row]] = defaultdict(list)
        for row in [row for row in rows if not row.is_masked]:
            beta = role_betas[row.turn.role]
            has_gradient = bool(row.advantage or beta or has_bonus)
            grouped[has_gradient, beta, None if self.sums else self.part_index(row)].append(row)
        return [RowGroup(group, beta, has_gradient, part) for (has_gradient, beta, part), group in grouped.items()]

    def layers_in_use(self) -> AbstractContextManager[None]:
        """Return the context in which all passes of the mini-batch run."""
        return self.passes.gradient_layers(self.layers, self.adapter, self.sums)

    def micro_batches(self, group: RowGroup, loads: list[float]) -> Iterator[MicroBatch]:
        """Yield the group's micro-batches of this process. The caller runs forward and backward of each before it asks for the next."""
        for parameter in self.params:
            parameter.grad = None
        cost = 3.0 if group.has_gradient else 1.0
        for micro in self.passes.micro_batches(group.rows, self.part_index, loads, cost, group.has_gradient):
            if self.sums is not None:
                self.sums.set_tokens(micro.runs(self.part_index, self.passes.multiple))
            yield micro
        if self.sums is None and group.has_gradient:
            self.values[group.part] += gradient_of(self.params)

    def reduce(self, losses: list[tuple[list[Row], Tensor]], iteration: int) -> Tensor:
        """Sum the gradient over the processes, and return the sum of all micro-batches' losses, detached.

        Raises FloatingPointError on every process if one of them has a loss that is not finite.
        """
        loss = sum((part for _, part in losses), torch.zeros((), device=self.values.device))
        all_reduce([loss] if self.passes.is_sharded else [loss, self.values])  # FSDP2 has reduced the gradients already
        if not torch.isfinite(loss):
            raise_non_finite_loss(losses, iteration)
        return loss

    def apply(self) -> None:
        """Write the sum of the parts into the parameters' `grad`."""
        set_gradient(self.params, functools.reduce(torch.add, self.values))


@contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, lr: float, scheduled: float) -> Iterator[None]:
    """Context manager: the optimizer steps with the learning rate `lr` in place of the schedule's, each group in proportion."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if lr != scheduled:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr if rate == scheduled else rate * lr / scheduled if scheduled else lr
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def raise_non_finite_loss(losses: list[tuple[list[Row], Tensor]], iteration: int) -> None:
    """Raise FloatingPointError for the first micro-batch of any process whose loss is not finite; for all processes to call."""
    bad = [(loss.item(), micro) for micro, loss in losses if not torch.isfinite(loss)]
    named = [(loss, [(r.episode.problem.id, r.episode.index, r.turn.role, r.turn.slot, r.turn.round) for r in micro])
             for loss, micro in bad]  # fmt: skip
    loss, rows = next(itertools.chain(*gather_objects(named)), (math.inf, []))
    raise FloatingPointError(
        f"The loss is {loss} at iteration {iteration} in one of the rows (problem, episode, role, slot, "
        f"round) {rows}. Lower `learning_rate`, or resume from an earlier checkpoint."
    )
