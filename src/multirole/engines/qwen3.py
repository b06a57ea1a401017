"""The forward pass of Qwen3 and of Llama as a function of plain tensors, and the merging of adapters into such tensors.

Llama is Qwen3 without q and k norms. Norm weights are folded: the layer norms into the projection that follows, the q and k
norms (and the 1 / sqrt(d) of attention) into the RoPE table. Logits agree with `transformers` to float32 rounding: 2e-6 on
random weights, up to 1.5e-5 on trained ones with logits near 20, where `transformers` itself is as far from float64 (1.0e-5).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from multirole.core.distributed import full
from multirole.engines import SERVED

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Served: TypeAlias = Qwen3ForCausalLM | LlamaForCausalLM
ROPES = ("default", "linear", "llama3")
"""Kinds of RoPE whose tables do not depend on the length of the sequence."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""(layer, q (N, heads, d), k (N, n_kv, d), v (N, n_kv, d)) -> (N, heads * d), or None to end the pass there."""


@dataclass(frozen=True)
class Weights:
    """One adapter's model. Per layer: qkv, o, gate_up, down, each (in, out), which multiplies few rows faster than (out, in)."""

    embed: Tensor
    head: Tensor
    layers: list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Span:
    """Rows start..stop-1 of a batch use `weights`."""

    weights: Weights
    start: int
    stop: int


@dataclass(frozen=True)
class Rope:
    """Rotary tables and the q and k norm weights that are folded into them, layer by layer, as they are used.

    For y = norm(x) * w, rotated: y * cos + rotate_half(y) * sin = norm(x) * (w * cos) + norm(x).roll(d / 2) * (w' * sin),
    with w' = w.roll(d / 2) and sin's first half negated. q's weights hold the 1 / sqrt(d) of attention, and nothing else where
    q and k are not normed (Llama).
    """

    cos: Tensor  # (length, d)
    sin: Tensor  # (length, d)
    weights: Tensor  # (layers, heads + n_kv, d)
    rolled: Tensor  # (layers, heads + n_kv, d)
    is_normed: bool


