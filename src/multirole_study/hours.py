"""Estimate how long a cell trains on GPUs, from memory bandwidth and arithmetic.

1. Asked: a cell, the model's shape, a GPU's data sheet (`GPUS`), the mean length of a reply, and `Constants`.
2. Computed: the tokens of an iteration by stage (`rows_of`), and the seconds of each part of it (`estimate`).
3. Printed by `multirole plan`.

**Every constant is assumed until one that `benchmarks/bench_gpu.py` has measured replaces it** (`Constants.from_file`); no run on a GPU
has checked an estimate. A rollout reads the KV cache of every sampled token and the weights in every decoding step, and prefills each
prompt; more GPUs do not shorten its longest chain of replies. An update scores every row, computes forward and backward of rows with an
advantage, and only forward of the others. Not covered: overlap, the prefix cache, rows with shared prompts, communication except
`update_imbalance`, changes of the reply length in training, and the evaluations of a grid.

Imports neither torch nor pydantic, so that the benchmark can use it on a machine without them.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multirole.policy import trained_part
from multirole_study.experiment.presets import Shape

if TYPE_CHECKING:
    from multirole_study.experiment.cell import Cell

REPLY_SHARE = 1250 / 5120
"""Assumed mean length of a reply as a fraction of its cap, where `reply_tokens` is not set."""
SHORTER, LONGER = 0.5, 2.0
"""The mean lengths that a plan shows on both sides, as factors."""
DEFAULT_VALIDATION = 256
"""Assumed validation problems of a cell that uses all rows of a file, because the file is not read here."""


# ---- asked: the GPU


class Gpu(NamedTuple):
    """A GPU's data sheet."""

    name: str
    chip: str
    """What torch's name of the device contains."""
    gib: float
    """Memory in GiB as torch reports it, which is less than the name says."""
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 FLOP per second."""


GPUS = {
    "4090": Gpu("RTX 4090", "RTX 4090", 23.5, 1.008e12, 165e12),
    "a10": Gpu("A10", "A10", 22.0, 0.6e12, 125e12),
    "l4": Gpu("L4", "L4", 22.0, 0.3e12, 121e12),
    "a100-40": Gpu("A100 SXM 40 GB", "A100", 39.4, 1.555e12, 312e12),
    "l40s": Gpu("L40S", "L40S", 44.4, 0.864e12, 362e12),
    "h100": Gpu("H100 SXM", "H100", 79.1, 3.35e12, 989e12),
    "h100-pcie": Gpu("H100 PCIe", "H100 PCIe", 79.1, 2.0e12, 756e12),
    "a100": Gpu("A100 SXM 80 GB", "A100", 79.1, 2.039e12, 312e12),
    "gh200": Gpu("GH200", "GH200", 94.5, 4.0e12, 989e12),
    "h200": Gpu("H200", "H200", 139.8, 4.8e12, 989e12),
}
"""Name for `multirole plan --gpu` -> GPU, by memory; of several with one size, the first stands for an unknown one."""
NOMINAL = 1.1
"""A card's nominal memory is at most this many times what torch reports."""


def gpu_of(gpu_bytes: int) -> Gpu:
    """Return the smallest of `GPUS` with at least this much memory, nominally, or else the largest."""
    return next((gpu for gpu in GPUS.values() if gpu_bytes <= NOMINAL * gpu.gib * 2**30), GPUS["h200"])


def gpu_named(device: str, gpu_bytes: int) -> Gpu | None:
    """Return the data sheet of torch's name of a device, such as "NVIDIA A100-SXM4-80GB"; None if it is not among `GPUS`."""
    named = [gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.chip}\b", device)]
    return max(named, key=lambda gpu: (len(gpu.chip), -abs(gpu.gib - gpu_bytes / 2**30)), default=None)


# ---- asked: the constants

DIVISORS = ("decoding_bandwidth", "prefill_mfu", "update_mfu")
"""Constants by which the estimate divides."""


def _assumed(value: float, text: str, shown: str = ".0%") -> float:
    """Declare a constant: its assumed value, what it means, and its format. "%" marks a fraction between 0 and 1."""
    return field(default=value, metadata={"text": text, "shown": shown})


