"""Bytes of one process, part by part: each function counts the tensors that a named piece of code keeps alive at its peak.

The counts were derived from the code of the trainer, TRL's fused LM head and the engine, and checked tensor by tensor
against a run on a CPU (`tests/test_plan.py` repeats the comparison with the resident set). What is no count is a named
constant. h, q, kv, I, r below: hidden, heads x head_dim, kv_heads x head_dim, intermediate, LoRA rank (0: whole layers).
"""

from multirole.core.policy import adapter_names
from multirole.diagnostics.remedies import needs_parts
from multirole.engines.transformers_engine import PREFILL_TOKENS, SHARED_ROWS, SHARED_TOKENS, SHORTEST_POOL
from multirole.engines.vllm_engine import LORA_RANKS
from multirole.experiment.cell import Cell
from multirole.experiment.presets import Shape, is_tiny

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
CPU_PROCESS = round(0.82 * GIB)
"""Measured on x86-64 Linux: what is resident beside the counted tensors. 0.77 to 0.79 GiB around a training step, 0.84 GiB at
the end of `multirole train` on a tiny scale (interpreter, torch, transformers, TRL, tables and plots)."""
GPU_PROCESS = round(0.75 * GIB)
"""Not measured: CUDA context, cuBLAS workspaces and communication buffers of one process on a GPU."""
VLLM_GRAPHS = GIB
"""Not measured: vLLM's CUDA graphs and sampling buffers, which stay when it sleeps."""
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""TRL's fused LM head works on tiles of so many tokens and vocabulary entries."""
HEAD_COPIES = 7.25
"""float32 tiles alive at once in TRL's backward tile on a CPU: logits, scaled, log p, p, gradient, two terms, one mask."""
MAX_ROWS = 384
"""Rows that TransformersEngine runs at once."""


def longest_row(cell: Cell) -> int:
    """Tokens of the longest training row."""
    return cell.max_prompt_tokens + cell.max_response_tokens


def is_checkpointed(cell: Cell) -> bool:
    """Whether layers are computed again in backward instead of kept."""
    return not is_tiny(cell.scale)


def micro_batch(cell: Cell) -> int:
    """Padded tokens of the largest micro-batch: the budget, or one row that is longer."""
    return max(cell.micro_batch_tokens, longest_row(cell))


def kept_by_layer(s: Shape, rank: int, dtype: str) -> int:
    """Bytes per token that autograd keeps of one decoder layer.

    float32: both norms' inputs and outputs (4h), q before and after its norm and the attention's output (3q), k twice and
    v (3kv), gate, up, silu(gate) and their product (4I), each adapter's inner product (7r). Under autocast the norms
    keep float32 inputs (8h + 4q + 4kv bytes), and each LoRA casts its own bfloat16 copy of its input, where layers that are
    trained whole keep the input itself. All: reciprocal norms and the attention's log-sum-exp, float32.
    """
    h, q, kv, inter = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.intermediate
    statistics = 4 * (2 + 2 * s.heads + s.kv_heads)
    if dtype == "float32":
        return 4 * (4 * h + 3 * q + 3 * kv + 4 * inter + 7 * rank) + statistics
    if rank == 0:
        return 12 * h + 8 * q + 8 * kv + 8 * inter + statistics
    return 18 * h + 10 * q + 8 * kv + 8 * inter + 14 * rank + statistics


def passing_in_layer(s: Shape, dtype: str) -> int:
    """Bytes per token that one layer's MLP needs beside what it keeps, at its worst moment.

    float32, in backward: the product's gradient from the base and from the adapter and their sum, the product itself
    freed (2I + h). bfloat16, at the end of the forward pass: the product in bfloat16, and in float32 for the adapter (6I),
    the residual stream and its gradient (10h).
    """
    return 4 * (2 * s.intermediate + s.hidden) if dtype == "float32" else 6 * s.intermediate + 10 * s.hidden


def lm_head(s: Shape, dtype: str, tokens: int, on_gpu: bool) -> int:
    """Bytes of TRL's fused LM head in backward: tiles of the logits; the last hidden state, its copy and gradient.

    On a GPU a Triton kernel works in place on one tile, which is always HEAD_COLUMNS wide; on a CPU the pages of columns
    past the vocabulary are never touched, and the tile is worked on out of place.
    """
    b, rows = BYTES[dtype], min(tokens, HEAD_TOKENS)
    tile = rows * HEAD_COLUMNS * b if on_gpu else rows * min(s.vocab, HEAD_COLUMNS) * (b + 4 * HEAD_COPIES)
    return round(tile) + tokens * s.hidden * (8 + b)


def activations(cell: Cell, s: Shape, on_gpu: bool) -> int:
    """Bytes of one micro-batch, forward and backward, at the worst moment."""
    tokens, b = micro_batch(cell), BYTES[cell.dtype]
    kept, passing = kept_by_layer(s, cell.lora_rank, cell.dtype), passing_in_layer(s, cell.dtype)
    head, casts = lm_head(s, cell.dtype, tokens, on_gpu), cast_weights(cell, s)
    if is_checkpointed(cell):  # every layer's input, and one layer at a time
        one = tokens * (kept - s.hidden * b + passing) + casts // s.layers
        return tokens * s.layers * s.hidden * b + max(head, casts, one)
    return tokens * s.layers * kept + casts + max(head, tokens * passing)


def cast_weights(cell: Cell, s: Shape) -> int:
    """Bytes of the bfloat16 copies that autocast makes of float32 layers and keeps for a pass; those of LoRA are small."""
    is_cast = cell.lora_rank == 0 and cell.dtype == "bfloat16"
    return 2 * s.adapter_parameters(0) if is_cast else 0


