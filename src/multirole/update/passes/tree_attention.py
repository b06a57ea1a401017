"""Compute attention over packed rows (`prefix_tree`), as an attention function of transformers.

Every block of queries is given the keys of its whole row, gathered from the packed sequence. On a GPU, in half precision, all blocks
go through PyTorch's `varlen_attn` at once, without masks and padding. Elsewhere, blocks of similar size go
through `scaled_dot_product_attention` with a mask. Not run on a GPU.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface

from multirole.update.passes.prefix_tree import BlockGroup, BlockSequence, Packing

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before PyTorch 2.10
    varlen_attn = None  # type: ignore[assignment]

ATTENTION_NAME = "multirole_prefix_tree"
PACKABLE_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Models whose attention over a row depends only on positions and causality."""
MAX_SCORES = 2**26
"""Largest matrix of attention scores, in numbers, that a CPU stores in full."""
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles do not depend on the length of the sequence."""
VARLEN_TOLERANCE = 0.1
"""Largest difference of `varlen_attn` from masked attention on normal values that rounding to half precision explains; 0.02 is typical."""

logger = logging.getLogger(__name__)


def can_share_prefixes(model: PreTrainedModel) -> bool:
    """Return whether the model's attention can be replaced: one of `PACKABLE_MODELS`, with full attention in every layer and a static RoPE."""
    if type(model) not in PACKABLE_MODELS:  # a subclass may have other layers
        return False
    return not has_windows(model) and model.config.rope_parameters["rope_type"] in STATIC_ROPES


def has_windows(model: PreTrainedModel) -> bool:
    """Return whether a layer of one of `PACKABLE_MODELS` attends to a window of the earlier tokens, or in another way than in full."""
    config = model.config.to_dict()
    is_full = set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
    is_windowed = config.get("use_sliding_window", isinstance(model, MistralForCausalLM))
    return not is_full or bool(is_windowed and config.get("sliding_window"))


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, prefix_tree: Packing,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention over one packed sequence: query (1, heads, N, d), key and value (1, n_kv, N, d) -> (1, N, heads, d).

    Heads that share a key are concatenated as queries, so that keys are not copied for each of them. A CPU computes in
    float32, with products in the precision that torch is set to.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads or n_kv, d)
    scaling = q.size(-1) ** -0.5 if scaling is None else scaling
    if has_varlen(q.device, q.dtype, q.size(-1)):
        return varlen_attention(q, k, v, prefix_tree.sequence, scaling)[None], None
    if stores_scores(prefix_tree, q.size(1)):
        return StoredScores.apply(q, k, v, prefix_tree, scaling)[None], None
    return masked_attention(q, k, v, prefix_tree, scaling)[None], None


def stores_scores(packing: Packing, n_heads: int) -> bool:
    """Return whether attention over a packed sequence stores its probabilities: on a CPU, if no matrix of them is larger than `MAX_SCORES`."""
    if packing.ids.device.type != "cpu":
        return False
    return max(group.mask.numel() for group in packing.groups) * n_heads <= MAX_SCORES


def stored_bytes(model: PreTrainedModel, packing: Packing) -> int:
    """Return the bytes that `StoredScores` keeps in all layers for the backward pass; 0 where scores are not stored."""
    config = model.config
    n_heads, n_kv = config.num_attention_heads, config.num_key_value_heads
    if not stores_scores(packing, n_heads):
        return 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    rows = sum(n_heads * len(group.queries) + 2 * n_kv * len(group.keys) for group in packing.groups)
    scores = n_heads * sum(group.mask.numel() for group in packing.groups)
    return 4 * config.num_hidden_layers * (rows * head_dim + scores)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> Tensor:
    """Compute attention with q (N, heads, d), k and v (N, n_kv, d), a group of blocks at a time -> (N, heads, d)."""
    outputs = []
    for group in packing.groups:
        queries, keys, values = (gather(x, group, i == 0, k.size(1)) for i, x in enumerate((q, k, v)))
        mask = group.mask.repeat(1, 1, q.size(1) // k.size(1), 1)  # (S, 1, rep * Q, K)
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling))
    return in_sequence(outputs, packing)