@dataclass(frozen=True)
class Constants:
    """What the estimate takes from experience. Each value below is assumed; `sources` names those that were measured, and where."""

    decoding_bandwidth: float = _assumed(0.75, "of the memory bandwidth is used in decoding")
    # vLLM's pull request 15655 reports 8 to 24 % for Llama 3.1 8B on a TPU v6e, issue 10062 up to 50 % on an A100 with an older vLLM
    lora_cost: float = _assumed(
        0.16, "of decoding's speed is lost to the adapters (public reports: 8 to 24 %, once 50 %)"
    )
    prefill_mfu: float = _assumed(0.4, "of the FLOP/s is used in prefill")
    update_mfu: float = _assumed(0.25, "of the FLOP/s is used in the update")
    step_seconds: float = _assumed(0.0015, "s per decoding step with few requests, besides reading the weights", "g")
    switch_seconds: float = _assumed(8.0, "s per iteration for sleep, wake-up and publishing", "g")
    grade_seconds: float = _assumed(6.0, "s per iteration for grading and records, which processes share", "g")
    update_imbalance: float = _assumed(
        1.1, "times as long an update on several processes, for the slowest and all_reduce", "g"
    )
    silent_rows: float = _assumed(0.4, "of the rows are in groups with equal rewards and have no gradient")
    accepted_drafts: float = _assumed(0.6, "of the drafts are accepted by Eval-Opt's evaluator, in each round")
    question_tokens: float = _assumed(150, "tokens of a prompt are not replies: the question and the instructions", "g")
    sources: Mapping[str, str] = field(default_factory=dict)
    """Name of a measured constant -> device and step that it was measured on."""

    @classmethod
    def from_file(cls, path: Path) -> "Constants":
        """Read measured constants from a file of `benchmarks/bench_gpu.py`; the others stay assumed.

        The file is an object with `device` and `constants`, of which each has `value` and `step`. Raises ValueError if it is anything else.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            measured = {name: (entry["value"], entry["step"]) for name, entry in record["constants"].items()}
            device = record["device"]
        except OSError as error:
            raise ValueError(
                f"--measured must name a file that benchmarks/bench_gpu.py wrote, got {str(path)!r}: {error.strerror}."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no measured constants. Write the file of `benchmarks/bench_gpu.py`, such as gpu.measured.json, with an object like "
                '{"device": "NVIDIA H100", "constants": {"update_mfu": {"value": 0.3, "step": "update-1.7b"}}}.'
            ) from error
        known = {constant.name: constant for constant in fields(cls) if constant.metadata}
        for name, (value, _) in measured.items():
            if name not in known:
                raise ValueError(
                    f"{path} has the constant {name!r}, which the estimate does not use. It uses {', '.join(known)}."
                )
            largest = 1 if "%" in known[name].metadata["shown"] else math.inf
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < largest or not value and name in DIVISORS:
                least = "above 0" if name in DIVISORS else "from 0"
                raise ValueError(
                    f"{path}: {name} must be a number {least} to below {largest}, got {value!r}. Meaning: it {known[name].metadata['text']}."
                )
        values = {name: value for name, (value, _) in measured.items()}
        return replace(ASSUMED, **values, sources={name: f"{device}, {step}" for name, (_, step) in measured.items()})

    def rows(self) -> list[tuple[str, str, str]]:
        """Return each constant as (value, meaning, "assumed" or where it was measured)."""
        declared = [constant for constant in fields(self) if constant.metadata]
        return [
            (format(getattr(self, c.name), c.metadata["shown"]), c.metadata["text"], self.status(c.name)) for c in declared
        ]  # fmt: skip

    def status(self, name: str) -> str:
        """Return "assumed", or where a constant was measured."""
        return f"measured: {self.sources[name]}" if name in self.sources else "assumed"


ASSUMED = Constants()


# ---- computed: the tokens of an iteration


class Calls(NamedTuple):
    """Expected number of calls of one stage of an episode, which run at the same time."""

    n: float
    replies_read: float
    """Number of earlier replies that the prompt holds."""


class Rows(NamedTuple):
    """Rows of one stage, and their mean lengths in tokens."""

    n: float
    prompt: float
    reply: float


def assumed_reply(cell: "Cell") -> float:
    """Return the mean length of a reply in tokens that is assumed for a cell."""
    return REPLY_SHARE * cell.max_completion_length


def calls_of(cell: "Cell", constants: Constants = ASSUMED) -> list[Calls]:
    """Return the stages of an episode in order. For a user's workflow, each slot makes one call that reads all earlier replies."""
    if cell.workflow == "single":
        return [Calls(1, 0)]
    if cell.workflow == "voting":
        return [Calls(cell.n_voters, 0), Calls(1, cell.n_voters)]
    if cell.workflow == "orch_workers":
        return [Calls(1, 0), Calls(cell.n_workers, 1 / cell.n_workers), Calls(1, cell.n_workers + 1)]
    if cell.workflow == "eval_opt":
        reached = [(1 - constants.accepted_drafts) ** k for k in range(cell.rounds)]
        return [Calls(part, 2 * k + is_verdict) for k, part in enumerate(reached) for is_verdict in (0, 1)]
    slots = list(cell.make_workflow().roles.values())
    return [Calls(n, sum(slots[:i])) for i, n in enumerate(slots)]