def n_parts(cell: Cell) -> int:
    """Parts of the gradient of the adapter that has most: one for each role and slot; one in all where nobody asks for them."""
    if not (cell.diagnostics or needs_parts(cell)):
        return 1
    slots = cell.make_workflow().roles
    return max(sum(n for role, n in slots.items() if cell.policy[role] == name) for name in cell.policy.values())


def gradients(cell: Cell, s: Shape) -> int:
    """Bytes of one adapter's gradients in `optimizer_step` while a micro-batch runs, float32.

    A row for each part, and what the present one has accumulated so far.
    """
    return (n_parts(cell) + 1) * 4 * s.adapter_parameters(cell.lora_rank)


def sums(cell: Cell, s: Shape) -> int:
    """Bytes that adding up the parts takes beside `gradients`, when no micro-batch runs, float32.

    The last part's flat copy, and two sums; for two parts one, and a single part is its own.
    """
    return (1 + min(2, n_parts(cell) - 1)) * 4 * s.adapter_parameters(cell.lora_rank)


def adapters(cell: Cell, s: Shape) -> int:
    """Bytes of all adapters, float32. AdamW's two moments are twice as many."""
    return 4 * len(adapter_names(cell.policy)) * s.adapter_parameters(cell.lora_rank)


def gathered(cell: Cell, s: Shape) -> int:
    """Bytes that FSDP2 gathers at once: a layer and the next one with their adapters; the embedding, and the head's copy."""
    linear = sum(a * b for a, b in s.linear_sizes)
    layer = linear + len(adapter_names(cell.policy)) * s.adapter_parameters(cell.lora_rank) // s.layers
    return BYTES[cell.dtype] * (2 * layer + 2 * s.vocab * s.hidden)


def torch_engine_weights(cell: Cell, s: Shape) -> int:
    """Bytes of TransformersEngine's merged float32 copies: embedding, head, and the layers of the base and each adapter."""
    linear = s.layers * sum(a * b for a, b in s.linear_sizes)
    return 4 * (2 * s.vocab * s.hidden + (1 + len(adapter_names(cell.policy))) * linear)


def torch_engine_rope(cell: Cell, s: Shape) -> int:
    """Bytes of TransformersEngine's position tables and norm weights, which it keeps asleep."""
    length = cell.max_prompt_tokens + max(cell.sampling(is_evaluation=e).max_tokens for e in (False, True))
    return 2 * 4 * s.head_dim * (length + s.layers * (s.heads + s.kv_heads))


def torch_engine_cache(cell: Cell, s: Shape, turns: list[tuple[int, int, int]]) -> int:
    """Bytes of TransformersEngine's KV pools, none of which is freed before the rollout ends.

    `turns` are (rows, prompt tokens, rows that share a prompt). A row has room for a whole reply; a prompt that enough
    rows share is stored once, else with its row. Turns whose prompts are of like length and sharing use one pool. On a
    CPU, room that no token was written to is not resident.
    """
    pools: dict[tuple[int, int], int] = {}
    for rows, prompt, sharing in turns:
        rows = min(rows, MAX_ROWS)
        shared = sharing >= SHARED_ROWS and prompt >= SHARED_TOKENS
        tokens = rows * cell.max_response_tokens + (-(-rows // sharing) if shared else rows) * prompt
        kind = ((prompt - 1) // SHORTEST_POOL).bit_length(), sharing.bit_length() if shared else 0
        pools[kind] = max(pools.get(kind, 0), tokens)
    return sum(pools.values()) * 4 * 2 * s.layers * s.kv_heads * s.head_dim


def torch_engine_passing(s: Shape, rows: int, prompt: int, sharing: int) -> int:
    """Bytes of TransformersEngine's larger step, float32.

    Prefill, per token of distinct prompts: cos and sin of its position; q, k, v; and the larger of attention (q and k
    rotated: four products of their size more, and three of the stream's) and the MLP (q and k; gate and up of this layer and
    of the last, 4I; the stream, its norm and three products of its size, 5h). Decoding, per row: logits, scaled, log p, p, and
    the cumulated p in float64 (6 V).
    """
    rows = min(rows, MAX_ROWS)
    tokens = min(max(PREFILL_TOKENS, prompt), -(-rows // sharing) * prompt)
    qk, qkv = ((s.heads + n * s.kv_heads) * s.head_dim for n in (1, 2))
    stage = max(5 * qk + 3 * s.hidden, qk + 4 * s.intermediate + 5 * s.hidden)
    return 4 * max(tokens * (2 * s.head_dim + qkv + stage), rows * 6 * s.vocab)


def vllm_parts(cell: Cell, s: Shape, tensor_parallel: int) -> dict[str, int]:
    """Bytes per GPU that vLLM needs beside its KV cache: bfloat16 weights, one LoRA slot per adapter and a spare, the work
    space of its largest batch (gate, up and the stream; float32 logits of 256 rows, twice) with its CUDA graphs.
    """
    rank = next(allowed for allowed in LORA_RANKS if allowed >= min(cell.lora_rank, LORA_RANKS[-1]))
    batch = max(8192, longest_row(cell))
    work = batch * 2 * (3 * s.intermediate + 3 * s.hidden) + 256 * s.vocab * 4 * 2
    return {
        "weights": 2 * s.parameters // tensor_parallel,
        "LoRA slots": 2 * (len(adapter_names(cell.policy)) + 1) * s.adapter_parameters(rank) // tensor_parallel,
        "work space": work + VLLM_GRAPHS,
    }


def vllm_cache_per_token(s: Shape, tensor_parallel: int) -> int:
    """Bytes of bfloat16 keys and values of one token on one GPU."""
    return 2 * 2 * s.layers * s.kv_heads * s.head_dim // tensor_parallel
