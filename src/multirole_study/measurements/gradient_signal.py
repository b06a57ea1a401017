"""Signal and noise of a policy gradient at fixed weights, by role and slot.

A mini-batch gradient is the mean gradient plus sampling noise, and its squared norm is mostly noise: E|g|^2 = |G|^2 + tr(Sigma). This module
draws independent batches of episodes at fixed weights, as training draws them, and separates both terms:

- *signal* |G|^2: the mean of the inner products of the gradients of two *different* batches. It is unbiased (a U-statistic), so it can be negative if there is no signal.
- *noise* tr(Sigma): the mean squared norm of one batch's gradient minus the signal.
- *noise scale* tr(Sigma) / |G|^2, in batches: about how many batches an optimizer step has to average before signal and noise are
  equal (the simple noise scale of McCandlish et al. 2018, arXiv:1812.06162, there in examples).

The parts of one batch share its problems and advantages, so their noise is correlated. All comparisons of mean gradients, such as the cosine between
two roles, therefore use inner products between different batches. Standard errors are delete-one jackknife errors over
batches. They say nothing about other checkpoints or seeds.

Not covered: the preconditioning of AdamW, which moves weights by another vector than the gradient, clipping, and sharded models (FSDP2).
"""

import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.inputs.streams import StreamedRows
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.update.gradients import Part, part_of
from multirole.update.rows import problem_order, trained_tokens

FIRST_ITERATION = 10**6
"""Iteration number of the first batch. Sampling seeds follow from it, so that no batch repeats one of the training run."""
CHUNK_COLUMNS = 2**18
"""Number of gradient elements that are multiplied at a time, in float64."""


class Estimate(NamedTuple):
    """A statistic of the batches and its jackknife standard error over them; NaN where one is not defined."""

    value: float
    error: float


class BatchProducts:
    """Inner products of the parts of one adapter's gradients over several batches.

    Args:
        parts: the K parts, (role, slot).
        products: (B, K, B, K) in float64; `products[b, i, c, j]` is the inner product of part i in batch b and part j in batch c.
    """

    def __init__(self, parts: list[Part], products: np.ndarray) -> None:
        n = len(parts)
        if products.ndim != 4 or products.shape[1:] != (n, products.shape[0], n):
            raise ValueError(
                f"`products` must have the shape (B, {n}, B, {n}) of B batches and {n} parts, got {products.shape}."
            )
        if len(products) < 2:
            raise ValueError(f"Signal and noise need two batches or more, got {len(products)}.")
        self.parts, self.products = parts, products

    @classmethod
    def from_gradients(cls, parts: list[Part], gradients: Tensor) -> "BatchProducts":
        """Multiply gradients (B, K, n) with each other."""
        n_batches, n_parts, n = gradients.shape
        flat, products = gradients.reshape(n_batches * n_parts, n), 0.0
        for columns in flat.split(CHUNK_COLUMNS, dim=1):
            wide = columns.double()
            products = products + wide @ wide.T
        shape = (n_batches, n_parts, n_batches, n_parts)
        return cls(parts, torch.as_tensor(products).reshape(shape).cpu().numpy())

    @property
    def n_batches(self) -> int:
        """Return the number of batches."""
        return len(self.products)

    @property
    def roles(self) -> list[str]:
        """Return the roles in the order of their parts."""
        return list(dict.fromkeys(role for role, _ in self.parts))

    def of_role(self, role: str) -> list[int]:
        """Return the indices of a role's parts."""
        return [i for i, part in enumerate(self.parts) if part[0] == role]

    def without(self, batch: int) -> "BatchProducts":
        """Return the products of all other batches."""
        batches = np.delete(np.arange(self.n_batches), batch)
        parts = np.arange(len(self.parts))
        return BatchProducts(self.parts, self.products[np.ix_(batches, parts, batches, parts)])

    def by_batch(self, some: list[int], others: list[int]) -> np.ndarray:
        """Return (B, B) inner products of the sums of two sets of parts."""
        return self.products[:, some][..., others].sum(axis=(1, 3))

    def within(self, some: list[int], others: list[int]) -> float:
        """Return the mean inner product within a batch."""
        return float(np.trace(self.by_batch(some, others)) / self.n_batches)

    def between(self, some: list[int], others: list[int]) -> float:
        """Return the mean inner product between two different batches, which estimates that of the two mean gradients without bias."""
        by_batch = self.by_batch(some, others)
        return float((by_batch.sum() - np.trace(by_batch)) / (self.n_batches * (self.n_batches - 1)))


