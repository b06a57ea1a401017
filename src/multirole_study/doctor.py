"""Run two real iterations of a cell on this machine, check its parts, and measure time and memory (`multirole doctor`).

The cell's trainer, engine and optimizer run with the cell's batch and lengths, and save a checkpoint. Three things differ from
the cell, so that a fault becomes visible: every adapter starts from different random weights (fresh adapters all equal the
base, which would hide a mix-up), every episode has an advantage of a different size, and the learning rate is large. The first iteration is checked
in detail, the second is measured.

Engine and trainer both round, so there is no fixed tolerance for their difference: it must be small compared with the difference
that a fault (another adapter, old weights) would cause on the same rows.

1. Asked: a cell and the options of its launch; `Trial` changes what the three differences need.
2. Computed: `Trial` records the two iterations, the functions of `CHECKS` judge them, and `measurements` has time and memory.
3. Printed: `run`.

`tests/study/test_doctor.py` plants a fault for every check. The sizes below were chosen so that all are found on the embedded models; that
they suffice for a large model on a GPU is assumed.
"""

import hashlib
import itertools
import json
import math
import random
import resource
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from peft.tuners.lora import LoraLayer
from tabulate import tabulate
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from multirole.callbacks import Iteration, MultiRoleCallback, OptimizerStep, Trainer
from multirole.inputs.adapters import adapter_parameters
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.types import Episode, Problem
from multirole.update.passes.model_passes import no_key
from multirole.update.processes import gather_objects, local_shard, processes
from multirole.update.rows import Row, Steps
from multirole_study.experiment.announce import announced, say
from multirole_study.experiment.base_models import locate, shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import make_trainer
from multirole_study.experiment.hardware import FREE_FRACTION, GIB, PHASES, preflight_checks
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.preflight import load_problems, preflight
from multirole_study.tasks.gym import Gym

# ---- asked


ITERATIONS = 2
ADAPTER_SIZE, STEP_SIZE = 0.15, 0.05
"""Assumed: size of a random adapter's contribution relative to its module's output, and the learning rate times the root of the model's width.
Both change log-probs by far more than rounding to bfloat16, and leave the model able to write."""
TOLERANCE = 0.25
"""Assumed: largest difference between the log-probs of engine and trainer, as a fraction of the difference that a fault would cause."""
FAULT_ROWS = 8
"""Assumed to suffice: number of a role's rows on which the difference by a fault is measured."""
MAX_LOGPROB = -1e-3
"""Assumed: tokens with a larger log-prob may have a gradient that rounds to zero."""


class Finding(NamedTuple):
    """The result of one check."""

    holds: bool
    measured: str
    expected: str


# ---- computed: two iterations


def digest(tensor: Tensor) -> str:
    """Hash the bytes of this process's shard of a tensor."""
    values = local_shard(tensor.detach()).cpu().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def digests(trainer: Trainer, is_base: bool = False) -> dict[str, str]:
    """Return name -> hash of every adapter tensor, or of every tensor of the base."""
    for module in trainer.peft_model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    prefix, named = trainer.peft_model.base_model.prefix, trainer.peft_model.named_parameters()
    return {name: digest(p) for name, p in named if (prefix not in name) == is_base}


def trained_tensors(trainer: Trainer) -> list[Tensor]:
    """Return this process's shards of all adapters, which share their memory."""
    return [
        local_shard(p.detach())
        for adapter in trainer.adapters
        for _, p in adapter_parameters(trainer.peft_model, adapter)
    ]


