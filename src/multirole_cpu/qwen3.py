"""Compute the forward pass of a decoder (`families`) on plain tensors, and copy these tensors from a model.

Llama, Mistral and Qwen2 are Qwen3 without q and k norms, whose weights (and the 1 / sqrt(d) of attention) are folded into the RoPE
table. Qwen2 has biases of q, k and v; a configuration may give the others biases, too.

- In float32, adapters are merged, and the weights of the layer norms are folded into the projections that follow. Logits agree
  with `transformers` to float32 rounding: 2e-6 on random weights, up to 1.5e-5 on trained ones with logits near 20, where
  `transformers` itself is as far from float64 (1.0e-5).
- In bfloat16, the base is stored once for all adapters, unchanged, and each adapter adds its low-rank part to a product before
  rounding: in merged weights, most of an adapter's first updates would be lost to rounding. The residual stream, norms,
  rotations and logits are in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from multirole.update.passes.tree_attention import STATIC_ROPES, has_windows
from multirole.update.processes import full_tensor
from multirole_cpu import SERVED, packed_products
from multirole_cpu.families import CLASSES, Served, head_dim
from multirole_cpu.kernels import FLOAT32, Kernels
from multirole_cpu.sampling_head import SAMPLING_HEADS, SamplingHead

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN_VARIANTS = ("MiCALinearVariant", "VeloraLinearVariant")
"""PEFT's variants of LoRA that compute what plain LoRA does: one starts from other matrices, one keeps fewer activations."""
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of weights that are numbers themselves; integers and 8-bit floats are multiples of a scale that is stored apart."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""(layer, q (N, heads, d), k (N, n_kv, d), v (N, n_kv, d)) -> (N, heads * d), or None to end the pass there."""


@dataclass(frozen=True)
class LowRank:
    """An adapter's part of a product: (x @ a) @ b, with the scaling in b."""

    a: Tensor  # (in, R)
    b: Tensor  # (R, out)


@dataclass(frozen=True)
class Weights:
    """The weights of one adapter's model, in the dtype of `embed`. Each layer has qkv, o, gate_up and down.

    The matrices of `layers` are packed for oneDNN (`is_packed`), or (in, out) in float32, which multiplies few rows faster than (out, in).
    `biases` are those of the four products, None without. `norms` are those before qkv and gate_up, and `norm` is the last one; None if folded.
    """

    embed: Tensor  # (V, H)
    head: SamplingHead
    layers: list[tuple[Tensor, ...]]
    biases: list[tuple[Tensor | None, ...]]
    norms: list[tuple[Tensor | None, Tensor | None]]
    norm: Tensor | None = None
    adapter: list[tuple[LowRank | None, ...]] | None = None
    is_packed: bool = True


@dataclass(frozen=True)
class Span:
    """Rows start..stop-1 of a batch, which use `weights`."""

    weights: Weights
    start: int
    stop: int


@dataclass(frozen=True)
class Rope:
    """Rotary tables, and the q and k norm weights that are folded into them layer by layer during the pass.

    For y = norm(x) * w, rotated: y * cos + rotate_half(y) * sin = norm(x) * (w * cos) + norm(x).roll(d / 2) * (w' * sin),
    with w' = w.roll(d / 2) and sin's first half negated. q's weights hold the 1 / sqrt(d) of attention, and nothing else if
    q and k are not normed, as in Qwen3 alone they are.
    """

    cos: Tensor  # (length, d)
    sin: Tensor  # (length, d)
    weights: Tensor  # (layers, heads + n_kv, d)
    rolled: Tensor  # (layers, heads + n_kv, d)
    is_normed: bool


