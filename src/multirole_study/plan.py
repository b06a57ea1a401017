"""Plan a cell before anything is downloaded or loaded: memory, disk space and, on GPUs, time (`multirole plan`).

    multirole plan -p workflow voting -p policy ip -p scale 1.7b --devices 2 --gpu h100

1. Asked: a cell, the options of its launch, and a device (`this_device`, or `--gpu` and `--memory-gib`).
2. Computed: the memory of each part at its peak (`plan`), the options that the plan chooses (`settled`), disk space, and hours (`hours`).
3. Checked: that this machine suffices (`check`).
4. Printed: `report`, and `time_report` on GPUs.

Memory is the sum of the tensors that each part keeps alive at its peak. Constants that no run has measured are called assumed where they
stand. Not covered: memory that an allocator keeps in addition to live tensors and communication buffers, for which a part of a GPU must
stay free (`FREE_FRACTION`), float32 on a GPU (its attention has no fused kernel), host memory of GPU runs, and a container's memory limit
below the machine's.
"""

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from tabulate import tabulate

from multirole.policy import adapter_names, adapters_served
from multirole.update.passes.activation_memory import bytes_per_token, kept_tokens
from multirole.workflows import WORKFLOWS
from multirole_study import hours
from multirole_study.experiment.base_models import locate, shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import (
    FREE_FRACTION,
    GIB,
    PHASES,
    blocking_problems,
    dtype_of,
    engine_of,
    has_cuda,
    preflight_checks,
)
from multirole_study.experiment.launch import ONE_PROCESS, Launch
from multirole_study.experiment.presets import MODELS, PAPER_SCALES, Shape, is_small, is_tiny
from multirole_study.experiment.run_folder import N_KEPT, folder_of
from multirole_study.tasks.code import SOURCE as CODE_ROWS
from multirole_study.tasks.math import SOURCE as MATH_ROWS

BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_BYTES = round(0.75 * GIB)
"""Memory of one process without the counted tensors: 0.59 to 0.64 GiB were measured on a CPU; on a GPU it is assumed."""
VLLM_GRAPHS = GIB
"""vLLM's CUDA graphs and sampling buffers, which stay allocated when it sleeps; assumed, not measured."""
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Tokens and columns of a tile in TRL's fused LM head, from its code."""
HEAD_TILE = 512, 2048
"""The same on a CPU, where `multirole-cpu` replaces it, from its code."""
ENGINE_ROWS = 384
"""Number of requests that the "transformers" engine runs at once, from its code."""
PREFIX_BYTES, PREFIX_PARAMETERS = GIB, 10_000_000
"""Size of the "transformers" engine's prefix cache, and parameters of the smallest model that has one, from its code."""
GENERATE_ROWS = 128
"""Number of requests in a batch of the "generate" engine, from its code."""
LOGIT_BYTES = 24
"""Bytes of a logit in the "generate" engine: in the model's dtype, in float32, and in five copies while a token is chosen; assumed, counted in its code."""
MAX_GRAPH_ROWS = 512
"""Largest batch for which vLLM captures a CUDA graph, from its code."""
STEP_TOKENS, STEP_FRACTION = (16384, 8192, 4096, 2048), 0.05
"""Candidates for the tokens of a vLLM step. The largest whose workspace fits into this fraction of its memory is used; the fraction is assumed, not measured."""
SHORT_REQUEST = 0.25
"""Assumed length of a request in the shortest stage, prompt and reply, as a fraction of the reply's cap."""
CHECKPOINTING_ABOVE = 0.8
"""Gradient checkpointing is on if training without it would take more than this fraction of a device; assumed, not measured."""

logger = logging.getLogger(__name__)


# ---- asked: the device


def this_device() -> tuple[str, int]:
    """Return "GPU" and the memory of the first visible one in bytes, or "CPU" and the RAM."""
    if has_cuda():
        import torch

        return "GPU", torch.cuda.get_device_properties(0).total_memory
    return "CPU", psutil.virtual_memory().total


def check_device(cell: Cell, gpu_bytes: int | None) -> None:
    """Raise ValueError if a cell that needs a GPU is planned for a machine without one, or for a GPU without memory."""
    if gpu_bytes is not None and gpu_bytes <= 0:
        raise ValueError(
            f"A GPU of {gpu_bytes / GIB:g} GiB holds nothing. Write its memory in GiB, such as --memory-gib 80."
        )
    if gpu_bytes is None and not is_small(cell.scale) and cell.model is None and not has_cuda():
        raise ValueError(
            f"scale={cell.scale!r} needs a GPU, and this machine has none. Write --memory-gib with the memory of one GPU in GiB, "
            "such as --memory-gib 80."
        )


