"""Check that a trainer trains what it is configured to train, before it costs days of a GPU.

Two short iterations are run with the real model, engine and optimizer, and compared with plain computations of the same
numbers. The trainer is left as it was: it trains as if it had not been examined.

Not covered: several processes and sharding, the KL penalty, callbacks, and whether training improves anything.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tabulate import tabulate

from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.doctor.bench import on_bench
from multirole.doctor.checks import CHECKS, Case
from multirole.experiment.cell import Cell
from multirole.experiment.presets import is_tiny
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
    """Run every check on a trainer before its `train`.

    Args:
        task: where the rewards come from; the built-in tasks are also given answers with known rewards.
    """
    if trainer.accelerator.num_processes > 1 or trainer.is_sharded:
        raise ValueError(
            f"The doctor examines a single process without sharding, got {trainer.accelerator.num_processes} processes. Examine the "
            "same configuration on one process first."
        )
    with on_bench(trainer) as bench:
        try:
            case = Case.of(bench, task)
        except Exception as error:  # noqa: BLE001 (whatever stops an iteration is the finding)
            return [Finding("iteration", False, f"{type(error).__name__}: {error}", "two iterations without an error")]
        findings = []
        for name, check in CHECKS.items():
            try:
                findings.append(Finding(name, *check(case)))
            except Exception as error:  # noqa: BLE001
                findings.append(Finding(name, False, f"{type(error).__name__}: {error}", "no error"))
    return findings


def report(findings: list[Finding]) -> str:
    """One table of all findings."""
    rows = [(f.check, "pass" if f.holds else "FAIL", f.measured, f.expected) for f in findings]
    return tabulate(rows, headers=("check", "result", "measured", "expected"), maxcolwidths=(None, None, 60, 60))


def examiner(cell: Cell) -> Callable[[MultiRoleGRPOTrainer], None] | None:
    """What `run_cell` calls before a cell's training: `admit`, or nothing at a tiny scale, which costs less than the doctor."""
    return None if is_tiny(cell.scale) else partial(admit, task=cell.make_task())


def admit(trainer: MultiRoleGRPOTrainer, task: TaskLike | None = None) -> None:
    """Examine a trainer and raise RuntimeError if a check fails. Several processes are not examined, which is logged."""
    if trainer.accelerator.num_processes > 1 or trainer.is_sharded:
        logger.warning("The doctor does not examine several processes. Run `multirole doctor` on one process first.")
        return
    findings = examine(trainer, task)
    if not all(finding.holds for finding in findings):
        raise RuntimeError(f"The doctor found faults, so training was not started:\n{report(findings)}")
    logger.info("doctor: %d of %d checks pass", len(findings), len(findings))