def stage_roles(cell: "Cell") -> list[str]:
    """Return the role of each stage of `calls_of`. Eval-Opt's two roles take turns; in other workflows, each role has one stage."""
    roles = list(cell.make_workflow().roles)
    return [roles[i % len(roles)] for i in range(len(calls_of(cell)))]


def rows_of(cell: "Cell", n_episodes: int, reply: float | None = None, constants: Constants = ASSUMED) -> list[Rows]:
    """Return the rows of `n_episodes` episodes by stage; prompts and replies are limited by the cell's caps."""
    reply = min(assumed_reply(cell) if reply is None else reply, cell.max_completion_length)
    return [
        Rows(n_episodes * n, min(constants.question_tokens + read * reply, cell.max_prompt_tokens), reply)
        for n, read in calls_of(cell, constants)
    ]


def mean_context(cell: "Cell", reply: float | None = None, constants: Constants = ASSUMED) -> float:
    """Return the mean number of tokens that a request has in the KV cache while it is decoded."""
    return kv_reads(stages := rows_of(cell, 1, reply, constants)) / sampled_tokens(stages)


def sampled_tokens(stages: list[Rows]) -> float:
    """Return the number of tokens that rows sample."""
    return sum(n * reply for n, _, reply in stages)


def kv_reads(stages: list[Rows]) -> float:
    """Return how many tokens of the KV cache are read: for each sampled token, all before it."""
    return sum(n * reply * (prompt + reply / 2) for n, prompt, reply in stages)


def forward_flops(s: Shape, rank: int, tokens: float, context: float) -> float:
    """Return the FLOP of a forward pass over `tokens`, each of which attends to `context` others."""
    return tokens * (2 * (s.parameters + s.adapter_parameters(rank)) + 4 * context * s.layers * s.heads * s.head_dim)


# ---- computed: seconds


Parts = dict[str, float]
"""What the time of an iteration is spent on -> seconds."""


def rollout_parts(
    cell: "Cell", s: Shape, gpu: Gpu, n_processes: int, n_episodes: int, rows_at_once: int, reply: float | None = None,
    constants: Constants = ASSUMED,
) -> Parts:  # fmt: skip
    """Estimate the seconds of a rollout of `n_episodes`, on processes with `rows_at_once` requests each.

    The longest chain has a reply of full length in each stage, whatever the mean is.
    """
    stages = rows_of(cell, n_episodes, reply, constants)
    bandwidth = constants.decoding_bandwidth * (1 - constants.lora_cost) * gpu.bandwidth
    weights = 2 * s.parameters / bandwidth  # seconds to read them once
    prefill = sum(forward_flops(s, cell.lora_r, n * prompt, prompt / 2) for n, prompt, _ in stages)
    n_stages = sum(min(n, 1) for n, _ in calls_of(cell, constants))
    chain = n_stages * cell.max_completion_length * (weights + constants.step_seconds)
    return {
        "reading the KV cache": kv_reads(stages) * 2 * s.kv_elements / bandwidth / n_processes,
        "reading the weights": sampled_tokens(stages) / rows_at_once * weights / n_processes,
        "prefill": prefill / (constants.prefill_mfu * gpu.flops) / n_processes,
        "waiting for the longest chain": chain * (1 - 1 / n_processes),
    }


