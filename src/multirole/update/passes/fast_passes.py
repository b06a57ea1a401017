"""Find faster passes for some models on some devices, which installed packages offer.

A package registers a class with the methods of `FastPasses` as an entry point of the group "multirole.passes":

    [project.entry-points."multirole.passes"]
    cpu = "multirole_cpu.passes:CPUPasses"

Without such a package the same log-probs and gradients are computed up to rounding, slower.
"""

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any, Protocol

from transformers import PreTrainedModel

from multirole.update.gradients import PartSums

GROUP = "multirole.passes"


class FastPasses(Protocol):
    """Faster computations of a base model and its adapters. Each method returns None for a model, or a device, that it is not for.

    Forward and backward passes run inside the contexts, which restore what they change.
    """

    def bfloat16_model(
        self, base: PreTrainedModel, adapter: str | None, sums: PartSums | None
    ) -> AbstractContextManager[None] | None:
        """Return the context in which `base` computes in bfloat16 with `adapter` (None: with none), called without autocast.

        The adapter is plain LoRA (`gradients.plain_lora`) with float32 weights. Backward passes add its gradient by part to `sums`, as
        `gradients.MergedLinear` does, and nothing to `grad`. Without `sums` there is no backward pass.
        """

    def head(self, base: PreTrainedModel) -> AbstractContextManager[None] | None:
        """Return the context in which TRL's fused head computes log-probs and entropies of tokens faster."""

    def kernels(
        self, base: PreTrainedModel, is_half: bool, recorded: Mapping[str, Any] | None = None
    ) -> dict[str, object]:
        """Choose between kernels that are equal up to rounding, and compute `base` with them from now on; return the choice, {} without one.

        The choice may depend on the machine. It is of plain values, which JSON can hold. `recorded` is one that was returned before, by the
        first process of the run or before the run was interrupted, and is to be used again. `is_half`: log-probs are computed in bfloat16.
        """


@functools.cache
def installed() -> list[FastPasses]:
    """Return the passes of all installed packages, in the order of their names."""
    return [point.load()() for point in sorted(entry_points(group=GROUP))]


def bfloat16_model(
    base: PreTrainedModel, adapter: str | None, sums: PartSums | None
) -> AbstractContextManager[None] | None:
    """Return the first installed `FastPasses.bfloat16_model` that is for this model, or None."""
    contexts = (passes.bfloat16_model(base, adapter, sums) for passes in installed())
    return next((context for context in contexts if context is not None), None)


def fast_head(base: PreTrainedModel) -> AbstractContextManager[None]:
    """Return the first installed `FastPasses.head` that is for this model, or a context that changes nothing."""
    contexts = (passes.head(base) for passes in installed())
    return next((context for context in contexts if context is not None), nullcontext())


def choose_kernels(
    base: PreTrainedModel, is_half: bool, recorded: Mapping[str, Any] | None = None
) -> dict[str, object]:
    """Return the choices of all installed `FastPasses.kernels`, which are used from now on."""
    chosen: dict[str, object] = {}
    for passes in installed():
        chosen |= passes.kernels(base, is_half, recorded)
    return chosen
