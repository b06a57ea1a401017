"""Measure the contribution of each role and slot to an adapter's gradient.

The paper infers *role capture* from tokens and slots (the role with most of the gradient decides where a shared adapter moves).
Here each role's part is measured in the gradients that are applied. Nearly all of a mini-batch gradient's squared norm is
sampling noise, so the shares say whose gradient is noisier, and not which role moves the adapter. The paper's *gradient
amplification* (same-role slots push one adapter in one direction) cannot be measured this way: slots are exchangeable, so
their cosine is the signal-to-noise ratio of one slot's estimate. All numbers are derived from the inner products of the
parts, summed over the optimizer steps of an iteration.
"""

import itertools
import math
from collections import defaultdict

from torch import Tensor

from multirole.update.gradients import Part
from multirole.update.processes import all_reduce


class GradientParts:
    """Inner products of the parts of one adapter's gradient, summed over the optimizer steps of an iteration."""

    def __init__(self) -> None:
        self.products: dict[tuple[Part, Part], float] = defaultdict(float)
        self.parts: list[Part] = []

    def add_step(self, parts: list[Part], gradients: Tensor, is_sharded: bool = False) -> dict[str, float]:
        """Add one optimizer step: `gradients` (K, n) has a part in each row. Return role -> norm of its part in this step."""
        products = gradients @ gradients.T  # (K, K)
        if is_sharded:
            all_reduce([products])
        squares: dict[str, float] = defaultdict(float)
        for a, row in zip(parts, products.tolist(), strict=True):
            for b, value in zip(parts, row, strict=True):
                self.products[a, b] += value
                if a[0] == b[0]:
                    squares[a[0]] += value
        self.parts += [part for part in parts if part not in self.parts]
        return {role: math.sqrt(max(0.0, square)) for role, square in squares.items()}

    def of_role(self, role: str) -> dict[str, float]:
        """Return one role's share of the gradient and the coherence of its slots.

        `grad_share`: the inner product of its part with the whole gradient, divided by the whole's squared norm. Shares sum to 1,
        and nearly all of the squared norm is sampling noise. `coherence`: mean cosine between the gradients of its slots, NaN if
        fewer than two slots have a gradient.
        """
        role_parts = self._by_role()[role]
        whole = self._between(self.parts, self.parts)
        cosines = (self._cosine([a], [b]) for a, b in itertools.combinations(role_parts, 2))
        pairs = [cosine for cosine in cosines if not math.isnan(cosine)]  # a slot without a gradient has no direction
        return {
            "grad_share": self._between(role_parts, self.parts) / whole if whole > 0 else math.nan,
            "coherence": sum(pairs) / len(pairs) if pairs else math.nan,
        }

    def cosines(self) -> list[tuple[str, str, float]]:
        """Return the cosine between the gradients of each pair of roles."""
        roles = self._by_role()
        return [(a, b, self._cosine(roles[a], roles[b])) for a, b in itertools.combinations(roles, 2)]

    def _by_role(self) -> dict[str, list[Part]]:
        roles: dict[str, list[Part]] = {}
        for part in self.parts:
            roles.setdefault(part[0], []).append(part)
        return roles

    def _between(self, left: list[Part], right: list[Part]) -> float:
        """Return the inner product of two sums of parts."""
        return sum(self.products[a, b] for a in left for b in right)

    def _cosine(self, left: list[Part], right: list[Part]) -> float:
        """Return the cosine of two sums of parts; NaN if one of them is zero."""
        norms = self._between(left, left) * self._between(right, right)
        return self._between(left, right) / math.sqrt(norms) if norms > 0 else math.nan
