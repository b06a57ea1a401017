"""Compute log-probs under a large vocabulary on a CPU, for TRL's fused head.

`large_head` replaces private names of TRL 1.16: `_ChunkedLogProbFunction` and `_CHUNKED_LOGPROB_CHUNK_SIZE` of `trl.trainer.utils`, and
`TOKEN_CHUNK_SIZE` of `trl.kernels.chunked_logprob`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from trl.kernels import chunked_logprob
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils

from multirole_cpu.half_model import products_in

TILE = 512, 2048
"""Tokens and vocabulary entries of a tile of logits in a `LargeHead`, small enough for the processor's cache."""
LARGE = 8192
"""Smallest vocabulary of a `LargeHead`."""
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel behind `scaled_dot_product_attention` on a CPU; it also returns the log-sum-exp of each query."""


HEADS: dict[str, tuple[int, int] | None] = {"attention": None, "tiles": (256, 2048), "bfloat16": (512, 2048)}
"""Names of the kernels of a `LargeHead`: PyTorch's fused attention, or tiles of so many tokens and words.

"bfloat16" is for bfloat16, and works as "tiles" in float32. Only AMX computes the float32 products of the other two at the speed of bfloat16 ones. Its products are
rounded to bfloat16, so they are of a logit's distance to that of the chosen token: likely words are near it, and a distance of one is rounded by less than 0.004.
"""


@dataclass(frozen=True)
class HeadKernels:
    """The kernels, by their names in `HEADS`, of tokens that are differentiated and of those that are only scored."""

    with_gradient: str = "attention"
    scoring: str = "attention"


class Statistics(NamedTuple):
    """Of each token's distribution over the words: log Z (N,), the mean h w / T (N,), and the mean row (N, H) where it is computed."""

    log_z: Tensor
    mean_logit: Tensor
    mean: Tensor | None


def statistics(
    hidden: Tensor, head: Tensor, temperature: float, kernel: str, needs_mean: bool, near: Tensor
) -> Statistics:
    """Compute the softmax of hidden states (N, H) over the rows of a head (V, H) in one dtype, without storing the logits.

    `near` (N,), a logit of each token from which its likely words are not far, is where "bfloat16" rounds least.
    """
    tile = HEADS[kernel]
    if tile is None:
        mean, log_z = FLASH(hidden[None, None], head[None, None], head[None, None], scale=1 / temperature)
        mean = mean[0, 0].float()
        return Statistics(log_z[0, 0].float(), torch.linalg.vecdot(hidden.float(), mean).div_(temperature), mean)
    is_rounded = kernel == "bfloat16" and hidden.dtype == torch.bfloat16
    offsets = (-near.bfloat16()).split(tile[0]) if is_rounded else repeat(None)  # (N,), what is added to the logits
    parts = [
        _by_tiles(part, head, 1 / temperature, tile[1], needs_mean, offset)
        for part, offset in zip(hidden.split(tile[0]), offsets, strict=False)
    ]
    means = [part.mean for part in parts if part.mean is not None]
    return Statistics(
        torch.cat([part.log_z for part in parts]),
        torch.cat([part.mean_logit for part in parts]),
        torch.cat(means) if means else None,
    )


def _by_tiles(
    hidden: Tensor, head: Tensor, scale: float, n_words: int, needs_mean: bool, offset: Tensor | None
) -> Statistics:
    """Compute `statistics` tile by tile. Sums are relative to the largest logit so far, and scaled whenever it grows.

    The mean row is a second product. Without it the mean logit takes one pass over the tile. With `offset` (N,) both products are bfloat16 ones, and it is
    added to a token's logits before they are rounded.
    """
    n, x = len(hidden), hidden.float()
    largest: Tensor = x.new_full((n,), -torch.inf)
    total, weighted = x.new_zeros(n), x.new_zeros(n)
    mean = torch.zeros_like(x) if needs_mean else None
    buffer = x.new_empty(n * n_words if offset is None else 0)
    for tile in head.split(n_words):
        if offset is None:
            rows = tile.float()  # (W, H)
            logits = torch.mm(x, rows.T, out=buffer[: n * len(rows)].view(n, -1))  # (N, W), without 1 / T
        else:
            rows = tile
            logits = torch.addmm(offset[:, None].expand(n, len(rows)), hidden, rows.T).float()
        new = largest.maximum(logits.amax(1).mul_(scale))
        kept = largest.sub_(new).exp_()
        largest = new
        logits = torch.add(-largest[:, None], logits, alpha=scale)  # relative to the largest
        exponentials = logits.exp() if mean is None else logits.exp_()
        of_tile = exponentials.sum(1)
        total.mul_(kept).add_(of_tile)
        if mean is None:
            of_logits = torch.linalg.vecdot(exponentials, logits).addcmul_(of_tile, largest)
            weighted.mul_(kept).add_(of_logits)
        else:
            mean.mul_(kept[:, None])
            if offset is None:
                mean.addmm_(exponentials, rows)
            else:
                mean.add_(torch.mm(exponentials.bfloat16(), rows))
    added = 0.0 if offset is None else offset.float() * scale
    log_z = largest + total.log() - added
    if mean is None:
        return Statistics(log_z, weighted.div_(total) - added, None)
    mean.div_(total[:, None])
    return Statistics(log_z, torch.linalg.vecdot(x, mean).mul_(scale), mean)


