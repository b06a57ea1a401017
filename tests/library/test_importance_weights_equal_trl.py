"""Importance weights between sampler and trainer are stock TRL's, and so is the loss that takes them."""

import logging
import math

import pytest
import torch
from trainers import episodes_of, library_trainer, rows_of

from multirole.trl_parts import GRPOTrainer
from multirole.update.importance import Correction, WeightSums
from multirole.update.rows import collate
from multirole.workflows import Single, Voting

MODES = [
    ("token_truncate", None, 1.2), ("token_truncate", 0.9, None), ("token_mask", 0.8, 1.2), ("sequence_truncate", 0.5, 2.0),
    ("sequence_mask", None, 3.0), ("sequence_mask", 0.5, None),
]  # fmt: skip


def trls_weights(old, sampled, mask, mode, clip_min, clip_max):
    """The statements of TRL 1.16's `_generate_and_score_completions`, in its order."""
    diff = torch.nan_to_num((old - sampled) * mask, nan=0.0)
    ratio = torch.exp(diff.sum(dim=-1, keepdim=True) if mode in ("sequence_mask", "sequence_truncate") else diff)
    if mode in ("sequence_truncate", "token_truncate"):
        return torch.clamp(ratio, min=clip_min, max=clip_max)
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode)))
def test_weights_of_planted_gaps(mode):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, generator=generator)
    sampled = old - 0.3 * torch.randn(6, 9, generator=generator)
    sampled[2, 3] = math.nan  # vLLM returned no log-prob
    mask = (torch.arange(9) < torch.tensor([9, 1, 5, 9, 3, 7])[:, None]).long()
    weights, _ = Correction(*mode).weigh(old, sampled, mask)
    expected = trls_weights(old, sampled, mask, *mode)
    assert torch.equal(weights, expected) and weights.unique().numel() > 2


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_without_bounds_no_weight_is_clipped(mode):
    weights, unclipped = Correction(mode, None, None).weigh(
        torch.zeros(1, 2), torch.tensor([[5.0, -1.0]]), torch.ones(1, 2)
    )
    gaps = [-4.0] if mode.startswith("sequence") else [-5.0, 1.0]
    assert weights[0].tolist() == unclipped[0].tolist() == pytest.approx([math.exp(gap) for gap in gaps])


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_rounding_has_weight_one(mode):
    old = -torch.rand(3, 50)
    sampled = old + 2e-5 * torch.randn(3, 50).clamp(-4, 4)
    weights, _ = Correction(mode, None, 3.0).weigh(old, sampled, torch.ones(3, 50))
    assert (weights == 1.0).all()


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [
        (mode, loss_type)
        for mode in MODES[::2]
        for loss_type in ("grpo", "dapo", "cispo", "vespo")
        if loss_type != "vespo" or mode[0].startswith("token")  # others are refused
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_loss_is_stock_trls(tokenizer, tmp_path, monkeypatch, mode, loss_type):
    """Compares a first step, whose old log-probs are its own, with TRL on a batch that has both kinds of log-probs."""
    trainer = library_trainer(
        Single(), tokenizer, tmp_path, old_logprobs="recomputed", updates="one", loss_type=loss_type, beta=0.1,
        vllm_importance_sampling_mode=mode[0], vllm_importance_sampling_clip_min=mode[1], vllm_importance_sampling_clip_max=mode[2],
    )  # fmt: skip
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles))
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        noise = torch.randn(len(logps), generator=torch.Generator().manual_seed(len(logps)))
        row.turn.logprobs = (logps - 0.2 * noise).tolist()
    params, loss = trainer.compute_gradient(trainer.model, "shared", rows, len(rows))
    gradient = torch.cat([p.grad.flatten() for p in params])

    batch = collate(rows, tokenizer.pad_token_id, torch.device("cpu"), "recomputed")
    old = torch.nn.utils.rnn.pad_sequence(trainer.logprobs_of(rows), True)
    batch["old_per_token_logps"] = old
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    batch["importance_sampling_ratio"] = trls_weights(
        old, batch["sampling_per_token_logps"], batch["completion_mask"], *mode
    )
    trainer.correction = None
    for name in ("beta", "use_vllm"):
        monkeypatch.setattr(trainer, name, 0.1 if name == "beta" else True)
    trainer.passes.set_active_adapter("shared")
    trainer.optimizer.zero_grad()
    trainer.model.train()
    stock = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    stock.backward()
    expected = torch.cat([p.grad.flatten() for p in params])
    assert loss == pytest.approx(stock.item(), abs=1e-5)
    assert expected.norm() > 1e-3 or loss_type == "vespo"  # whose weights vanish where a token is masked
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)  # weights are products over rounded log-probs


