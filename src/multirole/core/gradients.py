"""An adapter's gradient as one vector, taken apart by (role, slot) and put back.

A *part* is what the rows of one (role, slot) contribute to an optimizer step. The parts of a step are summed in a fixed order,
so that their sum is the applied gradient bit for bit.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from multirole.core.distributed import full
from multirole.core.rows import Row

Part = tuple[str, int]
"""(role, slot)."""


def by_part(rows: list[Row]) -> dict[Part, list[Row]]:
    """Group rows by part, in order of first appearance."""
    parts: dict[Part, list[Row]] = {}
    for row in rows:
        parts.setdefault((row.turn.role, row.turn.slot), []).append(row)
    return parts


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(tensors: list[Tensor]) -> Tensor:
    """One vector (n,) of all elements that this process holds, as a copy."""
    return torch.cat([local(tensor).detach().flatten() for tensor in tensors])


def gradient_of(parameters: list[nn.Parameter]) -> Tensor:
    """The accumulated gradients as one vector (n,); absent ones are zero."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])


def set_gradient(parameters: list[nn.Parameter], gradient: Tensor) -> None:
    """Write a vector (n,) into the parameters' `grad`, as the inverse of `gradient_of`."""
    pieces = gradient.split([local(p).numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).view(-1).copy_(piece)


def clip(parameters: list[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
    """Clip the gradients as one vector; return its norm before and after."""
    before = full(nn.utils.clip_grad_norm_(parameters, max_norm))
    return before, full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
