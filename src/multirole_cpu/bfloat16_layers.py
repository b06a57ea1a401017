"""Compute a model with an adapter in bfloat16, with the adapter's gradient by part.

Autocast computes a LoRA layer as a chain of small products with casts between them, and autograd needs one backward pass for each
part of the gradient. Here a layer is one product: with x' = [x, A x] and W' = [W, s B], its output is W' x', and the gradients
of x and of A x are a single product, too. On a CPU, `half_decoder` joins the products of a Llama or a Qwen3 with the same input, and
computes what is between them. Matrix products are in bfloat16 with float32 accumulation; adapters,
their gradients, the residual stream, the statistics of the norms, logits and log-probs are float32.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from multirole.update.gradients import PartSums
from multirole_cpu.half_decoder import HALF, HalfDecoder

COVERED = (LlamaForCausalLM, Qwen3ForCausalLM)
"""Models in which `half_layers` knows every layer."""


def needs_no_autocast(base: PreTrainedModel) -> bool:
    """Return whether `half_layers` covers the whole model: a Llama or a Qwen3 on a CPU, and no subclass, which may have other layers."""
    return type(base) in COVERED and base.config.hidden_act == "silu" and base.device.type == "cpu"


def cpu_has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 in hardware, through the oneDNN that torch is built with."""
    processor = torch.cpu.get_capabilities()
    has_products = processor.get("avx512_bf16", False) or processor.get("amx_bf16", False)
    return bool(has_products) and torch.backends.mkldnn.is_available()


def has_fast_bfloat16() -> bool:
    """Return whether matrix products are faster in bfloat16 here: on a CUDA device, or a CPU with AVX512-BF16 or AMX."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else cpu_has_bfloat16()


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
def half_layers(
    layers: list[LoraLinear], adapter: str | None, sums: PartSums | None, base: PreTrainedModel
) -> Iterator[bool]:
    """Context manager: compute in bfloat16 with `adapter`, or with none; backward passes add to `sums` instead of `grad`.

    Yields `needs_no_autocast(base)`. On a CPU, the models of `COVERED` are computed without autocast: the outputs of norms and the angles of RoPE are bfloat16, too; the
    residual stream is float32, and so are the logits: products of float32 tensors whose factors are rounded.
    """
    covers_model = needs_no_autocast(base)
    with ExitStack() as stack:
        if covers_model:
            for decoder in base.model.layers:
                stack.enter_context(replaced(decoder, HalfDecoder(decoder, adapter, sums)))
            norm, embed = base.model.norm, base.model.embed_tokens
            stack.enter_context(
                replaced(norm, lambda x: F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.variance_epsilon))
            )
            stack.enter_context(replaced(embed, lambda ids: F.embedding(ids, embed.weight).float()))
            stack.enter_context(replaced(base.model.rotary_emb, _half_angles(base.model.rotary_emb.forward)))
            stack.enter_context(products_in("bf16"))
        else:
            for layer in layers:
                stack.enter_context(replaced(layer, _lora_product(layer, adapter, sums)))
        yield covers_model


def _half_angles(forward: Callable) -> Callable[..., list[Tensor]]:
    """Compute RoPE's angles in float32 and return their cosines and sines in bfloat16, which would round positions above 256."""

    def angles(*args: Tensor, **named: Tensor) -> list[Tensor]:
        with products_in("ieee"):
            return [table.to(HALF) for table in forward(*args, **named)]

    return angles


def _lora_product(layer: LoraLinear, adapter: str | None, sums: PartSums | None) -> Callable[[Tensor], Tensor]:
    weight = layer.base_layer.weight
    name = adapter or next(iter(layer.lora_A))
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    scaling = layer.scaling[name] if adapter else 0.0
    with torch.no_grad():
        whole = torch.cat([weight.to(HALF), (b * scaling).to(HALF)], 1)  # (out, in + r)
        bias = None if layer.base_layer.bias is None else layer.base_layer.bias.to(HALF)
    return partial(LoraProduct.apply, whole, bias, a.detach().to(HALF), a, b, scaling, sums)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Context manager: set how a CPU multiplies float32 matrices: exactly ("ieee"), or with factors rounded to bfloat16 ("bf16")."""
    former = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = former  # type: ignore[attr-defined]