class VocabularyHead(torch.autograd.Function):
    """Compute log-probs (N,) and entropies (N,) of tokens under the head's rows (V, H) by `statistics`.

    With hidden state h, the mean row m under its distribution, the chosen token's row w and temperature T, the log-prob is
    h w / T - log Z, its gradient (w - m) / T, and the entropy log Z - h m / T. So logits are never stored, and are not computed again in
    the backward pass. The head gets no gradient.

    With "attention", m and log Z are one call of PyTorch's fused attention with the head's rows as keys and as values.
    """

    @staticmethod
    def forward(  # type: ignore
        ctx, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, kernels: HeadKernels
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        has_gradient = ctx.needs_input_grad[0]
        is_half = torch.is_autocast_enabled("cpu") or torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
        dtype = torch.bfloat16 if is_half else hidden.dtype
        rounded, rows = hidden.to(dtype), head.to(dtype)
        kernel = kernels.with_gradient if has_gradient else kernels.scoring
        chosen = rows[targets].float()
        logits = torch.linalg.vecdot(rounded.float(), chosen)  # (N,), of the chosen tokens
        with torch.autocast("cpu", enabled=False), products_in("bf16") if is_half else nullcontext():
            log_z, mean_logit, mean = statistics(rounded, rows, temperature, kernel, has_gradient, logits)
        logps = logits.div_(temperature).sub_(log_z)
        if has_gradient:
            assert mean is not None
            ctx.save_for_backward(hidden, head, targets, chosen.sub_(mean).div_(temperature))
            ctx.temperature = temperature
        return logps, log_z - mean_logit

    @staticmethod
    def backward(ctx, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore
        hidden, head, targets, slopes = ctx.saved_tensors
        if grad_entropies is None:
            return None if grad_logps is None else (slopes * grad_logps[:, None]).to(hidden.dtype), *[None] * 4
        with torch.enable_grad():  # an entropy's gradient needs every word's probability
            hidden = hidden.detach().requires_grad_()
            outputs = ChunkedLogProbFunction.apply(hidden, head, None, targets, ctx.temperature, TILE[1])[:2]
        grads = torch.zeros_like(grad_entropies) if grad_logps is None else grad_logps, grad_entropies
        return *torch.autograd.grad(outputs, hidden, grads), *[None] * 4


class LargeHead:
    """Replacement of TRL's `ChunkedLogProbFunction`: `VocabularyHead` for a frozen matrix, as most heads are, and TRL's for others."""

    def __init__(self, kernels: HeadKernels) -> None:
        self.kernels = kernels

    def apply(
        self, hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None, logit_scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if (
            bias is None
            and softcap is None
            and logit_scale == 1
            and not head.requires_grad
            and set(outputs) <= {"log_probs", "entropy"}
        ):
            return *VocabularyHead.apply(hidden, head, targets, temperature, self.kernels), None, None, None
        return ChunkedLogProbFunction.apply(
            hidden, head, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
        )


@contextmanager
def large_head(kernels: HeadKernels = HeadKernels()) -> Iterator[None]:
    """Context manager: TRL's fused head is a `LargeHead`, or works in tiles of `TILE`; it must last until `backward` has ended."""
    former = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction, chunked_logprob.TOKEN_CHUNK_SIZE
    chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE
    utils._ChunkedLogProbFunction = LargeHead(kernels)
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction, chunked_logprob.TOKEN_CHUNK_SIZE = former


def has_large_head(model: nn.Module) -> bool:
    """Return whether the head is computed by `LargeHead`: on a CPU, with a vocabulary above `LARGE`."""
    weight = model.get_output_embeddings().weight  # type: ignore[operator]
    return weight.device.type == "cpu" and weight.size(0) > LARGE
