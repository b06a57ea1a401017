"""Run forward and backward passes over rows of one adapter, in micro-batches.

`ModelPasses` uses the fast paths where the model allows them: adapters merged into the base (`gradients`), LoRA layers in
bfloat16 (`passes.bfloat16_layers`), shared prompts (`passes.prefix_tree`), and those of installed packages (`passes.fast_passes`). Log-probs and
gradients are those of PEFT's forward pass over padded rows, which a micro-batch that `is_plain` gets. A pass that runs out of memory is replaced by smaller ones (`fitting`).
"""

import functools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import Accelerator
from peft import PeftModel
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from multirole.options import MultiRoleGRPOConfig
from multirole.update.entropy import StepEntropy
from multirole.update.gradients import PartSums, keeps_rows, merged, plain_lora
from multirole.update.passes.activation_memory import kept_tokens
from multirole.update.passes.bfloat16_layers import HALF, half_layers
from multirole.update.passes.fast_passes import bfloat16_model, fast_head
from multirole.update.passes.logprobs import HeadWatch, score, score_packed
from multirole.update.passes.prefix_tree import Packing, block_runs, pack, packing_pays, tree_batches, tree_size
from multirole.update.passes.recomputation import (
    activation_bytes,
    fits,
    free_memory,
    is_out_of_memory,
    recomputation,
    recomputed_layers,
)
from multirole.update.passes.tree_attention import can_share_prefixes, packed_attention, plain_attention, stored_bytes
from multirole.update.processes import gather_objects, shard
from multirole.update.rows import Row, micro_batches, padded

T = TypeVar("T")
logger = logging.getLogger(__name__)

OUT_OF_MEMORY, NOT_FINITE = "passes_out_of_memory", "passes_not_finite"
"""What `ModelPasses.take_counts` counts: passes that were computed again in smaller ones, and without fast paths."""


def no_key(row: Row) -> int:
    """Return the same key for every row, so that rows of all parts may share one tree."""
    return 0


@dataclass
class MicroBatch:
    """The rows of one forward pass.

    Args:
        rows: in the order of the batch.
        weight: 1, or 0 for a row that is repeated to keep FSDP2's processes in step.
        packing: the rows as one sequence, where their prompts are shared.
        key: rows that share tokens have the same key.
        is_plain: computed without fast paths.
        recomputes: its activations are recomputed in the backward pass, also if they would fit.
        added: what interrupted backward passes over these rows have added to the gradient (`PartSums.missing`).
        batch: what TRL's loss is given; set before it is called.
        logged: what TRL's loss has logged.
        entropy: the entropy terms of the optimizer step; set with `batch`.
        logps, entropies: (N, C) of the completions, with gradient; set by the forward pass.
        importance: the four tensors of `WeightSums.add`, with a `Correction`.
        watch: records hidden states in the forward pass, where it is set before.
        teacher_kl: (N, C), 0 for rows without a teacher; set with the loss where a row has one.
    """

    rows: list[Row]
    weight: float
    packing: Packing | None
    key: Callable[[Row], int] = no_key
    is_plain: bool = False
    recomputes: bool = False
    added: set[tuple[Tensor, int]] = field(default_factory=set)
    batch: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    entropy: StepEntropy = field(default_factory=StepEntropy)
    logps: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    entropies: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    importance: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    watch: HeadWatch | None = None
    teacher_kl: Tensor | None = None

    def smaller(self, has_gradient: bool) -> "list[MicroBatch]":
        """Return what takes the place of this micro-batch where memory does not suffice for it: itself with recomputation, then its halves.

        There is nothing smaller than a single row whose activations are recomputed.
        """
        if has_gradient and not self.recomputes:
            return [self.of(self.rows, recomputes=True)]
        half = len(self.rows) // 2
        return [self.of(rows, self.recomputes) for rows in (self.rows[:half], self.rows[half:])] if half else []

    def of(self, rows: list[Row], recomputes: bool) -> "MicroBatch":
        """Return a micro-batch of some of the rows, which has not been computed."""
        packing = None if self.packing is None else pack(rows, self.key, self.packing.ids.device)
        return MicroBatch(rows, self.weight, packing, self.key, self.is_plain, recomputes, set(self.added))

    def clear(self) -> None:
        """Drop the tensors of its pass."""
        self.batch, self.importance, self.watch, self.teacher_kl = {}, None, None, None
        self.logps = self.entropies = torch.zeros(0, 0)

    @property
    def n_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return sum(self.packing.blocks) if self.packing else padded(self.rows)

    def width(self, multiple: int) -> int:
        """Return the number of tokens of a row that is not packed, padded to a multiple of `multiple` tokens."""
        width = max(row.length for row in self.rows)
        return width + -width % multiple

    def runs(self, key: Callable[[Row], int], multiple: int) -> list[tuple[int, int]]:
        """(key, number of tokens) of the rows one after another, padded to a multiple of `multiple` tokens."""
        blocks = self.packing.blocks if self.packing else [self.width(multiple)] * len(self.rows)
        return block_runs(self.rows, blocks, key)

    def places(self, multiple: int) -> list[Tensor]:
        """Return for each row the places (length,) of its tokens among all tokens of the pass, in one line; packed rows share some."""
        if self.packing is not None:
            return self.packing.paths
        width = self.width(multiple)
        return [i * width + torch.arange(row.length) for i, row in enumerate(self.rows)]


