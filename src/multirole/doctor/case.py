"""What every check of the doctor looks at, and how far numbers may differ by rounding."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from multirole.core.rows import Row
from multirole.core.types import Episode, Turn
from multirole.doctor.bench import Bench, Step, Trial, Weights

ROWS_OF_A_ROLE = 4
"""Rows of each role that are computed again in other ways."""
Verdict = tuple[bool, str]


@dataclass(frozen=True)
class Tolerance:
    """How far two computations of one number may differ by rounding.

    Args:
        mean, largest: of |difference| between log-probs of a token.
        gradient: |difference| over |gradient|, between batches of one's own code.
        formula: the same, between the trainer's loss and the formula written out.
    """

    mean: float
    largest: float
    gradient: float
    formula: float


TOLERANCES = {
    "float32": Tolerance(1e-4, 1e-3, 1e-5, 1e-3),
    "bfloat16": Tolerance(3e-2, 1.0, 5e-2, 5e-2),  # not measured on a GPU: what a forward pass in bfloat16 leaves
}


@dataclass(frozen=True)
class Case:
    """What every check looks at: two training steps in a row, the first one again from the same start, the weights between.

    Args:
        base: checksums of the base before the steps.
        weights: before the first step, after it, and after its repetition.
    """

    bench: Bench
    base: dict[str, int]
    first: Trial
    second: Trial
    again: Trial
    weights: tuple[Weights, Weights, Weights]

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.bench.cell.dtype]

    def few(self, trial: Trial) -> list[Row]:
        """The first rows of each role; the same ones each time."""
        by_role: dict[str, list[Row]] = defaultdict(list)
        for row in trial.rows:
            by_role[row.turn.role].append(row)
        return [row for mine in by_role.values() for row in mine[:ROWS_OF_A_ROLE]]

    def sample(self, adapter: str) -> list[Row]:
        """Of the first step's few, those of an adapter's roles, by the cell's policy."""
        return [row for row in self.few(self.first) if self.bench.cell.policy[row.turn.role] == adapter]

    def off(self, rows: list[Row], temperature: float | None = None, adapter: str | None = None) -> tuple[float, float]:
        """Mean and largest |recorded - plain| log-prob under the present weights; see `Bench.plain_of`."""
        turns = [row.turn for row in rows]
        recorded = [torch.tensor(turn.logprobs) for turn in turns]
        return gap_of(list(zip(self.bench.plain_of(turns, temperature, adapter), recorded, strict=True)))


def run_trials(bench: Bench) -> Case:
    """The training steps, at the first iteration of the full learning rate."""
    base, iteration = bench.checksum(), bench.cell.warmup_iterations
    bench.start(noise=1)
    first = bench.train(iteration)
    after = bench.weights()
    second = bench.train(iteration + 1)
    bench.start(noise=2)
    again = bench.train(iteration)
    return Case(bench, base, first, second, again, (bench.first, after, bench.weights()))


def first_steps(trial: Trial) -> dict[str, Step]:
    """adapter of the rows -> the first optimizer step on them, before which its weights are those that sampled."""
    steps: dict[str, Step] = {}
    for step in trial.steps:
        steps.setdefault(step.rows[0].adapter, step)
    return steps


def gap_of(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean and largest |difference|."""
    gaps = torch.cat([(one - other).abs() for one, other in pairs])
    return gaps.mean().item(), gaps.max().item()


def key_of(episode: Episode, turn: Turn) -> tuple:
    return episode.problem.id, episode.index, turn.role, turn.slot, turn.round
