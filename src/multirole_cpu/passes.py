"""Offer the faster passes of this package to the library: `multirole.update.passes.fast_passes.FastPasses`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from multirole.update.gradients import PartSums
from multirole_cpu.attention_head import has_large_head, large_head
from multirole_cpu.half_model import half_model, is_covered
from multirole_cpu.kernels import choose_once, from_record, has_choice, kernels_of, to_record, use


class CPUPasses:
    """One of `families` in bfloat16, and heads with a large vocabulary, on a CPU."""

    def bfloat16_model(
        self, base: PreTrainedModel, adapter: str | None, sums: PartSums | None
    ) -> AbstractContextManager[None] | None:
        """Return `half_model` if it covers the whole model."""
        return half_model(base, adapter, sums) if is_covered(base) else None

    def head(self, base: PreTrainedModel) -> AbstractContextManager[None] | None:
        """Return `large_head` if the model has one."""
        return large_head(kernels_of(base).of_training) if has_large_head(base) else None

    def kernels(
        self, base: PreTrainedModel, is_half: bool, recorded: Mapping[str, Any] | None = None
    ) -> dict[str, object]:
        """Choose kernels of the engine and of the head (`multirole_cpu.kernels`), unless the model is too small."""
        if not has_choice(base):
            return {}
        use(base, from_record(recorded, base) if recorded else choose_once(base, is_half))
        return to_record(kernels_of(base))