class GatheredRows(torch.autograd.Function):
    """Return x[index] for x (N, n_kv, d). The gradients of a token that many blocks share are summed in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:  # type: ignore
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockSequence, scaling: float) -> Tensor:
    """Compute `masked_attention` without masks: the queries of a block are the last tokens of its keys, so causal attention is all."""
    keys, values = (GatheredRows.apply(x, blocks.keys) for x in (k, v))  # (total keys, n_kv, d)
    return varlen_attn(  # type: ignore[return-value]  # a tuple only where more is asked for
        q, keys, values, blocks.query_ends, blocks.key_ends, blocks.max_queries, blocks.max_keys, scale=scaling,
        window_size=(-1, 0), enable_gqa=q.size(1) != k.size(1),
    )  # fmt: skip


@functools.cache
def has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `varlen_attn` is to be used: on a GPU, in half precision, if it gives there what masked attention gives.

    The second block of the example has fewer queries than keys. PyTorch does not document that its causal attention then counts from the
    end, as FlashAttention's does.
    """
    if varlen_attn is None or device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    paths = [torch.arange(40), torch.cat([torch.arange(24), torch.arange(40, 60)])]
    ids = torch.zeros(1, 60, dtype=torch.long, device=device)
    packing = Packing(ids, ids, ids, ids, ids, paths, [40, 20])
    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (torch.randn(60, n, head_dim, generator=generator, device=device, dtype=dtype) for n in (4, 2, 2))
        scaling = head_dim**-0.5
        expected = masked_attention(q, k, v, packing, scaling)
        try:
            difference = (varlen_attention(q, k, v, packing.sequence, scaling) - expected).abs().max().item()
            if difference <= VARLEN_TOLERANCE:
                return True
            reason = f"differs from it by {difference:.2g}"
        except (RuntimeError, TypeError, ValueError) as error:  # an older GPU, a large head, or another PyTorch
            reason = f"fails here ({error})"
    logger.warning("Shared prompts use attention with masks, which takes more memory: varlen_attn %s.", reason)
    return False


def gather(x: Tensor, group: BlockGroup, is_query: bool, n_kv: int) -> Tensor:
    """Return a group's rows of x (N, heads or n_kv, d): keys as (S, n_kv, K, d), queries as (S, n_kv, rep * Q, d)."""
    n_blocks, _, n_queries, n_keys = group.mask.shape
    rows = x.index_select(0, group.queries if is_query else group.keys)
    rows = rows.view(n_blocks, n_queries if is_query else n_keys, n_kv, -1, x.size(-1))  # (S, Q or K, n_kv, rep, d)
    return rows.permute(0, 2, 3, 1, 4).flatten(2, 3)


def in_sequence(outputs: list[Tensor], packing: Packing) -> Tensor:
    """Invert `gather` for the queries of all groups: (S, n_kv, rep * Q, d) of each -> (N, heads, d)."""
    rows = []
    for output, group in zip(outputs, packing.groups, strict=True):
        by_query = output.unflatten(2, (-1, group.mask.size(2))).permute(0, 3, 1, 2, 4)  # (S, Q, n_kv, rep, d)
        rows.append(by_query.flatten(2, 3).flatten(0, 1).index_select(0, group.outputs))
    return torch.cat(rows).index_select(0, packing.order)


class StoredScores(torch.autograd.Function):
    """Compute attention over a packed sequence with q (N, heads, d), k and v (N, n_kv, d) on a CPU, where the probabilities are stored.

    PyTorch's fused kernel takes as long in float32, and with its gradient three times as long in bfloat16, for blocks of some hundred tokens.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # the backward pass is in float32, and autograd runs it without autocast
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> Tensor:  # type: ignore
        outputs, saved, n_kv = [], [], k.size(1)
        for group in packing.groups:
            queries, keys, values = (gather(x, group, i == 0, n_kv).float() for i, x in enumerate((q, k, v)))
            queries *= scaling
            scores = queries @ keys.mT  # (S, n_kv, rep * Q, K)
            scores.unflatten(2, (-1, group.mask.size(2))).add_(group.bias)
            weights = torch.softmax(scores, -1)
            outputs.append(weights @ values)
            saved += [queries, keys, values, weights]
        ctx.save_for_backward(*saved)
        ctx.packing, ctx.scaling, ctx.shape = packing, scaling, k.shape
        return in_sequence(outputs, packing).to(v.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        n_tokens, n_kv, head_dim = ctx.shape
        grads_q, saved = [], iter(ctx.saved_tensors)
        grads_kv = torch.zeros(2, n_tokens, n_kv * head_dim)
        for group, (queries, keys, values, weights) in zip(
            ctx.packing.groups, zip(*[saved] * 4, strict=True), strict=True
        ):
            grads = gather(grad, group, True, n_kv).float()  # (S, n_kv, rep * Q, d)
            grads.unflatten(2, (-1, group.mask.size(2))).mul_(group.is_query)
            grad_scores = torch._softmax_backward_data(grads @ values.mT, weights, -1, torch.float32)
            grads_q.append((grad_scores @ keys).mul_(ctx.scaling))
            at = group.keys[:, None].expand(-1, n_kv * head_dim)
            for total, of_keys in zip(grads_kv, (grad_scores.mT @ queries, weights.mT @ grads), strict=True):
                total.scatter_add_(0, at, of_keys.transpose(1, 2).reshape(-1, n_kv * head_dim))
        grad_q = in_sequence(grads_q, ctx.packing)
        return *(x.view(n_tokens, -1, head_dim).to(grad.dtype) for x in (grad_q, *grads_kv)), None, None


AttentionInterface.register(ATTENTION_NAME, tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda **_: None)


@contextmanager
def attention_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context manager: the model computes attention by the function of this name. Run forward and backward pass inside it."""
    former = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = former


def packed_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return the context in which the model computes packed sequences."""
    return attention_by(model, ATTENTION_NAME)


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model computes attention by PyTorch's own kernels that need no FlashAttention."""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    is_flash = "flash" in model.config._attn_implementation
    with sdpa_kernel(kernels), attention_by(model, "sdpa") if is_flash else nullcontext():
        yield