def saved_tensors(trainer: MultiRoleGRPOTrainer) -> list[Tensor]:
    """Return this process's shards of all adapters and of the optimizer's moments, which share their memory."""
    states = trainer.optimizer.state.values()
    return trained_tensors(trainer) + [local_shard(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]


@torch.no_grad()
def randomise(trainer: MultiRoleGRPOTrainer) -> None:
    """Give each adapter different random weights, the same on every process."""
    for i, name in enumerate(trainer.adapters):
        generator = torch.Generator().manual_seed(i)
        for layer in [module for module in trainer.peft_model.modules() if isinstance(module, LoraLayer)]:
            weight, base = layer.lora_B[name].weight, layer.base_layer.weight
            inner = math.sqrt(layer.r[name] / 3)  # |A x| for an x of unit variance: A is uniform, as PEFT makes it
            std = ADAPTER_SIZE * base.norm().item() / (math.sqrt(len(base)) * layer.scaling[name] * inner)
            weight.copy_(std * torch.randn(weight.shape, generator=generator))


class PhasePeak:
    """Peak memory since this object was created: on a GPU all memory in use, torch's cache included, else the process's RAM.

    The GPU's peak is the memory in use at the start plus the largest growth of torch's reserved memory. If the peak of RAM cannot
    be reset (`/proc/self/clear_refs`), it is the peak of the whole process.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.outside_torch = memory_in_use() - torch.cuda.memory_reserved()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the resident peak, see proc(5)

    def bytes(self) -> int:
        """Return the peak so far in bytes."""
        if torch.cuda.is_available():
            return max(self.outside_torch + torch.cuda.max_memory_reserved(), memory_in_use())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_in_use() -> int:
    """Return the bytes in use on the GPU, torch's cache included."""
    free, total = torch.cuda.mem_get_info()
    return total - free


class Trial(MultiRoleCallback):
    """Callback that records two iterations of a trainer; the second is measured, so nothing slow is done in it."""

    trainer: MultiRoleGRPOTrainer

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.iterations: list[Iteration] = []
        self.gaps: list[dict[int, float]] = []
        """For each iteration: row -> mean |log-prob of the trainer - of the engine|, in each adapter's first step."""
        self.trained: list[int] = []
        """Indices of the rows in the micro-batches of the first iteration."""
        self.lost = self.others = 0
        self.peaks = dict.fromkeys(PHASES, 0)
        """Peak bytes of each phase over the iterations."""
        self.moved: list[tuple[int, int, int]] = []
        """For each step of the first iteration: how many tensors its adapter has, how many of them changed, and how many other tensors changed."""
        self.reached = torch.zeros(0)

    def run(self) -> None:
        """Train, overwrite the saved tensors with zeros, load the checkpoint, and restore the initial weights."""
        randomise(self.trainer)
        self.phase = PhasePeak()
        self.trainer.train()
        base_digests = digests(self.trainer, is_base=True)
        self.changed = sum(base_digests[name] != value for name, value in self.base.items())
        self.saved = [digest(tensor) for tensor in saved_tensors(self.trainer)]
        for tensor in saved_tensors(self.trainer):
            tensor.zero_()
        checkpoint = str(Path(self.trainer.args.output_dir) / f"checkpoint-{self.trainer.state.global_step}")
        self.trainer._load_from_checkpoint(checkpoint)
        self.trainer._load_optimizer_and_scheduler(checkpoint)
        self.loaded = [digest(tensor) for tensor in saved_tensors(self.trainer)]
        for tensor, values in zip(trained_tensors(self.trainer), self.start, strict=True):
            tensor.copy_(values)

    def end_phase(self, phase: str) -> None:
        """Record the peak of a phase and begin the next one."""
        self.peaks[phase] = max(self.peaks[phase], self.phase.bytes())
        self.phase = PhasePeak()

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        self.end_phase("rollout")
        if not self.iterations:  # FSDP2 has sharded the model only now
            self.base = digests(trainer, is_base=True)
            self.start = [tensor.cpu().clone() for tensor in trained_tensors(trainer)]

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        self.phase = PhasePeak()  # the engine is asleep now
        for row in rows:  # different sizes, or the gradients of two rows could cancel at a token that they share
            row.advantage = (-1.0) ** row.episode.index * random.Random(row.episode.index).uniform(1, 2)
        return rows

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        self.places = {id(row): place for place, row in enumerate(rows)}
        self.stepped: set[str] = set()
        self.gaps.append({})
        if not self.iterations:
            self.held = digests(trainer)
            decoder = trainer.peft_model.get_base_model().base_model
            self.handle = decoder.register_forward_hook(self.on_forward)

    def on_forward(self, _: object, __: object, output: Any) -> None:
        """Record which of the decoder's outputs get a gradient, in one line."""
        hidden = output.last_hidden_state
        self.reached = torch.zeros(hidden.shape[:2].numel(), dtype=torch.bool)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: setattr(self, "reached", (grad != 0).any(-1).flatten().cpu()))

    def on_micro_batch(
        self, trainer: Trainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
    ) -> None:  # fmt: skip
        places, is_first_step = [self.places[id(row)] for row in rows], rows[0].adapter not in self.stepped
        mask, sampled = batch["completion_mask"], batch["sampling_per_token_logps"]
        if is_first_step:
            gaps = ((logps - sampled).abs() * mask).sum(1) / mask.sum(1)
            self.gaps[-1] |= dict(zip(places, gaps.tolist(), strict=True))
        if self.iterations:
            return
        self.trained += places
        ratio, is_up = (logps - batch["old_per_token_logps"]).exp(), batch["advantages"][:, None] > 0
        too_low = (ratio < 1 - trainer.epsilon_low) | (ratio > (trainer.args.delta or math.inf))
        is_clipped = torch.where(is_up, ratio > 1 + trainer.epsilon_high, too_low)
        due = (~mask.bool() | is_first_step & ~is_clipped & (sampled < MAX_LOGPROB)).cpu()
        micro, multiple = trainer.passes.last, trainer.passes.multiple
        assert micro is not None and micro.rows is rows
        if sum(n for _, n in micro.runs(no_key, multiple)) != len(self.reached):
            self.lost += int(mask.sum())  # the pass has left out tokens of the rows
            return
        unexpected = self.reached.clone()
        for row, row_places, is_due in zip(rows, micro.places(multiple), due, strict=True):
            start, n = len(row.turn.prompt_ids) - 1, len(row.turn.completion_ids)  # an output predicts the next token
            outputs = row_places[start : start + n]
            self.lost += int((is_due[:n] & ~self.reached[outputs]).sum())
            unexpected[outputs] = False
        self.others += int(unexpected.sum())

    def on_adapter_step(self, trainer: Trainer, step: OptimizerStep) -> None:
        self.stepped.add(step.adapter)
        if not self.iterations:
            before, self.held = self.held, digests(trainer)
            moved = {name for name, value in self.held.items() if value != before[name]}
            owners = {trainer.policy[row.turn.role] for row in step.rows}
            adapter_tensors = {name for name in before if any(f".{owner}." in name for owner in owners)}
            self.moved.append((len(adapter_tensors), len(adapter_tensors & moved), len(moved - adapter_tensors)))

    def on_update_end(self, trainer: Trainer, rows: list[Row]) -> None:
        self.end_phase("update")
        self.handle.remove()

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        self.iterations.append(iteration)

    def judge(self, at: int, fault: Callable[[list[Row]], float], fault_name: str) -> Finding:
        """Compare each role's gap in an iteration with the gap that a fault would cause."""
        rows, distances = self.iterations[at].rows, []
        gaps = dict(itertools.chain.from_iterable(part.items() for part in gather_objects(self.gaps[at])))
        for role in self.trainer.policy:
            role_places = [place for place in sorted(gaps) if rows[place].turn.role == role]
            if role_places:
                gap, due = (
                    sum(gaps[place] for place in role_places) / len(role_places),
                    fault([rows[place] for place in role_places[:FAULT_ROWS]]),
                )
                distances.append((gap / max(due, 1e-9), gap, due, role))
        ratio, gap, due, role = max(distances)
        measured = f"log-probs of engine and trainer differ by {gap:.1e} (mean of {role})"
        return Finding(
            ratio <= TOLERANCE, measured, f"at most {TOLERANCE * due:.1e}; {fault_name} would give {due:.1e}"
        )

    def distance(self, rows: Iterable[Row], is_base: bool = False) -> float:
        """Return the mean |log-prob of the trainer - of the engine| of rows, under the initial weights."""
        rows = list(rows)
        pairs = zip(self.trainer.logprobs_of(rows, is_base), rows, strict=True)
        gaps = [(logps - torch.tensor(row.turn.logprobs)).abs().mean().item() for logps, row in pairs]
        return sum(gaps) / len(gaps)


