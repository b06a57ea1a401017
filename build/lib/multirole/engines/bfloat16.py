"""Matrix products in bfloat16 on processors that have them (AVX512-BF16, AMX), with weights that oneDNN has packed.

oneDNN rearranges a plain weight at every product, which takes as long as the product itself where rows are few: packed once,
products of 16 to 128 rows take half the time. `torch.compile` packs with the same two operators when it freezes a model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware, through the oneDNN that torch is built with."""
    processor = torch.cpu.get_capabilities()
    has_products = processor.get("avx512_bf16", False) or processor.get("amx_bf16", False)
    return bool(has_products) and torch.backends.mkldnn.is_available()


def pack(weight: Tensor) -> Tensor:
    """oneDNN's opaque copy of a weight (out, in), rounded to bfloat16. It is good for any number of rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous(), None)


def product(x: Tensor, packed: Tensor, addend: Tensor | None = None) -> Tensor:
    """x (N, in) times the weight, plus `addend` (N, out), summed in float32 and rounded once: (N, out). All are bfloat16."""
    if addend is None:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, addend, packed, None, "add")


@contextmanager
def rounded_factors() -> Iterator[None]:
    """Within it, products of float32 matrices are of factors rounded to bfloat16, with sums in float32.

    For logits: oneDNN rounds the sums of products of bfloat16 to bfloat16, which is up to 0.06 at a logit of 20.
    """
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
