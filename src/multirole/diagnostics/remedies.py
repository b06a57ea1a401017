"""Remedies for roles that break one another: callbacks that change advantages, gradients or weights.

A KL penalty to the base is `beta` or `role_beta` of `MultiRoleGRPOConfig`. Pass remedies after `RoleDiagnostics`.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from multirole.core.advantages import group_advantages
from multirole.core.distributed import all_reduce, gather_objects, processes
from multirole.core.gradients import Part
from multirole.core.hooks import Iteration, MultiRoleCallback
from multirole.core.rows import Row, Steps
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Episode
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.gradients import load_vectors, save_vectors

logger = logging.getLogger(__name__)

EPS = 1e-8


class ScaledRoles(MultiRoleCallback):
    """Multiplies the parts of a gradient.

    Args:
        balance: on an adapter of several roles, each role's part is multiplied by (mean norm / its norm) ** balance; 1 makes
            them equally long.
        slot_scaling: the part of a role with N slots is multiplied by N ** -slot_scaling. AdamW undoes a constant factor on
            an adapter that the role has for itself.
    """

    def __init__(self, balance: float = 0.0, slot_scaling: float = 0.0) -> None:
        self.balance, self.slot_scaling = balance, slot_scaling

    def on_gradient_parts(
        self, trainer: MultiRoleGRPOTrainer, adapter: str, parts: list[Part], gradients: Tensor
    ) -> None:  # fmt: skip
        roles = list(dict.fromkeys(role for role, _ in parts))
        sums = [reduce(torch.add, [gradients[i] for i, part in enumerate(parts) if part[0] == role]) for role in roles]
        squares = torch.stack([whole.square().sum() for whole in sums])
        if trainer.is_sharded:
            all_reduce([squares])
        norms = dict(zip(roles, squares.sqrt().tolist(), strict=True))
        positive = [norm for norm in norms.values() if norm > 0]
        mean = sum(positive) / max(1, len(positive))
        balance = {role: (mean / norm) ** self.balance if norm > 0 else 1.0 for role, norm in norms.items()}
        factors = [balance[role] * trainer.workflow.roles[role] ** -self.slot_scaling for role, _ in parts]
        gradients.mul_(gradients.new_tensor(factors)[:, None])


class CoherencePenalty(MultiRoleCallback):
    """Takes away part of an adapter's gradient where it repeats its own running mean.

    The gradient is multiplied by max(`FLOOR`, 1 - penalty x cosine), the cosine cut to [0, 1]. The mean starts at the adapter's
    first gradient, whose cosine with itself is 1.
    """

    FLOOR = 0.5
    WINDOW = 128
    """Optimizer steps that the running mean covers."""

    def __init__(self, penalty: float) -> None:
        self.penalty, self.is_sharded = penalty, False
        self.averages: dict[str, Tensor] = {}

    def on_gradient(self, trainer: MultiRoleGRPOTrainer, adapter: str, gradient: Tensor) -> Tensor:
        self.is_sharded = trainer.is_sharded
        average = self.averages.get(adapter, gradient).to(gradient.device)
        scaled = gradient * self.factor(gradient, average)
        self.averages[adapter] = torch.lerp(scaled, average, 1.0 - 1.0 / self.WINDOW)
        return scaled

    def factor(self, gradient: Tensor, average: Tensor) -> float:
        """What a gradient (n,) is multiplied by, given its running mean (n,)."""
        products = torch.stack([gradient @ average, gradient @ gradient, average @ average])
        if self.is_sharded:
            all_reduce([products])
        inner, own, its = products.tolist()
        cosine = inner / (own**0.5 * its**0.5 + EPS)
        return max(self.FLOOR, 1.0 - self.penalty * min(max(cosine, 0.0), 1.0))

    def save_state(self, folder: Path) -> None:
        save_vectors(self.averages, folder, "averages", self.is_sharded)

    def load_state(self, folder: Path) -> None:
        self.averages = load_vectors(folder, "averages")


class ProcessReward(MultiRoleCallback):
    """Adds a second advantage: whether the turn itself was right, against its (problem, role, round) group.

    Args:
        weight: of the second advantage.
        judge: sets `is_right` of the turns of scored episodes; turns that it leaves at None get nothing.
    """

    def __init__(self, weight: float, judge: Callable[[list[Episode]], None]) -> None:
        self.weight, self.judge = weight, judge

    def on_rollout_end(self, trainer: MultiRoleGRPOTrainer, episodes: list[Episode]) -> None:
        rank, size, n = processes().process_index, processes().num_processes, len(episodes)
        own = episodes[n * rank // size : n * (rank + 1) // size]
        self.judge(own)
        judged = gather_objects([[turn.is_right for turn in episode.turns] for episode in own])
        for episode, is_right in zip(episodes, [flags for part in judged for flags in part], strict=True):
            for turn, flag in zip(episode.turns, is_right, strict=True):
                turn.is_right = flag

    def on_rows(self, trainer: MultiRoleGRPOTrainer, rows: list[Row]) -> list[Row]:
        for row, advantage in zip(rows, process_advantages(rows, trainer.args.num_generations), strict=True):
            row.advantage = row.advantage + self.weight * advantage
        return rows


def process_advantages(rows: list[Row], n_episodes: int) -> list[float]:
    """Whether each row's own turn was right, against its (problem, role, round) group.

    0 for turns that nobody can judge and for groups of one.
    """
    known = [i for i, row in enumerate(rows) if row.turn.is_right is not None]
    groups = [(*rows[i].episode.group(n_episodes), rows[i].turn.role, rows[i].turn.round) for i in known]
    values = group_advantages([float(bool(rows[i].turn.is_right)) for i in known], groups)
    sizes, advantages = Counter(groups), [0.0] * len(rows)
    for i, group, value in zip(known, groups, values, strict=True):
        advantages[i] = value if sizes[group] > 1 else 0.0
    return advantages


class Rollback(MultiRoleCallback):
    """After an iteration with a new alarm, the adapters return to the best evaluated and saved step, AdamW's moments are
    cleared, and the learning rate is multiplied by `rate`. Where nothing has been evaluated and saved yet, nothing happens.

    Pass it after `AlarmCallback`.

    Args:
        restorable: step -> (validation accuracy, folder of its adapters) of the steps that can be returned to.
        restore: loads the adapters of such a folder into the trainer's model.
    """

    def __init__(
        self, alarms: Alarms, rate: float, restorable: Callable[[], dict[int, tuple[float, Path]]],
        restore: Callable[[MultiRoleGRPOTrainer, Path], None],
    ) -> None:  # fmt: skip
        self.alarms, self.rate, self.restorable, self.restore = alarms, rate, restorable, restore

    def on_update_begin(self, trainer: MultiRoleGRPOTrainer, rows: list[Row], steps: Steps) -> None:
        """What rollbacks have left of the learning rate, derived from the record so that a resumed run has the same."""
        if not self.alarms.log:
            return
        first = min(self._restorable(), default=math.inf)
        alarmed = {alarm["iteration"] for alarm in self.alarms.log if alarm["iteration"] > first}
        trainer.lr_scale = self.rate ** len(alarmed)

    def on_iteration_end(self, trainer: MultiRoleGRPOTrainer, iteration: Iteration) -> None:
        steps = self._restorable() if self.alarms.new else {}
        if steps:
            best = max(steps, key=lambda step: (steps[step][0], -step))  # the earlier of equals
            self.restore(trainer, steps[best][1])
            trainer.optimizer.state.clear()
            logger.warning("rolled back to the adapters of iteration %d; learning rate times %g", best, self.rate)

    def _restorable(self) -> dict[int, tuple[float, Path]]:
        return gather_objects(self.restorable())[0]  # the first process has the record
