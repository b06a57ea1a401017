"""`chi2_raw`: the policy during the update against temperature-1 log-probs of the policy that sampled."""

import pytest
import torch
from trainers import diagnostics_of, episodes_of

from multirole.roles.diagnostics import CLAMP, RoleDiagnostics, sample_rows
from multirole.types import Turn
from multirole.update.rows import Row, collate
from multirole.workflows import Voting


@torch.no_grad()
def from_whole_logits(model, row, temperature: float) -> torch.Tensor:
    """Log-probs (C,) of one row's completion, from the logits of every position and word."""
    model.set_adapter(row.adapter)
    ids, n = torch.tensor([row.turn.prompt_ids + row.turn.completion_ids]), len(row.turn.completion_ids)
    logps = (model(input_ids=ids).logits[0, -n - 1 : -1] / temperature).log_softmax(-1)  # (C, V)
    return logps.gather(1, torch.tensor(row.turn.completion_ids)[:, None])[:, 0]


def updated(make_diagnosed_trainer, monkeypatch, n_problems=8, **config):
    """A trainer's `update` with several optimizer steps; `seen` holds (row, lp) of every row, scored before its own step."""
    trainer = make_diagnosed_trainer(Voting(), learning_rate=3e-2, max_grad_norm=1.0, **config)
    seen, calls = [], []
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles, n_problems=n_problems))
    compute_gradient, logprobs_of = trainer.compute_gradient, trainer.logprobs_of

    def spy(model, adapter, mini_batch, *rest):
        seen.extend((row, from_whole_logits(model, row, trainer.temperature)) for row in mini_batch)
        return compute_gradient(model, adapter, mini_batch, *rest)

    monkeypatch.setattr(trainer, "compute_gradient", spy)
    monkeypatch.setattr(
        trainer, "logprobs_of", lambda *args, **named: calls.append(named) or logprobs_of(*args, **named)
    )
    raw = {id(row): from_whole_logits(trainer.model, row, 1.0) for row in rows}
    trainer.update(trainer.model, rows)
    return trainer, rows, seen, raw, calls


def test_it_equals_whole_logits_on_the_sampled_rows(make_diagnosed_trainer, monkeypatch):
    trainer, rows, seen, raw, calls = updated(make_diagnosed_trainer, monkeypatch, policy="ip", temperature=0.7)
    diagnostics, sampled = diagnostics_of(trainer), {id(row) for row in sample_rows(rows)}
    assert 8 <= len(sampled) < len(rows) / 4 and diagnostics.raw.keys() == sampled
    assert len({(entry["adapter"], entry["step"]) for entry in diagnostics.ledger}) > 8
    assert len(calls) == 2  # before the first step, and after the last
    for role, metrics in diagnostics.per_role(rows).items():
        gaps = [lp - raw[id(row)] for row, lp in seen if id(row) in sampled and row.turn.role == role]
        expected = torch.cat(gaps).double().clamp(-CLAMP, CLAMP).mul(2).exp().mean().item() - 1.0
        assert metrics["chi2_raw"] == pytest.approx(expected, abs=1e-6) and abs(expected) > 1e-4
        assert metrics["chi2_raw"] != pytest.approx(metrics["chi2"], rel=0.01)
    some = rows[:4]  # the head is at the sampling temperature again
    for row, again in zip(some, trainer.logprobs_of(some), strict=True):
        torch.testing.assert_close(again, from_whole_logits(trainer.model, row, 0.7), atol=1e-5, rtol=0)


def test_at_temperature_1_it_is_chi2_and_costs_no_pass(make_diagnosed_trainer, monkeypatch):
    trainer, rows, _, _, calls = updated(make_diagnosed_trainer, monkeypatch, 2, policy="sp", temperature=1.0)
    assert len(calls) == 1
    measured = diagnostics_of(trainer).per_role(rows).values()
    assert len(measured) == 2 and all(metrics["chi2_raw"] == metrics["chi2"] for metrics in measured)


def test_the_sums_of_two_processes_are_those_of_one():
    """Only the first process has sampled rows. The tokens of the other one must not count in the mean's denominator."""
    turns: list[tuple[object, Turn]] = [(e, t) for e in episodes_of({"generator": 3}, n_problems=1) for t in e.turns][
        :6
    ]
    rows = [Row(e, t, "shared", e.advantage) for e, t in turns]
    generator = torch.Generator().manual_seed(0)
    raw = {id(row): -6 + 0.1 * torch.randn(len(row.turn.completion_ids), generator=generator) for row in rows[:2]}

    def measure(mine: list[Row]) -> RoleDiagnostics:
        diagnostics = RoleDiagnostics()
        diagnostics.clip, diagnostics.is_raw_known, diagnostics.raw = (0.2, 0.28), False, raw
        batch = collate(mine, 0, torch.device("cpu"))
        diagnostics.on_micro_batch(
            None,
            mine,
            batch,
            torch.full(batch["completion_ids"].shape, -6.0),
            torch.zeros(batch["completion_ids"].shape),
        )
        return diagnostics

    one, parts = measure(rows), [measure(rows[:3]), measure(rows[3:])]
    parts[0].merge([{role: dict(stats.sums) for role, stats in part.tokens.items()} for part in parts])
    expected = torch.cat([-6.0 - values for values in raw.values()]).double().mul(2).exp().mean().item() - 1.0
    for diagnostics in (one, parts[0]):
        assert diagnostics.tokens["generator"].summary()["chi2_raw"] == pytest.approx(expected, abs=1e-6)
