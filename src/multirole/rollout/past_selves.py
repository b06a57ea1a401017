"""Past selves: copies of an adapter's earlier weights, which play a role and are not trained.

The model holds `n` copies of each such adapter. Every `every` iterations the oldest is overwritten with the present weights, and an episode
draws one of them by its seed. Which weights a copy holds follows from the number of iterations alone, and the copies are saved in every
checkpoint like the adapters that are trained. So a resumed run plays the same ones.
"""

from collections.abc import Mapping

import torch
from peft import PeftModel


def versions_at(iteration: int, every: int, n: int) -> list[int]:
    """Return the number of iterations after which each copy was made that is played after `iteration` iterations.

    The copies are made after 0, `every`, 2 `every` and so on, and copy m goes into place m modulo n. Places that are not filled yet are left out.
    """
    last = iteration // every
    return [every * (last - (last - place) % n) for place in range(min(n, last + 1))]


class PastSelves:
    """The copies of several adapters.

    Args:
        model: gets the copies as adapters with the adapters' present weights.
        places: adapter whose past selves are played -> the names of its `n` copies.
        every, n: see the module.

    Attributes:
        loaded_at: the iteration after which the copies were saved that have been loaded since training ended; None if none were.
    """

    def __init__(self, model: PeftModel, places: Mapping[str, list[str]], every: int, n: int) -> None:
        self.model, self.every, self.n = model, every, n
        self.loaded_at: int | None = None
        self.places = dict(places)
        for adapter, names in self.places.items():
            for name in names:
                model.add_adapter(name, model.peft_config[adapter])
        self.begin()

    def begin(self) -> None:
        """Begin a training run: every copy gets the present weights, which play until it is made again or loaded from a checkpoint."""
        self.loaded_at = None
        for adapter, names in self.places.items():
            for name in names:
                self._copy(adapter, name)

    def playing(self, iteration: int) -> dict[str, tuple[str, ...]]:
        """Return adapter -> the copies that are played after `iteration` iterations."""
        n = len(self._versions_at(iteration))
        return {adapter: tuple(names[:n]) for adapter, names in self.places.items()}

    def versions(self, iteration: int) -> Mapping[str, int]:
        """Return copy -> the number of iterations after which it was made."""
        versions = self._versions_at(iteration)
        return {name: version for names in self.places.values() for name, version in zip(names, versions, strict=False)}

    def _versions_at(self, iteration: int) -> list[int]:
        return versions_at(iteration if self.loaded_at is None else self.loaded_at, self.every, self.n)

    def end_iteration(self, iteration: int) -> None:
        """Copy the present weights, if it is time, after the updates of an iteration, counted from 1."""
        if iteration % self.every == 0:
            for adapter, names in self.places.items():
                self._copy(adapter, names[iteration // self.every % self.n])

    @torch.no_grad()
    def _copy(self, source: str, target: str) -> None:
        """Copy the weights of one adapter into another one of the same form."""
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            parts = name.split(".")
            if target in parts:
                parameter.copy_(parameters[".".join(source if part == target else part for part in parts)])
