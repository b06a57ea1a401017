"""Compute one of `families` with an adapter in bfloat16 on a CPU without autocast, with the adapter's gradient by part.

`half_decoder` joins the products of a decoder layer that have the same input, and computes what is between them. Matrix products are in
bfloat16 with float32 accumulation; adapters, their gradients, the residual stream, the statistics of the norms, logits and log-probs are
float32.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from multirole.update.gradients import PartSums
from multirole.update.passes.bfloat16_layers import HALF, replaced
from multirole_cpu.families import CLASSES
from multirole_cpu.half_decoder import HalfDecoder


def is_covered(base: PreTrainedModel) -> bool:
    """Return whether `half_model` covers the whole model: one of `families` on a CPU, and no subclass, which may have other layers."""
    return type(base) in CLASSES and base.config.hidden_act == "silu" and base.device.type == "cpu"


def cpu_has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 in hardware, through the oneDNN that torch is built with."""
    processor = torch.cpu.get_capabilities()
    has_products = processor.get("avx512_bf16", False) or processor.get("amx_bf16", False)
    return bool(has_products) and torch.backends.mkldnn.is_available()


@contextmanager
def half_model(base: PreTrainedModel, adapter: str | None, sums: PartSums | None) -> Iterator[None]:
    """Context manager: a model that `is_covered` computes in bfloat16 with `adapter`, or with none; backward passes add to `sums`.

    Call the base itself, without autocast. The outputs of norms and the angles of RoPE are bfloat16, too; the residual stream is float32,
    and so are the logits: products of float32 tensors whose factors are rounded.
    """
    with ExitStack() as stack:
        for decoder in base.model.layers:
            stack.enter_context(replaced(decoder, HalfDecoder(decoder, adapter, sums)))
        norm, embed = base.model.norm, base.model.embed_tokens
        stack.enter_context(
            replaced(norm, lambda x: F.rms_norm(x, x.shape[-1:], norm.weight.float(), norm.variance_epsilon))
        )
        stack.enter_context(replaced(embed, lambda ids: F.embedding(ids, embed.weight).float()))
        stack.enter_context(replaced(base.model.rotary_emb, _half_angles(base.model.rotary_emb.forward)))
        stack.enter_context(products_in("bf16"))
        yield


def _half_angles(forward: Callable) -> Callable[..., list[Tensor]]:
    """Compute RoPE's angles in float32 and return their cosines and sines in bfloat16, which would round positions above 256."""

    def angles(*args: Tensor, **named: Tensor) -> list[Tensor]:
        with products_in("ieee"):
            return [table.to(HALF) for table in forward(*args, **named)]

    return angles


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Context manager: set how a CPU multiplies float32 matrices: exactly ("ieee"), or with factors rounded to bfloat16 ("bf16")."""
    former = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = former  # type: ignore[attr-defined]