# ---- computed: memory


class Part(NamedTuple):
    """Bytes of one process while sampling and while training, and what to change to need fewer."""

    name: str
    rollout: int
    update: int
    remedy: str
    is_bound: bool = False
    """Whether this is an upper bound, reached only by replies of full length."""


@dataclass(frozen=True)
class Plan:
    """The memory of one cell on one kind of device; created by `plan`.

    Args:
        kind: "GPU" or "CPU".
        size: bytes of one device.
        n_sharing: number of processes that share it: one on a GPU, all on a CPU.
        cache: number of full-length sequences in vLLM's KV cache; None for other engines.
    """

    cell: Cell
    kind: str
    size: int
    n_sharing: int
    parts: list[Part]
    cache: float | None

    @property
    def per_process(self) -> dict[str, int]:
        """Return the peak bytes of one process in each phase."""
        return {phase: sum(getattr(part, phase) for part in self.parts) for phase in PHASES}

    @property
    def peaks(self) -> dict[str, int]:
        """Return the peak bytes of one device in each phase."""
        return {phase: self.n_sharing * n_bytes for phase, n_bytes in self.per_process.items()}

    @property
    def usual_rollout(self) -> float:
        """Return the bytes of a CPU's rollout whose replies have the assumed mean length (`hours.REPLY_SHARE`); 0 on a GPU.

        There the engines with such a bound run fewer requests at once where memory does not suffice; on a CPU the system would end the run.
        """
        if self.kind == "GPU":
            return 0
        share = hours.mean_context(self.cell) / (self.cell.max_prompt_tokens + self.cell.max_completion_length)
        return self.n_sharing * sum(part.rollout * (share if part.is_bound else 1) for part in self.parts)

    @property
    def required(self) -> list[Part]:
        """Return the parts that are not upper bounds."""
        return [part for part in self.parts if not part.is_bound]

    @property
    def need(self) -> tuple[int, str]:
        """Return the bytes that one device must have, and the phase that needs them."""
        return max((self.n_sharing * sum(getattr(part, phase) for part in self.required), phase) for phase in PHASES)

    @property
    def usable(self) -> float:
        """Return the bytes of one device that a plan may fill."""
        return self.size * (1 - FREE_FRACTION) if self.kind == "GPU" else self.size

    @property
    def fits(self) -> bool:
        """Return whether the cell fits the device with replies of the assumed length, and a full-length sequence fits vLLM's cache."""
        is_enough = max(self.need[0], self.usual_rollout) <= self.usable
        return is_enough and (self.cache is None or self.cache >= 1)

    @property
    def may_not_fit(self) -> bool:
        """Return whether a CPU's rollout would not fit if every reply had its full length."""
        return self.kind == "CPU" and self.fits and self.peaks["rollout"] > self.usable