# ---- computed: checks


def engine(trial: Trial) -> Finding:
    """Check that engine and trainer have the same log-probs at the first step of every adapter."""

    def other_adapters(rows: list[Row]) -> float:
        names = [name for name in trial.trainer.adapters if name != rows[0].adapter]
        distances = [trial.distance(replace(row, adapter=name) for row in rows) for name in names]
        return min([*distances, trial.distance(rows, is_base=True)])

    return trial.judge(0, other_adapters, "another adapter or none")


def published_weights(trial: Trial) -> Finding:
    """Check that the second iteration samples from the weights after the first one, not from those before it."""
    return trial.judge(1, trial.distance, "the weights before the update")


def masks(trial: Trial) -> Finding:
    """Check that every turn is trained once, and that the loss has a gradient exactly at the outputs that predict its completion."""
    counts_by_process = gather_objects((trial.trained, trial.lost, trial.others))
    lost, unexpected = sum(counts[1] for counts in counts_by_process), sum(counts[2] for counts in counts_by_process)
    first = trial.iterations[0]
    trained = trial.trainer.partners.trained
    turns = [turn for episode in first.episodes for turn in episode.turns if turn.role in trained]
    sampled = Counter(
        {id(turn) for turn in (*turns, *(row.turn for row in first.rows))}
    )  # rows of credit estimators may be of forks
    sampled.subtract(id(first.rows[place].turn) for places, _, _ in counts_by_process for place in places)
    wrong = sum(times != 0 for times in sampled.values())
    measured = (
        f"{lost} completion tokens have no gradient, {unexpected} other tokens have one; "
        f"{wrong} of {len(sampled)} turns are not trained exactly once"
    )
    return Finding(not (lost or unexpected or wrong), measured, "0, 0 and 0")


