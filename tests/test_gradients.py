"""What the gradient of a mini-batch must equal, whichever way it is computed (1e-6 in fp32)."""

import pytest
import torch
from conftest import make_episodes

from multirole.core.rows import Row, collate
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.experiment.cell import Cell

TOLERANCE = 1e-6


def gradient(trainer, adapter, rows, divisor=None):
    """The gradient that `optimizer_step` applies (clipping off), flat, in the order of the adapter's tensors."""
    seen = {}
    keep = trainer.optimizer.step
    trainer.optimizer.step = lambda: seen.update(
        {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    )
    try:
        diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
        trainer.optimizer_step(trainer.model, adapter, rows, divisor or len(rows), 0.0, diagnostics)
    finally:
        trainer.optimizer.step = keep
    assert all(f".{adapter}." in name for name in seen)
    return torch.cat([grad.flatten() for _, grad in sorted(seen.items())])


def make(make_trainer, **fields):
    cell = Cell(**{"workflow": "voting", "policy": "sp", "max_grad_norm": 1e9} | fields)
    trainer = make_trainer(cell)
    return trainer, trainer._rows(make_episodes(cell))


def test_sp_gradient_is_the_sum_of_the_role_gradients(make_trainer):
    trainer, rows = make(make_trainer)
    whole = gradient(trainer, "shared", rows)
    parts = [
        gradient(trainer, "shared", [row for row in rows if row.turn.role == role], len(rows))
        for role in ("generator", "aggregator")
    ]
    assert all(part.norm() > 1e-3 for part in parts)
    torch.testing.assert_close(whole, sum(parts), atol=TOLERANCE, rtol=0)


def test_ip_role_gradients_are_the_parts_of_the_sp_gradient(make_trainer):
    """All adapters of the fixture start equal, so the parts may be computed under either policy."""
    shared, rows = make(make_trainer)
    isolated, _ = make(make_trainer, policy="ip")
    whole = gradient(shared, "shared", rows)
    parts = []
    for role in ("generator", "aggregator"):
        owned = [Row(r.episode, r.turn, role, r.advantage) for r in rows if r.turn.role == role]
        parts.append(gradient(isolated, role, owned, len(rows)))
    torch.testing.assert_close(whole, sum(parts), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tokens", [1, 64, 500, 100_000])
def test_micro_batch_size_does_not_change_the_gradient(make_trainer, tokens):
    trainer, rows = make(make_trainer)
    whole = gradient(trainer, "shared", rows)
    object.__setattr__(trainer.cell, "micro_batch_tokens", tokens)
    torch.testing.assert_close(gradient(trainer, "shared", rows), whole, atol=TOLERANCE, rtol=0)


def test_row_order_does_not_change_the_gradient(make_trainer):
    trainer, rows = make(make_trainer)
    torch.testing.assert_close(
        gradient(trainer, "shared", rows[::-1]), gradient(trainer, "shared", rows), atol=TOLERANCE, rtol=0
    )


def test_right_padded_rows_score_like_left_padded_ones(make_trainer):
    """Our log-probs from rows at the left edge equal those of a plain forward with TRL's padding and mask."""
    trainer, rows = make(make_trainer)
    batch = collate(rows, 0, torch.device("cpu"))
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].size(1)
    ours, entropy, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -width - 1 : -1]
    logps = (logits / trainer.temperature).log_softmax(-1)
    keep = batch["completion_mask"].bool()
    plain = logps.gather(2, batch["completion_ids"][..., None])[..., 0]
    torch.testing.assert_close(ours[keep], plain[keep], atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy[keep], -(logps.exp() * logps).sum(-1)[keep], atol=1e-5, rtol=0)
    assert not ours[~keep].any()


def test_partial_mini_batch_is_under_weighted_only_in_the_released_code(make_trainer):
    trainer, rows = make(make_trainer)
    torch.testing.assert_close(
        gradient(trainer, "shared", rows, 2 * len(rows)), gradient(trainer, "shared", rows) / 2, atol=TOLERANCE, rtol=0
    )


def test_recomputed_old_log_probs_ignore_what_the_engine_said(make_trainer):
    """pi_old by the trainer: the same gradient as sampled ones that the engine reported without error."""
    trainer, rows = make(make_trainer, old_logprobs="recomputed")
    trainer._old_logprobs = trainer._logprobs_of(trainer.model, rows)
    recomputed = gradient(trainer, "shared", rows)
    for row in rows:
        row.turn.logprobs = trainer._old_logprobs[id(row.turn)].tolist()
    object.__setattr__(trainer.cell, "old_logprobs", "sampled")
    torch.testing.assert_close(gradient(trainer, "shared", rows), recomputed, atol=TOLERANCE, rtol=0)
    assert recomputed.norm() > 1e-3


def test_recomputed_old_log_probs_come_from_each_rows_own_adapter(make_trainer):
    trainer, rows = make(make_trainer, policy="ip", old_logprobs="recomputed")
    owned = {name: [row for row in rows if row.adapter == name] for name in trainer.adapters}
    before = IterationDiagnostics(rows, 0.2, 0.28)
    trainer._old_logprobs = trainer._logprobs_of(trainer.model, rows)
    trainer.optimizer_step(trainer.model, "generator", owned["generator"], 48, 1e-2, before)  # now the adapters differ
    trainer._old_logprobs = trainer._logprobs_of(trainer.model, rows)
    for row in rows:
        row.turn.logprobs = trainer._old_logprobs[id(row.turn)].tolist()
    diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
    for name, batch in owned.items():
        trainer.optimizer_step(trainer.model, name, batch, len(batch), 0.0, diagnostics)
        assert diagnostics.tokens[name, 0, name].summary()["max_logprob_gap"] < 1e-5