def forward(tokens: Tensor, positions: Tensor, spans: list[Span], rope: Rope, eps: float, attend: Attend) -> Tensor:
    """Compute hidden states (N, H) before the head for `tokens` (N,) at `positions` (N,). Only `attend` mixes tokens.

    `spans` cover the N rows in order, in one dtype. If `attend` returns None, the pass ends and its result is meaningless.
    """
    weights = spans[0].weights

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[1:], weight, eps).to(weights.embed.dtype)  # (N, H)

    x = weights.embed[tokens].float()  # (N, H)
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]  # (N, 1, d) each
    n_layers, n_qk, head_dim = rope.weights.shape
    for layer in range(n_layers):
        if rope.is_normed or layer == 0:  # else the factors of all layers are equal
            cos_factor, sin_factor = cos * rope.weights[layer], sin * rope.rolled[layer]  # (N, heads + n_kv, d) each
        before_attention, before_mlp = weights.norms[layer]
        qkv = _project(normed(x, before_attention), spans, layer, 0).unflatten(1, (-1, head_dim))
        n_kv = qkv.shape[1] - n_qk
        qk = qkv[:, :n_qk].float()  # (N, heads + n_kv, d)
        if rope.is_normed:
            qk = F.rms_norm(qk, (head_dim,), eps=eps)
        qk = torch.addcmul(qk * cos_factor, qk.roll(head_dim // 2, -1), sin_factor)
        attended = attend(layer, qk[:, : n_qk - n_kv], qk[:, n_qk - n_kv :], qkv[:, n_qk:])
        if attended is None:
            break
        x += _project(attended, spans, layer, 1)  # (N, H)
        gate, up = _project(normed(x, before_mlp), spans, layer, 2).chunk(2, 1)  # (N, I) each
        x += _project(F.silu(gate).mul_(up), spans, layer, 3)  # (N, H)
    return normed(x, weights.norm)


def _project(x: Tensor, spans: list[Span], layer: int, matrix: int) -> Tensor:
    """Multiply x (N, in) with each span's matrix, and add the bias, which no adapter changes -> (N, out)."""
    bias = spans[0].weights.biases[layer][matrix]
    if x.dtype == torch.bfloat16:
        added = _low_rank(x, spans, layer, matrix)
        return packed_products.product(x, spans[0].weights.layers[layer][matrix], added, bias)
    multiply = packed_products.product if spans[0].weights.is_packed else torch.matmul
    parts = x.split([span.stop - span.start for span in spans])
    products = [multiply(part, span.weights.layers[layer][matrix]) for part, span in zip(parts, spans, strict=True)]
    product = products[0] if len(products) == 1 else torch.cat(products)
    return product if bias is None else product.add_(bias)


def _low_rank(x: Tensor, spans: list[Span], layer: int, matrix: int) -> Tensor | None:
    """Return what the spans' adapters add to the base's product (N, out), or None if no span has an adapter here."""
    parts: list[Any] = [span.weights.adapter and span.weights.adapter[layer][matrix] for span in spans]
    n_out = next((part.b.shape[1] for part in parts if part), None)
    if n_out is None:
        return None
    if len(parts) == 1:
        return x @ parts[0].a @ parts[0].b
    added = x.new_zeros(len(x), n_out)
    for span, part in zip(spans, parts, strict=True):
        if part:
            torch.mm(x[span.start : span.stop] @ part.a, part.b, out=added[span.start : span.stop])
    return added


def rope_table(model: PeftModel | Served, length: int) -> Rope:
    """Build the tables for positions 0..length-1."""
    inner = base_of(model)
    config, embed = inner.config, inner.model.embed_tokens.weight
    positions = torch.arange(length, device=embed.device)[None]
    cos, sin = inner.model.rotary_emb(embed.new_zeros(1, dtype=torch.float32), positions)  # (1, length, d) each
    d = head_dim(inner)
    half = d // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    n_q, n_kv, scale = config.num_attention_heads, config.num_key_value_heads, d**-0.5
    is_normed, plain = isinstance(inner, Qwen3ForCausalLM), cos.new_ones(d)
    norms = torch.stack(
        [
            torch.cat([q.expand(n_q, -1) * scale, k.expand(n_kv, -1)])
            for q, k in (
                (full_tensor(a.q_norm.weight).float(), full_tensor(a.k_norm.weight).float())
                if is_normed
                else (plain, plain)
                for a in (layer.self_attn for layer in inner.model.layers)
            )
        ]
    )  # (layers, heads + n_kv, d)
    return Rope(cos[0], sin[0], norms, norms.roll(half, -1), is_normed)


def make_weights(
    model: PeftModel | Served, dtype: torch.dtype, kernels: Kernels = FLOAT32
) -> dict[str | None, Weights]:
    """Copy the base (key None) and every adapter in float32 or bfloat16, for these kernels; `model` is not modified."""
    inner = base_of(model)
    check_supported(model)
    adapters = list(model.peft_config) if isinstance(model, PeftModel) else []
    make = _packed_weights if dtype == torch.bfloat16 else _merged_weights
    return make(inner, adapters, kernels)


def _merged_weights(inner: Any, adapters: list[str], kernels: Kernels) -> dict[str | None, Weights]:
    """Copy the weights in float32, with adapters merged and norms folded."""
    embed = full_tensor(inner.model.embed_tokens.weight.detach()).float().clone()  # (V, H)
    head = (
        full_tensor(inner.lm_head.weight.detach()).float() * full_tensor(inner.model.norm.weight.detach()).float()
    )  # (V, H)
    layers: Any = inner.model.layers
    folded: list[Any] = [(None, None)] * len(layers)
    biases = _biases(inner, torch.float32)
    names: list[str | None] = [None, *adapters]
    sampling_head, is_packed = SAMPLING_HEADS[kernels.head](head), kernels.layers == "packed"
    return {
        name: Weights(
            embed,
            sampling_head,
            [_merged_layer(layer, name, is_packed) for layer in layers],
            biases,
            folded,
            is_packed=is_packed,
        )
        for name in names
    }


def _merged_layer(layer: Any, adapter: str | None, is_packed: bool) -> tuple[Tensor, ...]:
    """Return one decoder layer's fused and folded matrices: qkv, o, gate_up, down."""
    (q, k, v), (o,), (gate, up), (down,) = ([_merged(p, adapter) for p in group] for group in _fused(layer))
    before, after = (
        full_tensor(layer.input_layernorm.weight).float(),
        full_tensor(layer.post_attention_layernorm.weight).float(),
    )
    fused = (torch.cat([q, k, v]) * before, o, torch.cat([gate, up]) * after, down)  # (out, in) each
    return tuple(packed_products.pack(weight) if is_packed else weight.t().contiguous() for weight in fused)


def _merged(module: Any, adapter: str | None) -> Tensor:
    """Copy W + scaling * B @ A in float32, or W if `adapter` does not change this module."""
    weight = _base_weight(module).float()
    if not isinstance(module, LoraLayer) or adapter not in module.lora_A:
        return weight.clone()
    a, b = (full_tensor(part[adapter].weight.detach()).float() for part in (module.lora_A, module.lora_B))
    return weight + module.scaling[adapter] * (b @ a)


def _packed_weights(inner: Any, adapters: list[str], kernels: Kernels) -> dict[str | None, Weights]:
    """Copy the weights in bfloat16: one packed base, and the low-rank parts of the adapters."""
    embed = full_tensor(inner.model.embed_tokens.weight.detach()).bfloat16().clone()  # (V, H)
    base = Weights(
        embed,
        SAMPLING_HEADS[kernels.head](full_tensor(inner.lm_head.weight.detach()).float().clone()),
        [tuple(packed_products.pack(torch.cat([*map(_base_weight, group)]).bfloat16()) for group in _fused(layer)) for layer in inner.model.layers],
        _biases(inner, torch.bfloat16),
        [
            (_copied(layer.input_layernorm.weight), _copied(layer.post_attention_layernorm.weight))
            for layer in inner.model.layers
        ],
        _copied(inner.model.norm.weight),
    )  # fmt: skip
    return {None: base} | {
        name: replace(
            base,
            adapter=[tuple(_low_rank_part(group, name) for group in _fused(layer)) for layer in inner.model.layers],
        )
        for name in adapters
    }


def _low_rank_part(group: tuple[Any, ...], adapter: str) -> LowRank | None:
    """Join the adapter's matrices of fused modules: the a's side by side, the scaled b's as diagonal blocks."""
    ranks = [len(module.lora_A[adapter].weight) if _has_adapter(module, adapter) else 0 for module in group]
    widths = [module.out_features for module in group]
    if not any(ranks):
        return None
    weight = _base_weight(group[0])
    a, b = weight.new_zeros(weight.shape[1], sum(ranks)).float(), weight.new_zeros(sum(ranks), sum(widths)).float()
    row = column = 0
    for module, rank, width in zip(group, ranks, widths, strict=True):
        if rank:
            a[:, row : row + rank] = full_tensor(module.lora_A[adapter].weight.detach()).t()
            b[row : row + rank, column : column + width] = (
                module.scaling[adapter] * full_tensor(module.lora_B[adapter].weight.detach()).float().t()
            )
        row, column = row + rank, column + width
    return LowRank(a.bfloat16(), b.bfloat16())


def _has_adapter(module: Any, adapter: str) -> bool:
    return isinstance(module, LoraLayer) and adapter in module.lora_A


def _base(module: Any) -> Any:
    """Return a linear layer without adapters."""
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _base_weight(module: Any) -> Tensor:
    """Return a linear layer's weight (out, in) without adapters."""
    return full_tensor(_base(module).weight.detach())


def _biases(inner: Any, dtype: torch.dtype) -> list[tuple[Tensor | None, ...]]:
    """Copy the biases of each layer's four products (out,), None for a product without."""
    return [tuple(_joint_bias([*map(_base, group)], dtype) for group in _fused(layer)) for layer in inner.model.layers]


def _joint_bias(modules: list[Any], dtype: torch.dtype) -> Tensor | None:
    """Copy the biases of fused linear layers, with zeros for those without; None if all are without."""
    if all(module.bias is None for module in modules):
        return None
    zeros = [module.weight.new_zeros(module.out_features) for module in modules]
    parts = [
        zero if module.bias is None else full_tensor(module.bias.detach())
        for module, zero in zip(modules, zeros, strict=True)
    ]
    return torch.cat(parts).to(dtype)


def _copied(weight: Tensor) -> Tensor:
    return full_tensor(weight.detach()).float().clone()


def _fused(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the modules of a decoder layer, grouped by those computed as one product."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def base_of(model: PeftModel | PreTrainedModel) -> Any:
    """Return the model without adapters."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def check_supported(model: PeftModel | Served) -> None:
    """Raise ValueError for a model or adapter that this forward pass does not implement."""
    for problem in unsupported(model):
        raise ValueError(
            f"The transformers engine cannot serve this model: {problem}. It implements plain Llama, Mistral, Qwen2 and Qwen3 with "
            "LoRA on the linear layers. Use engine='generate' for other models, which is slower, or engine='vllm'."
        )


def unsupported(model: PeftModel | PreTrainedModel) -> Iterator[str]:
    """List the properties of a model and its adapters that this forward pass does not implement."""
    inner = base_of(model)
    if type(inner) not in CLASSES:  # a model's own code may use one of these names
        yield f"it is a {type(inner).__name__}" + " of other code" * (type(inner).__name__ in SERVED)
        return
    config = inner.config
    if config.rope_parameters["rope_type"] not in STATIC_ROPES:
        yield f"rope_type is {config.rope_parameters['rope_type']!r}"
    if config.hidden_act != "silu" or has_windows(inner):
        yield "it has sliding windows or an activation other than silu"
    if quantised := [name for name, weight in inner.named_parameters() if weight.dtype not in WEIGHT_DTYPES]:
        yield f"its weights are quantised, such as {quantised[0]}"
    for name, module in inner.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if name.rsplit(".", 1)[-1] not in PROJECTIONS or not isinstance(module, LoraLayer):
            yield f"{name} has an adapter that is not LoRA on one of {PROJECTIONS}"
        elif module.merged:
            yield f"{name} is merged"
        elif len(module.lora_magnitude_vector) or any(b.bias is not None for b in module.lora_B.values()):
            yield f"{name} uses DoRA or has a LoRA bias"
        elif others := {type(v).__name__ for v in module.lora_variant.values()} - {*PLAIN_VARIANTS}:
            yield f"{name} uses a variant of LoRA, {min(others)}"
    if isinstance(model, PeftModel) and any(config.modules_to_save for config in model.peft_config.values()):
        yield "an adapter has modules_to_save"
