"""What a cell needs, before anything is downloaded: memory per device, tokens, arithmetic and time per iteration.

    multirole plan -p workflow voting -p policy ip -p scale 1.7b --devices 2 --memory-gib 80

Memory is counted from the code that allocates it (`plan_memory`); tokens from the workflow's roles and the cell's caps.
Token numbers, arithmetic and time rest on a mean reply length and utilisations that are assumptions, and are named so.
Not covered: what an allocator keeps beside live tensors (glibc's default, up to half as much again on a CPU;
MALLOC_MMAP_THRESHOLD_=65536 in the environment makes it give blocks back); float32 on a GPU (attention without a fused
kernel); host memory of GPU runs (the sleeping engine's weights); workflows of your own beyond one turn per role and slot.
No number of a GPU was measured.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from multirole import plan_memory as memory
from multirole.core.policy import adapter_names
from multirole.experiment.cell import Cell
from multirole.experiment.launch import ONE_PROCESS, Launch, add_parameters, read_parameters
from multirole.experiment.models import shape_of
from multirole.experiment.presets import Shape
from multirole.experiment.refusals import check_served
from multirole.plan_memory import GIB
from multirole.workflows import EvalOpt, OrchWorkers, Voting

QUESTION_TOKENS = {"math": 160, "code": 640, "tiny_math": 48, "tiny_code": 64}
"""Assumed tokens of a first prompt: the question, our template around it, and the chat template."""
FLOPS = {"GPU": 989e12, "CPU": 6e10}
"""Assumed peak, floating-point operations per second: H100 SXM, dense bfloat16 (data sheet); one CPU core, float32."""
UTILISATION = {"rollout": 0.10, "update": 0.35}
"""Assumed part of the peak that is reached. Decoding is bound by memory, not arithmetic."""
TIGHT = 0.85
"""The estimate is good to 15 %: a need above this part of a device fits, but not surely."""


@dataclass(frozen=True)
class Device:
    """One device: `kind` "GPU" or "CPU" (then all processes share its memory), `size` in bytes."""

    kind: str
    size: int


@dataclass(frozen=True)
class Stage:
    """Turns of one role that an episode asks for together.

    `least` and `most` slots per episode; `prompt` expected tokens; `sharing` rows of an iteration with the same prompt.
    """

    role: str
    least: int
    most: int
    prompt: int
    sharing: int


def stages(cell: Cell, reply: int) -> list[Stage]:
    """The turns of one episode in order, for replies of `reply` tokens. A workflow of your own counts one turn per slot."""
    workflow, n = cell.make_workflow(), cell.n_episodes
    q, cap = QUESTION_TOKENS[cell.task_name], cell.max_prompt_tokens
    if isinstance(workflow, Voting):
        voters = workflow.roles["generator"]
        found = [Stage("generator", voters, voters, q, n * voters), Stage("aggregator", 1, 1, q + voters * reply, 1)]
    elif isinstance(workflow, EvalOpt):
        turns = [(role, k) for k in range(workflow.rounds) for role in ("generator", "evaluator")]
        found = [
            Stage(role, int(k == 0), 1, q + at * reply, 1 if at else n) for at, (role, k) in enumerate(turns)
        ]  # fmt: skip
    elif isinstance(workflow, OrchWorkers):
        workers = workflow.roles["worker"]
        found = [
            Stage("orchestrator", 1, 1, q, n),
            Stage("worker", 1, workers, q + reply // workers, 1),
            Stage("synthesizer", 1, 1, q + (workers + 1) * reply, 1),
        ]
    else:
        found = [Stage(role, slots, slots, q, n * slots) for role, slots in workflow.roles.items()]
    return [replace(stage, prompt=min(stage.prompt, cap)) for stage in found]


@dataclass(frozen=True)
class Plan:
    """The needs of one cell on one kind of device; made by `plan`.

    Args:
        parts: name -> (bytes while sampling, bytes while training) of one process.
        engine: "vllm" or "transformers".
        cache: full-length sequences that vLLM's KV cache holds; None for the transformers engine.
        reply: assumed mean tokens of a reply.
    """

    cell: Cell
    launch: Launch
    device: Device
    shape: Shape
    engine: str
    parts: dict[str, tuple[int, int]]
    cache: float | None
    reply: int
    stages: list[Stage]

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of one process per phase."""
        sums = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        return dict(zip(("rollout", "update"), sums, strict=True))

    @property
    def need(self) -> int:
        """Bytes that one device must have: the larger phase; processes on a CPU share its memory."""
        return max(self.peaks.values()) * (self.launch.n_processes if self.device.kind == "CPU" else 1)

    @property
    def fits(self) -> bool:
        """Whether the device can hold the cell, and vLLM's cache one sequence of full length."""
        return self.need <= self.device.size and (self.cache is None or self.cache >= 1)

    @property
    def operations(self) -> dict[str, float]:
        """Floating-point operations of one iteration per phase, over all devices, at the expected lengths.

        A pass through the linear modules is 2 per weight and token. The frozen base needs no gradient of its weights, so
        its backward is 2 and not 4; adapters' is 4, and those of rank 0 stand in for the base; checkpointing computes the
        layers once more. Causal attention over n tokens is 2 q n^2 per layer forward and 2.5 times that backward (its
        kernel recomputes). The head's backward recomputes the logits (4), on sampled positions alone on a GPU. Sampled
        prompts count in full: prefix sharing saves some of it.
        """
        s, cell = self.shape, self.cell
        frozen = s.adapter_parameters(0) if cell.lora_rank else 0
        trained, head = s.adapter_parameters(cell.lora_rank), s.vocab * s.hidden
        again = 1 if memory.is_checkpointed(cell) else 0
        recomputed, anchors = cell.old_logprobs == "recomputed", cell.anchors  # one more pass forward each
        rollout = update = 0.0
        for stage in self.stages:
            rows = cell.n_problems * cell.n_episodes * stage.most
            n, extra = stage.prompt + self.reply, recomputed + (anchors[stage.role] > 0)
            attention = 2 * s.layers * s.heads * s.head_dim * n**2
            scored = self.reply if self.device.kind == "GPU" else n
            forward = 2 * (frozen + trained) * n + attention
            rollout += rows * (forward + 2 * head * self.reply)
            backward = (2 * frozen + 4 * trained) * n + 2.5 * attention
            update += rows * ((1 + again + extra) * forward + backward + (6 + 2 * extra) * head * scored)
        return {"rollout": rollout, "update": update}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of one iteration per phase at the assumed peak and utilisation."""
        lanes = self.launch.n_processes if self.device.kind == "GPU" else torch.get_num_threads()
        speed = FLOPS[self.device.kind] * lanes
        return {phase: n / (speed * UTILISATION[phase]) for phase, n in self.operations.items()}

    def table(self) -> pd.DataFrame:
        """Memory of one process by part, then arithmetic and time, for the two phases of an iteration.

        In GiB, PFLOP, EFLOP, minutes and hours; in MiB, TFLOP, seconds and minutes where the model is small.
        """
        is_small = self.shape.parameters < 1e8
        memory_unit, size = ("MiB", GIB / 1024) if is_small else ("GiB", GIB)
        work_unit, run_unit, work = ("TFLOP", "PFLOP", 1e12) if is_small else ("PFLOP", "EFLOP", 1e15)
        brief, seconds, lasting, longer = ("s", 1, "min", 60) if is_small else ("min", 60, "h", 3600)
        n = self.cell.iterations
        rows = [(f"{name} ({memory_unit})", *(x / size for x in phases)) for name, phases in self.parts.items()]
        rows.append((f"all of it ({memory_unit})", *(x / size for x in self.peaks.values())))
        rows.append((f"operations per iteration ({work_unit})", *(x / work for x in self.operations.values())))
        rows.append((f"time per iteration, assumed ({brief})", *(x / seconds for x in self.seconds.values())))
        whole_run = (x * n / work / 1e3 for x in self.operations.values())
        rows.append((f"operations of {n} iterations ({run_unit})", *whole_run))
        rows.append((f"time of {n} iterations, assumed ({lasting})", *(x * n / longer for x in self.seconds.values())))
        return pd.DataFrame(rows, columns=["per process", "rollout", "update"]).set_index("per process").round(2)

    def tokens(self) -> pd.DataFrame:
        """Sequences, tokens and optimizer steps of one iteration, per role; at least, at most, expected."""
        cell = self.cell
        episodes, rows = cell.n_problems * cell.n_episodes, []
        for role in dict.fromkeys(stage.role for stage in self.stages):
            mine = [stage for stage in self.stages if stage.role == role]
            least, most = (episodes * sum(n) for n in zip(*((stage.least, stage.most) for stage in mine), strict=True))
            expected = episodes * sum(stage.most * stage.prompt for stage in mine)
            rows.append((
                role, cell.policy[role], least, most, expected, most * cell.max_prompt_tokens, most * self.reply,
                most * cell.max_response_tokens,
            ))  # fmt: skip
        names = ["role", "adapter", "sequences at least", "sequences at most", "prompt tokens expected",
                 "prompt tokens at most", "completion tokens expected", "completion tokens at most"]  # fmt: skip
        return pd.DataFrame(rows, columns=names).set_index("role")

    def optimizer_steps(self) -> dict[str, tuple[int, int]]:
        """adapter -> (at least, at most) optimizer steps of one iteration (`Cell.n_steps`), over the whole run.

        At least, every reply is one token, and roles that `train_after` leaves out at first are; at most, replies fill the cap.
        """
        table, counts, starts = self.tokens(), {}, pd.Series(self.cell.train_starts)
        starts = starts[table.index]
        for adapter in adapter_names(self.cell.policy):
            mine = table["adapter"] == adapter
            first, ever = table[mine & (starts == 0)], table[mine & (starts < self.cell.iterations)]
            least, most = int(first["sequences at least"].sum()), int(ever["sequences at most"].sum())
            tokens = int(ever["completion tokens at most"].sum())
            counts[adapter] = (self.cell.n_steps(least, least), self.cell.n_steps(most, tokens))
        return counts

    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        phase = max(self.peaks, key=self.peaks.get)
        n, size = self.launch.n_processes, self.device.size / GIB
        where = "this machine's RAM" if self.device.kind == "CPU" else "a GPU" if n == 1 else f"each of {n} GPUs"
        sizes = f"{self.need / GIB:.2f} GiB ({phase}) of the {size:.2f} GiB of {where}"
        if self.need > self.device.size:
            return f"{self.cell.id} at {self.cell.scale} does not fit: it needs {sizes}."
        if not self.fits:
            return (
                f"{self.cell.id} at {self.cell.scale} does not fit: vLLM's share leaves room for {max(self.cache, 0):.2f} "
                f"sequences of {memory.longest_row(self.cell)} tokens, and it must hold one."
            )
        room = "" if self.cache is None else f"; vLLM's cache holds {self.cache:.1f} sequences of full length"
        tight = ", which is tight" if self.need > TIGHT * self.device.size else ""
        return f"{self.cell.id} at {self.cell.scale} fits: it needs {sizes}{tight}{room}."

    def remedies(self) -> list[str]:
        """What to change, the phase that is too large first."""
        cell, launch, ideas = self.cell, self.launch, []
        if self.engine == "vllm" and self.device.kind == "GPU":
            if self.cache < 1:
                ideas.append("a larger vllm_memory, or a smaller max_prompt_tokens or max_response_tokens")
            if self.peaks["rollout"] > self.device.size:
                ideas.append(f"a vllm_memory below {launch.vllm_memory}")
        if self.engine == "transformers" and self.peaks["rollout"] >= self.peaks["update"]:
            other = ", or a GPU with engine='vllm'" if cell.lora_rank else ""
            ideas.append(
                "a smaller max_prompt_tokens or max_response_tokens (its cache is reserved in full), n_problems or "
                f"n_episodes{other}"
            )
        if self.peaks["update"] >= self.peaks["rollout"] or self.peaks["update"] > self.device.size:
            if cell.micro_batch_tokens > memory.longest_row(cell):
                ideas.append(f"a micro_batch_tokens below {cell.micro_batch_tokens}")
            else:
                ideas.append("a smaller max_prompt_tokens or max_response_tokens, since one row is a micro-batch")
        if self.device.kind == "GPU" and launch.sharding == "none":
            ideas.append("sharding='fsdp2' with n_processes=2 or more, which divides the frozen base")
        if cell.lora_rank == 0:
            ideas.append("a lora_rank of at least 1, such as 64")
        if self.device.kind == "CPU" and launch.n_processes > 1:
            ideas.append(f"fewer processes than {launch.n_processes}, which share the RAM")
        return ideas or ["a device with more memory"]

    def check(self) -> None:
        """Refuse what cannot fit (ValueError)."""
        if not self.fits:
            biggest = max(self.parts, key=lambda name: max(self.parts[name]))
            raise ValueError(
                f"{self.verdict()} The largest part is {biggest} with {max(self.parts[biggest]) / GIB:.2f} GiB. "
                f"Write {'; or '.join(self.remedies())}."
            )


def plan(
    cell: Cell, launch: Launch = ONE_PROCESS, n_devices: int | None = None, device_bytes: int | None = None,
    mean_response: int | None = None,
) -> Plan:  # fmt: skip
    """What `cell` needs; reads no weights.

    Args:
        n_devices: processes, each with its GPU; None is `launch.n_processes`.
        device_bytes: memory of one GPU. None asks the GPU that is here, or takes this machine's RAM where there is none.
        mean_response: assumed mean tokens of a reply; None is a quarter of the cap.
    """
    launch = launch if n_devices is None else replace(launch, n_processes=n_devices)
    launch.check_processes(launch.n_processes, cell.n_problems)
    device = Device("GPU", device_bytes) if device_bytes is not None else this_device()
    on_gpu, s = device.kind == "GPU", shape_of(cell)
    engine = ("vllm" if on_gpu else "transformers") if cell.engine == "auto" else cell.engine
    check_served(cell, engine)
    reply = mean_response or -(-cell.max_response_tokens // 4)
    turns = stages(cell, reply)
    shards = launch.n_processes if launch.is_sharded else 1
    base, own = memory.BYTES[cell.dtype] * s.parameters // shards, memory.adapters(cell, s) // shards
    parts = {
        "process": (memory.GPU_PROCESS if on_gpu else memory.CPU_PROCESS,) * 2,
        f"frozen base, {cell.dtype}": (base, base),
        "adapters, float32": (own, own),
        "AdamW moments, float32": (2 * own, 2 * own),
        "gradients, float32": (0, memory.gradients(cell, s) // shards),
    }
    batch = f"activations of {memory.micro_batch(cell)} tokens", memory.activations(cell, s, on_gpu)
    name, size = max(batch, ("sums of gradients, float32", memory.sums(cell, s) // shards), key=lambda part: part[1])
    parts[name] = (0, size)  # never both at once
    if cell.diagnostics and not on_gpu:  # a GPU's host keeps them
        parts["changes of two iterations, float32"] = (own, 2 * own)
    if cell.coherence_penalty:
        parts["running means of gradients, float32"] = (own, own)
    if shards > 1:
        parts["layers gathered by FSDP2"] = (0, memory.gathered(cell, s))
    elif launch.n_processes > 1:  # accelerate wraps the model in DistributedDataParallel, which makes its buckets
        parts["data-parallel buckets, float32"] = (own, own)
    engine_parts, cache = _engine(cell, launch, device, s, engine, turns)
    return Plan(cell, launch, device, s, engine, parts | engine_parts, cache, reply, turns)


def _engine(
    cell: Cell, launch: Launch, device: Device, s: Shape, engine: str, turns: list[Stage]
) -> tuple[dict[str, tuple[int, int]], float | None]:
    """The rollout engine's parts, and how many sequences of full length vLLM's cache holds.

    Asleep, the transformers engine keeps its position tables alone; vLLM on a GPU its work space.
    """
    if engine == "vllm":
        needs = memory.vllm_parts(cell, s, launch.vllm_tensor_parallel)
        per_sequence = memory.vllm_cache_per_token(s, launch.vllm_tensor_parallel) * memory.longest_row(cell)
        if device.kind == "GPU":
            share = round(launch.vllm_memory * device.size)
            cache = (share - sum(needs.values())) / per_sequence
            return {f"vLLM, {launch.vllm_memory:.0%} of the GPU": (share, needs["work space"])}, cache
        both = 2 * needs["weights"] + 2 * needs["LoRA slots"] + GIB  # float32 on a CPU, 1 GiB of cache; no sleep
        return {"vLLM": (both, both)}, GIB / (2 * per_sequence)
    episodes = cell.n_problems * cell.n_episodes // launch.n_processes
    rows = [(episodes * stage.most, stage.prompt, stage.sharing) for stage in turns]
    weights, rope = memory.torch_engine_weights(cell, s), memory.torch_engine_rope(cell, s)
    caches = memory.torch_engine_cache(cell, s, rows)
    passing = max(memory.torch_engine_passing(s, *turn) for turn in rows)
    return {
        "transformers engine, merged weights, float32": (weights, 0),
        "transformers engine, position tables": (rope, rope),
        # `publish` makes new tables beside the old ones
        "transformers engine, KV cache and one step": (max(caches + passing, rope), 0),
    }, None


def this_device() -> Device:
    """The first GPU that is visible, or this machine's RAM, or less where a control group grants less."""
    if torch.cuda.is_available():
        return Device("GPU", torch.cuda.get_device_properties(0).total_memory)
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) * 1024
    return Device("CPU", min([total, *_group_limits()]))


