"""Compute log-probs under a large vocabulary on a CPU, for TRL's fused head.

`large_head` replaces private names of TRL 1.16: `_ChunkedLogProbFunction` and `_CHUNKED_LOGPROB_CHUNK_SIZE` of `trl.trainer.utils`, and
`TOKEN_CHUNK_SIZE` of `trl.kernels.chunked_logprob`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from trl.kernels import chunked_logprob
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils

TILE = 512, 2048
"""Tokens and vocabulary entries of a tile of logits in a `LargeHead`, small enough for the processor's cache."""
LARGE = 8192
"""Smallest vocabulary of a `LargeHead`."""
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel behind `scaled_dot_product_attention` on a CPU; it also returns the log-sum-exp of each query."""


class AttentionHead(torch.autograd.Function):
    """Compute log-probs (N,) and entropies (N,) of tokens under the head's rows (V, H) with one call of PyTorch's fused attention.

    Softmax over the vocabulary is attention with the rows of the head as keys. With the rows as values, too, the kernel returns the mean row
    m under each token's distribution, and its log Z. With hidden state h, the chosen token's row w and temperature T, the log-prob is
    h w / T - log Z, its gradient (w - m) / T, and the entropy log Z - h m / T. So logits are never stored, and are not computed again in
    the backward pass. The head gets no gradient.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:  # type: ignore
        ctx.set_materialize_grads(False)
        is_half = torch.is_autocast_enabled("cpu") or torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
        dtype = torch.bfloat16 if is_half else hidden.dtype
        rounded, rows = hidden.to(dtype), head.to(dtype)
        mean, log_z = FLASH(rounded[None, None], rows[None, None], rows[None, None], scale=1 / temperature)
        mean, log_z, chosen, rounded = mean[0, 0].float(), log_z[0, 0].float(), rows[targets].float(), rounded.float()
        logps = torch.linalg.vecdot(rounded, chosen).div_(temperature).sub_(log_z)
        entropies = log_z - torch.linalg.vecdot(rounded, mean).div_(temperature)
        ctx.save_for_backward(hidden, head, targets, chosen.sub_(mean).div_(temperature))
        ctx.temperature = temperature
        return logps, entropies

    @staticmethod
    def backward(ctx, grad_logps: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore
        hidden, head, targets, slopes = ctx.saved_tensors
        if grad_entropies is None:
            return None if grad_logps is None else (slopes * grad_logps[:, None]).to(hidden.dtype), None, None, None
        with torch.enable_grad():  # an entropy's gradient needs every word's probability
            hidden = hidden.detach().requires_grad_()
            outputs = ChunkedLogProbFunction.apply(hidden, head, None, targets, ctx.temperature, TILE[1])[:2]
        grads = torch.zeros_like(grad_entropies) if grad_logps is None else grad_logps, grad_entropies
        return *torch.autograd.grad(outputs, hidden, grads), None, None, None


class LargeHead:
    """Replacement of TRL's `ChunkedLogProbFunction`: `AttentionHead` for a frozen matrix, as most heads are, and TRL's for others."""

    @staticmethod
    def apply(
        hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None, logit_scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if (
            bias is None
            and softcap is None
            and logit_scale == 1
            and not head.requires_grad
            and set(outputs) <= {"log_probs", "entropy"}
        ):
            return *AttentionHead.apply(hidden, head, targets, temperature), None, None, None
        return ChunkedLogProbFunction.apply(
            hidden, head, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
        )


@contextmanager
def large_head() -> Iterator[None]:
    """Context manager: TRL's fused head is a `LargeHead`, or works in tiles of `TILE`; it must last until `backward` has ended."""
    former = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction, chunked_logprob.TOKEN_CHUNK_SIZE
    chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE
    utils._ChunkedLogProbFunction = LargeHead
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction, chunked_logprob.TOKEN_CHUNK_SIZE = former


def has_large_head(model: nn.Module) -> bool:
    """Return whether the head is computed by `LargeHead`: on a CPU, with a vocabulary above `LARGE`."""
    weight = model.get_output_embeddings().weight  # type: ignore[operator]
    return weight.device.type == "cpu" and weight.size(0) > LARGE
