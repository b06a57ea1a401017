"""An adapter's gradient taken apart by role and slot, and how its updates follow one another.

The paper infers *role capture* (the role with most of the gradient owns a shared adapter); here it is measured, on the very
gradients that are applied. Its *gradient amplification* (same-role slots push one adapter in one direction) cannot be: slots are
exchangeable, so that their cosine is the signal-to-noise ratio of one slot's estimate. All numbers are derived from the inner products
of the parts, added up over the optimizer steps of an iteration.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from multirole.core.distributed import all_reduce, processes
from multirole.core.gradients import Part, flat


def weights_of(model: PeftModel, adapter: str) -> list[Tensor]:
    """The tensors of one adapter."""
    return [p for name, p in model.named_parameters() if f".{adapter}." in name]


def save_vectors(vectors: dict[str, Tensor], folder: Path, name: str, is_sharded: bool) -> None:
    """Write one vector per adapter into a checkpoint folder: every process its shard, or the first one the whole."""
    if is_sharded:
        torch.save(vectors, folder / f"{name}_{processes().process_index}.pt")
    elif processes().is_main_process:
        torch.save(vectors, folder / f"{name}.pt")


def load_vectors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read back what this process has to know of `save_vectors`; empty where there is nothing."""
    for path in (folder / f"{name}_{processes().process_index}.pt", folder / f"{name}.pt"):
        if path.exists():
            return torch.load(path, weights_only=True)
    return {}


class GradientParts:
    """Inner products of the parts of one adapter's gradient, summed over the optimizer steps of an iteration."""

    def __init__(self) -> None:
        self.products: dict[tuple[Part, Part], float] = defaultdict(float)
        self.parts: list[Part] = []

    def add_step(self, parts: list[Part], gradients: Tensor, is_sharded: bool = False) -> dict[str, float]:
        """One optimizer step: `gradients` (K, n), a part in each row. Returns role -> norm of its part in this step."""
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
        """What one role contributes.

        `grad_share`: its part's inner product with the whole gradient, over the whole's square; shares sum to 1, and a role
        that pulls against the others has a negative one. `coherence`: mean cosine between the gradients of its slots, NaN
        for one slot.
        """
        mine = self._by_role()[role]
        whole = self._between(self.parts, self.parts)
        pairs = [self._cosine([a], [b]) for a, b in itertools.combinations(mine, 2)]
        return {
            "grad_share": self._between(mine, self.parts) / whole if whole > 0 else math.nan,
            "coherence": sum(pairs) / len(pairs) if pairs else math.nan,
        }

    def cosines(self) -> list[tuple[str, str, float]]:
        """The cosine between the gradients of each two roles."""
        roles = self._by_role()
        return [(a, b, self._cosine(roles[a], roles[b])) for a, b in itertools.combinations(roles, 2)]

    def _by_role(self) -> dict[str, list[Part]]:
        roles: dict[str, list[Part]] = {}
        for part in self.parts:
            roles.setdefault(part[0], []).append(part)
        return roles

    def _between(self, some: list[Part], others: list[Part]) -> float:
        """The inner product of two sums of parts."""
        return sum(self.products[a, b] for a in some for b in others)

    def _cosine(self, some: list[Part], others: list[Part]) -> float:
        """NaN where one of them is zero."""
        norms = self._between(some, some) * self._between(others, others)
        return self._between(some, others) / math.sqrt(norms) if norms > 0 else math.nan


class Updates:
    """Compares each iteration's change of an adapter with the change before; `last` is what a resumed run needs for that."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        """adapter -> its last change (n,), in host memory."""

    def start(self, model: PeftModel, adapters: Iterable[str]) -> None:
        """Call before the first optimizer step of an iteration that updates these adapters."""
        self.before = {name: flat(weights_of(model, name)).cpu() for name in adapters}

    def finish(self, model: PeftModel) -> dict[str, float]:
        """adapter -> cosine between its change in this iteration and in the one before; NaN where there is none."""
        return {name: self._compare(name, weights_of(model, name)) for name in list(self.before)}

    def _compare(self, adapter: str, weights: list[Tensor]) -> float:
        change, last = flat(weights).cpu() - self.before.pop(adapter), self.last.get(adapter)
        self.last[adapter] = change
        if last is None:
            return math.nan
        products = torch.stack([change @ last, change @ change, last @ last]).double()
        if isinstance(weights[0], DTensor):
            products = products.to(weights[0].device)
            all_reduce([products])
        norms = math.sqrt(products[1] * products[2])
        return products[0].item() / norms if norms > 0 else math.nan
