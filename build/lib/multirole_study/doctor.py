"""`multirole doctor`: two real iterations of a cell on this machine, what they show of its parts, and what they cost.

The cell's own trainer, engine and optimizer run at the cell's batch and lengths, and save a checkpoint. Three things are not the
cell's, so that each check has something to see: every adapter starts from random weights of its own (fresh ones equal the base,
and a mix-up of adapters would not show), every episode is given an advantage, and the learning rate is large. The first iteration
is watched in detail, the second is measured.

Whether engine and trainer agree is not judged by a fixed number, since both round: their difference must be small against the
one that a fault would make (another adapter, old weights) on the same rows.
"""

import hashlib
import itertools
import json
import math
import resource
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from tabulate import tabulate
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from multirole.core.distributed import gather_objects, local, processes
from multirole.core.hooks import Iteration, MultiRoleCallback, OptimizerStep
from multirole.core.rows import Row, Steps
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode, Problem
from multirole.diagnostics.gradient_parts import weights_of
from multirole_study.experiment.announce import announced, say
from multirole_study.experiment.base_models import locate, shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import make_trainer
from multirole_study.experiment.hardware import GIB, preflight_checks
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.preflight import load_problems, preflight
from multirole_study.tasks.gym import Gym

ITERATIONS = 2
PHASES = ("rollout", "update")
NOISE, STEP = 0.15, 0.05
"""What an adapter adds to a module's output at first, as a part of that; and the learning rate times the root of the model's width.
Both move log-probs by far more than rounding to bfloat16 does, and leave the model able to write."""
SHARE = 0.25
"""The log-probs of engine and trainer may differ by this part of what a fault would make."""
FEW = 8
"""Rows of a role on which that is measured."""
CERTAIN = -1e-3
"""Tokens of a larger log-prob may have a gradient that rounds to zero."""


