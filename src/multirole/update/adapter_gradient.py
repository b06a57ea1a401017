"""Accumulate the gradient of one optimizer step of one adapter, by (role, slot).

`MultiRoleGRPOTrainer.compute_gradient` is the loop over groups and micro-batches that uses it.
"""

import functools
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from multirole.update.gradients import Part, PartSums, gradient_of, part_of, set_gradient
from multirole.update.passes.model_passes import MicroBatch, ModelPasses, no_key
from multirole.update.processes import all_reduce, gather_objects, local_shard, raise_out_of_memory
from multirole.update.rows import Row

logger = logging.getLogger(__name__)

Losses = list[tuple[list[Row], Tensor]]
"""The rows and the loss of each pass, detached."""


def set_optimizer_mode(optimizer: object, mode: str) -> None:
    """Call `optimizer.train()` or `optimizer.eval()`, as HF's loop does, if the optimizer has them."""
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
        role_betas: KL weight of each role.
        taught: the roles that have a teacher, whose rows have a gradient without advantage, too.
        has_bonus: whether an entropy bonus gives a gradient to rows without advantage, too.
    """

    def __init__(
        self, passes: ModelPasses, adapter: str, rows: list[Row], needs_parts: bool, role_betas: dict[str, float],
        has_bonus: bool, taught: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.passes, self.adapter, self.role_betas, self.has_bonus = passes, adapter, role_betas, has_bonus
        self.taught = taught
        self.rows = [row for row in rows if not row.is_masked]
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
        self._out_of_memory = ""

    def part_index(self, row: Row) -> int:
        """Return the index in `values` of the part that a row of the mini-batch adds to."""
        return self.index[part_of(row)] if self.index else 0

    def groups(self, rows: list[Row], is_plain: bool) -> list[RowGroup]:
        """Group rows by what one pass has in common: a KL weight, and whether they have a gradient."""
        has_one_pass = self.sums is not None and not is_plain
        grouped: dict[tuple, list[Row]] = defaultdict(list)
        for row in rows:
            beta = self.role_betas[row.turn.role]
            has_gradient = bool(row.advantage or beta or self.has_bonus or row.turn.role in self.taught)
            grouped[has_gradient, beta, None if has_one_pass else self.part_index(row)].append(row)
        return [RowGroup(group, beta, has_gradient, part) for (has_gradient, beta, part), group in grouped.items()]

    def compute(
        self, backward: Callable[[MicroBatch, RowGroup], Tensor], record: Callable[[MicroBatch], None], iteration: int
    ) -> Tensor:
        """Compute the gradient of the mini-batch and return its loss, detached; both are summed over the processes.

        `backward` runs the forward and, if its loss is finite, the backward pass over a micro-batch, and returns the loss. `record` is called
        once for every row, after its pass.

        What is not finite is computed again without fast paths. Every process raises FloatingPointError if a loss is not finite then, and
        torch.OutOfMemoryError if one of them has too little memory.
        """
        losses = self._add(self.rows, backward, record)
        loss = self._total(losses)
        if not torch.isfinite(loss):  # the same on every process
            bad = {id(row) for micro, part in losses if not torch.isfinite(part) for row in micro}
            failed = {
                place
                for part in gather_objects([i for i, row in enumerate(self.rows) if id(row) in bad])
                for place in part
            }
            logger.warning(
                "The loss of iteration %d is %s. %d of the %d rows of adapter %r are computed again without fast paths.",
                iteration, loss.item(), len(failed), len(self.rows), self.adapter,
            )  # fmt: skip
            losses = [(micro, part) for micro, part in losses if torch.isfinite(part)]
            # FSDP2's backward pass runs whatever the loss is, since the processes wait for each other in it
            if self.passes.is_sharded:
                self.values.zero_()
                self._add([row for i, row in enumerate(self.rows) if i not in failed], backward, is_plain=True)
            losses += self._add([self.rows[i] for i in sorted(failed)], backward, record, is_plain=True)
            loss = self._total(losses)
            if not torch.isfinite(loss):
                raise_non_finite_loss(losses, iteration)
        if not self._reduce():
            logger.warning(
                "The gradient of adapter %r is not finite in iteration %d, although its loss is. It is computed again without fast paths.",
                self.adapter, iteration,
            )  # fmt: skip
            self.values.zero_()
            self._total(self._add(self.rows, backward, is_plain=True))
            self._reduce()
        return loss

    def _add(
        self, rows: list[Row], backward: Callable[[MicroBatch, RowGroup], Tensor],
        record: Callable[[MicroBatch], None] = lambda micro: None, is_plain: bool = False,
    ) -> Losses:  # fmt: skip
        """Add this process's share of the gradient of rows to `values`; return the losses of its passes.

        A loss of NaN without rows says that memory did not suffice, which `_total` raises on all processes.
        """
        losses: Losses = []
        loads = [0.0] * self.passes.accelerator.num_processes
        layers = nullcontext() if is_plain else self.passes.gradient_layers(self.layers, self.adapter, self.sums)
        try:
            with layers:
                for group in self.groups(rows, is_plain):
                    compute = functools.partial(self._pass, group=group, backward=backward)
                    cost = 3.0 if group.has_gradient else 1.0
                    for whole in self.passes.micro_batches(
                        group.rows, self.part_index, loads, cost, group.has_gradient, is_plain
                    ):
                        if is_plain:
                            self.passes.count_not_finite()
                        for micro, loss in self.passes.fitting(whole, compute, group.has_gradient):
                            losses.append((micro.rows, loss))
                            if torch.isfinite(loss):
                                record(micro)
        except torch.OutOfMemoryError as error:
            if self.passes.is_sharded:
                raise
            self._out_of_memory = str(error)
            losses.append(([], torch.full((), math.nan, device=self.values.device)))
        return losses

    def _pass(self, micro: MicroBatch, group: RowGroup, backward: Callable[[MicroBatch, RowGroup], Tensor]) -> Tensor:
        """Run one forward and backward pass, and return its loss. What an interrupted one has added is not added again."""
        for parameter in self.params:
            parameter.grad = None
        if self.sums is None or micro.is_plain:
            loss = backward(micro, group)
            if group.has_gradient:
                self.values[group.part] += gradient_of(self.params)
            return loss
        self.sums.set_tokens(micro.runs(self.part_index, self.passes.multiple), micro.added)
        try:
            return backward(micro, group)
        finally:
            micro.added |= self.sums.added

    def _total(self, losses: Losses) -> Tensor:
        """Return the sum of all passes' losses. Every process raises torch.OutOfMemoryError if memory did not suffice in one of them."""
        loss = sum((part for _, part in losses), torch.zeros((), device=self.values.device))
        all_reduce([loss])
        if not torch.isfinite(loss):
            raise_out_of_memory(gather_objects(self._out_of_memory))
        return loss

    def _reduce(self) -> bool:
        """Sum the gradient over the processes; return whether it is finite."""
        if not self.passes.is_sharded:  # FSDP2 has reduced the gradients already
            all_reduce([self.values])
        norm = torch.linalg.vector_norm(self.values)
        if self.passes.is_sharded:
            all_reduce([norm])
        return bool(torch.isfinite(norm))

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


def raise_non_finite_loss(losses: Losses, iteration: int) -> None:
    """Raise FloatingPointError for the first micro-batch of any process whose loss is not finite; for all processes to call."""
    bad = [(loss.item(), micro) for micro, loss in losses if not torch.isfinite(loss)]
    named = [(loss, [(r.episode.problem.id, r.episode.index, r.turn.role, r.turn.slot, r.turn.round) for r in micro])
             for loss, micro in bad]  # fmt: skip
    loss, rows = next(itertools.chain(*gather_objects(named)), (math.inf, []))
    raise FloatingPointError(
        f"The loss is {loss} at iteration {iteration}, computed without fast paths, in one of the rows (problem, episode, role, slot, "
        f"round) {rows}. Lower `learning_rate`, or resume from an earlier checkpoint."
    )