def adapters(trial: Trial) -> Finding:
    """Check that a step on the rows of a role changes the tensors of the role's adapter and no other tensor."""
    n_moved, n_own, n_others = (sum(column) for column in zip(*trial.moved, strict=True))
    measured = (
        f"{len(trial.moved)} steps changed {n_own} of {n_moved} tensors of their own adapters, {n_others} of other adapters, "
        f"and {trial.changed} of the base"
    )
    return Finding(n_own == n_moved and not n_others and not trial.changed, measured, "all, 0 and 0")


def grading(trial: Trial) -> Finding:
    """Check that this machine grades a right, a wrong and an empty answer of a built-in task correctly (code in the sandbox)."""
    task = trial.cell.make_task()
    if "task_sha256" in trial.cell.to_dict():
        return Finding(True, "not checked: a user-supplied task has no known answers", "nothing")
    if isinstance(task, Gym):
        problem = task.problems("validation", 1)[0]
        if problem.reference["answer"] is None:
            return Finding(True, f"not checked: {task.name} scores answers and has no reference", "nothing")
        right, wrong = (f"\\boxed{{{answer}}}" for answer in (problem.reference["answer"], "no answer"))
    else:
        reference, right, wrong = TRIAL_ANSWERS[task.name]
        problem = Problem("doctor", task.name, "", reference)
    rewards = task.score([problem] * 3, [right, wrong, ""])
    verdicts = [bool(reward.is_correct) for reward in rewards]
    due = [True, False, False]
    return Finding(verdicts == due, f"a right, a wrong and no answer are graded {verdicts}", str(due))


def memory(trial: Trial) -> Finding:
    """Check that no phase comes so close to all memory of the device that longer replies would not fit."""
    total = psutil.virtual_memory().total // processes().num_processes
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]
    phase = max(PHASES, key=lambda name: trial.peaks[name])
    share = trial.peaks[phase] / total
    expected = f"at most {1 - FREE_FRACTION:.0%}; else lower micro_batch_tokens, vllm_gpu_memory_utilization or the largest lengths"
    return Finding(share <= 1 - FREE_FRACTION, f"{phase} takes {share:.0%} of {total / GIB:.2f} GiB", expected)


def checkpoint(trial: Trial) -> Finding:
    """Check that loading a checkpoint restores every adapter and the optimizer's moments, bit for bit."""
    differ = sum(before != after for before, after in zip(trial.saved, trial.loaded, strict=True))
    return Finding(differ == 0, f"{differ} of {len(trial.saved)} tensors differ after loading", "0")


