"""Estimate how long a cell trains on GPUs, from memory bandwidth and arithmetic. **Not measured: no run on a GPU has checked it.**

Inputs, all assumed, are the constants below. A rollout reads the KV cache of every sampled token and the weights of every decoding
step, and prefills each prompt; more GPUs do not shorten its longest chain of replies. An update scores every row, computes forward
and backward of rows with an advantage, and only forward of the others. Not covered: overlap, the prefix cache, kernel launches,
communication except `UPDATE_IMBALANCE`, changes of the reply length in training, and the evaluations of a grid.
"""

from dataclasses import dataclass
from typing import NamedTuple

from multirole_study.experiment.base_models import shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import Shape

REPLY_SHARE = 1250 / 5120
"""Assumed mean length of a reply as a fraction of its cap."""
INSTRUCTION_TOKENS = 150
"""Assumed tokens of a prompt without the replies in it: the question and the role's instructions."""
CORRECT_VERDICTS = 0.6
"""Assumed fraction of the drafts that Eval-Opt's evaluator accepts in each round."""
SILENT_ROWS = 0.4
"""Assumed fraction of the rows whose group has equal rewards, so that they have no gradient."""
BANDWIDTH_USED = 0.75
"""Assumed fraction of the memory bandwidth that decoding reaches."""
PREFILL_MFU, UPDATE_MFU = 0.4, 0.25
"""Assumed fraction of the dense bfloat16 FLOP/s that prefill and update reach."""
STEP_OVERHEAD = 0.0015
"""Assumed seconds of a decoding step with few requests, in addition to reading the weights."""
UPDATE_IMBALANCE = 1.1
"""Assumed factor for the update on several processes: the slowest one, and all_reduce."""
DEFAULT_VALIDATION = 256
"""Assumed validation problems of a cell that uses all rows of a file, because the file is not read here."""
SWITCH_SECONDS, GRADE_SECONDS = 8.0, 6.0
"""Assumed seconds per iteration for sleep, wake-up and publishing, and for grading and records, which processes share."""


class Gpu(NamedTuple):
    """A GPU's data sheet."""

    name: str
    gib: int
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 FLOP per second."""


GPUS = {
    "4090": Gpu("RTX 4090", 24, 1.008e12, 165e12),
    "a100-40": Gpu("A100 SXM 40 GB", 40, 1.555e12, 312e12),
    "l40s": Gpu("L40S", 48, 0.864e12, 362e12),
    "h100": Gpu("H100 SXM", 80, 3.35e12, 989e12),
    "a100": Gpu("A100 SXM 80 GB", 80, 2.039e12, 312e12),
    "h200": Gpu("H200", 141, 4.8e12, 989e12),
}
"""Name for `multirole plan --gpu` -> GPU, by memory; of two with equal memory, the first stands for an unknown one."""


def gpu_of(gpu_bytes: int) -> Gpu:
    """Return the smallest of `GPUS` with at least this much memory, or else the largest."""
    return next((gpu for gpu in GPUS.values() if gpu_bytes <= gpu.gib * 2**30), GPUS["h200"])


class Calls(NamedTuple):
    """Expected number of calls of one stage of an episode, which run at the same time."""

    n: float
    replies_read: float
    """Number of earlier replies that the prompt holds."""


def calls_of(cell: Cell) -> list[Calls]:
    """Return the stages of an episode in order. For a user's workflow, each slot makes one call that reads all earlier replies."""
    if cell.workflow == "single":
        return [Calls(1, 0)]
    if cell.workflow == "voting":
        return [Calls(cell.n_voters, 0), Calls(1, cell.n_voters)]
    if cell.workflow == "orch_workers":
        return [Calls(1, 0), Calls(cell.n_workers, 1 / cell.n_workers), Calls(1, cell.n_workers + 1)]
    if cell.workflow == "eval_opt":
        reached = [(1 - CORRECT_VERDICTS) ** k for k in range(cell.rounds)]
        return [Calls(part, 2 * k + is_verdict) for k, part in enumerate(reached) for is_verdict in (0, 1)]
    slots = list(cell.make_workflow().roles.values())
    return [Calls(n, sum(slots[:i])) for i, n in enumerate(slots)]


class Rows(NamedTuple):
    """Rows of one stage, and their mean lengths in tokens."""

    n: float
    prompt: float
    reply: float