@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
def test_a_token_without_a_sampled_logprob_has_the_ratio_one(tokenizer, tmp_path, old_logprobs):
    """vLLM gives NaN for a token that it could not score, and TRL corrects nothing there."""
    trainer = library_trainer(Single(), tokenizer, tmp_path, old_logprobs=old_logprobs)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    present = trainer.logprobs_of(rows)[0][0].item()
    gradients = []
    for logprob in (present, math.nan):
        rows[0].turn.logprobs[0] = logprob
        params, loss = trainer.compute_gradient(trainer.model, "shared", rows, len(rows))
        gradients.append(torch.cat([p.grad.flatten() for p in params]))
        assert loss.isfinite()
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_correction_is_on_if_the_ratio_does_not_start_from_the_sampler(tokenizer, tmp_path):
    def correction(**options):
        return library_trainer(Voting(), tokenizer, tmp_path, **options).correction

    assert correction(old_logprobs="sampled") is None
    assert correction(old_logprobs="recomputed") == Correction("sequence_mask", None, 3.0)
    assert correction(old_logprobs="recomputed", vllm_importance_sampling_correction=False) is None


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_gap_of_stale_rows_gives_no_alarm(tokenizer, tmp_path, max_staleness):
    """It is expected to grow with the learning rate."""
    trainer = library_trainer(
        Voting(), tokenizer, tmp_path, max_staleness=max_staleness, old_logprobs="recomputed", learning_rate=1e-2
    )
    assert trainer.update_metrics.weights.warns == (max_staleness == 0)


def test_metrics_by_role_and_an_alarm(tokenizer, tmp_path, caplog):
    """Two tokens of one row, of weights 1 and 4 (masked), and a role without a gap."""
    trainer = library_trainer(Voting(), tokenizer, tmp_path)
    rows = rows_of(trainer, episodes_of({"generator": 1, "aggregator": 1}, 1, 1))
    mask, old = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.zeros(2, 3)
    sums, logger = WeightSums(), logging.getLogger("multirole.update.importance")
    for gap, is_warned in ((0.0, False), (math.log(4), True)):
        sampled = -torch.tensor([[0.0, gap, 9.0], [0.0, 0.0, 0.0]])
        weights, unclipped = Correction("token_mask", None, 3.0).weigh(old, sampled, mask)
        sums.add(rows, weights, unclipped, old, sampled, mask)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger.name):
            metrics = sums.collect(lambda part: [part, {}])
        assert bool(caplog.records) == is_warned
    assert metrics["generator"] == pytest.approx(
        {"importance_weight": 0.5, "importance_clipped": 0.5, "sampler_gap": math.log(4) / 2}
    )
    assert metrics["aggregator"] == {"importance_weight": 1.0, "importance_clipped": 0.0, "sampler_gap": 0.0}


def test_the_gap_leaves_out_tokens_without_a_sampled_logprob(tokenizer, tmp_path):
    """As in TRL's `sampling_logp_difference`: the mean of 0.5 and 0.25, and no gap where no token has one."""
    rows = rows_of(library_trainer(Voting(), tokenizer, tmp_path), episodes_of({"generator": 1, "aggregator": 1}, 1, 1))
    old, sampled = torch.zeros(2, 3), torch.tensor([[0.5, math.nan, -0.25], [math.nan, 0.0, 0.0]])
    mask, sums = torch.tensor([[1, 1, 1], [1, 0, 0]]), WeightSums()
    sums.add(rows, *Correction("token_mask", None, 3.0).weigh(old, sampled, mask), old, sampled, mask)
    metrics = sums.collect(lambda part: [part])
    assert [metrics[role]["sampler_gap"] for role in ("generator", "aggregator")] == [0.375, 0.0]
    assert metrics["aggregator"]["importance_weight"] == 1.0