def plan(cell: Cell, launch: Launch = ONE_PROCESS, gpu_bytes: int | None = None) -> Plan:
    """Plan the memory of `cell` without reading weights; with `gpu_bytes=None` for the devices of this machine."""
    launch = cell.launched(launch)
    n, s, recomputes = launch.n_processes, shape_of(cell), launch.recomputes(cell.scale)
    kind, size = ("GPU", gpu_bytes) if gpu_bytes is not None else this_device()
    on_gpu, names = kind == "GPU", adapter_names(cell.policy)
    shards = n if launch.is_sharded else 1
    base, adapter_bytes = BYTES[dtype_of(cell)] * s.parameters // shards, adapters(cell) // shards
    held = served_adapters(cell) // shards
    row = cell.max_prompt_tokens + cell.max_completion_length
    tokens = max(launch.pass_tokens(cell.scale), row)  # a row longer than the budget is a micro-batch
    is_merged = dtype_of(cell) == "float32" and shards == 1
    joined = (not is_merged and shards == 1) * 2 * s.layers * sum((a + cell.lora_r) * b for a, b in s.linear_sizes)
    gradients = (n_parts(cell) + (not is_merged)) * adapter_bytes // len(names)  # by part, and the accumulated gradient
    buckets = (
        on_gpu and n > 1 and shards == 1
    ) * adapter_bytes  # accelerate wraps the model in DDP, which is not called
    rank, lengths = "lower lora_r", "lower max_prompt_tokens or max_completion_length"
    split = "write sharding='fsdp2' and a larger n_processes" if on_gpu else "use a smaller model"
    parts = [
        Part("process", PROCESS_BYTES, PROCESS_BYTES, "fixed" if on_gpu or n == 1 else "lower n_processes"),
        Part(f"frozen base, {dtype_of(cell)}", base, base, split),
        Part("adapters, float32", held, held, rank),
        Part("AdamW moments, float32", 2 * adapter_bytes, 2 * adapter_bytes, rank),
        Part("gradients, float32", 0, gradients, rank),
        Part("buckets of DDP, float32", buckets, buckets, rank),
        Part("layers with the adapter merged", 0, is_merged * 4 * s.layers * s.linear, split),
        Part("layers with the adapter joined", 0, joined, split),
        Part(
            f"activations of {tokens} tokens", 0, activations(cell, s, tokens, on_gpu, recomputes),
            "lower micro_batch_tokens" if tokens > row else lengths,
        ),
    ]  # fmt: skip
    if recomputes and on_gpu and shards == 1 and (kept_tokens := tokens_kept(cell, launch, size)) < tokens:
        room = activations(cell, s, kept_tokens, on_gpu, recomputes=False)
        if room > parts[-1].update:
            parts[-1] = Part(f"activations of {kept_tokens} tokens, kept", 0, room, lengths)
    cache = None
    engine = engine_of(cell, gpu_bytes is not None)
    if on_gpu and engine == "vllm":
        part, cache = vllm_engine(cell, launch, s, size)
        parts.append(part)
    elif engine != "vllm_server":
        parts += own_engine(cell, s, engine, n, lengths)
    return Plan(cell, kind, size, 1 if on_gpu else n, [part for part in parts if part.rollout or part.update], cache)