def rows_of(cell: Cell, n_episodes: int) -> list[Rows]:
    """Return the rows of `n_episodes` episodes by stage; prompts and replies are limited by the cell's caps."""
    reply = REPLY_SHARE * cell.max_completion_length
    return [
        Rows(n_episodes * n, min(INSTRUCTION_TOKENS + read * reply, cell.max_prompt_tokens), reply)
        for n, read in calls_of(cell)
    ]


# ---- seconds


def forward_flops(s: Shape, rank: int, tokens: float, context: float) -> float:
    """Return the FLOP of a forward pass over `tokens`, each of which attends to `context` others."""
    return tokens * (2 * (s.parameters + s.adapter_parameters(rank)) + 4 * context * s.layers * s.heads * s.head_dim)


def rollout_seconds(cell: Cell, gpu: Gpu, n_processes: int, n_episodes: int, rows_at_once: int) -> float:
    """Estimate the seconds of a rollout of `n_episodes`, on processes with `rows_at_once` requests each."""
    s, stages = shape_of(cell), rows_of(cell, n_episodes)
    bandwidth = BANDWIDTH_USED * gpu.bandwidth
    weights = 2 * s.parameters / bandwidth  # seconds to read them once
    kv = sum(n * reply * (prompt + reply / 2) for n, prompt, reply in stages) * 2 * s.kv_elements / bandwidth
    steps = sum(n * reply for n, _, reply in stages) / rows_at_once
    prefill = sum(forward_flops(s, cell.lora_r, n * prompt, prompt / 2) for n, prompt, _ in stages)
    packed = kv + steps * weights + prefill / (PREFILL_MFU * gpu.flops)
    chain = sum(min(n, 1) for n, _ in calls_of(cell)) * cell.max_completion_length * (weights + STEP_OVERHEAD)
    return packed / n_processes + chain * (1 - 1 / n_processes)


def update_seconds(cell: Cell, gpu: Gpu, n_processes: int, recomputes: bool) -> float:
    """Estimate the seconds of an update. Scoring, backward through the frozen base, and recomputing cost one forward pass each."""
    s, stages = shape_of(cell), rows_of(cell, cell.n_problems * cell.num_generations)
    forward = sum(
        forward_flops(s, cell.lora_r, n * (prompt + reply), (prompt + reply) / 2) for n, prompt, reply in stages
    )
    passes = 1 + (1 - SILENT_ROWS) * (1 + recomputes) + (cell.old_logprobs == "recomputed")
    return passes * forward / (UPDATE_MFU * gpu.flops) / n_processes * (UPDATE_IMBALANCE if n_processes > 1 else 1)


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of each part of a cell's training on `n_processes` GPUs; not measured."""

    gpu: Gpu
    n_processes: int
    iterations: int
    rollout: float
    update: float
    other: float
    validation: float
    """Seconds of one validation."""
    validations: int

    @property
    def iteration(self) -> float:
        """Return the seconds of an iteration, without validation."""
        return self.rollout + self.update + self.other

    @property
    def hours(self) -> float:
        """Return the hours of the whole training, with its validations."""
        return (self.iterations * self.iteration + self.validations * self.validation) / 3600

    @property
    def gpu_hours(self) -> float:
        """Return hours times GPUs."""
        return self.hours * self.n_processes


def mean_context(cell: Cell) -> float:
    """Return the mean number of tokens that a request has in the KV cache while it is decoded."""
    stages = rows_of(cell, 1)
    return sum(n * reply * (prompt + reply / 2) for n, prompt, reply in stages) / sum(
        n * reply for n, _, reply in stages
    )


def estimate(cell: Cell, gpu: Gpu, n_processes: int, recomputes: bool, rows_at_once: int) -> Estimate:
    """Estimate a cell's training; `rows_at_once` is the number of requests that one process decodes at once."""
    n = cell.n_problems * cell.num_generations
    rollout, validation = (
        rollout_seconds(cell, gpu, n_processes, n_episodes, rows_at_once)
        for n_episodes in (n, cell.n_validation or DEFAULT_VALIDATION)
    )
    return Estimate(
        gpu, n_processes, cell.max_steps,
        rollout, update_seconds(cell, gpu, n_processes, recomputes), SWITCH_SECONDS + GRADE_SECONDS / n_processes,
        validation, -(-cell.max_steps // cell.eval_steps) + 1,
    )  # fmt: skip
