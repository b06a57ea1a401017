"""The gradient of a mini-batch does not depend on how it is computed: padding, micro-batches, row order (1e-6 in fp32)."""

import dataclasses

import pytest
import torch
from trainers import diagnostics_of, episodes_of, rows_of, slow_but

from multirole.update.rows import Row, collate
from multirole.workflows import Voting

TOLERANCE = 1e-6


def gradient(trainer, adapter, rows, divisor=None):
    """The gradient that `optimizer_step` applies (clipping off), flat, in the order of the adapter's tensors."""
    seen = {}
    keep = trainer.optimizer.step
    trainer.optimizer.step = lambda: seen.update(
        {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    )
    try:
        trainer.optimizer_step(trainer.model, adapter, rows, divisor or len(rows), 0.0)
    finally:
        trainer.optimizer.step = keep
    assert all(f".{adapter}." in name for name in seen)
    return torch.cat([grad.flatten() for _, grad in sorted(seen.items())])


def cut(trainer, rows, tokens):
    """Let micro-batches have at most `tokens` tokens; return how many the rows make."""
    trainer.passes.micro_batch_tokens = tokens
    trainer.passes.__dict__.pop("tokens_with_gradient", None)  # cached
    return len(trainer.passes.shard(rows, trainer.passes.tokens_with_gradient, [0.0]))


def make(make_library_trainer, **config):
    trainer = make_library_trainer(Voting(), **config)
    return trainer, rows_of(trainer, episodes_of(trainer.workflow.roles, 4))


def test_sp_gradient_is_the_sum_of_the_role_gradients(make_library_trainer):
    trainer, rows = make(make_library_trainer)
    whole = gradient(trainer, "shared", rows)
    parts = [
        gradient(trainer, "shared", [row for row in rows if row.turn.role == role], len(rows))
        for role in ("generator", "aggregator")
    ]
    assert all(part.norm() > 1e-3 for part in parts)
    torch.testing.assert_close(whole, sum(parts), atol=TOLERANCE, rtol=0)


def test_ip_role_gradients_are_the_parts_of_the_sp_gradient(make_library_trainer):
    """All adapters of the fixture start equal, so the parts may be computed under either policy."""
    shared, rows = make(make_library_trainer)
    isolated, _ = make(make_library_trainer, policy="ip")
    whole = gradient(shared, "shared", rows)
    parts = []
    for role in ("generator", "aggregator"):
        role_rows = [Row(r.episode, r.turn, role, r.advantage) for r in rows if r.turn.role == role]
        parts.append(gradient(isolated, role, role_rows, len(rows)))
    torch.testing.assert_close(whole, sum(parts), atol=TOLERANCE, rtol=0)


def test_row_order_and_micro_batch_size_do_not_change_the_gradient(make_library_trainer):
    trainer, rows = make(make_library_trainer)
    whole = gradient(trainer, "shared", rows)
    torch.testing.assert_close(gradient(trainer, "shared", rows[::-1]), whole, atol=TOLERANCE, rtol=0)
    counts = []
    for tokens in (1, 64, 500, 100_000):
        counts.append(cut(trainer, rows, tokens))
        torch.testing.assert_close(gradient(trainer, "shared", rows), whole, atol=TOLERANCE, rtol=0)
    assert counts[0] == len(rows) > counts[1] > counts[2] > counts[3] == 1


def test_right_padded_rows_score_like_left_padded_ones(make_library_trainer):
    """Our log-probs from rows at the left edge equal those of a plain forward with TRL's padding and mask."""
    trainer, rows = make(make_library_trainer)
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


def test_partial_mini_batch_is_under_weighted_only_in_the_released_code(make_library_trainer):
    trainer, rows = make(make_library_trainer)
    torch.testing.assert_close(
        gradient(trainer, "shared", rows, 2 * len(rows)), gradient(trainer, "shared", rows) / 2, atol=TOLERANCE, rtol=0
    )


def test_recomputed_old_log_probs_ignore_the_engine_s(make_library_trainer):
    """With pi_old from the trainer, the gradient is that of exact sampled log-probs."""
    trainer, _ = make(make_library_trainer, old_logprobs="recomputed", vllm_importance_sampling_correction=False)
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    recomputed = gradient(trainer, "shared", rows)
    sampled = []
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        turn = dataclasses.replace(row.turn, logprobs=logps.tolist())
        sampled.append(Row(row.episode, turn, row.adapter, row.advantage))
    torch.testing.assert_close(gradient(trainer, "shared", sampled), recomputed, atol=TOLERANCE, rtol=0)
    assert recomputed.norm() > 1e-3
    trainer.args.old_logprobs = "sampled"
    assert (gradient(trainer, "shared", rows) - recomputed).norm() > 1e-3


def test_recomputed_old_log_probs_come_from_each_rows_own_adapter(make_diagnosed_trainer):
    trainer = make_diagnosed_trainer(Voting(), policy="ip", old_logprobs="recomputed")
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    rows_by_adapter = {name: [row for row in rows if row.adapter == name] for name in trainer.adapters}
    trainer.optimizer_step(
        trainer.model, "generator", rows_by_adapter["generator"], 48, 1e-2
    )  # now the adapters differ
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        row.turn.logprobs = logps.tolist()
    diagnostics = diagnostics_of(trainer)
    diagnostics.on_update_begin(trainer, [], {})
    for name in trainer.adapters:
        batch = [row for row in rows if row.adapter == name]
        trainer.optimizer_step(trainer.model, name, batch, len(batch), 0.0)
        assert diagnostics.tokens[name].summary()["max_logprob_gap"] < 1e-5


@pytest.mark.parametrize("loss_type", slow_but(["cispo", "luspo"], ["cispo", "vespo", "sapo", "luspo"]))
def test_no_loss_type_depends_on_the_micro_batches(make_library_trainer, loss_type):
    """On rows of one role, whose micro-batches differ in rows and in tokens. `test_matching_switches.py` has the other types."""
    wide = {"epsilon_high": 5.0} if loss_type == "cispo" else {}  # TRL's recommended value; it bounds the ratio itself
    trainer, rows = make(make_library_trainer, loss_type=loss_type, **wide)
    rows = [row for row in rows if row.turn.role == "generator"]
    assert cut(trainer, rows, 100_000) == 1
    whole = gradient(trainer, "shared", rows)
    assert whole.norm() > 1e-3
    for tokens in (1, 64, 500):
        assert cut(trainer, rows, tokens) > 1
        torch.testing.assert_close(gradient(trainer, "shared", rows), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"epsilon": 1e-3, "epsilon_high": 1e-3}, "clip_ratio/region_mean"),
        ({"epsilon": 1e-3, "epsilon_high": 1e-3, "importance_sampling_level": "sequence"}, "clip_ratio/region_mean"),
        ({"loss_type": "vespo"}, "vespo/phi_seq_mean"),
    ],
)
def test_the_logged_ratios_do_not_depend_on_the_micro_batches(make_library_trainer, options, name):
    """TRL logs a mean over tokens, or over rows where a row has one ratio."""
    trainer, rows = make(make_library_trainer, **options)
    logged = []
    for tokens in (100_000, 128):
        cut(trainer, rows, tokens)
        trainer.compute_gradient(trainer.model, "shared", rows, len(rows))
        trainer.update_metrics.loss.write_to(trainer._metrics["train"])
        logged.append(trainer._metrics["train"].pop(name)[0])
    assert 0 < logged[0] and logged[1] == pytest.approx(logged[0], abs=1e-6)


def test_a_loss_may_log_a_metric_several_times(make_library_trainer):
    """A subclass may append to TRL's `_metrics` as often as it likes."""
    trainer, rows = make(make_library_trainer)
    usual = trainer._compute_loss

    def compute_loss(model, inputs):
        trainer._metrics["train"]["mine"] += [1.0, 2.0]
        return usual(model, inputs)

    trainer._compute_loss = compute_loss
    trainer.compute_gradient(trainer.model, "shared", rows, len(rows))
    trainer.update_metrics.loss.write_to(trainer._metrics["train"])
    assert trainer._metrics["train"]["mine"] == [1.5]


@pytest.mark.parametrize("max_norm", [0.0, -1.0])
def test_a_norm_that_is_not_positive_clips_nothing(make_library_trainer, max_norm):
    """HF clips only where `max_grad_norm > 0`; torch's `clip_grad_norm_` would turn the gradient round at a negative norm."""
    trainer, rows = make(make_library_trainer)
    expected = gradient(trainer, "shared", rows)
    trainer.args.max_grad_norm = max_norm
    torch.testing.assert_close(gradient(trainer, "shared", rows), expected, atol=TOLERANCE, rtol=0)
