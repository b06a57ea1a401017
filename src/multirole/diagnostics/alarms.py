"""Training alarms: which role is breaking, and by which mechanism, before validation falls (paper sec 5 and A.6.2).

`Alarms` is given every iteration's rows of `roles.parquet`, with the signatures and the gradient metrics where a run has
them, and announces the conditions of `alarm_rules`; `AlarmCallback` acts on what is new. An alarm rings once per episode of
trouble: it is announced again only after `REARM` iterations in a row without its condition. One whose metrics are missing is
silent, and `not_evaluated` says so.
"""

import logging
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from transformers import TrainerControl, TrainerState, TrainingArguments

from multirole.core.hooks import Iteration, MultiRoleCallback
from multirole.diagnostics.alarm_rules import BASELINE, NEEDS, READ, TESTS, History

if TYPE_CHECKING:
    from multirole.core.trainer import MultiRoleGRPOTrainer

logger = logging.getLogger(__name__)

REARM = 3  # iterations
ACTIONS = ("log", "checkpoint", "stop")


class Alarms:
    """Every alarm of a run. `new` holds those of the last update, `log` all of them, as rows.

    A row has iteration, alarm, role, adapter, value, threshold and message. `policy` maps roles to adapters, `slots` to the
    number of slots in one stage (`Workflow.roles`).
    """

    def __init__(self, policy: dict[str, str], slots: dict[str, int]) -> None:
        self.history = History(policy, slots)
        self.new: list[dict] = []
        self.log: list[dict] = []
        self._quiet: dict[str, int] = {}  # ringing "alarm:role" -> iterations since its condition last held

    def update(self, iteration: int, roles: dict[str, dict[str, float]]) -> list[dict]:
        """Add one iteration (role -> metrics) and return what it announces. Iterations must ascend."""
        done = self.history.iterations
        if done and iteration <= done[-1]:
            raise ValueError(
                f"Iterations must ascend, got {iteration} after {done[-1]}. After a resume, call `replay` with the record's rows first."
            )
        self.history.add(iteration, roles)
        held = {}
        if len(done) > BASELINE:
            held = {f"{name}:{r.role}": (name, r) for name, test in TESTS.items() for r in test(self.history)}
        self.new = [
            {"iteration": iteration, "alarm": name, **reading._asdict()}
            for key, (name, reading) in held.items()
            if key not in self._quiet
        ]
        quiet = {key: 0 if key in held else n + 1 for key, n in self._quiet.items()}
        self._quiet = {key: n for key, n in quiet.items() if n < REARM} | dict.fromkeys(held, 0)
        self.log += self.new
        return self.new

    def replay(self, rows: Iterable[dict]) -> None:
        """Update with rows of `roles.parquet` in order of iteration: a resumed run's alarms from its own record."""
        for iteration, group in groupby(rows, key=lambda row: row["iteration"]):
            self.update(iteration, {row["role"]: {k: row[k] for k in row if k in READ} for row in group})

    def not_evaluated(self) -> dict[str, str]:
        """alarm -> why it could not ring so far."""
        history, reasons = self.history, {}
        for name, sets in NEEDS.items():
            if name.startswith("sp_role_capture") and not list(history.shared()):
                reasons[name] = "no adapter serves several roles"
            elif name in ("gradient_amplification", "sp_role_capture_frequency") and max(history.slots.values()) < 2:
                reasons[name] = "no role has several slots"
            elif not any(history.has(metrics) for metrics in sets):
                reasons[name] = "no " + ", nor ".join(" with ".join(metrics) for metrics in sets)
        return reasons


class AlarmCallback(MultiRoleCallback):
    """Updates the alarms after each iteration and acts once on every new one: "log" warns, "checkpoint" also saves, "stop" also
    ends the training.

    Pass it after `RoleDiagnostics`, whose metrics it reads, and on every process: the action must be the same on all.
    """

    def __init__(self, alarms: Alarms, action: str = "log") -> None:
        if action not in ACTIONS:
            raise ValueError(f"`action` must be one of {list(ACTIONS)}, got {action!r}.")
        self.alarms, self.action = alarms, action

    def on_iteration_end(self, trainer: "MultiRoleGRPOTrainer", iteration: Iteration) -> None:
        new = self.alarms.update(iteration.number, iteration.roles)
        for alarm in new if trainer.is_world_process_zero() else []:
            logger.warning("iteration %(iteration)d, %(alarm)s: %(message)s", alarm)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Iteration `state.global_step` has just ended."""
        if self.action != "log" and any(alarm["iteration"] == state.global_step for alarm in self.alarms.new):
            control.should_save = True
            control.should_training_stop |= self.action == "stop"