def _group_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Memory limits of this process's control groups and their parents, version 1 or 2, in bytes."""
    limits = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.lstrip("/")
        for level in (folder, *folder.parents):
            if not level.is_relative_to(top):
                break
            file = level / name
            text = file.read_text().strip() if file.is_file() else "max"
            limits += [int(text)] if text != "max" else []
    return limits


def main(argv: list[str]) -> int:
    """Print what a cell needs and whether it fits: exit code 0 if it does, 1 if not, 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="multirole plan", description=main.__doc__)
    add_parameters(parser)
    parser.add_argument("--devices", type=int, help="processes, each with its GPU (default: n_processes)")
    parser.add_argument("--memory-gib", type=float, help="memory of one GPU in GiB (default: this machine's)")
    parser.add_argument(
        "--mean-response", type=int, help="assumed mean tokens of a reply (default: a quarter of the cap)"
    )
    arguments = parser.parse_args(argv)
    size = None if arguments.memory_gib is None else round(arguments.memory_gib * GIB)
    try:
        cell, launch = Cell.from_parameters(read_parameters(arguments))
        found = plan(cell, launch, arguments.devices, size, arguments.mean_response)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    steps = ", ".join(
        f"{name} {a}" if a == b else f"{name} {a} to {b}" for name, (a, b) in found.optimizer_steps().items()
    )
    n, counts = cell.iterations, found.tokens()
    most, sampled = (n * int(counts[what].sum()) for what in ("sequences at most", "completion tokens expected"))
    sys.stdout.write(
        f"{found.table().to_string(float_format='%.2f')}\n\n{found.tokens().T.to_string()}\n"
        f"optimizer steps per iteration: {steps}\n"
        f"{n} iterations: at most {most:,} sequences, {sampled:,} sampled tokens expected\n"
        f"assumed: replies of {found.reply} tokens, first prompts of {found.stages[0].prompt}, every round and worker; "
        f"{FLOPS[found.device.kind]:.3g} FLOP/s per device or core, of which "
        f"{UTILISATION['rollout']:.0%} while sampling and {UTILISATION['update']:.0%} while training\n\n"
        f"{found.verdict()}\n"
    )
    if found.fits:
        return 0
    sys.stdout.write(f"Write {'; or '.join(found.remedies())}.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
