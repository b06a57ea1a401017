"""TRL's entropy options over the whole mini-batch of an optimizer step: the bonus, its adaptive coefficient, the top quantile.

TRL takes all three over a micro-batch, whose size must not change the gradient here. Where a mini-batch is one micro-batch the
loss is TRL's.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.rows import Row


@dataclass
class StepEntropy:
    """The entropy terms of one optimizer step.

    Args:
        coef: weight of the bonus, which is the mean entropy of the step's tokens.
        n_tokens: those tokens, of all processes: the trained ones, or the selected ones of them.
        selected: id of a row -> its selected tokens (C,), bool; empty where all are.
    """

    coef: float = 0.0
    n_tokens: int = 1
    selected: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    """Sum of the entropies of the tokens that this process has seen, in nats."""

    def mask(self, rows: list[Row], mask: Tensor) -> Tensor:
        """The tokens of a micro-batch, trained ones in `mask` (N, C), that the step's terms act on (N, C)."""
        if not self.selected:
            return mask
        chosen = pad_sequence([self.selected[id(row)] for row in rows], batch_first=True)  # (N, longest)
        return mask * torch.nn.functional.pad(chosen, (0, mask.size(1) - chosen.size(1))).to(mask)

    def bonus(self, rows: list[Row], entropies: Tensor, mask: Tensor) -> Tensor:
        """A micro-batch's part of the bonus, from entropies (N, C) with a gradient; summed over the step it is coef x mean entropy."""
        total = (entropies * self.mask(rows, mask)).sum()
        self.total = total.detach() if self.total is None else self.total + total.detach()
        return self.coef * total / self.n_tokens


def select_tokens(entropies: list[Tensor], quantile: float) -> list[Tensor]:
    """For each row's entropies (C,), which of its tokens are among the fraction `quantile` of highest entropy of all rows (C,)."""
    threshold = torch.quantile(torch.cat(entropies).float(), 1 - quantile)
    return [values >= threshold for values in entropies]


def next_coef(coef: float, entropy: float, args: MultiRoleGRPOConfig) -> float:
    """TRL's adaptive coefficient after a step of this mean entropy (Skywork-OR1, 2505.22312)."""
    if entropy <= args.entropy_target:
        return min(coef + args.entropy_coef_delta, args.entropy_coef_max)
    return max(coef - args.entropy_coef_delta, args.entropy_coef_min)