Statistic = Callable[[BatchProducts], float]


def jackknife(products: BatchProducts, statistic: Statistic) -> Estimate:
    """Return a statistic with its delete-one jackknife standard error over batches.

    The error of `BatchProducts.between` is too large where there is no signal (the variance of a degenerate U-statistic is
    overestimated about twofold), and not too small on average.
    """
    value, n = statistic(products), products.n_batches
    if n < 3 or math.isnan(value):
        return Estimate(value, math.nan)
    left = np.array([statistic(products.without(batch)) for batch in range(n)])
    return Estimate(value, math.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))


# ---- statistics


def signal(products: BatchProducts, some: list[int]) -> float:
    """Return |G|^2 of a sum of parts, without bias."""
    return products.between(some, some)


def noise(products: BatchProducts, some: list[int]) -> float:
    """Return tr(Sigma) of a sum of parts, of one batch."""
    return products.within(some, some) - products.between(some, some)


def signal_share(products: BatchProducts, some: list[int]) -> float:
    """Return |G|^2 / E|g|^2, the share of a batch gradient's squared norm that is signal; NaN without a gradient."""
    square = products.within(some, some)
    return products.between(some, some) / square if square > 0 else math.nan


def noise_scale(share: float) -> float:
    """Return tr(Sigma) / |G|^2 in batches, from the signal's share; infinite where that is zero or less."""
    if math.isnan(share):
        return math.nan
    return max(0.0, 1 / share - 1) if share > 0 else math.inf


def role_share(products: BatchProducts, role: str, is_of_mean: bool) -> float:
    """Return a role's part of the squared norm of its adapter's gradient: of the mean gradient, or of a batch's, which is mostly noise.

    A part is its inner product with the whole; the shares of all roles sum to 1. NaN where the mean gradient has no positive estimate.
    """
    product = products.between if is_of_mean else products.within
    every = list(range(len(products.parts)))
    whole = product(every, every)
    return product(products.of_role(role), every) / whole if whole > 0 else math.nan


def cosine(products: BatchProducts, role: str, other: str) -> float:
    """Return the cosine between the mean gradients of two roles, from different batches; NaN where one has no positive signal.

    It may lie beyond ±1 where the signal is weak.
    """
    some, others = products.of_role(role), products.of_role(other)
    squares = products.between(some, some), products.between(others, others)
    return products.between(some, others) / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else math.nan


def coherence(products: BatchProducts, role: str, is_of_mean: bool) -> float:
    """Return the mean inner product of two slots of a role over the mean squared norm of one slot; NaN for a single slot.

    Within a batch, slots share the episodes' problems and advantages; between batches only the mean gradient is left (`is_of_mean`). The
    difference is the part of coherence that the shared advantage makes.
    """
    slots = products.of_role(role)
    if len(slots) < 2:
        return math.nan
    product = products.between if is_of_mean else products.within
    square = sum(products.within([i], [i]) for i in slots) / len(slots)
    pairs = [product([i], [j]) for i, j in itertools.permutations(slots, 2)]
    return sum(pairs) / len(pairs) / square if square > 0 else math.nan


