"""Check that a trainer trains what it is configured to train, before it costs days of a GPU.

Three short iterations and an evaluation are run with the real model, engine and optimizer, and compared with plain computations
of the same numbers. The trainer is left as it was: it trains as if it had not been examined. Of several processes each examines
its own share, and all of them must agree. A base that FSDP2 shards is examined when training begins, where it is sharded.

Not covered: losses other than TRL's "grpo", callbacks, and whether training improves anything.
"""

import json
import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from multirole.core.distributed import gather_objects, processes
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.doctor.bench import on_bench
from multirole.doctor.checks import CHECKS, Case
from multirole.experiment.cell import Cell
from multirole.experiment.checks import preflight
from multirole.experiment.launch import ONE_PROCESS, Launch
from multirole.experiment.machine import look
from multirole.experiment.presets import is_tiny
from multirole.experiment.progress import announced, say
from multirole.experiment.trainer import make_trainer
from multirole.tasks import TaskLike

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was measured, and what was expected."""

    check: str
    holds: bool
    measured: str
    expected: str


def examine(trainer: MultiRoleGRPOTrainer, task: TaskLike | None = None) -> list[Finding]:
    """Run every check on a trainer before its `train`; every process gets the same findings.

    Args:
        task: where the rewards come from; the built-in tasks are also given answers with known rewards.

    A trainer whose base is to be sharded cannot train afterwards; `admit` examines it within its training.
    """
    if trainer.is_sharded and not isinstance(trainer.model, FSDPModule):
        found: list[Finding] = []

        def work() -> None:
            found.extend(examine(trainer, task))
            raise Examined

        trainer.callback_handler.callbacks = [AtStart(work)]
        with suppress(Examined):
            trainer.train()
        return found
    is_alone = trainer.accelerator.num_processes == 1
    with on_bench(trainer) as bench:
        try:
            case = Case.of(bench, task)
        except Exception as error:
            if not is_alone:  # the others wait for this process: it must end
                raise
            return [
                Finding("iteration", False, f"{type(error).__name__}: {error}", "three iterations without an error")
            ]
        findings = []
        for name, check in CHECKS.items():
            try:
                findings.append(Finding(name, *check(case)))
            except Exception as error:  # noqa: BLE001 (whatever stops a check is its finding)
                findings.append(Finding(name, False, f"{type(error).__name__}: {error}", "no error"))
    gathered = zip(*gather_objects(findings), strict=True)
    return [next((one for one in of_all if not one.holds), of_all[0]) for of_all in gathered]


class AtStart(TrainerCallback):
    """Calls `work` when training begins."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Call it."""
        self.work()


class Examined(Exception):
    """Ends a training that was begun for an examination."""


def report(findings: list[Finding]) -> str:
    """One table of all findings."""
    rows = [(f.check, "pass" if f.holds else "FAIL", f.measured, f.expected) for f in findings]
    return tabulate(rows, headers=("check", "result", "measured", "expected"), maxcolwidths=(None, None, 60, 60))


def examiner(cell: Cell, launch: Launch = ONE_PROCESS) -> Callable[[MultiRoleGRPOTrainer], None] | None:
    """What `run_cell` calls before a cell's training: `admit`, or nothing at a tiny scale, which costs less than the doctor."""
    if is_tiny(cell.scale) or launch.doctor == "off":
        return None
    return lambda trainer: admit(trainer, cell.make_task(), refuses=launch.doctor == "refuse")


def admit(trainer: MultiRoleGRPOTrainer, task: TaskLike | None = None, refuses: bool = True) -> None:
    """Examine a trainer; raise RuntimeError, or only warn, if a check fails. A sharded model is examined when it trains."""
    if trainer.is_sharded and not isinstance(trainer.model, FSDPModule):

        def work() -> None:
            with announced("the doctor's examination of the sharded model", trainer.accelerator.is_main_process):
                admit(trainer, task, refuses)

        trainer.callback_handler.callbacks.insert(0, AtStart(work))
        return
    findings = examine(trainer, task)
    faults = [finding for finding in findings if not finding.holds]
    logger.info("doctor: %d of %d checks pass", len(findings) - len(faults), len(findings))
    if faults and refuses:
        raise RuntimeError(
            f"The doctor found faults, so training was not started:\n{report(findings)}\nWrite doctor='warn' to train all the same."
        )
    if faults:
        logger.warning("The doctor found faults:\n%s", report(faults))


def run(cell: Cell, launch: Launch, json_file: Path | None = None) -> int:
    """Print the preflight and the findings of every check, from the first of several processes; 1 where a check fails.

    ValueError or OSError where the cell cannot run.
    """
    is_main, found = processes().is_main_process, look(cell, launch)
    rows = [(line.what, "STOP" if line.stops else "", line.found, line.advice) for line in found]
    if is_main:
        say(f"{cell.id} at {cell.scale}\n\n{tabulate(rows, maxcolwidths=(None, None, 60, 60), tablefmt='plain')}\n")
    preflight(cell, launch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, folder, launch)
        try:
            findings = examine(trainer, cell.make_task())
        finally:
            trainer.engine.close()
    if is_main:
        say(report(findings))
    if is_main and json_file:
        lines, checks = [line._asdict() for line in found], [asdict(finding) for finding in findings]
        json_file.write_text(json.dumps({"preflight": lines, "checks": checks}, indent=2) + "\n")
    return 0 if all(finding.holds for finding in findings) else 1