def update_parts(
    cell: "Cell", s: Shape, gpu: Gpu, n_processes: int, recomputes: bool, reply: float | None = None,
    constants: Constants = ASSUMED,
) -> Parts:  # fmt: skip
    """Estimate the seconds of an update on the rows of trained roles. Scoring, backward through the base, and recomputing cost a forward pass each."""
    stages = rows_of(cell, cell.n_problems * cell.num_generations, reply, constants)
    trained_roles = trained_part(cell.policy)
    flops = sum(
        forward_flops(s, cell.lora_r, n * (prompt + length), (prompt + length) / 2)
        for (n, prompt, length), role in zip(stages, stage_roles(cell), strict=True)
        if role in trained_roles
    )
    imbalance = constants.update_imbalance if n_processes > 1 else 1
    forward = flops / (constants.update_mfu * gpu.flops) / n_processes * imbalance
    trained = 1 - constants.silent_rows
    return {
        "old log-probs": forward * (cell.old_logprobs == "recomputed"),
        "forward and backward": forward * (1 + trained),
        "recomputing layers": forward * trained * recomputes,
    }


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of each part of a cell's training on `n_processes` GPUs."""

    gpu: Gpu
    n_processes: int
    iterations: int
    validations: int
    rollout_parts: Parts
    update_parts: Parts
    other_parts: Parts
    validation: float
    """Seconds of one validation."""

    @property
    def rollout(self) -> float:
        """Return the seconds of a rollout."""
        return sum(self.rollout_parts.values())

    @property
    def update(self) -> float:
        """Return the seconds of an update."""
        return sum(self.update_parts.values())

    @property
    def iteration(self) -> float:
        """Return the seconds of an iteration, without validation."""
        return self.rollout + self.update + sum(self.other_parts.values())

    @property
    def hours(self) -> float:
        """Return the hours of the whole training, with its validations."""
        return (self.iterations * self.iteration + self.validations * self.validation) / 3600

    @property
    def gpu_hours(self) -> float:
        """Return hours times GPUs."""
        return self.hours * self.n_processes

    @property
    def largest(self) -> tuple[str, float]:
        """Return the part that takes most of the training, and its fraction of the hours."""
        of_iteration = self.rollout_parts | self.update_parts | self.other_parts
        seconds = {name: self.iterations * value for name, value in of_iteration.items()}
        name, most = max(
            (seconds | {"validation": self.validations * self.validation}).items(), key=lambda part: part[1]
        )
        return name, most / (3600 * self.hours)


def estimate(
    cell: "Cell", s: Shape, gpu: Gpu, n_processes: int, recomputes: bool, rows_at_once: int, reply: float | None = None,
    constants: Constants = ASSUMED,
) -> Estimate:  # fmt: skip
    """Estimate a cell's training; `rows_at_once` is the number of requests that one process decodes at once, `reply` the mean length in tokens."""
    rollout, validation = (
        rollout_parts(cell, s, gpu, n_processes, n_episodes, rows_at_once, reply, constants)
        for n_episodes in (cell.n_problems * cell.num_generations, cell.n_validation or DEFAULT_VALIDATION)
    )
    other = {
        "sleep, wake-up and publishing": constants.switch_seconds,
        "grading and records": constants.grade_seconds / n_processes,
    }
    return Estimate(
        gpu, n_processes, cell.max_steps, -(-cell.max_steps // cell.eval_steps) + 1, rollout,
        update_parts(cell, s, gpu, n_processes, recomputes, reply, constants), other, sum(validation.values()),
    )  # fmt: skip
