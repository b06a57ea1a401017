"""Count what a cell needs of memory, disk and time before anything is downloaded or loaded.

    multirole plan -p workflow voting -p policy ip -p scale 1.7b --devices 2 --memory-gib 80

On a GPU it also estimates the time (`hours`), which no run has checked.

Memory is the sum of the tensors that each piece of code keeps alive at its peak; of the transformers engine's KV cache an upper
bound is told and nothing is refused for it. Not covered: what an allocator keeps beside live tensors, float32 on a GPU (its
attention has no fused kernel), the buffers of several processes' communication, the host memory of GPU runs, and a container's
limit on memory that is below the machine's.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from tabulate import tabulate

from multirole.core.policy import adapter_names
from multirole.workflows import WORKFLOWS
from multirole_study import hours
from multirole_study.experiment.base_models import shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import GIB, blocking_problems, engine_of, has_cuda, preflight_checks
from multirole_study.experiment.launch import ONE_PROCESS, Launch
from multirole_study.experiment.presets import PAPER_SCALES, Shape, is_small, is_tiny
from multirole_study.experiment.run_folder import KEPT, folder_of

BYTES = {"float32": 4, "bfloat16": 2}
PROCESS = round(0.75 * GIB)
"""Of one process beside the counted tensors: on a CPU 0.59 to 0.64 GiB were measured; on a GPU (context, workspaces) nothing was."""
VLLM_GRAPHS = GIB
"""Not measured: vLLM's CUDA graphs and sampling buffers, which stay when it sleeps."""
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""TRL's fused LM head works on tiles of so many tokens and columns."""
ENGINE_ROWS = 384
"""Requests that the transformers engine runs at once."""
GENERATE_ROWS = 128
"""Requests of a batch of the engine "generate"."""
MOST_ROWS, STEPS, STEP_SHARE = 512, (16384, 8192, 4096, 2048), 0.05
"""vLLM captures CUDA graphs up to so many rows. Of its steps' sizes in tokens, the largest whose work space takes so much of its
memory (not measured)."""
SHORTEST = 0.25
"""Assumed length of a request in the shortest stage, prompt and reply, as a part of the reply's cap."""
CHECKPOINTING_ABOVE = 0.8
"""Layers are computed again in backward where keeping them would take more than this part of a device."""


PHASES = ("rollout", "update")


class Part(NamedTuple):
    """Bytes of one process while sampling and while training, and what to change to need fewer."""

    name: str
    rollout: int
    update: int
    remedy: str
    is_bound: bool = False
    """Whether it may take less: the longest replies fill it."""


@dataclass(frozen=True)
class Plan:
    """The memory of one cell on one kind of device; made by `plan`.

    Args:
        kind: "GPU" or "CPU".
        size: bytes of one device.
        n_sharing: processes that share it: one on a GPU, all on a CPU.
        cache: full-length sequences that vLLM's KV cache holds; None for the transformers engine.
    """

    cell: Cell
    kind: str
    size: int
    n_sharing: int
    parts: list[Part]
    cache: float | None

    @property
    def per_process(self) -> dict[str, int]:
        """Bytes of one process in each phase, at most."""
        return {phase: sum(getattr(part, phase) for part in self.parts) for phase in PHASES}

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of one device in each phase, at most."""
        return {phase: self.n_sharing * n_bytes for phase, n_bytes in self.per_process.items()}

    @property
    def certain(self) -> list[Part]:
        """The parts that are no mere bounds."""
        return [part for part in self.parts if not part.is_bound]

    @property
    def need(self) -> tuple[int, str]:
        """Bytes that one device must have, and in which phase."""
        return max((self.n_sharing * sum(getattr(part, phase) for part in self.certain), phase) for phase in PHASES)

    @property
    def fits(self) -> bool:
        """Whether the device holds the cell, and vLLM's cache at least one sequence of full length."""
        return self.need[0] <= self.size and (self.cache is None or self.cache >= 1)

    def verdict(self) -> str:
        """Whether it fits, and if not, which parts are the largest and what to change."""
        need, phase = self.need
        text = f"{self.cell.id} at {self.cell.scale} {'fits' if self.fits else 'does not fit'}: "
        has = f"this machine has {self.size / GIB:.2f} GiB of RAM"
        has = has if self.kind == "CPU" else f"one GPU has {self.size / GIB:.2f} GiB"
        text += f"its {phase} phase needs {need / GIB:.2f} GiB; {has}"
        if self.cache is None:
            text += f". Rollout takes at most {self.peaks['rollout'] / GIB:.2f} GiB."
        else:
            text += f". vLLM's cache holds {max(self.cache, 0):.1f} sequences of full length."
        if need > self.size:
            largest = sorted(self.certain, key=lambda part: -getattr(part, phase))[:4]
            parts = [f"{part.name}, {getattr(part, phase) / GIB:.2f} GiB ({part.remedy})" for part in largest]
            text += f" Use a device with more memory, or make the largest parts smaller: {'; '.join(parts)}."
        elif not self.fits:
            text += " It must hold one. Raise vllm_memory, or lower max_prompt_tokens or max_response_tokens."
        return text


