"""Offer the faster passes of this package to the library: `multirole.update.passes.fast_passes.FastPasses`."""

from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from multirole.update.gradients import PartSums
from multirole_cpu.attention_head import has_large_head, large_head
from multirole_cpu.half_model import half_model, is_covered


class CPUPasses:
    """One of `families` in bfloat16, and heads with a large vocabulary, on a CPU."""

    def bfloat16_model(
        self, base: PreTrainedModel, adapter: str | None, sums: PartSums | None
    ) -> AbstractContextManager[None] | None:
        """Return `half_model` if it covers the whole model."""
        return half_model(base, adapter, sums) if is_covered(base) else None

    def head(self, base: PreTrainedModel) -> AbstractContextManager[None] | None:
        """Return `large_head` if the model has one."""
        return large_head() if has_large_head(base) else None
