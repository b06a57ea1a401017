"""Compute an adapter's gradient as a vector (n,), and split it by (role, slot).

A *part* is what the rows of one (role, slot) contribute to an optimizer step. The parts of a step are summed in a fixed order,
so that their sum is the applied gradient bit for bit.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from multirole.update.processes import full_tensor, local_shard
from multirole.update.rows import Row

Part = tuple[str, int]
"""(role, slot)."""


def part_of(row: Row) -> Part:
    """Return the part that a row belongs to."""
    return row.turn.role, row.turn.slot


def flat(tensors: list[Tensor]) -> Tensor:
    """Copy all elements that this process holds into one vector (n,)."""
    return torch.cat([local_shard(tensor).detach().flatten() for tensor in tensors])


def gradient_of(parameters: list[nn.Parameter]) -> Tensor:
    """Return the accumulated gradients as one vector (n,); absent gradients are zeros."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])


def set_gradient(parameters: list[nn.Parameter], gradient: Tensor) -> None:
    """Write a vector (n,) into the parameters' `grad`; the inverse of `gradient_of`."""
    pieces = gradient.split([local_shard(p).numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = torch.zeros_like(parameter)
        local_shard(parameter.grad).view(-1).copy_(piece)


def clip(parameters: list[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
    """Clip the gradients by their joint norm if `max_norm` is positive, as HF does; return the norm before and after."""
    before = full_tensor(nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf))
    return before, full_tensor(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


# ---- all parts in one backward pass


class PartSums:
    """Accumulator of the gradient's parts (K, n), one per row, that backward passes through merged layers add to.

    `segments` holds, for the current micro-batch, (part, its tokens) with each part's tokens side by side. `added` lists what the
    current backward pass has added to; if it is interrupted, the pass that replaces it adds only the rest.
    """

    def __init__(self, parameters: list[nn.Parameter], gradients: Tensor) -> None:
        pieces = gradients.split([p.numel() for p in parameters], dim=1)
        self.by_parameter: dict[Tensor, Tensor] = {
            p: piece.view(-1, *p.shape) for p, piece in zip(parameters, pieces, strict=True)
        }
        self.segments: list[tuple[int, slice]] = []
        self.added: set[tuple[Tensor, int]] = set()
        self._before: frozenset[tuple[Tensor, int]] = frozenset()

    def set_tokens(self, runs: list[tuple[int, int]], added: Iterable[tuple[Tensor, int]] = ()) -> None:
        """Set the parts of the next micro-batch's tokens: consecutive runs (part, number of tokens).

        `added` is what interrupted passes over the same rows have added to.
        """
        ends = itertools.accumulate(count for _, count in runs)
        self.segments = [(part, slice(end - count, end)) for (part, count), end in zip(runs, ends, strict=True)]
        self.added, self._before = set(), frozenset(added)

    def missing(self, total: Tensor, segments: list[tuple[int, slice]]) -> Iterator[tuple[int, slice]]:
        """Yield the segments whose gradient no interrupted pass has added to `total` (K, ...). The caller adds each to its row."""
        for part, tokens in segments:
            if (total, part) not in self._before:
                yield part, tokens
                self.added.add((total, part))  # not reached if the addition fails


class MergedLinear(torch.autograd.Function):
    """Multiply x (N, L, in) with the merged weight W + scaling * B @ A, add the bias, and give the gradients of A and B by part.

    Autograd would need one pass per part, with separate products for W, A and B.
    """

    @staticmethod
    def forward(  # type: ignore
        ctx, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, sums: PartSums, x: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling, ctx.segments, ctx.sums = scaling, sums.segments, sums
        ctx.totals = sums.by_parameter[a], sums.by_parameter[b]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x, weight, a, b = ctx.saved_tensors
        inner, grad_inner = F.linear(x, a), grad @ b  # (N, L, r) each
        for total, left, right in zip(ctx.totals, (grad_inner, grad), (x, inner), strict=True):
            left, right = left.flatten(0, 1).T, right.flatten(0, 1)  # (out, N * L), (N * L, in)
            for part, tokens in ctx.sums.missing(total, ctx.segments):
                total[part].addmm_(left[:, tokens], right[tokens], alpha=ctx.scaling)
        return *[None] * 6, grad @ weight if ctx.needs_input_grad[6] else None


@torch.no_grad()
def keeps_rows(model: PeftModel) -> bool:
    """Return whether every LoRA layer gets (N, L, in) for N rows of L tokens, as `MergedLinear` needs; experts get single tokens."""
    ids, shapes = torch.tensor([[0, 1, 2], [0, 1, 2]], device=model.device), []
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[:-1] if inputs else None))
        for layer in layers
    ]
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    for handle in handles:
        handle.remove()
    return all(shape == ids.shape for shape in shapes)


def plain_lora(
    model: PeftModel, adapter: str, parameters: list[nn.Parameter], dtypes: tuple[torch.dtype, ...]
) -> list[LoraLinear]:
    """Return the adapter's layers if it is plain float32 LoRA on linear layers of `dtypes`, with `parameters` as its A and B; else none."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and adapter in module.scaling]
    plain = [
        layer
        for layer in layers
        if type(layer) is LoraLinear
        and type(layer.base_layer) is nn.Linear
        and layer.base_layer.weight.dtype in dtypes
        and layer.lora_A[adapter].weight.dtype == torch.float32
        and not (layer.merged or layer.lora_variant or layer.fan_in_fan_out)
        and (isinstance(layer.lora_dropout[adapter], nn.Identity) or layer.lora_dropout[adapter].p == 0)
    ]
    layer_parameters = {p for layer in plain for p in (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)}
    return plain if layer_parameters == set(parameters) else []


@contextmanager
def merged(layers: list[LoraLinear], adapter: str, sums: PartSums) -> Iterator[None]:
    """Context manager: layers compute with `adapter` merged, and backward passes add to `sums` instead of `grad`."""
    try:
        for layer in layers:
            a, b, scaling = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter]
            with torch.no_grad():
                weight = torch.addmm(layer.base_layer.weight, b, a, alpha=scaling)
            layer.forward = partial(MergedLinear.apply, weight, layer.base_layer.bias, a, b, scaling, sums)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
