"""Apply TRL's entropy options (bonus, adaptive coefficient, top quantile) to the whole mini-batch of an optimizer step.

TRL applies them to a micro-batch, but here the size of a micro-batch must not change the gradient. If a mini-batch is one
micro-batch, the loss is TRL's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multirole.options import MultiRoleGRPOConfig
from multirole.update.rows import Row, trained_tokens


@dataclass
class StepEntropy:
    """The entropy terms of one optimizer step.

    Args:
        coef: weight of the bonus, which is the mean entropy of the step's tokens.
        n_tokens: number of these tokens on all processes: the trained tokens, or the selected ones among them.
        selected: id of a row -> its selected tokens (C,), bool; empty if all are selected.
    """

    coef: float = 0.0
    n_tokens: int = 1
    selected: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    """Sum of the entropies of this process's tokens so far, in nats."""

    def mask(self, rows: list[Row], mask: Tensor) -> Tensor:
        """Return the tokens (N, C) of a micro-batch that the terms act on; `mask` (N, C) has its trained tokens."""
        if not self.selected:
            return mask
        chosen = pad_sequence([self.selected[id(row)] for row in rows], batch_first=True)  # (N, longest)
        return mask * torch.nn.functional.pad(chosen, (0, mask.size(1) - chosen.size(1))).to(mask)

    def bonus(self, rows: list[Row], entropies: Tensor, mask: Tensor) -> Tensor:
        """Return a micro-batch's part of the bonus, from entropies (N, C) with a gradient; the parts sum to coef x mean entropy."""
        return self.coef * (entropies * self.mask(rows, mask)).sum() / self.n_tokens

    def add(self, rows: list[Row], entropies: Tensor, mask: Tensor) -> None:
        """Add the entropies (N, C) of a micro-batch to the total."""
        total = (entropies * self.mask(rows, mask)).sum()
        self.total = total if self.total is None else self.total + total


def step_entropy(
    rows: list[Row], coef: float, quantile: float, entropies_of: Callable[[list[Row]], list[Tensor]]
) -> StepEntropy:
    """Return the entropy terms of one optimizer step on `rows`; measures the entropies where only a quantile of them counts."""
    trained = [row for row in rows if not row.is_masked]
    if quantile == 1 or not trained:
        return StepEntropy(coef, max(1, trained_tokens(rows)))
    selected = select_tokens(entropies_of(trained), quantile)
    n_tokens = sum(int(tokens.sum()) for tokens in selected)
    return StepEntropy(coef, n_tokens, dict(zip(map(id, trained), selected, strict=True)))


def select_tokens(entropies: list[Tensor], quantile: float) -> list[Tensor]:
    """Return, for each row's entropies (C,), a mask (C,) of its tokens in the top fraction `quantile` of all rows' entropies."""
    threshold = torch.quantile(torch.cat(entropies).float(), 1 - quantile)
    return [values >= threshold for values in entropies]


def by_adapter(adapters: list[str], value: float) -> float | dict[str, float]:
    """Return the value of every adapter; a number for a single one, as in TRL's trainer and checkpoints."""
    return value if len(adapters) == 1 else dict.fromkeys(adapters, value)


def value_of(values: float | dict[str, float], adapter: str) -> float:
    """Return an adapter's value."""
    return values[adapter] if isinstance(values, dict) else values


def with_value(values: float | dict[str, float], adapter: str, value: float) -> float | dict[str, float]:
    """Return the values with a new one for an adapter."""
    return values | {adapter: value} if isinstance(values, dict) else value


def next_coef(coef: float, entropy: float, args: MultiRoleGRPOConfig) -> float:
    """Return TRL's adaptive coefficient after a step with this mean entropy (Skywork-OR1, 2505.22312)."""
    if entropy <= args.entropy_target:
        return min(coef + args.entropy_coef_delta, args.entropy_coef_max)
    return max(coef - args.entropy_coef_delta, args.entropy_coef_min)
