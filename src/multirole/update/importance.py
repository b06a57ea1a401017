"""Compute importance weights between the engine's log-probs and the trainer's, as TRL does for vLLM.

The weight of a token is exp(old - sampled), `old` being the trainer's log-prob under the weights at the start of the update; that of a
sequence is the product over its tokens. The adapters at the start of the update are those that sampled, or up to `max_staleness`
versions newer. Weights outside [`clip_min`, `clip_max`] are clipped to the nearer bound ("truncate") or set to 0 ("mask").
TRL's loss multiplies with them (`trl.GRPOTrainer._generate_and_score_completions`, `importance_sampling_ratio`).
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multirole.options import MultiRoleGRPOConfig
from multirole.update.rows import Row

logger = logging.getLogger(__name__)

LOGPROB_ROUNDING = 1e-4
"""In nats. A row has weight 1 if no token's log-probs differ by more: float32 rounding, about 1e-5, is no mismatch."""
GROWTH, NOTABLE = 4.0, 0.05
"""A warning is logged if a role's mean gap exceeds both `GROWTH` times its value in the first iteration and `NOTABLE` nats."""


@dataclass(frozen=True)
class Correction:
    """TRL's `vllm_importance_sampling_mode`, `_clip_min` and `_clip_max`."""

    mode: str
    clip_min: float | None
    clip_max: float | None

    @classmethod
    def from_args(cls, args: MultiRoleGRPOConfig) -> "Correction | None":
        """Return the correction of a run; None where it is off, or where the ratio of the loss starts from the sampler's log-probs."""
        if not args.vllm_importance_sampling_correction or args.old_logprobs == "sampled":
            return None
        return cls(
            args.vllm_importance_sampling_mode,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
        )

    def add_weights(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add a micro-batch's weights to what TRL's loss is given; return the tensors of `WeightSums.add`."""
        old, sampled = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        weights, unclipped = self.weigh(old, sampled, batch["completion_mask"])
        batch["importance_sampling_ratio"] = weights
        return weights, unclipped, old, sampled

    def weigh(self, old: Tensor, sampled: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights after and before clipping, (N, C), or (N, 1) in sequence modes; old, sampled and mask are (N, C).

        A token whose `sampled` is NaN counts as equal.
        """
        gap = torch.nan_to_num((old - sampled) * mask, nan=0.0)  # (N, C)
        gap = gap * (gap.abs().amax(1, keepdim=True) > LOGPROB_ROUNDING)
        if self.mode.startswith("sequence"):
            gap = gap.sum(1, keepdim=True)  # (N, 1)
        weights = gap.exp()
        low = -math.inf if self.clip_min is None else self.clip_min
        high = math.inf if self.clip_max is None else self.clip_max
        if self.mode.endswith("truncate"):
            return weights.clamp(low, high), weights
        return weights.masked_fill((weights < low) | (weights > high), 0.0), weights


def total_by_role(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Return role -> the sums over all processes, roles in order, from each process's role -> sums."""
    total: dict[str, list[float]] = {}
    for part in parts:
        for role, values in part.items():
            total[role] = [a + b for a, b in zip(total.get(role, [0.0] * len(values)), values, strict=True)]
    return dict(sorted(total.items()))


@dataclass
class WeightSums:
    """Sums of an iteration's importance weights by role; they are added up over the processes (`collect`)."""

    sums: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 5))
    first_gaps: dict[str, float] = field(default_factory=dict)
    warns: bool = True  # of a gap that has grown; False where rows are stale, whose gap is expected to

    def add(
        self, rows: list[Row], weights: Tensor, unclipped: Tensor, old: Tensor, sampled: Tensor, mask: Tensor
    ) -> None:
        """Add one micro-batch: weights (N, C) or (N, 1), the others (N, C). The gap leaves out tokens whose `sampled` is NaN."""
        is_weight = mask if weights.size(1) > 1 else mask[:, :1] > 0  # every row has a first token
        gap = torch.nan_to_num((old - sampled).abs() * mask, nan=0.0).sum(1)
        columns = [
            (weights * is_weight).sum(1),
            ((weights != unclipped) * is_weight).sum(1),
            is_weight.sum(1),
            gap,
            (mask * ~sampled.isnan()).sum(1),
        ]
        for row, values in zip(rows, torch.stack([c.double() for c in columns], 1).tolist(), strict=True):
            self.sums[row.turn.role] = [a + b for a, b in zip(self.sums[row.turn.role], values, strict=True)]

    def collect(self, gather: Callable[[dict], list[dict]]) -> dict[str, dict[str, float]]:
        """Return role -> metrics over all processes, start again from zero, and warn of roles whose gap has grown."""
        total = total_by_role(gather(dict(self.sums)))
        self.sums.clear()
        metrics = {}
        for role, (weight, clipped, n_weights, gap, tokens) in total.items():
            mean_gap = gap / max(tokens, 1)
            metrics[role] = {
                "importance_weight": weight / n_weights, "importance_clipped": clipped / n_weights, "sampler_gap": mean_gap,
            }  # fmt: skip
            first = self.first_gaps.setdefault(role, mean_gap)
            if self.warns and mean_gap > max(NOTABLE, GROWTH * first):
                logger.warning(
                    "The log-probs of engine and trainer differ by %.3f nats per token for the role %r, %.1f times as much as "
                    "in the first iteration; %.0f %% of its importance weights are clipped. Lower `learning_rate`, or check that the "
                    "engine serves the adapters that are trained.",
                    mean_gap, role, mean_gap / max(first, 1e-9), 100 * clipped / n_weights,
                )  # fmt: skip
        return metrics