def forward(tokens: Tensor, positions: Tensor, spans: list[Span], rope: Rope, eps: float, attend: Attend) -> Tensor:
    """Hidden states (N, H) before the head for `tokens` (N,) at `positions` (N,); all else is per token but `attend`.

    `spans` cover the N rows in order. When `attend` returns None the pass ends and the result has no meaning.
    """
    x = spans[0].weights.embed[tokens]  # (N, H)
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]  # (N, 1, d) each
    n_layers, n_qk, head_dim = rope.weights.shape
    for layer in range(n_layers):
        qkv = _project(F.rms_norm(x, x.shape[1:], eps=eps), spans, layer, 0).unflatten(1, (-1, head_dim))
        n_kv = qkv.shape[1] - n_qk
        qk = qkv[:, :n_qk]  # (N, heads + n_kv, d)
        if rope.is_normed:
            qk = F.rms_norm(qk, (head_dim,), eps=eps)
        qk = torch.addcmul(qk * (cos * rope.weights[layer]), qk.roll(head_dim // 2, -1), sin * rope.rolled[layer])
        attended = attend(layer, qk[:, : n_qk - n_kv], qk[:, n_qk - n_kv :], qkv[:, n_qk:])
        if attended is None:
            break
        x = x + _project(attended, spans, layer, 1)  # (N, H)
        gate, up = _project(F.rms_norm(x, x.shape[1:], eps=eps), spans, layer, 2).chunk(2, 1)  # (N, I) each
        x = x + _project(F.silu(gate).mul_(up), spans, layer, 3)  # (N, H)
    return F.rms_norm(x, x.shape[1:], eps=eps)


def _project(x: Tensor, spans: list[Span], layer: int, which: int) -> Tensor:
    """x (N, in) times each span's matrix -> (N, out)."""
    if len(spans) == 1:
        return x @ spans[0].weights.layers[layer][which]
    parts = x.split([span.stop - span.start for span in spans])
    return torch.cat([part @ span.weights.layers[layer][which] for part, span in zip(parts, spans, strict=True)])


def rope_table(model: PeftModel | Served, length: int) -> Rope:
    """The tables for positions 0..length-1."""
    inner = _inner(model)
    config, embed = inner.config, inner.model.embed_tokens.weight
    positions = torch.arange(length, device=embed.device)[None]
    cos, sin = inner.model.rotary_emb(embed.new_zeros(1, dtype=torch.float32), positions)  # (1, length, d) each
    half = config.head_dim // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    n_q, n_kv, scale = config.num_attention_heads, config.num_key_value_heads, config.head_dim**-0.5
    is_normed, plain = isinstance(inner, Qwen3ForCausalLM), cos.new_ones(config.head_dim)
    norms = torch.stack(
        [
            torch.cat([q.expand(n_q, -1) * scale, k.expand(n_kv, -1)])
            for q, k in (
                (full(a.q_norm.weight).float(), full(a.k_norm.weight).float()) if is_normed else (plain, plain)
                for a in (layer.self_attn for layer in inner.model.layers)
            )
        ]
    )  # (layers, heads + n_kv, d)
    return Rope(cos[0], sin[0], norms, norms.roll(half, -1), is_normed)


def merge_adapters(model: PeftModel | Served) -> dict[str | None, Weights]:
    """Float32 copies of the base (None) and of every adapter merged into it; `model` is only read."""
    inner = _inner(model)
    check_supported(model)
    embed = full(inner.model.embed_tokens.weight.detach()).float().clone()  # (V, H)
    head = full(inner.lm_head.weight.detach()).float() * full(inner.model.norm.weight.detach()).float()  # (V, H)
    names: list[str | None] = [None, *(model.peft_config if isinstance(model, PeftModel) else ())]
    return {name: Weights(embed, head, [_layer(layer, name) for layer in inner.model.layers]) for name in names}


def _layer(layer: Any, adapter: str | None) -> tuple[Tensor, ...]:
    """One decoder layer's fused and folded matrices: qkv, o, gate_up, down."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = (_merged(p, adapter) for p in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj))
    gate, up, down = (_merged(p, adapter) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    before, after = full(layer.input_layernorm.weight).float(), full(layer.post_attention_layernorm.weight).float()
    fused = (torch.cat([q, k, v]) * before, o, torch.cat([gate, up]) * after, down)  # (out, in) each
    return tuple(weight.t().contiguous() for weight in fused)


def _merged(module: Any, adapter: str | None) -> Tensor:
    """A float32 copy of W + scaling * B @ A, or of W where `adapter` has no part in this module."""
    if not isinstance(module, LoraLayer):
        return full(module.weight.detach()).float().clone()
    weight = full(module.get_base_layer().weight.detach()).float()
    if adapter not in module.lora_A:
        return weight.clone()
    a, b = (full(part[adapter].weight.detach()).float() for part in (module.lora_A, module.lora_B))
    return weight + module.scaling[adapter] * (b @ a)


def _inner(model: PeftModel | Served) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def check_supported(model: PeftModel | Served) -> None:
    """Refuse a model or an adapter that this forward pass does not implement (ValueError)."""
    for problem in unsupported(model):
        raise ValueError(
            f"The transformers engine cannot serve this model: {problem}. It implements plain Qwen3 and Llama with LoRA on the "
            "linear layers. Use engine='generate' for other models, which is slower, or engine='vllm'."
        )


def unsupported(model: PeftModel | Served) -> Iterator[str]:
    """What of a model and its adapters this forward pass does not implement."""
    inner = _inner(model)
    if type(inner).__name__ not in SERVED:
        yield f"it is a {type(inner).__name__}"
        return
    config = inner.config
    if config.rope_parameters["rope_type"] not in ROPES:
        yield f"rope_type is {config.rope_parameters['rope_type']!r}"
    if config.hidden_act != "silu" or any("sliding" in kind for kind in config.to_dict().get("layer_types") or ()):
        yield "it has sliding windows or an activation other than silu"
    if quantised := [name for name, weight in inner.named_parameters() if not weight.is_floating_point()]:
        yield f"its weights are quantised, such as {quantised[0]}"
    if any(name.endswith(("_proj.bias", "_proj.base_layer.bias")) for name, _ in inner.named_parameters()):
        yield "its linear layers have biases"
    for name, module in inner.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if name.rsplit(".", 1)[-1] not in PROJECTIONS or not isinstance(module, LoraLayer):
            yield f"{name} has an adapter that is not LoRA on one of {PROJECTIONS}"
        elif module.merged:
            yield f"{name} is merged"
        elif len(module.lora_magnitude_vector) or any(b.bias is not None for b in module.lora_B.values()):
            yield f"{name} uses DoRA or has a LoRA bias"
    if isinstance(model, PeftModel) and any(config.modules_to_save for config in model.peft_config.values()):
        yield "an adapter has modules_to_save"