class ModelPasses:
    """Runs a PEFT model over rows of one adapter at a time.

    Args:
        model: without the wrappers of accelerate.
        adapters: the adapters that are trained.
        is_sharded: FSDP2 shards the model.

    Attributes:
        is_half: the model computes in bfloat16.
        can_merge_adapters: an adapter can be merged for a pass, whose backward then gives the gradient by part.
        can_share_prompts: prompts can be shared.
        last: the micro-batch of the pass that is under way, or of the last one.
    """

    def __init__(
        self, model: PeftModel, adapters: list[str], accelerator: Accelerator, args: MultiRoleGRPOConfig, is_sharded: bool
    ) -> None:  # fmt: skip
        self.model, self.adapters, self.accelerator, self.is_sharded = model, adapters, accelerator, is_sharded
        self.micro_batch_tokens, self.multiple = args.micro_batch_tokens, args.pad_to_multiple_of or 1
        self.is_half = accelerator.mixed_precision == "bf16"
        is_known = self.is_half or accelerator.mixed_precision == "no"
        self.can_merge_adapters = not is_sharded and is_known and keeps_rows(model)
        self.can_share_prompts = can_share_prefixes(self.base)
        self._active: dict[str, tuple[list[nn.Parameter], list[LoraLinear]]] = {}
        self.last: MicroBatch | None = None
        self._packing: Packing | None = None  # of the pass that is under way
        # (has a gradient, recomputes) -> tokens of the smallest pass that ran out of memory
        self._too_large: dict[tuple[bool, bool], float] = defaultdict(lambda: math.inf)
        self._counts: Counter[str] = Counter()
        self._runs_without_autocast = False  # in the context of `bfloat16_model`

    @property
    def base(self) -> PreTrainedModel:
        """The frozen base model."""
        return self.model.get_base_model()

    @functools.cached_property
    def n_parameters(self) -> int:
        """The number of the model's parameters, which takes a walk over all of its modules."""
        return self.base.num_parameters()

    @property
    def is_float32(self) -> bool:
        """Return whether everything is computed in float32."""
        return self.base.dtype == torch.float32 and self.accelerator.mixed_precision == "no"

    @functools.cached_property
    def tokens_with_gradient(self) -> int:
        """Return the tokens of a micro-batch with a gradient, the same on every process.

        Where gradient checkpointing is on, on a GPU, micro-batches are cut so that their activations can be kept (`kept_tokens`).
        """
        base = self.base
        if base.device.type != "cuda" or self.is_sharded or not recomputed_layers(base):
            return self.micro_batch_tokens
        adapters = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        frozen = sum(p.nbytes for p in self.model.parameters()) - adapters
        total = torch.cuda.get_device_properties(base.device).total_memory
        per_token = activation_bytes(base, 1, self.is_half)
        return min(gather_objects(kept_tokens(total, frozen, adapters, per_token, self.micro_batch_tokens)))

    def set_active_adapter(self, adapter: str) -> tuple[list[nn.Parameter], list[LoraLinear]]:
        """Make the model compute with `adapter`; return its tensors, and its layers if they can be merged.

        All adapters keep `requires_grad`, as optimizer and checkpoints expect; the others get no gradient.
        """
        model = self.model
        if self.is_sharded or model.active_adapter != adapter or adapter not in self._active:
            # `set_adapter` leaves the others' `modules_to_save` on; the model may hold adapters that are not trained
            model.set_requires_grad(list(model.peft_config), False)
            model.set_adapter(adapter)
            params = [p for p in model.parameters() if p.requires_grad]
            dtypes = (torch.float32, HALF) if self.is_half else (torch.float32,)
            self._active = {adapter: (params, plain_lora(model, adapter, params, dtypes))}
            model.set_requires_grad(self.adapters, True)
        return self._active[adapter]

    def gradient_layers(
        self, layers: list[LoraLinear], adapter: str, sums: PartSums | None
    ) -> AbstractContextManager[None]:
        """Return the context in which backward passes leave the adapter's gradient by part in `sums`; without them, in `grad`."""
        if sums is None:
            return nullcontext()
        return self._half_layers(layers, adapter, sums) if self.is_half else merged(layers, adapter, sums)

    def scoring_layers(self, layers: list[LoraLinear], adapter: str | None) -> AbstractContextManager[None]:
        """Return the context in which rows are only scored, with `adapter` or, if it is None, with the base alone."""
        if self.is_half and self.can_merge_adapters and layers:
            return self._half_layers(layers, adapter, None)
        return nullcontext()

    @contextmanager
    def _half_layers(self, layers: list[LoraLinear], adapter: str | None, sums: PartSums | None) -> Iterator[None]:
        whole = bfloat16_model(self.base, adapter, sums)
        with half_layers(layers, adapter, sums) if whole is None else whole:
            self._runs_without_autocast = whole is not None
            try:
                yield
            finally:
                self._runs_without_autocast = False

    def shares_prompts(self, rows: list[Row], key: Callable[[Row], int]) -> bool:
        """Return whether rows of equal `key` are packed into trees, in which common prefixes are computed once."""
        return self.can_share_prompts and packing_pays(rows, self.n_parameters, key)

    def micro_batches(
        self, rows: list[Row], key: Callable[[Row], int], loads: list[float], cost: float = 1.0, has_gradient: bool = False,
        is_plain: bool = False,
    ) -> Iterator[MicroBatch]:  # fmt: skip
        """Return the micro-batches of `rows` that this process computes, each sorted by `key`; `loads` and `cost` of `processes.shard`."""
        is_packed = not is_plain and self.shares_prompts(rows, key)
        max_tokens = self.tokens_with_gradient if has_gradient else self.micro_batch_tokens
        for micro, weight in self.shard(rows, max_tokens, loads, cost, key if is_packed else None):
            packing = pack(micro, key, self.accelerator.device) if is_packed else None
            if packing is None:
                micro.sort(key=key)
            yield MicroBatch(micro, weight, packing, key, is_plain)

    def shard(
        self, rows: list[Row], max_tokens: int, loads: list[float], cost: float = 1.0,
        tree_key: Callable[[Row], int] | None = None,
    ) -> list[tuple[list[Row], float]]:  # fmt: skip
        """This process's rows of each micro-batch, and their weight. With `tree_key` they are for `prefix_tree.pack`, by this key."""
        cut: Callable[[list[Row], int], list[list[Row]]] = micro_batches
        size: Callable[[list[Row]], int] = padded
        if tree_key is not None:
            cut = functools.partial(tree_batches, key=tree_key)
            size = functools.partial(tree_size, key=tree_key)
        rank = self.accelerator.process_index
        return shard(rows, max_tokens, rank, loads, self.is_sharded, cost, cut, size)

    @contextmanager
    def pass_over(self, micro: MicroBatch, keeps_activations: bool) -> Iterator[None]:
        """Return the context of a forward pass over a micro-batch, and of its backward pass where it `keeps_activations`."""
        n_tokens = micro.n_tokens if keeps_activations else 0
        scores = stored_bytes(self.base, micro.packing) if keeps_activations and micro.packing is not None else 0
        self.last, self._packing = micro, micro.packing
        try:
            with ExitStack() as stack:
                can_keep = not self.is_sharded and fits(self.base, n_tokens, self.is_half, scores)
                is_on = True if micro.recomputes else False if can_keep else None
                stack.enter_context(recomputation(self.base, is_on))
                if micro.is_plain:
                    stack.enter_context(plain_attention(self.base))
                else:
                    if micro.packing is not None:
                        stack.enter_context(packed_attention(self.base))
                    stack.enter_context(fast_head(self.base))
                    # PEFT would cast the inputs of adapters to float32, and autocast back
                    stack.enter_context(disable_input_dtype_casting(self.model, active=self.is_half))
                yield
        finally:
            self._packing = None

    def fitting(
        self, micro: MicroBatch, compute: Callable[[MicroBatch], T], has_gradient: bool = False
    ) -> Iterator[tuple[MicroBatch, T]]:
        """Yield a micro-batch and what `compute` returns for it or, if memory does not suffice, those of smaller ones with the same rows.

        A size that has once run out of memory is not tried again. Raises torch.OutOfMemoryError if it does not suffice for a single row, and
        under FSDP2 for any number of rows, because the other processes wait within the pass.
        """
        kind = has_gradient, micro.recomputes
        if micro.n_tokens < self._too_large[kind] or not micro.smaller(has_gradient):
            reason = ""
            try:
                result = compute(micro)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0] or type(error).__name__
            if not reason:
                yield micro, result
                return
            # only now the traceback is gone, with the tensors that it held
            micro.clear()
            free_memory(self.base)
            self._too_large[kind] = min(self._too_large[kind], micro.n_tokens)
            self._counts[OUT_OF_MEMORY] += 1
            if self.is_sharded or not micro.smaller(has_gradient):
                raise torch.OutOfMemoryError(self._advice(micro, reason))
            logger.warning(
                "Memory did not suffice for a pass over %d rows of %d tokens together (%s). They are computed again %s.",
                len(micro.rows), micro.n_tokens, reason,
                "in halves" if micro.recomputes or not has_gradient else "with gradient checkpointing",
            )  # fmt: skip
        for part in micro.smaller(has_gradient):
            yield from self.fitting(part, compute, has_gradient)

    def _advice(self, micro: MicroBatch, reason: str) -> str:
        row = max(micro.rows, key=lambda row: row.length).turn
        lengths = f"{len(row.prompt_ids)} tokens of prompt and {len(row.completion_ids)} of completion"
        if self.is_sharded:
            return (
                f"Memory did not suffice for a pass over {len(micro.rows)} rows, the longest with {lengths} ({reason}). With FSDP2 a pass cannot "
                f"be computed again, because the other processes wait within it. Lower `micro_batch_tokens` ({self.micro_batch_tokens}), set "
                "`gradient_checkpointing=True`, or lower `max_prompt_tokens` or `max_completion_length`."
            )
        return (
            f"Memory did not suffice for a single row of {lengths}, with its activations recomputed ({reason}), so smaller micro-batches do not "
            "help. Lower `max_prompt_tokens` or `max_completion_length`, or shard the model with FSDP2."
        )

    def count_not_finite(self) -> None:
        """Count a pass that is computed again without fast paths."""
        self._counts[NOT_FINITE] += 1

    def take_counts(self) -> Counter[str]:
        """Return how often this process has computed passes again since the last call, by reason."""
        counts, self._counts = self._counts, Counter()
        return counts

    def score(self, input_ids: Tensor, attention_mask: Tensor, n_completion: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N, C) of the last C = `n_completion` of ids and mask (N, P + C), or of the packed rows of `pass_over`.

        Data parallelism is ours (`processes`), so the model is called without its wrappers.
        """
        with nullcontext() if self._runs_without_autocast else self.accelerator.autocast():
            # the PEFT model's forward enters autocast itself
            model = self.base if self._runs_without_autocast else self.model
            watch = None if self.last is None else self.last.watch
            if self._packing is not None:
                return score_packed(model, self._packing, watch)
            return score(model, input_ids, attention_mask, n_completion, self.multiple, watch)
