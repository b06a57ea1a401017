"""Count the ticks of the learning-rate schedule: iterations, or update calls as in the authors' released code.

The released code steps its one scheduler after each `update_actor` call, that is once per adapter and iteration (verl v0.6.1,
`workers/fsdp_workers.py`). Shared-Policy makes one call per iteration, Isolated-Policy one per role type: two on Voting and Eval-Opt, three on
Orch-Workers. What the rate was after the warm-up is not known, because verl's fork and the logs of the runs are not public. docs/deviations.md lists the
readings, the pair of `lr_clock` and `lr_schedule` of each, and its evidence. `preset="released_code"` takes one of them.
"""

from dataclasses import dataclass, field

from torch.optim.lr_scheduler import LambdaLR

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.update.rows import Row, Steps


@dataclass
class UpdateCallClock(MultiRoleCallback):
    """Callback that makes the schedule tick once per update call, that is per adapter and iteration; TRL's ticks once per iteration.

    Args:
        is_wrapped: evaluate the schedule's formula beyond the run's number of iterations, where a cosine rises again. By default the
            rate keeps the schedule's final value.
    """

    is_wrapped: bool = False
    calls: int = field(default=0, init=False, compare=False)  # of this iteration so far

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        self.calls = 0

    def on_learning_rate(self, trainer: Trainer, adapter: str, lr: float) -> float:
        schedule = trainer.lr_scheduler
        if not isinstance(schedule, LambdaLR):
            raise TypeError(
                f"A clock per update call needs a schedule that is a function of the step, got a {type(schedule).__name__}. Use "
                "`lr_scheduler_type='cosine'`, 'linear' or 'constant_with_warmup'."
            )
        tick = trainer.state.global_step * len(trainer.adapters) + self.calls
        self.calls += 1
        if not self.is_wrapped:
            tick = min(tick, trainer.state.max_steps)
        return float(schedule.base_lrs[0]) * schedule.lr_lambdas[0](tick)
