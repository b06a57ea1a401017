"""The callback that hands what happens in a run to its `Recorder`."""

from pathlib import Path

from multirole import sandbox
from multirole.core.hooks import Iteration, MultiRoleCallback
from multirole.core.rows import Row
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.metrics import RoleDiagnostics
from multirole.experiment.record import N_INSPECTED, Recorder


class Recording(MultiRoleCallback):
    """Records iterations and evaluations. Pass it after the callbacks whose results it reads.

    `recorder` is None on all but the first of several processes.
    """

    def __init__(self, recorder: Recorder | None, diagnostics: RoleDiagnostics, alarms: Alarms) -> None:
        self.recorder, self.diagnostics, self.alarms = recorder, diagnostics, alarms
        self.grading_seconds = 0.0

    def on_rollout_end(self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> None:
        self.grading_seconds = sandbox.take_stats().seconds

    def on_iteration_end(self, trainer: MultiRoleGRPOTrainer, iteration: Iteration) -> None:
        if self.recorder is not None:
            self.recorder.add_iteration(
                iteration.number, iteration.episodes, trainer.args.num_generations, iteration.roles, self.alarms.new,
                self.diagnostics, iteration.seconds | {"grading": self.grading_seconds},
            )  # fmt: skip

    def on_episodes_evaluated(
        self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode], metrics: dict[str, float]
    ) -> None:  # fmt: skip
        rows = [Row(e, turn, trainer.policy[turn.role]) for e in episodes[:N_INSPECTED] for turn in e.turns]
        base = trainer.logprobs_of(rows, base=True)  # every process computes a share
        if self.recorder is not None:
            base_logprobs = {id(row.turn): logps for row, logps in zip(rows, base, strict=True)}
            self.recorder.add_evaluation(
                trainer.state.global_step, episodes, base_logprobs, trainer.processing_class.decode
            )


def restorable(recorder: Recorder | None, save_every: int) -> dict[int, tuple[float, Path]]:
    """step -> validation accuracy and adapters of the steps that a run has evaluated and, on its schedule, saved so far.

    Steps that were saved for another reason do not count: a resumed run would have others than an unbroken one.
    """
    found: dict[int, tuple[float, Path]] = {}
    outcomes: dict[int, list[bool]] = {}
    for row in recorder.tables["eval"] if recorder is not None else ():
        outcomes.setdefault(row["step"], []).append(row["correct"])
    for step, right in outcomes.items():
        folder = recorder.folder / "adapters" / f"step_{step:05d}" if recorder is not None else Path()
        if step % save_every == 0 and folder.is_dir():
            found[step] = sum(right) / len(right), folder
    return found
