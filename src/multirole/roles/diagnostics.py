"""Compute the per-role metrics of one iteration. METRICS.md has a row for each.

The policy metrics compare the trainer's log-probs *during* the update (lp) with the engine's at sampling time (lr, `ls` in METRICS.md; not a learning rate),
token by token, as the released code does (verl's `rollout_corr_helper`): for the second and third mini-batch the policy has
already changed. With the engine's processed log-probs they start at zero instead of at a temperature offset.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from multirole.callbacks import Iteration, MultiRoleCallback, OptimizerStep, Trainer
from multirole.roles.gradient_parts import GradientParts
from multirole.update.gradients import Part
from multirole.update.kl_bound import CLAMP
from multirole.update.processes import gather_objects
from multirole.update.rows import Row, Steps, trained_tokens

SHARES = ("grad_share", "coherence")


class TokenStats:
    """Sums over the trained tokens of one role, accumulated over the micro-batches of an iteration."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)

    def add(
        self, lp: torch.Tensor, lr: torch.Tensor, old: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor,
        advantages: torch.Tensor, clip_low: float, clip_high: float, raw: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Accumulate one micro-batch: lp, lr, old (pi_old of the loss), entropy, mask are (N, T), advantages (N,).

        `raw` (N, T) is lr at temperature 1, NaN where it was not measured; None if sampling was at temperature 1. A token whose
        lr is NaN, because the engine could not score it, is left out of the comparisons with lr.
        """
        mask, n_tokens = mask.bool(), mask.sum(1)  # (N, T), (N,)
        compared = mask & ~lr.isnan()  # (N, T)
        delta = (lp - lr).masked_fill(~compared, 0.0).clamp(-CLAMP, CLAMP)  # (N, T)
        ratio, sign = delta.exp(), advantages.sign()[:, None]  # (N, T), (N, 1)
        trained = (lp - old).exp()  # (N, T)
        clipped = ((trained > 1 + clip_high) & (sign > 0)) | ((trained < 1 - clip_low) & (sign < 0))
        known, raw_ratio = compared, ratio
        if raw is not None:
            known = mask & raw.isfinite()  # (N, T)
            raw_ratio = (lp - raw).masked_fill(~known, 0.0).clamp(-CLAMP, CLAMP).exp()  # (N, T)
        values = {
            "tokens": mask, "compared": compared, "chi2": ratio.square() * compared, "kl": -delta, "k3": ratio - delta - 1, "entropy": entropy,
            "clip": clipped, "raw_tokens": known, "chi2_raw": raw_ratio.square() * known,
        }  # fmt: skip
        sums = torch.stack([(value * mask).sum(dtype=torch.float64) for value in values.values()])
        for name, value in zip(values, sums.tolist(), strict=True):
            self.sums[name] += value
        self.sums["max_delta"] = max(self.sums["max_delta"], (delta.abs() * mask).max().item())
        self.sums["ppl"] += (-(lp * mask).sum(1) / n_tokens).exp().sum(dtype=torch.float64).item()
        self.sums["rows"] += len(lp)

    def merge(self, sums: dict[str, float]) -> None:
        """Add the sums of another process."""
        for name, value in sums.items():
            self.sums[name] = max(self.sums[name], value) if name == "max_delta" else self.sums[name] + value

    def summary(self) -> dict[str, float]:
        """Return token means (perplexity: mean over rows of exp(-mean log-prob)); NaN if no row was trained."""
        s = self.sums
        tokens, compared, rows = (s[name] or math.nan for name in ("tokens", "compared", "rows"))
        return {
            "perplexity": s["ppl"] / rows,
            "entropy": s["entropy"] / tokens,
            "chi2": s["chi2"] / compared - 1.0,
            "chi2_raw": s["chi2_raw"] / s["raw_tokens"] - 1.0 if s["raw_tokens"] else math.nan,
            "kl": s["kl"] / compared,
            "k3_kl": s["k3"] / compared,
            "clip_fraction": s["clip"] / tokens,
            "max_logprob_gap": s["max_delta"] if s["rows"] else math.nan,
        }


@contextmanager
def head_at(model: PeftModel, temperature: float, cast_to_fp32: bool) -> Iterator[None]:
    """Context manager: the fused head divides logits by `temperature` instead of the trainer's."""
    base = model.get_base_model()
    usual = base.forward
    add_fused_lm_head(base, temperature, cast_to_fp32, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        base.forward = usual


def by_role(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by role, in order of appearance."""
    return {role: [row for row in rows if row.turn.role == role] for role in dict.fromkeys(r.turn.role for r in rows)}


def sample_rows(rows: Sequence[Row], every: int = 16, minimum: int = 4) -> list[Row]:
    """Return a sample of each role's rows for metrics that need extra forward passes: each `every`-th row, but at least `minimum`."""
    return [
        row
        for role_rows in by_role(rows).values()
        for row in role_rows[:: max(1, min(every, len(role_rows) // minimum))]
    ]


class RoleDiagnostics(MultiRoleCallback):
    """Callback that measures each role in every iteration and adds the metrics to `iteration.roles`.

    Pass it before callbacks that scale gradients, so that it measures them unscaled, and before callbacks that read
    `iteration.roles`.
    """

    def __init__(self) -> None:
        self.is_sharded = False
        self._clear()

    def _clear(self) -> None:
        self.raw: dict[int, Tensor] = {}
        self.tokens: dict[str, TokenStats] = defaultdict(TokenStats)
        self.grad_norms: dict[str, list[float]] = defaultdict(list)
        self.gradients: dict[str, GradientParts] = defaultdict(GradientParts)
        self.chi2_after: dict[str, float] = {}
        self.taken: Counter[str] = Counter()
        self.ledger: list[dict[str, object]] = []

    # ---- events

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        self._clear()
        self.is_sharded, self.clip = trainer.is_sharded, (trainer.epsilon_low, trainer.epsilon_high)
        self.is_raw_known = trainer.args.temperature == 1.0
        self.sample = sample_rows(rows)
        if self.sample and not self.is_raw_known:
            with head_at(trainer.peft_model, 1.0, trainer.args.cast_lm_head_to_fp32):
                measured = trainer.logprobs_of(self.sample)
            self.raw = {id(row): logps for row, logps in zip(self.sample, measured, strict=True)}

    def on_micro_batch(
        self, trainer: Trainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
    ) -> None:  # fmt: skip
        raw = None if self.is_raw_known else self._raw(rows).to(logps)
        batch = batch | {"lp": logps, "entropy": entropies}
        for role in dict.fromkeys(row.turn.role for row in rows):
            indices = [i for i, row in enumerate(rows) if row.turn.role == role]
            role_batch = {name: tensor[indices] for name, tensor in batch.items() if tensor.dim()}
            self.tokens[role].add(
                role_batch["lp"], role_batch["sampling_per_token_logps"], role_batch["old_per_token_logps"], role_batch["entropy"], role_batch["completion_mask"],
                role_batch["advantages"], *self.clip, raw=None if raw is None else raw[indices],
            )  # fmt: skip

    def _raw(self, rows: list[Row]) -> Tensor:
        """Return the rows' log-probs (N, C) at temperature 1, NaN in rows that were not measured."""
        lines = [self.raw.get(id(row), torch.full((len(row.turn.completion_ids),), math.nan)) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)

    def on_gradient_parts(
        self, trainer: Trainer, adapter: str, parts: list[Part], gradients: Tensor
    ) -> None:  # fmt: skip
        for role, norm in self.gradients[adapter].add_step(parts, gradients, self.is_sharded).items():
            self.grad_norms[role].append(norm)

    def on_adapter_step(self, trainer: Trainer, step: OptimizerStep) -> None:
        self.ledger.append(
            {
                "adapter": step.adapter,
                "step": self.taken[step.adapter],
                "rows": len(step.rows),
                "tokens": trained_tokens(step.rows),
                "duplicated_rows": len(step.rows) - len({id(row.turn) for row in step.rows}),
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "grad_norm_clipped": step.grad_norm_clipped,
            }
        )
        self.taken[step.adapter] += 1

    def on_update_end(self, trainer: Trainer, rows: list[Row]) -> None:
        if self.sample:
            self.add_after(self.sample, trainer.logprobs_of(self.sample))

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        self.merge(gather_objects({role: dict(stats.sums) for role, stats in self.tokens.items()}))
        for role, metrics in self.per_role(iteration.rows).items():
            iteration.roles[role] |= metrics

    # ---- results

    def add_after(self, rows: Sequence[Row], logprobs: Sequence[Tensor]) -> None:
        """Add the chi2 of sampled rows between the updated weights, whose log-probs (C,) are given, and the weights that sampled."""
        by_role: dict[str, list[Tensor]] = defaultdict(list)
        for row, lp in zip(rows, logprobs, strict=True):
            lr = torch.tensor(row.turn.logprobs)
            by_role[row.turn.role].append((lp - lr)[~lr.isnan()].clamp(-CLAMP, CLAMP))
        self.chi2_after = {
            role: torch.cat(deltas).double().mul(2).exp().mean().item() - 1.0 for role, deltas in by_role.items()
        }

    def merge(self, parts: list[dict[str, dict[str, float]]]) -> None:
        """Replace this process's sums by those over all processes."""
        self.tokens.clear()
        for part in parts:
            for role, sums in part.items():
                self.tokens[role].merge(sums)

    def cosines(self) -> list[dict[str, object]]:
        """Return the cosine between the gradients of each pair of roles that share an adapter."""
        return [
            {"adapter": adapter, "role": role, "other": other, "cosine": cosine}
            for adapter, parts in self.gradients.items()
            for role, other, cosine in parts.cosines()
        ]

    def per_role(self, rows: list[Row]) -> dict[str, dict[str, float]]:
        """Return role -> metrics. `grad_norm` is the mean, over the role's optimizer steps, of the norm of its part of the gradient.

        A role without an optimizer step has NaN for metrics of training.
        """
        rows_of = by_role(rows)
        tokens = {role: trained_tokens(role_rows) for role, role_rows in rows_of.items()}
        metrics = {}
        for role, role_rows in rows_of.items():
            adapter = role_rows[0].adapter
            adapter_tokens = sum(
                tokens[other] for other, other_rows in rows_of.items() if other_rows[0].adapter == adapter
            )
            norms = self.grad_norms[role]
            shares = self.gradients[adapter].of_role(role) if norms else dict.fromkeys(SHARES, math.nan)
            metrics[role] = self.tokens[role].summary() | {
                "grad_norm": sum(norms) / len(norms) if norms else math.nan,
                "optimizer_steps": len(norms),
                "chi2_after": self.chi2_after.get(role, math.nan),
                "token_mass": tokens[role] / adapter_tokens if adapter_tokens else math.nan,
            } | shares  # fmt: skip
        return metrics
