"""Play the episodes of the next iterations in a background thread while the update runs (`max_staleness`).

Version v of the adapters is their weights after v iterations. Iteration n, counted from 0, is trained on episodes that were played with
version max(0, n - k), where k is `max_staleness`. The order is fixed: a slow engine makes the trainer wait, but makes no row older and
changes no result. All turns of an episode have one version.

The thread plays one iteration after another and makes all calls to the engine. It never reads weights that the update moves: between
two updates the adapters are copied, and the thread publishes the copy, as a model that shares the frozen base with the trainer's.

With several processes, the threads of all of them play the same iterations in the same order, each its share of the episodes. What they
gather goes through a process group of their own (`new_thread_group`), and they stop together.

A checkpoint holds no episodes. Those in flight belong to iterations that are not trained yet. It holds the versions of the adapters that
play them (`save`), so a resumed run plays them again with the same weights, from the same seeds, and equals an uninterrupted run.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from multirole.rollout.errors import RolloutStopped
from multirole.rollout.rollout import Attempt
from multirole.types import Episode
from multirole.update.processes import gather_objects, new_thread_group, use_thread_group
from multirole.update.rows import Row

Play = Callable[[PeftModel, int, list[Attempt], int], list[Episode]]
"""`play(model, version, attempts, iteration)` returns the episodes, sampled with the adapters of `model`."""
FILE = "played_ahead.safetensors"
"""File of a checkpoint with the adapters that play the iterations in flight."""


class Version(NamedTuple):
    """The weights after `number` iterations, in the order of the model's trained parameters."""

    number: int
    weights: list[Tensor]


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

    All processes of a run create it and call `take`, `wait` and `stop` together.

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
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.copy = copy_with_shared_base(model)
        self.copied_parameters = [p for p in self.copy.parameters() if p.requires_grad]
        self.thread = ThreadPoolExecutor(1, "rollouts-ahead", use_thread_group, (new_thread_group(),))
        self.pending: dict[int, Future[list[Episode]]] = {}
        self.versions: dict[int, Version] = {}  # that play an iteration which is not trained yet
        self.is_stopped, self.is_broken = Event(), False

    def take(self, iteration: int) -> list[Episode]:
        """Return the episodes of an iteration, and submit the next ones, which are played with the current adapters, version `iteration`.

        Call it between two updates. Raises the error that ended the rollout of these episodes.
        """
        self.versions = {coming: version for coming, version in self.versions.items() if coming >= iteration}
        current = Version(iteration, [p.detach().clone() for p in self.parameters.values()])
        for coming in range(iteration, iteration + self.max_staleness + 1):
            if coming not in self.pending and (attempts := self.attempts_of(coming)):
                version = self.versions.setdefault(coming, current)
                self.pending[coming] = self.thread.submit(self._play, version, attempts, coming)
        return self.pending.pop(iteration).result()

    def _play(self, version: Version, attempts: list[Attempt], iteration: int) -> list[Episode]:
        # an engine that has just failed would be waited for once more; and no process may play while another one does not
        if self.is_broken or any(gather_objects(self.is_stopped.is_set())):
            raise RolloutStopped
        for parameter, value in zip(self.copied_parameters, version.weights, strict=True):
            parameter.data = value
        self.is_broken = True  # until this rollout has ended well
        episodes = self.play(self.copy, version.number, attempts, iteration)
        self.is_broken = False
        return episodes

    def wait(self) -> None:
        """Wait until all iterations to be played are finished and the engine is idle. Raises the error of the first that failed."""
        for future in list(self.pending.values()):
            future.result()

    def stop(self) -> None:
        """Drop all episodes that are not trained. Returns when the engine has finished the requests that it has."""
        self.is_stopped.set()
        futures = list(self.pending.values())
        try:
            wait(futures)
        finally:  # also after a second Ctrl-C
            for future in futures:
                future.cancel()
            self.pending.clear()
            self.versions.clear()
            self.is_stopped.clear()
            self.is_broken = False

    def save(self, folder: Path, iteration: int) -> None:
        """Save to a checkpoint of `iteration` the older adapters that play the iterations in flight."""
        older = {coming: v for coming, v in self.versions.items() if v.number < iteration <= coming}
        tensors = {
            f"{version.number}.{name}": weight.contiguous()
            for version in older.values()
            for name, weight in zip(self.parameters, version.weights, strict=True)
        }
        if tensors:
            save_file(tensors, folder / FILE, {str(coming): str(version.number) for coming, version in older.items()})

    def load(self, folder: Path) -> None:
        """Load from a checkpoint the adapters that play the next iterations. Those that are older than `max_staleness` allows stay out."""
        self.versions.clear()
        if not (folder / FILE).exists():  # of a run without `max_staleness`
            return
        with safe_open(folder / FILE, "pt") as file:
            versions = {
                number: Version(number, [file.get_tensor(f"{number}.{name}").to(p.device) for name, p in self.parameters.items()])
                for number in sorted({int(number) for number in file.metadata().values()})
            }  # fmt: skip
            for coming, number in file.metadata().items():
                if int(coming) - int(number) <= self.max_staleness:
                    self.versions[int(coming)] = versions[int(number)]


def staleness_metrics(rows: Sequence[Row], iteration: int) -> dict[str, float]:
    """Compute mean and maximum, over rows, of the updates between the adapters that sampled a row and version `iteration`; {} without rows."""
    staleness = torch.tensor([iteration - row.turn.version for row in rows if row.turn.version is not None]).double()
    if not len(staleness):
        return {}
    return {"staleness/mean": staleness.mean().item(), "staleness/max": staleness.max().item()}