def shared_coherence(products: BatchProducts, role: str) -> float:
    """Return how much more coherent two slots of a role are in one batch than in different ones."""
    return coherence(products, role, is_of_mean=False) - coherence(products, role, is_of_mean=True)


def role_statistics(products: BatchProducts) -> dict[str, dict[str, Estimate]]:
    """Return role -> statistic -> estimate: signal, noise, signal_share, mean_share, batch_share, coherence, mean_coherence
    and shared_coherence (the difference of the last two).
    """
    estimates: dict[str, dict[str, Estimate]] = {}
    for role in products.roles:
        parts = products.of_role(role)
        statistics: dict[str, Statistic] = {
            "signal": partial(signal, some=parts),
            "noise": partial(noise, some=parts),
            "signal_share": partial(signal_share, some=parts),
            "mean_share": partial(role_share, role=role, is_of_mean=True),
            "batch_share": partial(role_share, role=role, is_of_mean=False),
            "coherence": partial(coherence, role=role, is_of_mean=False),
            "mean_coherence": partial(coherence, role=role, is_of_mean=True),
            "shared_coherence": partial(shared_coherence, role=role),
        }
        estimates[role] = {name: jackknife(products, statistic) for name, statistic in statistics.items()}
    return estimates


def cosines(products: BatchProducts) -> dict[tuple[str, str], Estimate]:
    """Return the cosine between the mean gradients of every two roles of an adapter."""
    return {
        (role, other): jackknife(products, partial(cosine, role=role, other=other))
        for role, other in itertools.combinations(products.roles, 2)
    }


# ---- measurement


@dataclass
class AdapterGradients:
    """One adapter's gradients at fixed weights: `values` (B, K, n) by batch and part, and each part's rows and trained tokens."""

    parts: list[Part]
    values: Tensor
    rows: Counter[Part]
    tokens: Counter[Part]

    def products(self) -> BatchProducts:
        """Return the inner products of all parts."""
        return BatchProducts.from_gradients(self.parts, self.values)


class KeptParts(MultiRoleCallback):
    """Keeps the parts of the gradient that was computed last."""

    def __init__(self) -> None:
        self.parts: dict[Part, Tensor] = {}

    def on_gradient_parts(
        self, trainer: Trainer, adapter: str, parts: list[Part], gradients: Tensor
    ) -> None:  # fmt: skip
        self.parts = {part: gradients[i].clone() for i, part in enumerate(parts)}


def measure_gradients(trainer: MultiRoleGRPOTrainer, n_batches: int, seed: int = 0) -> dict[str, AdapterGradients]:
    """Return each adapter's gradients of `n_batches` independent batches at the current weights, which do not change.

    An adapter whose roles were not called in any batch is left out.

    A batch is an iteration's episodes: as many problems and attempts as training takes, with their advantages. A gradient is that
    of the loss over all rows of the adapter in the batch (`update` would cut them into optimizer steps). Problems come in a new
    order, drawn by `seed`. The measurement is not logged, and changes no counter. Callbacks see the episodes and may change the rows, but do not see the gradients. Memory: B x K x n float32
    numbers on the CPU for an adapter of n elements and K parts.

    Raises ValueError for fewer than two batches, for a dataset that is a stream, or for a sharded model.
    """
    if n_batches < 2:
        raise ValueError(f"`n_batches` must be 2 or more, got {n_batches}: noise is what differs between batches.")
    if trainer.is_sharded or isinstance(trainer.train_rows, StreamedRows):
        raise ValueError(
            "Gradients at fixed weights need an unsharded model and a dataset of known length. Leave out FSDP2, and pass a `Dataset`, not a stream."
        )
    n_episodes = trainer.args.generation_batch_size
    length, first = n_batches * n_episodes, FIRST_ITERATION * (seed + 1)
    order = problem_order(len(trainer.problems), trainer.args.num_generations, length, FIRST_ITERATION + seed)
    batches = []
    trainer.model.train()
    with _restored(trainer):
        for batch in range(n_batches):
            trainer.state.global_step = first + batch  # every turn has its own seed
            batches.append(_gradients_of_batch(trainer, order[batch * n_episodes : (batch + 1) * n_episodes]))
    called = [adapter for adapter in trainer.adapters if any(batch[adapter][0] for batch in batches)]
    return {adapter: _stacked([batch[adapter] for batch in batches]) for adapter in called}


