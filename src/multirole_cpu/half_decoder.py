"""Compute the decoder layers of one of `families` in bfloat16 on a CPU, with hand-written gradients.

Besides its products a layer consists of token-wise operations, which are bound by memory. Here they take few passes: a layer is
two autograd functions with attention between them, which keep what their backward passes need in the dtype they need it in. Projections
with the same input (q, k, v; gate, up) are one product, low-rank parts included. The residual stream and the statistics of norms
are float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from multirole.update.gradients import PartSums
from multirole.update.passes.bfloat16_layers import HALF


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of float32 x (..., H) in bfloat16, and the factors (..., 1) that it scales by."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(HALF), scale


def norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return the float32 gradient of x (..., H) from that of its norm, plus `addend`."""
    grad = grad * weight.float()  # (..., H), of x * scale
    along = torch.linalg.vecdot(grad, x)[..., None] * scale.pow(3).div_(x.size(-1))
    grad = grad.mul_(scale) if addend is None else torch.addcmul(addend, grad, scale)
    return grad.addcmul_(x, along, value=-1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x (N, L, heads, d) by RoPE's angles; `sin` has its first half negated. With -sin it is the inverse."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


@dataclass(frozen=True)
class JointLora:
    """Linear layers with the same input x (N, L, in), as one product W' x' with x' = [x, A x] and W' = [W, s B].

    A has the rows of all layers' A, and B is block-diagonal. A layer without the adapter has rank 0.

    Args:
        whole: W' (out, in + R) in bfloat16.
        a: A (R, in) in bfloat16.
        parts: for each layer with the adapter its outputs, its rows of A, its scaling and the sums of the gradients of A and B by part.
        sums: has the segments of the current micro-batch.
    """

    whole: Tensor
    bias: Tensor | None
    a: Tensor
    parts: list[tuple[slice, slice, float, Tensor, Tensor]]
    sums: PartSums | None

    def extend(self, x: Tensor) -> Tensor:
        """Return x' (N, L, in + R)."""
        return torch.cat([x, F.linear(x, self.a)], -1) if len(self.a) else x

    def product(self, extended: Tensor) -> Tensor:
        """Return W' x' (N, L, out)."""
        return F.linear(extended, self.whole, self.bias)

    def backward(self, grad: Tensor, extended: Tensor, segments: list[tuple[int, slice]]) -> Tensor:
        """Add the gradients of A and B to the sums, and return that of x (N, L, in)."""
        n_in = self.a.size(1)
        shape = (*extended.shape[:-1], n_in)
        grad, extended = grad.flatten(0, 1), extended.flatten(0, 1)  # (N * L, out), (N * L, in + R)
        grad_extended = grad @ self.whole  # (N * L, in + R)
        if not len(self.a):
            return grad_extended.view(shape)
        grad_inner = grad_extended[:, n_in:].contiguous()  # (N * L, R)
        for segment in segments:
            assert self.sums is not None
            grad_a = grad_inner[segment[1]].T @ extended[segment[1], :n_in]  # (R, in)
            for outputs, rank, scaling, sum_a, sum_b in self.parts:
                for part, _ in self.sums.missing(sum_a, [segment]):
                    sum_a[part].add_(grad_a[rank])
                for part, tokens in self.sums.missing(sum_b, [segment]):
                    inner = extended[tokens, n_in + rank.start : n_in + rank.stop]
                    sum_b[part].add_(grad[tokens, outputs].T @ inner, alpha=scaling)
        return torch.addmm(grad_extended[:, :n_in], grad_inner, self.a).view(shape)


@torch.no_grad()
def join(modules: Iterable[Any], adapter: str | None, sums: PartSums | None) -> JointLora:
    """Join linear layers with the same input, with `adapter` or with none."""
    modules = list(modules)
    bases = [module.base_layer if isinstance(module, LoraLinear) else module for module in modules]
    with_adapter = [isinstance(module, LoraLinear) and adapter in module.lora_A for module in modules]
    ranks = [len(m.lora_A[adapter].weight) if has else 0 for m, has in zip(modules, with_adapter, strict=True)]
    n_in, n_out = bases[0].in_features, sum(base.out_features for base in bases)
    whole, a = torch.zeros(n_out, n_in + sum(ranks), dtype=HALF), torch.empty(sum(ranks), n_in, dtype=HALF)
    parts, row, first = [], 0, 0
    for module, base, rank in zip(modules, bases, ranks, strict=True):
        outputs, rows = slice(row, row + base.out_features), slice(first, first + rank)
        whole[outputs, :n_in] = base.weight
        if rank:
            weight_a, weight_b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            a[rows] = weight_a
            whole[outputs, n_in + first : n_in + first + rank] = weight_b * module.scaling[adapter]
            if sums is not None:
                totals = sums.by_parameter[weight_a], sums.by_parameter[weight_b]
                parts.append((outputs, rows, module.scaling[adapter], *totals))
        row, first = row + base.out_features, first + rank
    bias = None
    if any(base.bias is not None for base in bases):
        zeros = torch.zeros(n_out).split([base.out_features for base in bases])
        bias = torch.cat(
            [zero if base.bias is None else base.bias for base, zero in zip(bases, zeros, strict=True)]
        ).to(HALF)
    return JointLora(whole, bias, a, parts, sums)


class HalfDecoder:
    """The forward pass of a decoder layer of one of `families`, to replace its `forward`.

    Args:
        adapter: computed with; None for the base alone.
        sums: backward passes add the adapter's gradient by part to it. Without it there is no backward pass.
    """

    def __init__(self, layer: Any, adapter: str | None, sums: PartSums | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.sums = attention, sums
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        joined = partial(join, adapter=adapter, sums=sums)
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o, self.gate_up, self.down = (
            joined([attention.o_proj]),
            joined([mlp.gate_proj, mlp.up_proj]),
            joined([mlp.down_proj]),
        )
        config = attention.config
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.qk_norm: Tensor | None = None  # (heads + n_kv, d)
        if isinstance(layer, Qwen3DecoderLayer):
            norms = zip((attention.q_norm, attention.k_norm), self.heads, strict=True)
            self.qk_norm, self.qk_eps = (
                torch.cat([norm.weight.float().expand(n, -1) for norm, n in norms]),
                attention.q_norm.variance_epsilon,
            )
        # an input that needs a gradient, so that autograd calls the backward passes of the first layer
        self.anchor = next(iter(sums.by_parameter)) if sums else None

    @property
    def segments(self) -> list[tuple[int, slice]]:
        """The parts of the current micro-batch's tokens."""
        return self.sums.segments if self.sums else []

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, position_embeddings: tuple[Tensor, Tensor],
        **named: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the layer on the residual stream (N, L, H), with the arguments of transformers' layers."""
        q, k, v = AttentionInput.apply(self.anchor, hidden_states, *position_embeddings, self)
        module = self.attention
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention_forward)
        dropout = module.attention_dropout if module.training else 0.0
        attended, _ = attend(
            module, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention_mask, dropout=dropout, scaling=module.scaling,
            **named,
        )  # fmt: skip
        return AfterAttention.apply(hidden_states, attended.flatten(2), self)


class AttentionInput(torch.autograd.Function):
    """Compute q (N, L, heads, d), k and v (N, L, n_kv, d) of the residual stream x (N, L, H): norm, projections and RoPE."""

    @staticmethod
    def forward(  # type: ignore
        ctx, anchor: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, layer: HalfDecoder
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed, scale = norm_forward(x, layer.before_attention.weight, layer.before_attention.variance_epsilon)
        extended = layer.qkv.extend(normed)
        n_q, n_kv = layer.heads
        qkv = layer.qkv.product(extended).unflatten(-1, (n_q + 2 * n_kv, -1))  # (N, L, heads + 2 n_kv, d)
        qk, v = qkv.split((n_q + n_kv, n_kv), 2)
        of_norm: tuple[Tensor, ...] = ()
        if layer.qk_norm is not None:
            of_norm = (qk.float(),)
            qk, qk_scale = norm_forward(*of_norm, layer.qk_norm, layer.qk_eps)
            of_norm += (qk_scale,)
        half = cos.size(-1) // 2
        cos, sin = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]  # (1, L, 1, d)
        ctx.save_for_backward(x, scale, extended, cos, sin, *of_norm)
        ctx.layer, ctx.segments = layer, layer.segments
        return *rotate(qk, cos, sin).split((n_q, n_kv), 2), v

    @staticmethod
    def backward(ctx, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x, scale, extended, cos, sin, *of_norm = ctx.saved_tensors
        layer: HalfDecoder = ctx.layer
        grad = rotate(torch.cat([grad_q, grad_k], 2), cos, -sin)
        if layer.qk_norm is not None:
            grad = norm_backward(grad, of_norm[0], of_norm[1], layer.qk_norm)
        grad = torch.cat([grad.to(HALF), grad_v], 2).flatten(2)  # (N, L, (heads + 2 n_kv) * d)
        grad_normed = layer.qkv.backward(grad, extended, ctx.segments)
        return None, norm_backward(grad_normed, x, scale, layer.before_attention.weight), None, None, None


class AfterAttention(torch.autograd.Function):
    """Add the projected attention (N, L, heads * d), and then the MLP of the sum's norm, to the residual stream x (N, L, H)."""

    @staticmethod
    def forward(ctx, x: Tensor, attended: Tensor, layer: HalfDecoder) -> Tensor:  # type: ignore
        of_o = layer.o.extend(attended)
        x = x + layer.o.product(of_o)
        normed, scale = norm_forward(x, layer.before_mlp.weight, layer.before_mlp.variance_epsilon)
        of_gate_up = layer.gate_up.extend(normed)
        gate_up = layer.gate_up.product(of_gate_up)  # (N, L, 2 I)
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate)
        of_down = layer.down.extend(activated * up)
        ctx.save_for_backward(of_o, x, scale, of_gate_up, gate_up, activated, of_down)
        ctx.layer, ctx.segments = layer, layer.segments
        return x + layer.down.product(of_down)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        of_o, x, scale, of_gate_up, gate_up, activated, of_down = ctx.saved_tensors
        layer: HalfDecoder = ctx.layer
        gate, up = gate_up.chunk(2, -1)
        grad_product = layer.down.backward(grad.to(HALF), of_down, ctx.segments)  # (N, L, I)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad_product, activated, out=grad_up)
        torch.ops.aten.silu_backward(grad_product.mul_(up), gate, grad_input=grad_gate)
        grad_normed = layer.gate_up.backward(grad_gate_up, of_gate_up, ctx.segments)
        grad = norm_backward(grad_normed, x, scale, layer.before_mlp.weight, grad)
        return grad, layer.o.backward(grad.to(HALF), of_o, ctx.segments), None
