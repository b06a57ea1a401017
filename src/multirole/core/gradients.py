"""An adapter's gradient taken apart by role and slot, and how its updates follow one another.

The paper infers *gradient amplification* (several same-role slots push one adapter in one direction) and *role capture* (the
role with most of the gradient owns a shared adapter); here both are measured, on the very gradients that are applied. A
*part* is what the rows of one (role, slot) contribute to an optimizer step; the parts of a step sum to its gradient, bit
for bit. All numbers are derived from the parts' inner products, added up over the optimizer steps of an iteration.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from multirole.core.distributed import add_up, full, processes
from multirole.core.rows import Row

Part = tuple[str, int]
"""(role, slot)."""


def by_part(rows: list[Row]) -> dict[Part, list[Row]]:
    """The rows of each part, in order of first appearance."""
    parts: dict[Part, list[Row]] = {}
    for row in rows:
        parts.setdefault((row.turn.role, row.turn.slot), []).append(row)
    return parts


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(tensors: list[Tensor]) -> Tensor:
    """One vector (n,) of all elements that this process holds, a copy."""
    return torch.cat([local(tensor).detach().flatten() for tensor in tensors])


def weights_of(model: PeftModel, adapter: str) -> list[Tensor]:
    """The tensors of one adapter."""
    return [p for name, p in model.named_parameters() if f".{adapter}." in name]


def gradient_of(parameters: list[Tensor]) -> Tensor:
    """Their accumulated gradients as one vector (n,); absent ones are zero."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])


def set_gradient(parameters: list[Tensor], gradient: Tensor) -> None:
    """The opposite of `gradient_of`."""
    pieces = gradient.split([local(p).numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).view(-1).copy_(piece)


def clipped(parameters: list[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """Clip their gradients as one vector; returns its norm before and after."""
    before = full(nn.utils.clip_grad_norm_(parameters, max_norm))
    return before, full(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))


class GradientParts:
    """Inner products of the parts of one adapter's gradient, summed over the optimizer steps of an iteration."""

    def __init__(self) -> None:
        self.products: dict[tuple[Part, Part], float] = defaultdict(float)
        self.parts: list[Part] = []

    def add_step(self, parts: list[Part], gradients: Tensor, is_sharded: bool = False) -> dict[str, float]:
        """One optimizer step: `gradients` (K, n), a part in each row. Returns role -> norm of its part in this step."""
        products = gradients @ gradients.T  # (K, K)
        if is_sharded:
            add_up([products])
        step = GradientParts()
        step.parts = parts
        for a, row in zip(parts, products.tolist(), strict=True):
            for b, value in zip(parts, row, strict=True):
                step.products[a, b] = value
                self.products[a, b] += value
        self.parts += [part for part in parts if part not in self.parts]
        return {role: math.sqrt(max(0.0, step._between(mine, mine))) for role, mine in step._by_role().items()}

    def of_role(self, role: str) -> dict[str, float]:
        """What one role contributes.

        `grad_share`: its part's inner product with the whole gradient, over the whole's square; shares sum to 1, and a role
        that pulls against the others has a negative one. `coherence`: mean cosine between the gradients of its slots, NaN
        for one slot. `amplification`: slots x coherence.
        """
        mine = self._by_role()[role]
        whole = self._between(self.parts, self.parts)
        pairs = [self._cosine([a], [b]) for a, b in itertools.combinations(mine, 2)]
        coherence = sum(pairs) / len(pairs) if pairs else math.nan
        return {
            "grad_share": self._between(mine, self.parts) / whole if whole > 0 else math.nan,
            "coherence": coherence,
            "amplification": len(mine) * coherence,
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
    """What an adapter's next update is compared with; a resumed run needs it to go on as if it had never stopped.

    `last` is the last iteration's change of each adapter, in host memory; `averages` the running means of its applied gradients,
    where a coherence penalty keeps them (`remedies`).
    """

    def __init__(self, is_sharded: bool = False) -> None:
        self.is_sharded = is_sharded
        self.before: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.averages: dict[str, Tensor] = {}

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
            add_up([products])
        norms = math.sqrt(products[1] * products[2])
        return products[0].item() / norms if norms > 0 else math.nan

    def save(self, checkpoint: Path) -> None:
        """Write both to a checkpoint; sharded, each process saves its part."""
        for path, tensors in self._files(checkpoint):
            if self.is_sharded or processes().is_main_process:
                torch.save(tensors, path)

    def load(self, checkpoint: Path) -> None:
        """The opposite of `save`; where there is no such file, nothing came before."""
        for path, tensors in self._files(checkpoint):
            tensors.clear()
            tensors.update(torch.load(path, weights_only=True) if path.exists() else {})

    def _files(self, checkpoint: Path) -> list[tuple[Path, dict[str, Tensor]]]:
        part = f"_{processes().process_index}" if self.is_sharded else ""
        return [(checkpoint / f"updates{part}.pt", self.last), (checkpoint / f"averages{part}.pt", self.averages)]
