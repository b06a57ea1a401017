"""Does a trainer train what its cell says? Three short training steps on a bench, and 16 checks of what they did.

A check reads what the trainer, the engine and the optimizer really did, and compares it with a plain computation of its
own. Nothing is written, and a trainer that was examined trains as if it had not been.

Not covered: several processes, sharding, the remedies of `bench.NEUTRAL`, and whether training learns anything.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.doctor import rollout_checks, update_checks
from multirole.doctor.bench import on_bench
from multirole.doctor.case import Case, Verdict, run_trials

logger = logging.getLogger(__name__)

CHECKS: dict[str, Callable[[Case], Verdict]] = {
    "episodes": rollout_checks.episodes,
    "adapter isolation": update_checks.adapter_isolation,
    "frozen base": update_checks.frozen_base,
    "mask ownership": update_checks.mask_ownership,
    "padding invariance": update_checks.padding_invariance,
    "loss formula": update_checks.loss_formula,
    "engine = trainer": rollout_checks.engine_agrees,
    "update reaches engine": rollout_checks.update_reaches_engine,
    "temperature": rollout_checks.temperature,
    "ratio at first step": update_checks.ratio,
    "advantages": rollout_checks.advantages,
    "optimizer": update_checks.optimizer,
    "ledger": update_checks.ledger,
    "seeds": rollout_checks.seeds,
    "reward": rollout_checks.reward,
    "sandbox": rollout_checks.sandbox_holds,
}
"""In the order of a report; "sandbox" is for code alone."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    holds: bool
    proof: str

    def line(self) -> str:
        return f"{'PASS' if self.holds else 'FAIL'}  {self.check:<23}{self.proof}"


def examine(trainer: MultiRoleGRPOTrainer) -> list[Finding]:
    """Every check of a trainer that does not train yet; it is left as it was."""
    if trainer.accelerator.num_processes > 1 or trainer.is_sharded:
        raise ValueError(
            f"{trainer.accelerator.num_processes} processes, sharding={trainer.launch.sharding!r}: the doctor examines one whole "
            "process. Write n_processes=1 and sharding='none' to examine the same cell."
        )
    with on_bench(trainer) as bench:
        try:
            case = run_trials(bench)
        except Exception as error:  # noqa: BLE001 (whatever breaks a step is what was found)
            return [_broken("training step", error)]
        checks = {name: check for name, check in CHECKS.items() if name != "sandbox" or bench.cell.task == "code"}
        return [_look(name, check, case) for name, check in checks.items()]


def admit(trainer: MultiRoleGRPOTrainer) -> None:
    """Log what the doctor finds; RuntimeError where a check fails: the run would train something else than its cell."""
    findings = examine(trainer)
    for finding in findings:
        logger.info("doctor: %s", finding.line())
    if failed := [finding for finding in findings if not finding.holds]:
        raise RuntimeError(
            f"The doctor found {trainer.cell.id} unfit to train:\n" + "\n".join(finding.line() for finding in failed)
        )


def _look(name: str, check: Callable[[Case], Verdict], case: Case) -> Finding:
    try:
        return Finding(name, *check(case))
    except Exception as error:  # noqa: BLE001
        return _broken(name, error)


def _broken(name: str, error: Exception) -> Finding:
    return Finding(name, False, f"{type(error).__name__}: {error}")
