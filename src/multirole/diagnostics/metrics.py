"""Per-role metrics of one iteration. Every name here is a row of METRICS.md.

The policy metrics compare the trainer's log-probs *during* the update (lp) with the engine's at sampling time (lr),
token by token, as the released code does: the second and third mini-batch already see a moved policy (facts: verl
`rollout_corr_helper`). With the engine's processed log-probs they start at zero instead of at a temperature offset.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from multirole.core.gradients import GradientParts, Part
from multirole.core.logprobs import padded
from multirole.core.rows import Row
from multirole.diagnostics.signatures import SIGNATURES, signatures

CLAMP = 20.0
SHARES = ("grad_share", "coherence", "amplification")


class TokenStats:
    """Sums over the trained tokens of one role, accumulated over the micro-batches of an iteration."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)

    def add(
        self, lp: torch.Tensor, lr: torch.Tensor, old: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor,
        advantages: torch.Tensor, clip_low: float, clip_high: float, raw: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Accumulate one micro-batch: lp, lr, old (pi_old of the loss), entropy, mask are (N, T), advantages (N,).

        `raw` (N, T) is lr at temperature 1, NaN where it was not measured; None where lr is at temperature 1 itself.
        """
        mask, n_tokens = mask.bool(), mask.sum(1)  # (N, T), (N,)
        delta = (lp - lr).clamp(-CLAMP, CLAMP)  # (N, T)
        ratio, sign = delta.exp(), advantages.sign()[:, None]  # (N, T), (N, 1)
        trained = (lp - old).exp()  # (N, T)
        clipped = ((trained > 1 + clip_high) & (sign > 0)) | ((trained < 1 - clip_low) & (sign < 0))
        known, raw_ratio = mask, ratio
        if raw is not None:
            known = mask & raw.isfinite()  # (N, T)
            raw_ratio = (lp - raw).masked_fill(~known, 0.0).clamp(-CLAMP, CLAMP).exp()  # (N, T)
        values = {
            "tokens": mask, "chi2": ratio.square(), "kl": -delta, "k3": ratio - delta - 1, "entropy": entropy,
            "clip": clipped, "raw_tokens": known, "chi2_raw": raw_ratio.square() * known,
        }  # fmt: skip
        sums = torch.stack([(value * mask).sum(dtype=torch.float64) for value in values.values()])
        for name, value in zip(values, sums.tolist(), strict=True):
            self.sums[name] += value
        self.sums["max_delta"] = max(self.sums["max_delta"], (delta.abs() * mask).max().item())
        self.sums["ppl"] += (-(lp * mask).sum(1) / n_tokens).exp().sum(dtype=torch.float64).item()
        self.sums["rows"] += len(lp)

    def merge(self, sums: dict[str, float]) -> None:
        """Add what another process, or another optimizer step, has added up."""
        for name, value in sums.items():
            self.sums[name] = max(self.sums[name], value) if name == "max_delta" else self.sums[name] + value

    def summary(self) -> dict[str, float]:
        """Token means (perplexity: mean over rows of exp(-mean log-prob)); NaN where no row was trained."""
        s = self.sums
        tokens, rows = s["tokens"] or math.nan, s["rows"] or math.nan
        return {
            "perplexity": s["ppl"] / rows,
            "entropy": s["entropy"] / tokens,
            "chi2": s["chi2"] / tokens - 1.0,
            "chi2_raw": s["chi2_raw"] / s["raw_tokens"] - 1.0 if s["raw_tokens"] else math.nan,
            "kl": s["kl"] / tokens,
            "k3_kl": s["k3"] / tokens,
            "clip_fraction": s["clip"] / tokens,
            "max_logprob_gap": s["max_delta"] if s["rows"] else math.nan,
        }


def text_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """What can be read off one role's rows without the model, besides the `signatures` of their texts."""
    lengths = torch.tensor([len(row.turn.completion_ids) for row in rows], dtype=torch.float64)  # (N,)
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)  # (N,)
    return {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "reward": sum(row.episode.reward.value for row in rows) / len(rows),
        "advantage_mean": advantages.mean().item(),
        "advantage_abs": advantages.abs().mean().item(),
        "unparsed_rate": sum(row.turn.outcome == "unparsed" for row in rows) / len(rows),
    }