# ---- memory


def plan(cell: Cell, launch: Launch = ONE_PROCESS, gpu_bytes: int | None = None) -> Plan:
    """Count what `cell` needs without reading weights; `gpu_bytes` None looks at the devices of this machine."""
    n, s, recomputes = launch.n_processes, shape_of(cell), launch.recomputes(cell.scale)
    launch.check_processes(n, cell.n_problems)
    kind, size = ("GPU", gpu_bytes) if gpu_bytes is not None else this_device()
    on_gpu, names = kind == "GPU", adapter_names(cell.policy)
    shards = n if launch.is_sharded else 1
    base, adapter_bytes = BYTES[cell.dtype] * s.parameters // shards, adapters(cell) // shards
    row = cell.max_prompt_tokens + cell.max_response_tokens
    tokens = max(cell.micro_batch_tokens, row)  # a row longer than the budget is a micro-batch
    merges = cell.dtype == "float32" and shards == 1
    gradients = (n_parts(cell) + (not merges)) * adapter_bytes // len(names)  # by part, and what is accumulated
    rank, lengths = "lower lora_rank", "lower max_prompt_tokens or max_response_tokens"
    split = "write sharding='fsdp2' and a larger n_processes" if on_gpu else "use a smaller model"
    parts = [
        Part("process", PROCESS, PROCESS, "fixed" if on_gpu or n == 1 else "lower n_processes"),
        Part(f"frozen base, {cell.dtype}", base, base, split),
        Part("adapters, float32", adapter_bytes, adapter_bytes, rank),
        Part("AdamW moments, float32", 2 * adapter_bytes, 2 * adapter_bytes, rank),
        Part("gradients, float32", 0, gradients, rank),
        Part("layers with the adapter merged", 0, merges * 4 * s.layers * s.linear, split),
        Part(
            f"activations of {tokens} tokens", 0, activations(cell, s, tokens, on_gpu, recomputes),
            "lower micro_batch_tokens" if tokens > row else lengths,
        ),
    ]  # fmt: skip
    cache = None
    engine = engine_of(cell, gpu_bytes is not None)
    if on_gpu and engine == "vllm":
        part, cache = vllm_engine(cell, launch, s, size)
        parts.append(part)
    else:  # every row at its full length; the engine "transformers" has float32 weights with each adapter merged
        weights = 4 * (2 * s.vocab * s.hidden + (1 + len(names)) * s.layers * s.linear)
        rows = min(most_asked(cell) // n, ENGINE_ROWS if engine == "transformers" else GENERATE_ROWS)
        if engine == "transformers":
            parts.append(Part("engine's merged weights", weights, 0, "use fewer adapters"))
        parts.append(Part("engine's KV cache, at most", rows * row * 4 * s.kv_elements, 0, lengths, is_bound=True))
    return Plan(cell, kind, size, 1 if on_gpu else n, [part for part in parts if part.rollout or part.update], cache)


def adapters(cell: Cell) -> int:
    """Bytes of all adapters, float32. AdamW's two moments are twice as many."""
    return 4 * len(adapter_names(cell.policy)) * shape_of(cell).adapter_parameters(cell.lora_rank)


def n_parts(cell: Cell) -> int:
    """Parts of the gradient of the adapter that has most, one per role and slot."""
    slots = cell.make_workflow().roles
    return max(sum(n for role, n in slots.items() if cell.policy[role] == name) for name in cell.policy.values())


def most_asked(cell: Cell) -> int:
    """Requests of an iteration's largest stage."""
    return cell.n_problems * cell.n_episodes * max(cell.make_workflow().roles.values())


def activations(cell: Cell, s: Shape, tokens: int, on_gpu: bool, recomputes: bool) -> int:
    """Bytes of a micro-batch of padded `tokens`, forward and backward, at the worst moment.

    A layer keeps per token, in float32: both norms' inputs and outputs (4h), q before and after its norm and the
    attention's output (3q), k twice and v (3kv), gate, up, silu(gate) and their product (4I), each adapter's inner product
    (7r); under bfloat16 autocast the norms keep float32 inputs (8h + 4q + 4kv bytes), and each LoRA casts its own copy of its
    input. Both keep reciprocal norms and the attention's log-sum-exp. In backward the MLP of one layer holds in float32 the
    product's gradient from base and adapter and their sum (2I + h), in bfloat16 the product in both types (6I bytes) and
    the stream with its gradient (10h). The fused head holds the last hidden state, its copy and gradient, and a tile of the
    logits, in place on a GPU and as eight float32 tensors on a CPU.
    """
    h, q, kv, inter, rank = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.intermediate, cell.lora_rank
    b, kept = BYTES[cell.dtype], 4 * (2 + 2 * s.heads + s.kv_heads)
    if cell.dtype == "float32":
        kept += 4 * (4 * h + 3 * q + 3 * kv + 4 * inter + 7 * rank)
        passing = 4 * (2 * inter + h)
    else:
        kept += 18 * h + 10 * q + 8 * kv + 8 * inter + 14 * rank
        passing = 6 * inter + 10 * h
    tile = min(tokens, HEAD_TOKENS) * (HEAD_COLUMNS * b if on_gpu else min(s.vocab, HEAD_COLUMNS) * 8 * 4)
    head = tile + tokens * h * (8 + b)
    if recomputes:  # every layer's input, and one layer at a time
        return tokens * s.layers * h * b + max(head, tokens * (kept - h * b + passing))
    return tokens * s.layers * kept + max(head, tokens * passing)


# ---- vLLM


def vllm_engine(cell: Cell, launch: Launch, s: Shape, gpu_bytes: int) -> tuple[Part, float]:
    """vLLM, and how many sequences of full length its cache holds; asleep it keeps its work space.

    It holds the weights, a LoRA slot per adapter and a spare one, and the work space of its largest batch with its CUDA graphs.
    """
    length, b = cell.max_prompt_tokens + cell.max_response_tokens, BYTES[cell.dtype]
    row = b * s.kv_elements * length
    slots = (len(adapter_names(cell.policy)) + 1) * s.adapter_parameters(cell.lora_rank)
    weight_bytes = b * (s.parameters + slots)
    rows, tokens = launch.vllm_max_num_seqs or MOST_ROWS, launch.vllm_max_num_batched_tokens or STEPS[1]
    work, share = VLLM_GRAPHS + vllm_work(s, rows, tokens), round(launch.vllm_memory * gpu_bytes)
    remedy = f"lower vllm_memory below {launch.vllm_memory}"
    return Part(f"vLLM, {launch.vllm_memory:.0%} of the GPU", share, work, remedy), (share - weight_bytes - work) / row


def vllm_work(s: Shape, rows: int, tokens: int) -> int:
    """Bytes of vLLM's work space: gate, up and the stream of a step's tokens in bfloat16; float32 logits of all rows, twice."""
    return tokens * 2 * (3 * s.intermediate + 3 * s.hidden) + rows * s.vocab * 4 * 2


def vllm_batch(cell: Cell, launch: Launch, gpu_bytes: int) -> dict[str, int]:
    """The tokens of vLLM's steps, and how many requests run at once.

    These are as many as a stage asks for, as the cache holds of the shortest stage (of longer ones vLLM admits fewer by itself),
    and as have a CUDA graph. More would only take work space from the cache.
    """
    s = shape_of(cell)
    step = next((n for n in STEPS if vllm_work(s, 0, n) <= STEP_SHARE * launch.vllm_memory * gpu_bytes), STEPS[-1])
    largest = launch.replace(vllm_max_num_seqs=MOST_ROWS, vllm_max_num_batched_tokens=step)
    room = vllm_engine(cell, largest, s, gpu_bytes)[1] * (cell.max_prompt_tokens + cell.max_response_tokens)  # tokens
    rows = min(most_asked(cell) // launch.n_processes, MOST_ROWS, int(room / (SHORTEST * cell.max_response_tokens)))
    return {"vllm_max_num_seqs": max(1, rows // 8 * 8 or rows), "vllm_max_num_batched_tokens": step}


def settled(cell: Cell, launch: Launch, gpu_bytes: int | None = None) -> Launch:
    """The launch with what is left to the plan decided.

    These are the sizes of vLLM's batches (`vllm_batch`), and gradient checkpointing: none where all layers fit with room to spare.
    """
    kind, size = ("GPU", gpu_bytes) if gpu_bytes is not None else this_device()
    if kind == "GPU" and engine_of(cell, gpu_bytes is not None) == "vllm":
        launch = launch.replace(**vllm_batch(cell, launch, size) | launch.vllm_sizes())
    if launch.gradient_checkpointing is not None or is_tiny(cell.scale):
        return launch
    kept = launch.replace(gradient_checkpointing=False)
    memory_plan = plan(cell, kept, gpu_bytes)
    return kept if memory_plan.fits and memory_plan.need[0] <= CHECKPOINTING_ABOVE * memory_plan.size else launch


# ---- time


def has_estimate(cell: Cell) -> bool:
    """Whether the time of a cell can be estimated: one of the paper's scales with its base model, on a GPU with vLLM."""
    return cell.scale in PAPER_SCALES and cell.model is None and cell.engine in ("auto", "vllm")


def estimate(cell: Cell, launch: Launch, gpu_bytes: int) -> hours.Estimate:
    """The seconds of a cell's parts on GPUs of so much memory, under the batches that the plan chooses; not measured."""
    launch = settled(cell, launch, gpu_bytes)
    tokens = (plan(cell, launch, gpu_bytes).cache or 0) * (cell.max_prompt_tokens + cell.max_response_tokens)
    fitting = max(1, min(launch.vllm_max_num_seqs or MOST_ROWS, int(tokens / hours.mean_context(cell))))
    gpu = hours.gpu_of(gpu_bytes)
    return hours.estimate(cell, gpu, launch.n_processes, launch.recomputes(cell.scale), fitting)


def time_report(cell: Cell, launch: Launch, gpu_bytes: int, grid: Sequence[Cell]) -> str:
    """A line of seconds for the cell and for each other workflow in its place, and the sum of `grid` on a GPU per cell."""
    gpu, policy = hours.gpu_of(gpu_bytes), cell.policy_name if cell.policy_name == "ip" else "sp"
    others = [cell.sibling(name, policy) for name in WORKFLOWS if name != cell.workflow_name]
    rows = []
    for one in (cell, *others):
        made = estimate(one, launch, gpu_bytes)
        seconds = made.rollout, made.update, made.iteration, made.validation
        rows.append((one.workflow_name, *seconds, made.hours, made.gpu_hours, disk_need(one) / GIB))
    headers = ("workflow", "rollout", "update", "iteration", "validation", "hours", "GPU-hours", "GiB of disk")
    table = tabulate(rows, headers=headers, floatfmt=("", ".0f", ".0f", ".0f", ".0f", ".1f", ".0f", ".1f"))
    head = (
        f"Time, estimate, not measured: seconds on {launch.n_processes} x {gpu.name} ({gpu.bandwidth / 1e12:.2f} TB/s, "
        f"{gpu.flops / 1e12:.0f} TFLOP/s), with replies of {hours.REPLY_SHARE:.0%} of their cap. Hours include validation."
    )
    whole = (
        f"The grid of {len(grid)} cells at this scale, one seed, a GPU each: {grid_gpu_hours(grid, gpu_bytes):.0f} GPU-hours "
        f"(estimate, not measured) and {sum(map(disk_need, grid)) / GIB:.0f} GiB of disk."
    )
    return f"{head}\n{table}\n{whole}"


def grid_gpu_hours(cells: Sequence[Cell], gpu_bytes: int) -> float:
    """The training of all cells, each on one GPU, with their validations and without evaluations; not measured."""
    return sum(estimate(cell, ONE_PROCESS, gpu_bytes).gpu_hours for cell in cells)


# ---- disk and this machine


def disk_need(cell: Cell) -> int:
    """Bytes that a whole run saves: the kept checkpoints and the next one, and the adapters of every evaluated step.

    A checkpoint is the adapters with AdamW's two moments, in float32. Tables are small beside them and not counted.
    """
    n_evaluated = -(-cell.iterations // cell.eval_every)
    return (KEPT + 1) * 3 * adapters(cell) + n_evaluated * adapters(cell) * BYTES[cell.dtype] // 4


def this_device() -> tuple[str, int]:
    """ "GPU" and the bytes of the first visible one, or "CPU" and the bytes of RAM."""
    if has_cuda():
        import torch

        return "GPU", torch.cuda.get_device_properties(0).total_memory
    return "CPU", psutil.virtual_memory().total


def check_device(cell: Cell, gpu_bytes: int | None) -> None:
    """Refuse to plan a cell that needs a GPU for a machine without one (ValueError)."""
    if gpu_bytes is None and not is_small(cell.scale) and cell.model is None and not has_cuda():
        raise ValueError(
            f"scale={cell.scale!r} needs a GPU, and this machine has none. Write --memory-gib with the memory of one GPU in GiB, "
            "such as --memory-gib 80."
        )


def check(cell: Cell, launch: Launch = ONE_PROCESS) -> Launch:
    """Refuse a run that this machine, its memory, or the disk of the run's results cannot hold (ValueError).

    Returns the launch with what is left to the plan decided.
    """
    if missing := blocking_problems(preflight_checks(cell, launch)):
        raise ValueError(f"{cell.id} at scale={cell.scale!r} cannot run here. {' '.join(missing)}")
    launch = settled(cell, launch)
    memory_plan = plan(cell, launch)
    if not memory_plan.fits:
        text = memory_plan.verdict()
        if has_cuda() and not is_tiny(cell.scale) and cell.engine == "auto" and engine_of(cell) != "vllm":
            text += " There is no CUDA build of vLLM in this Python environment: install requirements-cuda.lock, or use the image."
        raise ValueError(text)
    check_disk(cell, folder_of(cell, launch.results_dir))
    return launch


def check_disk(cell: Cell, folder: Path) -> None:
    """Refuse a disk that cannot hold what the run will save in `folder` (ValueError); what is there already counts."""
    existing = next(level for level in (folder.absolute(), *folder.absolute().parents) if level.exists())
    saved = [path for name in ("checkpoints", "adapters") for path in (folder / name).rglob("*") if path.is_file()]
    need, free = disk_need(cell), shutil.disk_usage(existing).free
    if free + sum(path.stat().st_size for path in saved) < need:
        raise ValueError(
            f"{folder} has {free / 2**20:.0f} MiB free, but checkpoints and adapters of {cell.iterations} iterations take "
            f"{need / 2**20:.0f} MiB. Use a results_dir on a larger disk, raise eval_every, or free some space."
        )


def report(memory_plan: Plan, launch: Launch) -> str:
    """The parts of one process as a table, then what was decided, and whether it fits."""
    cell, total = memory_plan.cell, [sum(getattr(part, phase) for part in memory_plan.parts) for phase in PHASES]
    rows = [(part.name, part.rollout / GIB, part.update / GIB) for part in memory_plan.parts]
    rows.append(("total", *(size / GIB for size in total)))
    disk = f"Checkpoints and adapters of {cell.iterations} iterations take {disk_need(cell) / GIB:.2f} GiB of disk."
    lines = [tabulate(rows, headers=("GiB per process", *PHASES), floatfmt=".3f"), disk]
    if launch.vllm_max_num_seqs and memory_plan.cache is not None:
        rows_at_once, step = launch.vllm_max_num_seqs, launch.vllm_max_num_batched_tokens
        lines.append(f"vLLM runs {rows_at_once} requests at once. A step has {step} tokens.")
    if not is_tiny(cell.scale):
        lines.append(f"Gradient checkpointing is {'on' if launch.recomputes(cell.scale) else 'off'}.")
    return "\n".join([*lines, memory_plan.verdict()])