CHECKS: dict[str, Callable[[Trial], Finding]] = {
    check.__name__.replace("_", " "): check
    for check in (engine, published_weights, masks, adapters, grading, checkpoint, memory)
}
FENCE = "```python\n%s\n```"
TRIAL_ANSWERS: dict[str, tuple[object, str, str]] = {
    "tiny_chain": (15, "so the answer is \\boxed{15}.", "so the answer is \\boxed{14}."),
    "math": ("\\frac{1}{2}", "so the answer is \\boxed{0.5}.", "so the answer is \\boxed{0.4}."),
    "tiny_pipe": (
        {"arguments": [[[]], [[1, 2]]], "expected": [0, 3]},
        FENCE % "def f(xs):\n    return sum(xs)", FENCE % "def f(xs):\n    return 0",
    ),
    "functions": (
        json.dumps([{"input": str(n), "output": str(2 * n), "testtype": "functional", "metadata": {"func_name": "f"}}
                    for n in (0, 1)]),
        FENCE % "def f(n):\n    return 2 * n", FENCE % "def f(n):\n    return 0",
    ),
    "code": (
        json.dumps([{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin"} for n in (0, 1)]),
        FENCE % "print(2 * int(input()))", FENCE % "print(0)",
    ),
}  # fmt: skip
"""Built-in task -> a reference, a right answer and a wrong one."""
TRIAL_ANSWERS["programs"] = TRIAL_ANSWERS["functions"]


# ---- computed: the whole examination


def examine(cell: Cell, launch: Launch, folder: str) -> tuple[dict[str, Finding], dict[str, float]]:
    """Train two iterations in a folder. Return the findings by check and the measurements, the same on every process."""
    short: dict[str, int | None] = {"max_steps": ITERATIONS, "save_steps": ITERATIONS, "eval_steps": ITERATIONS + 1}
    short |= dict.fromkeys(
        ("role_order", "target_kl", "max_sampled_tokens")
    )  # with which some rows would not be trained
    rate = STEP_SIZE / math.sqrt(shape_of(cell).hidden)
    trial_cell = cell.replace(**short, learning_rate=rate, warmup_steps=0)
    trial, is_main = Trial(cell), processes().is_main_process
    with announced("loading the model and the rollout engine", is_main):
        train, validation, _ = load_problems(trial_cell, AutoTokenizer.from_pretrained(locate(cell)))
        problems = train[: ITERATIONS * cell.n_problems], validation[:1]
        trainer = make_trainer(trial_cell, folder, launch.replace(report_to="none"), [trial], problems=problems)
        trial.trainer = trainer
    activity = f"{ITERATIONS} iterations of {cell.n_problems} problems x {cell.num_generations} episodes, from random adapters,"
    with closing(trainer.engine), announced(activity, is_main):
        trial.run()
        of_all = gather_objects([check(trial) for check in CHECKS.values()])
    findings = [min(of_check, key=lambda finding: finding.holds) for of_check in zip(*of_all, strict=True)]
    return dict(zip(CHECKS, findings, strict=True)), measurements(trial)


def measurements(trial: Trial) -> dict[str, float]:
    """Return time and memory of the last iteration, and the training time of the cell at that rate."""
    last = trial.iterations[-1]
    rollout, update = last.seconds["rollout"], last.seconds["update"]
    sampled = sum(len(turn.completion_ids) for episode in last.episodes for turn in episode.turns)
    return {
        "rollout_seconds": rollout,
        "update_seconds": update,
        "sampled_tokens_per_second": sampled / rollout,
        "hours_of_training": trial.cell.max_steps * (rollout + update) / 3600,
        **{f"{phase}_peak_gib": max(gather_objects(trial.peaks[phase])) / GIB for phase in PHASES},
    }


# ---- printed


def run(cell: Cell, launch: Launch, planned: Mapping[str, int] | None = None) -> int:
    """Print the preflight, the findings and the measurements, on the first process only; return 1 if a check fails, else 0.

    `planned` are the bytes that the plan expects in each phase, printed with the measured ones. Raises ValueError or
    OSError if the cell cannot run.
    """
    is_main, widths = processes().is_main_process, (None, None, 60, 60)
    if is_main:
        lines = [
            (check.name, "STOP" if check.advice else "", check.status, check.advice)
            for check in preflight_checks(cell, launch)
        ]
        say(f"{cell.id} at {cell.scale}\n\n{tabulate(lines, maxcolwidths=widths, tablefmt='plain')}\n")
    preflight(cell, launch)
    with tempfile.TemporaryDirectory() as scratch:
        findings, measured = examine(cell, launch, gather_objects(scratch)[0])
        processes().wait_for_everyone()
    if is_main:
        rows = [(name, "pass" if holds else "FAIL", *rest) for name, (holds, *rest) in findings.items()]
        table = tabulate(rows, headers=("check", "result", "measured", "expected"), maxcolwidths=widths)
        memory_kind = "GPU memory in use" if torch.cuda.is_available() else "resident memory of a process"
        peaks = [f"{phase} {measured[f'{phase}_peak_gib']:.2f} GiB" for phase in PHASES]
        if planned:
            peaks = [f"{peak} (planned {planned[phase] / GIB:.2f})" for peak, phase in zip(peaks, PHASES, strict=True)]
        hours = measured["hours_of_training"]
        duration = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
        say(
            f"\n{table}\n\nThe last iteration took {measured['rollout_seconds']:.1f} s of rollout, at "
            f"{measured['sampled_tokens_per_second']:.0f} sampled tokens/s, and {measured['update_seconds']:.1f} s of update.\n"
            f"At that rate {cell.max_steps} iterations take {duration}. Validation is not "
            f"counted, and replies change in length during training.\nPeak {memory_kind}: {', '.join(peaks)}."
        )
    return 0 if all(finding.holds for finding in findings.values()) else 1
