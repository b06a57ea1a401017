"""Play the episodes of the next iterations in a background thread while the update runs (`max_staleness`).

Version v of the adapters is their weights after v iterations. Iteration n, counted from 0, is trained on episodes that were played with
version max(first, n - k), where k is `max_staleness` and `first` is the iteration that this process began with. The order is fixed: a
slow engine makes the trainer wait, but makes no row older and changes no result. All turns of an episode have one version.

The thread plays one iteration after another and makes all calls to the engine. It never reads weights that the update moves: between
two updates the adapters are copied, and the thread publishes the copy, as a model that shares the frozen base with the trainer's.

A checkpoint holds no episodes. Those in flight belong to iterations that are not trained yet: a resumed run plays them again, from the
same seeds, with the checkpoint's adapters. So each problem is trained as often as in an uninterrupted run, but the first k iterations after a
resume have newer rows than they would have had.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from multirole.rollout.rollout import Attempt, RolloutStopped
from multirole.types import Episode
from multirole.update.rows import Row

Play = Callable[[PeftModel, int, list[Attempt], int], list[Episode]]
"""`play(model, version, attempts, iteration)` returns the episodes, sampled with the adapters of `model`."""


def plays_during_update(engine: Any) -> bool:
    """Return an engine's optional attribute `plays_during_update`: whether it samples, undisturbed, while the trainer computes.

    It must keep published weights apart from the trainer's, and must not need the memory that `sleep` gives to the update.
    """
    return getattr(engine, "plays_during_update", False)


def copy_with_shared_base(model: PeftModel) -> PeftModel:
    """Copy a model. Parameters that are frozen are shared; those that require a gradient are copied, in the same order."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


class RolloutsAhead:
    """Plays iterations in order in a background thread, at most `max_staleness` of them ahead of the one that is trained.

    Args:
        model: the trainer's, with a gradient required of all adapters that are trained, and of nothing else.
        play: called in the thread.
        attempts_of: the attempts of an iteration; none after the last one. Called in the caller's thread.
        max_staleness: largest number of updates between the adapters that sample a row and those that train it.
    """

    def __init__(
        self, model: PeftModel, play: Play, attempts_of: Callable[[int], list[Attempt]], max_staleness: int
    ) -> None:  # fmt: skip
        self.play, self.attempts_of, self.max_staleness = play, attempts_of, max_staleness
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.copy = copy_with_shared_base(model)
        self.copied_parameters = [p for p in self.copy.parameters() if p.requires_grad]
        self.thread = ThreadPoolExecutor(1, "rollouts-ahead")
        self.pending: dict[int, Future[list[Episode]]] = {}
        self.is_stopped, self.is_broken = Event(), False

    def take(self, iteration: int) -> list[Episode]:
        """Return the episodes of an iteration, and submit the next ones, which are played with the current adapters, version `iteration`.

        Call it between two updates. Raises the error that ended the rollout of these episodes.
        """
        weights = [p.detach().clone() for p in self.parameters]
        for coming in range(iteration, iteration + self.max_staleness + 1):
            if coming not in self.pending and (attempts := self.attempts_of(coming)):
                self.pending[coming] = self.thread.submit(self._play, weights, iteration, attempts, coming)
        return self.pending.pop(iteration).result()

    def _play(self, weights: list[Tensor], version: int, attempts: list[Attempt], iteration: int) -> list[Episode]:
        if self.is_broken:  # an engine that has just failed would be waited for once more
            raise RolloutStopped
        for parameter, value in zip(self.copied_parameters, weights, strict=True):
            parameter.data = value
        self.is_broken = True  # until this rollout has ended well
        episodes = self.play(self.copy, version, attempts, iteration)
        self.is_broken = False
        return episodes

    def wait(self) -> None:
        """Wait until all iterations to be played are finished and the engine is idle. Raises the error of the first that failed."""
        for future in list(self.pending.values()):
            future.result()

    def stop(self) -> None:
        """Drop all episodes that are not trained. Returns when the engine has finished the requests that it has."""
        self.is_stopped.set()
        futures = [future for future in self.pending.values() if not future.cancel()]
        try:
            wait(futures)
        finally:  # also after a second Ctrl-C
            self.pending.clear()
            self.is_stopped.clear()
            self.is_broken = False


def staleness_metrics(rows: Sequence[Row], iteration: int) -> dict[str, float]:
    """Compute mean and maximum, over rows, of the updates between the adapters that sampled a row and version `iteration`; {} without rows."""
    staleness = torch.tensor([iteration - row.turn.version for row in rows if row.turn.version is not None]).double()
    if not len(staleness):
        return {}
    return {"staleness/mean": staleness.mean().item(), "staleness/max": staleness.max().item()}