def own_engine(cell: Cell, s: Shape, engine: str, n_processes: int, lengths: str) -> list[Part]:
    """Return the memory of the engines "transformers" and "generate"; `lengths` is what to change for a smaller cache.

    "transformers" holds copies of the base. In float32 there is one for each adapter, merged, and one without adapter. In bfloat16 there
    is one, with a float32 head and the unmerged adapters. The bound of the KV cache assumes that every row of the largest batch,
    evaluations included, has full length.
    """
    n_bytes = BYTES[dtype_of(cell)]
    row = (cell.max_prompt_tokens + cell.max_completion_length) * n_bytes * s.kv_elements
    n_rows = min(largest_batch(cell) // n_processes, ENGINE_ROWS if engine == "transformers" else GENERATE_ROWS)
    parts = [Part("engine's KV cache, at most", n_rows * row, 0, lengths, is_bound=True)]
    if engine != "transformers":
        b, tokens = BYTES[dtype_of(cell)], n_rows * cell.max_prompt_tokens
        workspace = tokens * b * (3 * s.intermediate + 6 * s.hidden) + n_rows * s.vocab * LOGIT_BYTES
        return [*parts, Part("engine's longest prefill, at most", workspace, 0, lengths, is_bound=True)]
    head, matrices = 4 * s.vocab * s.hidden, s.layers * s.linear
    weights = head + n_bytes * s.vocab * s.hidden
    if dtype_of(cell) == "float32":
        parts.append(
            Part("engine's merged weights", weights + 4 * (1 + n_served(cell)) * matrices, 0, "use fewer adapters")
        )
    else:
        parts.append(
            Part("engine's weights", weights + 2 * matrices + served_adapters(cell) // 2, 0, "use a smaller model")
        )
    if s.parameters >= PREFIX_PARAMETERS:
        parts.append(Part("engine's prefix cache, at most", PREFIX_BYTES, 0, "fixed", is_bound=True))
    return parts


def activations(cell: Cell, s: Shape, tokens: int, on_gpu: bool, recomputes: bool) -> int:
    """Return the peak bytes of activations of a micro-batch of padded `tokens`, over forward and backward pass.

    In float32 a layer keeps per token the inputs and outputs of both norms (4h), q before and after its norm and the
    attention's output (3q), k twice and v (3kv), gate, up, silu(gate) and their product (4I), and each adapter's inner product
    (7r). Under bfloat16 autocast the norms keep float32 inputs (8h + 4q + 4kv bytes), and each LoRA layer casts a copy of its
    input. Both dtypes keep reciprocal norms and the attention's log-sum-exp. In backward, the MLP of one layer has in float32 the
    product's gradient from base and adapter and their sum (2I + h), and in bfloat16 the product in both dtypes (6I bytes) and
    the residual stream with its gradient (10h). The fused head has the last hidden state, its copy and gradient, and a tile of
    the logits, in place on a GPU and as eight float32 tensors on a CPU.
    """
    h, q, kv, inter, rank = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.intermediate, cell.lora_r
    b, per_token = BYTES[dtype_of(cell)], 4 * (2 + 2 * s.heads + s.kv_heads)
    if dtype_of(cell) == "float32":
        per_token += 4 * (4 * h + 3 * q + 3 * kv + 4 * inter + 7 * rank)
        passing = 4 * (2 * inter + h)
    else:
        per_token += 18 * h + 10 * q + 8 * kv + 8 * inter + 14 * rank
        passing = 6 * inter + 10 * h
    if on_gpu:
        tile = min(tokens, HEAD_TOKENS) * HEAD_COLUMNS * b
    else:
        tile = min(tokens, HEAD_TILE[0]) * min(s.vocab, HEAD_TILE[1]) * 8 * 4
    head = tile + tokens * h * (8 + b)
    if recomputes:  # every layer's input, and one layer at a time
        return tokens * s.layers * h * b + max(head, tokens * (per_token - h * b + passing))
    return tokens * s.layers * per_token + max(head, tokens * passing)


def vllm_engine(cell: Cell, launch: Launch, s: Shape, gpu_bytes: int) -> tuple[Part, float]:
    """Return vLLM's memory, and how many full-length sequences its cache holds. During the update it keeps its workspace.

    It stores the weights, a LoRA slot per adapter and a spare one, and the workspace of its largest batch with its CUDA graphs.
    """
    length, b = cell.max_prompt_tokens + cell.max_completion_length, BYTES[dtype_of(cell)]
    row = b * s.kv_elements * length
    of_ends = 2 * cell.lora_r * (s.vocab + s.hidden)  # vLLM gives embeddings and head a place in every slot
    slots = (n_served(cell) + 1) * (s.adapter_parameters(cell.lora_r) + of_ends)
    weight_bytes = b * (s.parameters + slots)
    rows, tokens = launch.vllm_max_num_seqs or MAX_GRAPH_ROWS, launch.vllm_max_num_batched_tokens or STEP_TOKENS[1]
    work, share = VLLM_GRAPHS + vllm_work(s, rows, tokens), round(launch.vllm_gpu_memory_utilization * gpu_bytes)
    remedy = f"lower vllm_gpu_memory_utilization below {launch.vllm_gpu_memory_utilization}"
    return Part(f"vLLM, {launch.vllm_gpu_memory_utilization:.0%} of the GPU", share, work, remedy), (
        share - weight_bytes - work
    ) / row


def vllm_work(s: Shape, rows: int, tokens: int) -> int:
    """Return the bytes of vLLM's workspace: gate, up and the residual stream in bfloat16; float32 logits of all rows, twice."""
    return tokens * 2 * (3 * s.intermediate + 3 * s.hidden) + rows * s.vocab * 4 * 2


def tokens_kept(cell: Cell, launch: Launch, gpu_bytes: int) -> int:
    """Return the largest micro-batch whose activations are kept on a GPU although gradient checkpointing is on.

    The trainer decides it in the same way (`multirole.update.passes.activation_memory.kept_tokens`). It is `micro_batch_tokens` if all are recomputed.
    """
    s, n_bytes = shape_of(cell), BYTES[dtype_of(cell)]
    per_token = bytes_per_token(s.hidden, s.intermediate, s.layers, n_bytes == 2)
    return kept_tokens(gpu_bytes, n_bytes * s.parameters, adapters(cell), per_token, launch.pass_tokens(cell.scale))


def adapters(cell: Cell) -> int:
    """Return the bytes of the adapters that are trained, in float32. AdamW's two moments take twice as many."""
    return 4 * len(adapter_names(cell.policy)) * shape_of(cell).adapter_parameters(cell.lora_r)


def served_adapters(cell: Cell) -> int:
    """Return the bytes of all adapters of the model in float32, with those of partners."""
    return 4 * n_served(cell) * shape_of(cell).adapter_parameters(cell.lora_r)


def n_served(cell: Cell) -> int:
    """Return the number of adapters of the model, with those of partners."""
    return len(adapters_served(cell.policy, cell.past_selves))


def n_parts(cell: Cell) -> int:
    """Return the largest number of (role, slot) parts in any adapter's gradient."""
    slots = cell.make_workflow().roles
    return max(sum(n for role, n in slots.items() if cell.policy[role] == name) for name in adapter_names(cell.policy))


def largest_stage(cell: Cell) -> int:
    """Return the number of requests in an iteration's largest stage."""
    return cell.n_problems * cell.num_generations * max(cell.make_workflow().roles.values())


def largest_batch(cell: Cell) -> int:
    """Return the number of requests that wait at once: those of an iteration's largest stage, or of an evaluation's, if its size is set."""
    return max(cell.n_problems * cell.num_generations, cell.n_validation or 0) * max(
        cell.make_workflow().roles.values()
    )


# ---- computed: what the plan chooses


def settled(cell: Cell, launch: Launch, gpu_bytes: int | None = None) -> Launch:
    """Return the launch with the options filled in that the plan chooses.

    These are the sizes of vLLM's batches (`vllm_batch`), gradient checkpointing, which is off if all layers fit easily, and on a GPU the
    tokens of a forward pass, which are fewer than the scale's if only so the cell fits. Raises ValueError for options that do not fit (`Launch.check`).
    """
    launch.check(cell)
    launch = cell.launched(launch)
    kind, size = ("GPU", gpu_bytes) if gpu_bytes is not None else this_device()
    if kind == "GPU" and engine_of(cell, gpu_bytes is not None) == "vllm":
        launch = launch.replace(**vllm_batch(cell, launch, size) | launch.vllm_sizes())
    if launch.gradient_checkpointing is None and not is_tiny(cell.scale):
        without = launch.replace(gradient_checkpointing=False)
        memory_plan = plan(cell, without, gpu_bytes)
        if memory_plan.fits and memory_plan.need[0] <= CHECKPOINTING_ABOVE * memory_plan.size:
            return without
    tokens, row = launch.pass_tokens(cell.scale), cell.max_prompt_tokens + cell.max_completion_length
    fitting = launch
    while kind == "GPU" and launch.micro_batch_tokens is None and not plan(cell, fitting, gpu_bytes).fits:
        if tokens <= row:  # a row is a micro-batch, however long it is
            return launch
        tokens = max(row, tokens // 2)
        fitting = launch.replace(micro_batch_tokens=tokens)
    return fitting


def vllm_batch(cell: Cell, launch: Launch, gpu_bytes: int) -> dict[str, int]:
    """Choose the tokens of vLLM's steps, and how many requests run at once.

    The number of requests is the smallest of three: the requests of a stage, those of the shortest stage that fit into the cache
    (of longer ones vLLM admits fewer), and the largest CUDA graph. More requests would only take memory from the cache for their workspace.
    """
    s = shape_of(cell)
    step = next(
        (
            n
            for n in STEP_TOKENS
            if vllm_work(s, 0, n) <= STEP_FRACTION * launch.vllm_gpu_memory_utilization * gpu_bytes
        ),
        STEP_TOKENS[-1],
    )
    largest = launch.replace(vllm_max_num_seqs=MAX_GRAPH_ROWS, vllm_max_num_batched_tokens=step)
    room = vllm_engine(cell, largest, s, gpu_bytes)[1] * (cell.max_prompt_tokens + cell.max_completion_length)  # tokens
    rows = min(
        largest_stage(cell) // launch.n_processes,
        MAX_GRAPH_ROWS,
        int(room / (SHORT_REQUEST * cell.max_completion_length)),
    )
    return {"vllm_max_num_seqs": max(1, rows // 8 * 8 or rows), "vllm_max_num_batched_tokens": step}


# ---- computed: disk and time


def disk_need(cell: Cell) -> int:
    """Return the bytes that a whole run saves: the newest checkpoints, the next one, and the adapters of every evaluated step.

    A checkpoint has all adapters of the model, and AdamW's two moments of those that are trained, in float32. Tables are much smaller and not counted.
    """
    n_evaluated, saved = -(-cell.max_steps // cell.eval_steps), served_adapters(cell)
    return (N_KEPT + 1) * (saved + 2 * adapters(cell)) + n_evaluated * saved * BYTES[dtype_of(cell)] // 4


def has_estimate(cell: Cell) -> bool:
    """Return whether the time of a cell can be estimated: at a paper scale with its base model, on a GPU with vLLM, without replays."""
    is_usual = cell.model is None and not cell.replays_episodes
    return cell.scale in PAPER_SCALES and is_usual and cell.engine in ("auto", "vllm")


class Assumptions(NamedTuple):
    """What an estimate of time assumes; each may be set by the user."""

    gpu: hours.Gpu | None = None
    """None stands for a GPU of the memory that is planned for (`hours.gpu_of`)."""
    reply: float | None = None
    """Mean length of a reply in tokens; None for `hours.REPLY_SHARE` of its cap."""
    constants: hours.Constants = hours.ASSUMED


ASSUMED = Assumptions()


def estimate(cell: Cell, launch: Launch, gpu_bytes: int, assumed: Assumptions = ASSUMED) -> hours.Estimate:
    """Estimate the seconds of a cell on GPUs with `gpu_bytes` of memory and the batches that the plan chooses."""
    launch, reply = settled(cell, launch, gpu_bytes), assumed.reply
    tokens = (plan(cell, launch, gpu_bytes).cache or 0) * (cell.max_prompt_tokens + cell.max_completion_length)
    at_once = int(tokens / hours.mean_context(cell, reply, assumed.constants))
    fitting = max(1, min(launch.vllm_max_num_seqs or MAX_GRAPH_ROWS, at_once))
    are_kept = not launch.is_sharded and tokens_kept(cell, launch, gpu_bytes) < launch.pass_tokens(cell.scale)
    recomputes = launch.recomputes(cell.scale) and not are_kept
    gpu, s = assumed.gpu or hours.gpu_of(gpu_bytes), shape_of(cell)
    return hours.estimate(cell, s, gpu, launch.n_processes, recomputes, fitting, reply, assumed.constants)


def wall_hours(times: Sequence[float], n_gpus: int) -> float:
    """Return the hours until cells that take `times` on one GPU each are trained on `n_gpus`, the longest first."""
    busy = [0.0] * n_gpus
    for time in sorted(times, reverse=True):
        busy[busy.index(min(busy))] += time
    return max(busy)


def grid_layout(launch: Launch, gpu_bytes: int, grid: Sequence[Cell]) -> tuple[Launch | None, list[Cell]]:
    """Return how the cells of a grid are laid out, one GPU each or, if some cell needs more, as `launch`, and an empty list.

    If some cell fits neither, return None and the cells that do not fit `launch`.
    """

    def fits(cell: Cell, layout: Launch) -> bool:
        try:
            return plan(cell, settled(cell, layout, gpu_bytes), gpu_bytes).fits
        except ValueError:  # the grid's cell cannot be shared by so many processes
            return False

    for layout in (ONE_PROCESS, launch):
        large = [cell for cell in grid if not fits(cell, layout)]
        if not large:
            return layout, []
    return None, large


# ---- checked: this machine


def check(cell: Cell, launch: Launch = ONE_PROCESS) -> Launch:
    """Raise ValueError if this machine, its memory or the disk of the results is not enough for a run.

    Returns the launch with the options filled in that the plan chooses (`settled`).
    """
    if missing := blocking_problems(preflight_checks(cell, launch)):
        raise ValueError(f"{cell.id} at scale={cell.scale!r} cannot run here. {' '.join(missing)}")
    launch = settled(cell, launch)
    memory_plan = plan(cell, launch)
    if not memory_plan.fits:
        text = verdict(memory_plan)
        if has_cuda() and not is_tiny(cell.scale) and cell.engine == "auto" and engine_of(cell) != "vllm":
            text += " There is no CUDA build of vLLM in this Python environment: install requirements-cuda.lock, or use the image."
        raise ValueError(text)
    if memory_plan.may_not_fit:
        logger.warning(verdict(memory_plan))
    check_disk(cell, folder_of(cell, launch.results_dir))
    return launch


def check_disk(cell: Cell, folder: Path) -> None:
    """Raise ValueError if the disk is too small for what a run saves in `folder`; files already there are counted as free.

    With a budget of sampled tokens, which may end the run long before `max_steps`, warn instead.
    """
    existing = next(level for level in (folder.absolute(), *folder.absolute().parents) if level.exists())
    saved = [path for name in ("checkpoints", "adapters") for path in (folder / name).rglob("*") if path.is_file()]
    need, free = disk_need(cell), shutil.disk_usage(existing).free
    if free + sum(path.stat().st_size for path in saved) < need:
        text = (
            f"{folder} has {free // 2**20} MiB free, but checkpoints and adapters of {cell.max_steps} iterations take "
            f"{-(-need // 2**20)} MiB. Use a results_dir on a larger disk, raise eval_steps, or free some space."
        )
        if cell.max_sampled_tokens is None:
            raise ValueError(text)
        logger.warning("%s A run that spends max_sampled_tokens=%d before saves less.", text, cell.max_sampled_tokens)


# ---- printed


def report(memory_plan: Plan, launch: Launch) -> str:
    """Format the memory of one process as a table, then the plan's choices, what is downloaded, and whether the cell fits."""
    cell = memory_plan.cell
    rows = [(part.name, part.rollout / GIB, part.update / GIB) for part in memory_plan.parts]
    rows.append(("total", *(n_bytes / GIB for n_bytes in memory_plan.per_process.values())))
    disk = f"Checkpoints and adapters of {cell.max_steps} iterations take {disk_need(cell) / GIB:.2f} GiB of disk."
    lines = [tabulate(rows, headers=("GiB per process", *PHASES), floatfmt=".3f"), disk]
    if launch.vllm_max_num_seqs and memory_plan.cache is not None:
        rows_at_once, step = launch.vllm_max_num_seqs, launch.vllm_max_num_batched_tokens
        lines.append(f"vLLM runs {rows_at_once} requests at once. A step has {step} tokens.")
    if not is_tiny(cell.scale):
        lines.append(f"{checkpointing(memory_plan, launch)}.")
    return "\n".join([*lines, *downloads(cell), *cell.remarks(), verdict(memory_plan)])


def checkpointing(memory_plan: Plan, launch: Launch) -> str:
    """Say whether gradient checkpointing is on, and for which micro-batches."""
    cell = memory_plan.cell
    if not launch.recomputes(cell.scale):
        return "Gradient checkpointing is off"
    n_tokens = tokens_kept(cell, launch, memory_plan.size)
    if memory_plan.kind == "CPU" or launch.is_sharded or n_tokens >= launch.pass_tokens(cell.scale):
        return "Gradient checkpointing is on"
    return f"Micro-batches have at most {n_tokens} tokens, whose activations are kept. Gradient checkpointing is for longer rows only"


def _has_model(cell: Cell) -> bool:
    """Return whether the cell's pinned model is on this machine, in the Hub's cache or from a source that stands in for it."""
    try:
        locate(cell, may_download=False)
    except ValueError:
        return False
    return True


def downloads(cell: Cell) -> list[str]:
    """Return a line on what a first run downloads, or none. A pinned model that is on this machine is not downloaded; rows are not looked for."""
    files = []
    if cell.model is None and not is_tiny(cell.scale) and not _has_model(cell):
        files.append(f"{MODELS[cell.scale].repo} ({MODELS[cell.scale].download_gb:.2g} GB)")
    source = {"math": MATH_ROWS, "code": CODE_ROWS}.get(cell.task)
    if source is not None and cell.data is None and not is_small(cell.scale):
        files.append(f"the rows of {source.repo} ({source.download_gb:.2g} GB)")
    return [f"A first run downloads {' and '.join(files)}."] if files else []


def verdict(memory_plan: Plan) -> str:
    """Say whether the cell fits, and if not, which parts are the largest and what to change."""
    cell, (need, phase), usual = memory_plan.cell, memory_plan.need, memory_plan.usual_rollout
    parts = memory_plan.required
    if usual > need:
        need, phase, parts = round(usual), "rollout", memory_plan.parts
    text = f"{cell.id} at {cell.scale} {'fits' if memory_plan.fits else 'does not fit'}: its {phase} phase needs {need / GIB:.2f} GiB"
    text += " with replies of the assumed length" if parts is memory_plan.parts else ""
    holds = "this machine has" if memory_plan.kind == "CPU" else "one GPU has"
    text += f"; {holds} {memory_plan.size / GIB:.2f} GiB{' of RAM' if memory_plan.kind == 'CPU' else ''}"
    if memory_plan.cache is not None:
        text += f". vLLM's cache holds {max(memory_plan.cache, 0):.1f} sequences of full length."
    else:
        text += f". Rollout takes at most {memory_plan.peaks['rollout'] / GIB:.2f} GiB."
    if memory_plan.may_not_fit:
        bounds = [part for part in memory_plan.parts if part.is_bound]
        text += (
            " That is more than there is, and the system would end the run, if every reply had its full length. To be sure, make these smaller: "
            f"{largest_of(bounds, 'rollout')}."
        )
    elif need > memory_plan.usable:
        if memory_plan.kind == "GPU":
            text += f" {FREE_FRACTION:.0%} of it must stay free."
        text += f" Use a device with more memory, or make the largest parts smaller: {largest_of(parts, phase)}."
    elif not memory_plan.fits:
        text += (
            " It must hold one. Raise vllm_gpu_memory_utilization, or lower max_prompt_tokens or max_completion_length."
        )
    return text


def largest_of(parts: Sequence[Part], phase: str) -> str:
    """Name the four largest parts of a phase, and what makes each smaller."""
    largest = sorted(parts, key=lambda part: -getattr(part, phase))[:4]
    return "; ".join(f"{part.name}, {getattr(part, phase) / GIB:.2f} GiB ({part.remedy})" for part in largest)


def time_report(
    cell: Cell, launch: Launch, gpu_bytes: int, grid: Sequence[Cell], assumed: Assumptions = ASSUMED
) -> str:  # fmt: skip
    """Format the estimated times for three mean lengths of a reply, of the cell, the other workflows in its place, and `grid`."""
    middle = hours.assumed_reply(cell) if assumed.reply is None else assumed.reply
    if middle > cell.max_completion_length:
        raise ValueError(
            f"--reply-tokens {middle:g} is more than a reply can have: max_completion_length is {cell.max_completion_length}. Write the mean "
            "length, which is at most that."
        )
    lengths = {
        f"{hours.SHORTER * middle:.0f} (short)": hours.SHORTER,
        f"{middle:.0f} ({'given' if assumed.reply else 'assumed'})": 1.0,
        f"{min(hours.LONGER * middle, cell.max_completion_length):.0f} (long)": hours.LONGER,
    }
    gpu, policy = assumed.gpu or hours.gpu_of(gpu_bytes), cell.policy_name if cell.policy_name == "ip" else "sp"
    siblings = []
    for name in (other for other in WORKFLOWS if other != cell.workflow_name):
        with contextlib.suppress(ValueError):  # a setting that another workflow cannot have
            siblings.append(cell.sibling(name, policy))
    layout, large = grid_layout(launch, gpu_bytes, grid)

    def column(factor: float) -> list[tuple[str, str]]:
        """Return (what, value) of a length of reply; in cells of another task it is the same fraction of the cap."""

        def of(planned: Cell, by: Launch) -> hours.Estimate:
            share = factor * middle / cell.max_completion_length
            return estimate(planned, by, gpu_bytes, assumed._replace(reply=share * planned.max_completion_length))

        time = of(cell, launch)
        part, share = time.largest
        rows = [
            ("seconds of a rollout", f"{time.rollout:.0f}"), ("seconds of an update", f"{time.update:.0f}"),
            ("seconds of an iteration", f"{time.iteration:.0f}"), ("seconds of a validation", f"{time.validation:.0f}"),
            (f"hours of {cell.id}, validations included", f"{time.hours:.1f}"), ("GPU-hours", f"{time.gpu_hours:.0f}"),
            ("largest part of the hours", f"{part}, {share:.0%}"),
        ]  # fmt: skip
        rows += [
            (f"hours of {sibling.workflow_name} instead", f"{of(sibling, launch).hours:.1f}") for sibling in siblings
        ]
        if layout is not None:
            times = [of(cell_of_grid, layout) for cell_of_grid in grid]
            n_jobs = max(1, launch.n_processes // layout.n_processes)
            days = wall_hours([time.hours for time in times], n_jobs) / 24
            gpus = "a GPU each" if layout.n_processes == 1 else f"{layout.n_processes} GPUs each"
            rows.append((f"GPU-hours of the grid, {gpus}", f"{sum(time.gpu_hours for time in times):.0f}"))
            rows.append((f"days of the grid, {n_jobs} cell{'s' * (n_jobs > 1)} at a time", f"{days:.1f}"))
        return rows

    columns = [column(factor) for factor in lengths.values()]
    table = [(rows[0][0], *(value for _, value in rows)) for rows in zip(*columns, strict=True)]
    stands = "" if assumed.gpu else ", which stands for every GPU of its size (--gpu names another)"
    checked = "with measured constants" if assumed.constants.sources else "from assumed constants"
    disk = f"{sum(map(disk_need, grid)) / GIB:.0f} GiB of disk"
    needs = f"The grid is {len(grid)} cells at this scale with one seed, and takes {disk}."
    if large:
        needs += f" Its time is not estimated: {len(large)} of its cells do not fit this layout, such as {large[0].id}."
    widths = [None, *[24] * len(lengths)]
    return "\n".join([
        f"Estimated {checked}, not measured, on {launch.n_processes} x {gpu.name} ({gpu.bandwidth / 1e12:.2f} TB/s, {gpu.flops / 1e12:.0f} TFLOP/s){stands}:", "",
        tabulate(table, headers=("mean tokens of a reply", *lengths), disable_numparse=True, maxcolwidths=widths), "",
        needs, "",
        tabulate(assumed.constants.rows(), headers=("constant", "meaning", ""), disable_numparse=True, tablefmt="plain"),
    ])  # fmt: skip