class Finding(NamedTuple):
    """The result of one check."""

    holds: bool
    measured: str
    expected: str


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes, as far as this process holds it."""
    values = local(tensor.detach()).cpu().reshape(-1)
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def digests(trainer: MultiRoleGRPOTrainer, is_base: bool = False) -> dict[str, str]:
    """name -> hash of the tensors of all adapters, or of the base."""
    for module in trainer.peft_model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    prefix, named = trainer.peft_model.base_model.prefix, trainer.peft_model.named_parameters()
    return {name: digest(p) for name, p in named if (prefix not in name) == is_base}


def trained_tensors(trainer: MultiRoleGRPOTrainer) -> list[Tensor]:
    """All adapters, as far as this process holds them; shares their memory."""
    return [local(p.detach()) for name in trainer.adapters for p in weights_of(trainer.peft_model, name)]


def saved_tensors(trainer: MultiRoleGRPOTrainer) -> list[Tensor]:
    """All adapters and the optimizer's moments, as far as this process holds them; shares their memory."""
    states = trainer.optimizer.state.values()
    return trained_tensors(trainer) + [local(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]


@torch.no_grad()
def randomise(trainer: MultiRoleGRPOTrainer) -> None:
    """Give each adapter random weights of its own, the same on every process."""
    for i, name in enumerate(trainer.adapters):
        generator = torch.Generator().manual_seed(i)
        for layer in [module for module in trainer.peft_model.modules() if isinstance(module, LoraLayer)]:
            weight, base = layer.lora_B[name].weight, layer.base_layer.weight
            inner = math.sqrt(layer.r[name] / 3)  # |A x| for an x of unit variance: A is uniform, as PEFT makes it
            std = NOISE * base.norm().item() / (math.sqrt(len(base)) * layer.scaling[name] * inner)
            weight.copy_(std * torch.randn(weight.shape, generator=generator))


class PhasePeak:
    """The most memory of this process from its making on: on a GPU all that is in use, torch's cache included, else in RAM.

    The GPU's is what is in use at the start, and by how much torch's reserved memory has grown at most since; where RAM's peak
    cannot be reset (`/proc/self/clear_refs`), it is that of the whole process.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.beside_torch = memory_in_use() - torch.cuda.memory_reserved()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the resident peak, see proc(5)

    def bytes(self) -> int:
        """Bytes at most until now."""
        if torch.cuda.is_available():
            return max(self.beside_torch + torch.cuda.max_memory_reserved(), memory_in_use())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_in_use() -> int:
    """Bytes in use on the GPU, torch's cache included."""
    free, total = torch.cuda.mem_get_info()
    return total - free


class Trial(MultiRoleCallback):
    """Records two iterations of a trainer; the second with nothing that takes time."""

    trainer: MultiRoleGRPOTrainer

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.iterations: list[Iteration] = []
        self.gaps: list[dict[int, float]] = []
        """Of each iteration: row -> mean |log-prob of the trainer - of the engine|, of each adapter's first step."""
        self.trained: list[int] = []
        """Rows that the first iteration trained, in its micro-batches."""
        self.lost = self.others = 0
        self.peaks = dict.fromkeys(PHASES, 0)
        """Bytes at most of each phase, over the iterations."""
        self.moved: list[tuple[int, int, int]] = []
        """Of each step of the first iteration: tensors of its own adapter, those that moved, and those of others that moved."""
        self.reached = torch.zeros(0)

    def run(self) -> None:
        """Train, lose what was saved, load it, and put back the weights of the start."""
        randomise(self.trainer)
        self.phase = PhasePeak()
        self.trainer.train()
        now = digests(self.trainer, is_base=True)
        self.changed = sum(now[name] != value for name, value in self.base.items())
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
        """Take the peak of a phase; the next one begins."""
        self.peaks[phase] = max(self.peaks[phase], self.phase.bytes())
        self.phase = PhasePeak()

    def on_rollout_end(self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> None:
        self.end_phase("rollout")
        if not self.iterations:  # FSDP2 has sharded the model only now
            self.base = digests(trainer, is_base=True)
            self.start = [tensor.cpu().clone() for tensor in trained_tensors(trainer)]

    def on_rows(self, trainer: MultiRoleGRPOTrainer, rows: list[Row]) -> list[Row]:
        self.phase = PhasePeak()  # the engine is asleep now
        for row in rows:
            row.advantage = (-1.0) ** row.episode.index
        return rows

    def on_update_begin(self, trainer: MultiRoleGRPOTrainer, rows: list[Row], steps: Steps) -> None:
        self.places = {id(row): place for place, row in enumerate(rows)}
        self.stepped: set[str] = set()
        self.gaps.append({})
        if not self.iterations:
            self.held = digests(trainer)
            decoder = trainer.peft_model.get_base_model().base_model
            self.handle = decoder.register_forward_hook(self.on_forward)

    def on_forward(self, _: object, __: object, output: Any) -> None:
        """Remember at which positions (N, width) the decoder's outputs get a gradient."""
        hidden = output.last_hidden_state
        self.reached = torch.zeros(hidden.shape[:2], dtype=torch.bool)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: setattr(self, "reached", (grad != 0).any(-1).cpu()))

    def on_micro_batch(
        self, trainer: MultiRoleGRPOTrainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
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
        due = (~mask.bool() | is_first_step & ~is_clipped & (sampled < CERTAIN)).cpu()
        for i, row in enumerate(rows):
            start, n = len(row.turn.prompt_ids) - 1, len(row.turn.completion_ids)  # rows lie at the left edge
            reached = self.reached[i, start : start + n]
            self.lost += int((due[i, :n] & ~reached).sum())
            self.others += int(self.reached[i].sum() - reached.sum())

    def on_adapter_step(self, trainer: MultiRoleGRPOTrainer, step: OptimizerStep) -> None:
        self.stepped.add(step.adapter)
        if not self.iterations:
            before, self.held = self.held, digests(trainer)
            moved = {name for name, value in self.held.items() if value != before[name]}
            owners = {trainer.policy[row.turn.role] for row in step.rows}
            adapter_tensors = {name for name in before if any(f".{owner}." in name for owner in owners)}
            self.moved.append((len(adapter_tensors), len(adapter_tensors & moved), len(moved - adapter_tensors)))

    def on_update_end(self, trainer: MultiRoleGRPOTrainer, rows: list[Row]) -> None:
        self.end_phase("update")
        self.handle.remove()

    def on_iteration_end(self, trainer: MultiRoleGRPOTrainer, iteration: Iteration) -> None:
        self.iterations.append(iteration)

    def judge(self, at: int, fault: Callable[[list[Row]], float], fault_name: str) -> Finding:
        """Compare the gaps of an iteration with what a fault would make of them, role by role."""
        rows, distances = self.iterations[at].rows, []
        gaps = dict(itertools.chain.from_iterable(part.items() for part in gather_objects(self.gaps[at])))
        for role in self.trainer.policy:
            role_places = [place for place in sorted(gaps) if rows[place].turn.role == role]
            if role_places:
                gap, due = (
                    sum(gaps[place] for place in role_places) / len(role_places),
                    fault([rows[place] for place in role_places[:FEW]]),
                )
                distances.append((gap / max(due, 1e-9), gap, due, role))
        part, gap, due, role = max(distances)
        measured = f"log-probs of engine and trainer differ by {gap:.1e} (mean of {role})"
        return Finding(part <= SHARE, measured, f"at most {SHARE * due:.1e}; {fault_name} would make {due:.1e}")

    def distance(self, rows: Iterable[Row], is_base: bool = False) -> float:
        """Mean |log-prob of the trainer - of the engine| of rows, under the weights of the start."""
        rows = list(rows)
        pairs = zip(self.trainer.logprobs_of(rows, is_base), rows, strict=True)
        gaps = [(logps - torch.tensor(row.turn.logprobs)).abs().mean().item() for logps, row in pairs]
        return sum(gaps) / len(gaps)


# ---- checks


def engine(trial: Trial) -> Finding:
    """The engine's log-probs are the trainer's at the first step of every adapter."""

    def others(rows: list[Row]) -> float:
        names = [name for name in trial.trainer.adapters if name != rows[0].adapter]
        distances = [trial.distance(replace(row, adapter=name) for row in rows) for name in names]
        return min([*distances, trial.distance(rows, is_base=True)])

    return trial.judge(0, others, "another adapter or none")


def published_weights(trial: Trial) -> Finding:
    """The second iteration is sampled from the weights after the first one, and not from those before it."""
    return trial.judge(1, trial.distance, "the weights before the update")


def masks(trial: Trial) -> Finding:
    """Every turn is trained once, and the loss reaches the outputs that predict its completion and no others."""
    seen = gather_objects((trial.trained, trial.lost, trial.others))
    lost, others = sum(counts[1] for counts in seen), sum(counts[2] for counts in seen)
    first = trial.iterations[0]
    sampled = Counter(id(turn) for episode in first.episodes for turn in episode.turns)
    sampled.subtract(id(first.rows[place].turn) for places, _, _ in seen for place in places)
    wrong = sum(times != 0 for times in sampled.values())
    measured = (
        f"{lost} completion tokens have no gradient, {others} other tokens have one; "
        f"{wrong} of {len(sampled)} turns are not trained exactly once"
    )
    return Finding(not (lost or others or wrong), measured, "0, 0 and 0")


def adapters(trial: Trial) -> Finding:
    """A step on the rows of a role moves the tensors of the role's adapter and no other tensor."""
    n_moved, n_own, others = (sum(column) for column in zip(*trial.moved, strict=True))
    measured = (
        f"{len(trial.moved)} steps moved {n_own} of {n_moved} tensors of their own adapters, {others} of other adapters; "
        f"{trial.changed} of the base have changed"
    )
    return Finding(n_own == n_moved and not others and not trial.changed, measured, "all, 0 and 0")


def grading(trial: Trial) -> Finding:
    """Right and wrong answers of a built-in task are told apart here, in the sandbox where it is code."""
    task = trial.cell.make_task()
    if isinstance(task, Gym):
        problem = task.problems("validation", 1)[0]
        right, wrong = (f"\\boxed{{{answer}}}" for answer in (problem.reference["answer"], "no answer"))
    elif task.name in ANSWERS:
        reference, right, wrong = ANSWERS[task.name]
        problem = Problem("doctor", task.name, "", reference)
    else:
        return Finding(True, "no answers to a task of your own are known", "nothing")
    rewards = task.score([problem] * 3, [right, wrong, ""])
    verdicts = [bool(reward.is_correct) for reward in rewards]
    due = [True, False, False]
    return Finding(verdicts == due, f"a right, a wrong and no answer are graded {verdicts}", str(due))


def checkpoint(trial: Trial) -> Finding:
    """A checkpoint gives back every adapter and the optimizer's moments, bit for bit."""
    differ = sum(before != after for before, after in zip(trial.saved, trial.loaded, strict=True))
    return Finding(differ == 0, f"{differ} of {len(trial.saved)} tensors differ after loading", "0")


CHECKS: dict[str, Callable[[Trial], Finding]] = {
    check.__name__.replace("_", " "): check
    for check in (engine, published_weights, masks, adapters, grading, checkpoint)
}
FENCE = "```python\n%s\n```"
ANSWERS: dict[str, tuple[object, str, str]] = {
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
"""name of a built-in task -> a reference, a right answer and a wrong one."""


# ---- the command


def examine(cell: Cell, launch: Launch, folder: str) -> tuple[dict[str, Finding], dict[str, float]]:
    """Train two iterations in a folder; every process gets the same findings by check, and measurements."""
    short = {"iterations": ITERATIONS, "save_every": ITERATIONS, "eval_every": ITERATIONS + 1}
    rate = STEP / math.sqrt(shape_of(cell).hidden)
    trial_cell = cell.replace(**short, learning_rate=rate, warmup_iterations=0)
    trial, is_main = Trial(cell), processes().is_main_process
    with announced("loading the model and the rollout engine", is_main):
        train, validation, _ = load_problems(trial_cell, AutoTokenizer.from_pretrained(locate(cell)))
        few = train[: ITERATIONS * cell.n_problems], validation[:1]
        trainer = make_trainer(trial_cell, folder, launch.replace(report_to="none"), [trial], problems=few)
        trial.trainer = trainer
    activity = (
        f"{ITERATIONS} iterations of {cell.n_problems} problems x {cell.n_episodes} episodes, from random adapters,"
    )
    with closing(trainer.engine), announced(activity, is_main):
        trial.run()
        of_all = gather_objects([check(trial) for check in CHECKS.values()])
    findings = [min(of_check, key=lambda finding: finding.holds) for of_check in zip(*of_all, strict=True)]
    return dict(zip(CHECKS, findings, strict=True)), measurements(trial)


def measurements(trial: Trial) -> dict[str, float]:
    """What the last iteration has cost, and the cell's training at that rate."""
    last = trial.iterations[-1]
    rollout, update = last.seconds["rollout"], last.seconds["update"]
    sampled = sum(len(turn.completion_ids) for episode in last.episodes for turn in episode.turns)
    return {
        "rollout_seconds": rollout,
        "update_seconds": update,
        "sampled_tokens_per_second": sampled / rollout,
        "hours_of_training": trial.cell.iterations * (rollout + update) / 3600,
        **{f"{phase}_peak_gib": max(gather_objects(trial.peaks[phase])) / GIB for phase in PHASES},
    }


def run(cell: Cell, launch: Launch, planned: Mapping[str, int] | None = None) -> int:
    """Print the preflight, the findings and the measurements, from the first of several processes; 1 where a check fails.

    `planned` are the bytes that the plan expects in each phase, shown beside the measured ones. ValueError or OSError where the cell cannot run.
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
        where = "GPU memory in use" if torch.cuda.is_available() else "resident memory of a process"
        peaks = [f"{phase} {measured[f'{phase}_peak_gib']:.2f} GiB" for phase in PHASES]
        if planned:
            peaks = [f"{peak} (planned {planned[phase] / GIB:.2f})" for peak, phase in zip(peaks, PHASES, strict=True)]
        say(
            f"\n{table}\n\nThe last iteration took {measured['rollout_seconds']:.1f} s of rollout, at "
            f"{measured['sampled_tokens_per_second']:.0f} sampled tokens/s, and {measured['update_seconds']:.1f} s of update.\n"
            f"At that rate {cell.iterations} iterations take {measured['hours_of_training']:.2f} hours. Validation is not "
            f"counted, and replies change in length while they are trained.\nPeak {where}: {', '.join(peaks)}."
        )
    return 0 if all(finding.holds for finding in findings.values()) else 1
