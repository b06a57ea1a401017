"""Stop a role's updates in an iteration once its policy has moved too far from the one that sampled (`target_kl`)."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirole.update.rows import Row

CLAMP = 20.0
"""Largest difference of two log-probs, here and in `RoleDiagnostics`."""


class KLBound:
    """Leaves out the rows of a role from the mini-batch on at which KL(sampling policy || current policy) exceeds a bound.

    The KL is estimated from the role's rows of the mini-batch before its step, by k3: the mean over tokens of exp(d) - 1 - d, where d is the
    current log-prob minus the engine's. The first step of an adapter in an iteration is always taken, since nothing has moved yet.

    Args:
        bound: in nats per token.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.begin()

    def begin(self) -> None:
        """Begin an iteration: every role may move again."""
        self.largest: dict[str, float] = {}
        self.left_out: dict[str, int] = defaultdict(int)
        self._exceeded: set[str] = set()

    def within(self, rows: Sequence[Row], logprobs_of: Callable[[list[Row]], list[Tensor]]) -> list[Row]:
        """Return the rows of a mini-batch whose role is still within the bound; `logprobs_of` returns their current log-probs (C,)."""
        moving = [row for row in rows if row.turn.role not in self._exceeded]
        terms: dict[str, list[Tensor]] = defaultdict(list)
        for row, logps in zip(moving, logprobs_of(moving) if moving else [], strict=True):
            sampled = torch.tensor(row.turn.logprobs, dtype=torch.float64)  # (C,)
            delta = (logps.double() - sampled)[~sampled.isnan()].clamp(-CLAMP, CLAMP)  # (known tokens,)
            terms[row.turn.role].append(delta.exp() - 1 - delta)
        for role, parts in terms.items():
            kl = torch.cat(parts).mean().item()
            self.largest[role] = max(kl, self.largest.get(role, 0.0))
            if kl > self.bound:
                self._exceeded.add(role)
        for row in rows:
            self.left_out[row.turn.role] += row.turn.role in self._exceeded
        return [row for row in moving if row.turn.role not in self._exceeded]

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return role -> the largest KL that was measured, and the number of rows that were left out; the roles that were measured alone."""
        return {
            role: {"kl_before_step": kl, "rows_beyond_kl": float(self.left_out[role])}
            for role, kl in self.largest.items()
        }
