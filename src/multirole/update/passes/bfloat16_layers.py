"""Compute LoRA layers in bfloat16, with the adapter's gradient by part.

Autocast computes a LoRA layer as a chain of small products with casts between them, and autograd needs one backward pass for each
part of the gradient. Here a layer is one product: with x' = [x, A x] and W' = [W, s B], its output is W' x', and the gradients
of x and of A x are a single product, too. Products are in bfloat16 with float32 accumulation; adapters and their gradients are float32.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from multirole.update.gradients import PartSums

HALF = torch.bfloat16


class LoraProduct(torch.autograd.Function):
    """Compute W x + s B A x of x (N, L, in) as one product W' x', with the gradients of A and B by part.

    `whole` (out, in + r) is W' and `half_a` (r, in) is A in bfloat16; `a` and `b` are the parameters that both are computed from.
    """

    @staticmethod
    def forward(  # type: ignore
        ctx, whole: Tensor, bias: Tensor | None, half_a: Tensor, a: Tensor, b: Tensor, scaling: float, sums: PartSums | None,
        x: Tensor,
    ) -> Tensor:  # fmt: skip
        x = x.to(HALF)
        extended = torch.cat([x, F.linear(x, half_a)], -1)  # (N, L, in + r)
        ctx.save_for_backward(extended, whole, half_a)
        ctx.scaling = scaling
        if sums is not None:
            ctx.segments, ctx.sums = sums.segments, sums
            ctx.totals = sums.by_parameter[a], sums.by_parameter[b]
        return F.linear(extended, whole, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        extended, whole, a = ctx.saved_tensors
        n_in = a.size(1)
        grad = grad.to(HALF).flatten(0, 1)  # (N * L, out)
        grad_extended = grad @ whole  # (N * L, in + r)
        rank, x = grad_extended[:, n_in:].contiguous(), extended.flatten(0, 1)
        total_a, total_b = ctx.totals
        for part, tokens in ctx.sums.missing(total_a, ctx.segments):
            total_a[part].add_(rank[tokens].T @ x[tokens, :n_in])  # (r, in)
        for part, tokens in ctx.sums.missing(total_b, ctx.segments):
            total_b[part].add_(grad[tokens].T @ x[tokens, n_in:], alpha=ctx.scaling)  # (out, r)
        if not ctx.needs_input_grad[7]:
            return (None,) * 8
        return *[None] * 7, torch.addmm(grad_extended[:, :n_in], rank, a).view(*extended.shape[:-1], n_in)


@contextmanager
def replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Context manager: replace the `forward` of `module`."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def half_layers(layers: list[LoraLinear], adapter: str | None, sums: PartSums | None) -> Iterator[None]:
    """Context manager: the layers compute in bfloat16 with `adapter`, or with none; backward passes add to `sums` instead of `grad`.

    The rest of the model is autocast's.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, _lora_product(layer, adapter, sums)))
        yield


def _lora_product(layer: LoraLinear, adapter: str | None, sums: PartSums | None) -> Callable[[Tensor], Tensor]:
    weight = layer.base_layer.weight
    name = adapter or next(iter(layer.lora_A))
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    scaling = layer.scaling[name] if adapter else 0.0
    with torch.no_grad():
        whole = torch.cat([weight.to(HALF), (b * scaling).to(HALF)], 1)  # (out, in + r)
        bias = None if layer.base_layer.bias is None else layer.base_layer.bias.to(HALF)
    return partial(LoraProduct.apply, whole, bias, a.detach().to(HALF), a, b, scaling, sums)