Batch = tuple[dict[Part, Tensor], Counter[Part], Counter[Part]]


LOGGED = (
    "_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "update_metrics", "entropy_coef", "_last_world_entropy",
)  # fmt: skip
"""The trainer's attributes in which a rollout or a loss counts something for a log or for the next optimizer step."""


@contextmanager
def _restored(trainer: MultiRoleGRPOTrainer) -> Iterator[None]:
    """Context manager: the trainer plays no episodes ahead, has rows of all roles at once, counts and logs nothing, and its engine rests afterwards."""
    state, ahead = trainer.state, trainer.player.ahead
    if ahead is not None:
        ahead.wait()
    trainer.player.ahead = None
    role_order, trainer.args.role_order = trainer.args.role_order, None
    step, n_tokens, n_sampled = state.global_step, state.num_input_tokens_seen, trainer.rollout.sampled_tokens
    kept = {name: getattr(trainer, name) for name in LOGGED}
    for name, value in kept.items():
        setattr(trainer, name, copy.deepcopy(value))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
        state.global_step, state.num_input_tokens_seen, trainer.rollout.sampled_tokens = step, n_tokens, n_sampled
        trainer.player.rest()
        trainer.player.ahead = ahead
        trainer.args.role_order = role_order


@contextmanager
def _only_callback(trainer: MultiRoleGRPOTrainer, callback: MultiRoleCallback) -> Iterator[None]:
    """Context manager: the trainer has this callback only, because others would record measured gradients as training."""
    handler = trainer.callback_handler
    usual, handler.callbacks = handler.callbacks, [callback]
    try:
        yield
    finally:
        handler.callbacks = usual


def _gradients_of_batch(trainer: MultiRoleGRPOTrainer, indices: list[int]) -> dict[str, Batch]:
    """Play one batch of episodes and return adapter -> its gradient by part, rows by part and tokens by part."""
    inputs = [dict(trainer.train_rows[index]) for index in indices]
    rows = trainer.prepare_rows(trainer._generate_and_score_completions(inputs))
    trainer.player.rest()
    gradients: dict[str, Batch] = {}
    for adapter in trainer.adapters:
        adapter_rows = [row for row in rows if row.adapter == adapter]
        callback = KeptParts()
        if adapter_rows:
            with _only_callback(trainer, callback):
                params, _ = trainer.compute_gradient(trainer.model, adapter, adapter_rows, len(adapter_rows))
            for parameter in params:
                parameter.grad = None
        tokens: Counter[Part] = Counter()
        for row in adapter_rows:
            tokens[part_of(row)] += trained_tokens([row])
        parts = {part: values.cpu() for part, values in callback.parts.items()}
        gradients[adapter] = parts, Counter(map(part_of, adapter_rows)), tokens
    return gradients


def _stacked(batches: list[Batch]) -> AdapterGradients:
    """Stack one adapter's batches; a part that has no row in a batch has a gradient of zero there."""
    totals: dict[str, Counter[Part]] = defaultdict(Counter)
    for _, rows, tokens in batches:
        totals["rows"] += rows
        totals["tokens"] += tokens
    parts = sorted(totals["rows"])
    like = next(values for gradients, *_ in batches for values in gradients.values())
    values = torch.stack([
        torch.stack([gradients.get(part, torch.zeros_like(like)) for part in parts]) for gradients, *_ in batches
    ])  # fmt: skip  # (B, K, n)
    return AdapterGradients(parts, values, totals["rows"], totals["tokens"])
