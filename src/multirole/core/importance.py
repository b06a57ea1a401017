"""Importance weights between the log-probs that sampled and those that train, as TRL computes them for vLLM.

The weight of a token is exp(old - sampled), `old` being the trainer's log-prob under the weights that sampled; that of a sequence is
the product over its tokens. Weights outside [`clip_min`, `clip_max`] are moved to the bound ("truncate") or set to 0 ("mask").
TRL's loss multiplies with them (`trl.GRPOTrainer._generate_and_score_completions`, `importance_sampling_ratio`).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multirole.core.rows import Row

logger = logging.getLogger(__name__)

ROUNDING = 1e-4
"""Nats. A row of which no token's log-probs differ by more has weight 1: float32 rounding, of the order of 1e-5, is no mismatch."""
GROWTH, NOTABLE = 4.0, 0.05
"""A role's mean gap is warned of at `GROWTH` times that of its first iteration, if it is above `NOTABLE` nats."""


@dataclass(frozen=True)
class Correction:
    """`vllm_importance_sampling_mode`, `_clip_min` and `_clip_max` of TRL's configuration."""

    mode: str
    clip_min: float | None
    clip_max: float | None

    def weigh(self, old: Tensor, sampled: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, and before clipping, of tokens (N, C), or (N, 1) in sequence modes; old, sampled and mask are (N, C).

        A token whose `sampled` is NaN counts as equal.
        """
        gap = torch.nan_to_num((old - sampled) * mask, nan=0.0)  # (N, C)
        gap = gap * (gap.abs().amax(1, keepdim=True) > ROUNDING)
        if self.mode.startswith("sequence"):
            gap = gap.sum(1, keepdim=True)  # (N, 1)
        weights = gap.exp()
        if self.mode.endswith("truncate"):
            return weights.clamp(self.clip_min, self.clip_max), weights
        low = -math.inf if self.clip_min is None else self.clip_min
        high = math.inf if self.clip_max is None else self.clip_max
        return weights.masked_fill((weights < low) | (weights > high), 0.0), weights


@dataclass
class WeightSums:
    """What an iteration's importance weights were, by role; processes add theirs up (`rows_of`)."""

    sums: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 5))
    first_gaps: dict[str, float] = field(default_factory=dict)

    def add(
        self, rows: list[Row], weights: Tensor, unclipped: Tensor, old: Tensor, sampled: Tensor, mask: Tensor
    ) -> None:
        """One micro-batch: weights (N, C) or (N, 1), the others (N, C)."""
        is_weight = mask if weights.size(1) > 1 else mask[:, :1] > 0  # every row has a first token
        gap = torch.nan_to_num((old - sampled).abs() * mask, nan=0.0).sum(1)
        columns = [
            (weights * is_weight).sum(1),
            ((weights != unclipped) * is_weight).sum(1),
            is_weight.sum(1),
            gap,
            mask.sum(1),
        ]
        for row, values in zip(rows, torch.stack([c.double() for c in columns], 1).tolist(), strict=True):
            self.sums[row.turn.role] = [a + b for a, b in zip(self.sums[row.turn.role], values, strict=True)]

    def collect(self, gather: Callable[[dict], list[dict]]) -> dict[str, dict[str, float]]:
        """role -> its metrics, over all processes; forgets the iteration and warns of roles whose gap has grown."""
        total: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        for part in gather(dict(self.sums)):
            for role, values in part.items():
                total[role] = [a + b for a, b in zip(total[role], values, strict=True)]
        self.sums.clear()
        metrics = {}
        for role, (weight, clipped, n_weights, gap, tokens) in sorted(total.items()):
            mean_gap = gap / tokens
            metrics[role] = {
                "importance_weight": weight / n_weights, "importance_clipped": clipped / n_weights, "sampler_gap": mean_gap,
            }  # fmt: skip
            first = self.first_gaps.setdefault(role, mean_gap)
            if mean_gap > max(NOTABLE, GROWTH * first):
                logger.warning(
                    "The log-probs that sampled and those that train differ by %.3f nats per token for the role %r, %.1f times as much as "
                    "in the first iteration; %.0f %% of its importance weights are clipped. Lower `learning_rate`, or check that the "
                    "engine serves the adapters that are trained.",
                    mean_gap, role, mean_gap / max(first, 1e-9), 100 * clipped / n_weights,
                )  # fmt: skip
        return metrics