def diverged(loss: float, iteration: int, rows: list[Row]) -> FloatingPointError:
    """What to raise where a loss is not finite."""
    named = [(row.episode.problem.id, row.episode.index, row.turn.slot, row.turn.round) for row in rows]
    return FloatingPointError(
        f"loss={loss} at iteration {iteration}, role {rows[0].turn.role!r}, rows (problem, episode, slot, round) {named}: training on "
        "would hide a divergence. Lower learning_rate, or resume from an earlier checkpoint."
    )


def nothing_sampled(max_prompt_tokens: int, iteration: int) -> ValueError:
    """What to raise where an iteration has no row at all."""
    return ValueError(
        f"max_prompt_tokens={max_prompt_tokens} is shorter than the first prompt of every episode of iteration "
        f"{iteration + 1}: nothing was sampled. Write a larger max_prompt_tokens."
    )


def sample_rows(rows: Sequence[Row], share: int = 16, least: int = 4) -> list[Row]:
    """Every 16th row of each role, at least four: what is measured apart, before the updates and after them."""
    by_role: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_role[row.turn.role].append(row)
    return [row for mine in by_role.values() for row in mine[:: max(1, min(share, len(mine) // least))]]


Step = tuple[str, int, str]
"""(adapter, optimizer step of it in this iteration, role)."""


class IterationDiagnostics:
    """Collects one iteration: token statistics and gradients per optimizer step and role, the ledger of optimizer steps.

    Args:
        temperature: of the rows' log-probs; at 1, `chi2_raw` is `chi2`.
        is_on: whether gradients are taken apart and texts read; metrics that need it are NaN without.

    `raw` maps id(turn) to the log-probs (C,) at temperature 1, under the weights that sampled, of the rows that have them.
    """

    def __init__(
        self, rows: list[Row], clip_low: float, clip_high: float, temperature: float = 1.0, is_on: bool = True
    ) -> None:
        self.rows, self.clip, self.temperature, self.is_on = rows, (clip_low, clip_high), temperature, is_on
        self.raw: dict[int, torch.Tensor] = {}
        self.tokens: dict[Step, TokenStats] = defaultdict(TokenStats)
        self.grad_norms: dict[Step, float] = {}
        self.gradients: dict[str, GradientParts] = defaultdict(GradientParts)
        self.cosine_previous: dict[str, float] = {}
        self.chi2_after: dict[str, float] = {}
        self.ledger: list[dict[str, object]] = []

    def _step(self, adapter: str) -> int:
        """The optimizer step that is being prepared."""
        return sum(entry["adapter"] == adapter for entry in self.ledger)

    def add_tokens(
        self, rows: list[Row], batch: dict[str, torch.Tensor], lp: torch.Tensor, entropy: torch.Tensor
    ) -> None:
        """One micro-batch of one role, as the loss saw it."""
        adapter, role, lr = rows[0].adapter, rows[0].turn.role, batch["sampling_per_token_logps"]
        self.tokens[adapter, self._step(adapter), role].add(
            lp,
            lr,
            batch["old_per_token_logps"],
            entropy,
            batch["completion_mask"],
            batch["advantages"],
            *self.clip,
            raw=None if self.temperature == 1.0 else padded(self.raw, rows).to(lr),
        )

    def add_gradients(self, adapter: str, parts: list[Part], gradients: torch.Tensor, is_sharded: bool) -> None:
        """The parts (K, n) of one optimizer step's gradient, before clipping."""
        for role, norm in self.gradients[adapter].add_step(parts, gradients, is_sharded).items():
            self.grad_norms[adapter, self._step(adapter), role] = norm

    def add_after(self, rows: Sequence[Row], logprobs: dict[int, torch.Tensor]) -> None:
        """Log-probs of a sample of rows under the updated weights: id(turn) -> (C,)."""
        by_role: dict[str, list[torch.Tensor]] = defaultdict(list)
        for row in rows:
            lp = logprobs[id(row.turn)]
            by_role[row.turn.role].append((lp - torch.tensor(row.turn.logprobs)).clamp(-CLAMP, CLAMP))
        self.chi2_after = {
            role: torch.cat(deltas).double().mul(2).exp().mean().item() - 1.0 for role, deltas in by_role.items()
        }

    def cosines(self) -> list[dict[str, object]]:
        """The cosine between the gradients of each two roles that share an adapter."""
        return [
            {"adapter": adapter, "role": role, "other": other, "cosine": cosine}
            for adapter, parts in self.gradients.items()
            for role, other, cosine in parts.cosines()
        ]

    def token_sums(self) -> dict[Step, dict[str, float]]:
        """What this process has added up, step by step; `merge` makes the whole of every process's sums."""
        return {step: dict(stats.sums) for step, stats in self.tokens.items()}

    def merge(self, parts: list[dict[Step, dict[str, float]]]) -> None:
        """Replace the sums by those over all processes."""
        self.tokens.clear()
        for part in parts:
            for step, sums in part.items():
                self.tokens[step].merge(sums)

    def steps(self) -> list[dict[str, object]]:
        """One row per optimizer step and role: what its tokens and its part of the gradient were, before the step.

        Step 0 sees the policy that sampled, so it is the measurement at the start of the update.
        """
        return [
            {
                "adapter": adapter,
                "step": step,
                "role": role,
                "rows": int(stats.sums["rows"]),
                "tokens": int(stats.sums["tokens"]),
            }
            | stats.summary()
            | {"grad_norm": self.grad_norms.get((adapter, step, role), math.nan)}
            for (adapter, step, role), stats in sorted(self.tokens.items(), key=lambda item: item[0][:2])
        ]

    def add_step(self, adapter: str, rows: list[Row], lr: float, grad_norm: float, grad_norm_clipped: float) -> None:
        """One optimizer step, for the ledger. The norms are of the gradient that is applied, before and after clipping."""
        tokens = sum(len(row.turn.completion_ids) for row in rows)
        self.ledger.append(
            {
                "adapter": adapter,
                "step": self._step(adapter),
                "rows": len(rows),
                "tokens": tokens,
                "duplicated_rows": len(rows) - len({id(row.turn) for row in rows}),
                "lr": lr,
                "grad_norm": grad_norm,
                "grad_norm_clipped": grad_norm_clipped,
            }
        )

    def per_role(self) -> dict[str, dict[str, float]]:
        """role -> metrics. `grad_norm` is the mean over the role's optimizer steps of its own part of the gradient.

        A role that was not trained has NaN for what only training shows.
        """
        by_role: dict[str, list[Row]] = defaultdict(list)
        masses: dict[str, tuple[Counter, Counter]] = defaultdict(lambda: (Counter(), Counter()))
        for row in self.rows:
            by_role[row.turn.role].append(row)
            rows_of, tokens_of = masses[row.adapter]
            rows_of[row.turn.role] += row.is_trained
            tokens_of[row.turn.role] += row.is_trained * len(row.turn.completion_ids)
        texts = {role: dict.fromkeys(SIGNATURES, math.nan) for role in by_role}
        if self.is_on:
            texts = signatures(list({id(row.episode): row.episode for row in self.rows}.values()))
        sums: dict[str, TokenStats] = defaultdict(TokenStats)
        for (_, _, role), stats in self.tokens.items():
            sums[role].merge(stats.sums)
        n_steps = Counter(role for _, _, role in self.tokens)
        norms: dict[str, list[float]] = defaultdict(list)
        for (_, _, role), norm in self.grad_norms.items():
            norms[role].append(norm)
        return {
            role: text_metrics(rows)
            | texts[role]
            | sums[role].summary()
            | {
                "grad_norm": sum(norms[role]) / len(norms[role]) if norms[role] else math.nan,
                "optimizer_steps": n_steps[role],
                "chi2_after": self.chi2_after.get(role, math.nan),
                "row_mass": _share(role, masses[rows[0].adapter][0]),
                "token_mass": _share(role, masses[rows[0].adapter][1]),
                "cosine_previous": self.cosine_previous.get(rows[0].adapter, math.nan) if n_steps[role] else math.nan,
            }
            | (self.gradients[rows[0].adapter].of_role(role) if norms[role] else dict.fromkeys(SHARES, math.nan))
            for role, rows in by_role.items()
        }


def _share(role: str, counts: Counter) -> float:
    """The role's part of its adapter's counts; NaN where nothing of the adapter was trained."""
    return counts[role] / counts.total() if counts.total() else math.nan
