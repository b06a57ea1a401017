"""Entropy bonus, its adaptive coefficient and the top quantile belong to an optimizer step, however its rows are computed."""

import pytest
import torch
from trainers import SUMS, episodes_of, rows_of, slow_but

from multirole.options import MultiRoleGRPOConfig
from multirole.update.entropy import next_coef, select_tokens
from multirole.update.gradients import gradient_of
from multirole.workflows import Voting

CASES = {
    "bonus": {"entropy_coef": 0.5},
    "bonus of dapo": {"entropy_coef": 0.5, "loss_type": "dapo"},
    "quantile": {"top_entropy_quantile": 0.2},
    "quantile and bonus": {"top_entropy_quantile": 0.2, "entropy_coef": 0.5},
    "masked rows": {"mask_truncated_completions": True, "entropy_coef": 0.5, "top_entropy_quantile": 0.5},
    "masked rows of dapo": {"mask_truncated_completions": True, "loss_type": "dapo"},
    "padding": {"pad_to_multiple_of": 64},
}


def step_rows(trainer):
    """One mini-batch in which some rows were cut and some have no advantage."""
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    for i, row in enumerate(rows):
        row.is_masked = trainer.args.mask_truncated_completions and i % 3 == 0
        row.advantage = 0.0 if i % 4 == 0 else row.advantage
    return rows


@pytest.mark.parametrize(
    "case", slow_but(["quantile and bonus", "masked rows", "masked rows of dapo", "padding"], CASES)
)
def test_micro_batches_do_not_change_the_gradient(make_library_trainer, case):
    gradients, losses = [], []
    for size in (10**6, 150, 1):
        trainer = make_library_trainer(Voting(2, prompts=SUMS), micro_batch_tokens=size, **CASES[case])
        rows = step_rows(trainer)
        params, loss = trainer.compute_gradient(trainer.model.train(), "shared", rows, len(rows))
        gradients.append(gradient_of(params))
        losses.append(loss.item())
    assert gradients[0].norm() > 1e-3
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        torch.testing.assert_close(gradient, gradients[0], atol=1e-6, rtol=0)
        assert loss == pytest.approx(losses[0], abs=1e-6)


def test_padding_changes_shapes_alone(make_library_trainer):
    gradients, widths = [], []
    for multiple in (None, 64):
        trainer = make_library_trainer(Voting(2, prompts=SUMS), pad_to_multiple_of=multiple)
        decoder = trainer.peft_model.get_base_model().model
        decoder.register_forward_hook(lambda _, __, out: widths.append(out.last_hidden_state.shape[1]))
        rows = step_rows(trainer)
        params, _ = trainer.compute_gradient(trainer.model.train(), "shared", rows, len(rows))
        gradients.append(gradient_of(params))
        if multiple:
            assert all(width % multiple == 0 for width in widths)
        widths.clear()
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


def test_the_bonus_is_the_mean_entropy_of_the_trained_tokens(make_library_trainer):
    """The losses with and without the bonus differ by coef x the mean. Rows without advantage are included, masked ones are not."""
    loss = []
    for coef in (0.0, 0.5):
        trainer = make_library_trainer(
            Voting(2, prompts=SUMS), entropy_coef=coef, mask_truncated_completions=True, micro_batch_tokens=150
        )
        rows = step_rows(trainer)
        loss.append(trainer.compute_gradient(trainer.model.train(), "shared", rows, len(rows))[1].item())
    trained = [row for row in rows if not row.is_masked]
    mean = torch.cat(trainer.entropies_of(trained)).mean().item()
    assert loss[0] - loss[1] == pytest.approx(0.5 * mean, abs=1e-5)
    assert trainer._metrics["train"]["policy_loss"] == [pytest.approx(loss[0], abs=1e-5)]


def test_masked_rows_do_not_train(make_library_trainer):
    """Their content has no effect, but their number has one, because TRL's mean over rows counts them."""
    gradients = []
    for change in (None, "tokens", "absent"):
        trainer = make_library_trainer(Voting(2, prompts=SUMS), mask_truncated_completions=True)
        rows = step_rows(trainer)
        for row in [row for row in rows if row.is_masked]:
            if change == "tokens":
                row.advantage, row.turn.completion_ids = 99.0, row.turn.completion_ids[::-1] * 2
            if change == "absent":
                rows.remove(row)
        params, _ = trainer.compute_gradient(trainer.model.train(), "shared", rows, len(rows))
        gradients.append(gradient_of(params))
    same, changed, absent = gradients
    assert torch.equal(same, changed)
    torch.testing.assert_close(absent * len(rows) / len(step_rows(trainer)), same, atol=1e-6, rtol=0)


def test_rows_are_masked_by_the_reason_of_their_end(make_library_trainer):
    trainer = make_library_trainer(Voting(2, prompts=SUMS), mask_truncated_completions=True)
    episodes = episodes_of(trainer.workflow.roles)
    for i, turn in enumerate(turn for episode in episodes for turn in episode.turns):
        turn.finish_reason = "length" if i % 5 == 0 else "stop"
    rows = trainer.prepare_rows(episodes)
    assert [row.is_masked for row in rows] == [row.turn.finish_reason == "length" for row in rows]
    assert 0 < sum(row.is_masked for row in rows) < len(rows)
    trainer.update(trainer.model, rows)


def test_an_iteration_of_masked_rows_alone_moves_nothing(make_library_trainer):
    trainer = make_library_trainer(Voting(2, prompts=SUMS), mask_truncated_completions=True, weight_decay=0.0)
    episodes = episodes_of(trainer.workflow.roles)
    for turn in (turn for episode in episodes for turn in episode.turns):
        turn.finish_reason = "length"
    before = [p.detach().clone() for p in trainer.model.parameters()]
    _, loss = trainer.update(trainer.model, trainer.prepare_rows(episodes))
    assert loss == 0
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_top_quantiles_by_hand():
    entropies = [torch.tensor([0.0, 4.0, 1.0]), torch.tensor([3.0, 2.0])]
    chosen = {q: [tokens.tolist() for tokens in select_tokens(entropies, q)] for q in (0.0, 0.5, 1.0)}
    assert chosen[0.0] == [[False, True, False], [False, False]]
    assert chosen[0.5] == [[False, True, False], [True, True]]  # the median, 2, included
    assert chosen[1.0] == [[True, True, True], [True, True]]


def test_the_adaptive_coefficient_by_hand():
    args = MultiRoleGRPOConfig(
        "unused", use_cpu=True, bf16=False, use_adaptive_entropy=True, entropy_target=0.5, entropy_coef_delta=0.1,
        entropy_coef_max=0.25, entropy_coef_min=0.05,
    )  # fmt: skip
    coefs = [0.1]
    for entropy in (0.4, 0.5, 0.6, 0.9, 0.9):
        coefs.append(next_coef(coefs[-1], entropy, args))
    assert coefs == pytest.approx([0.1, 0.2, 0.25, 0.15, 0.05, 0.05])


def test_each_adapter_has_a_coefficient(make_library_trainer):
    """The first step has no bonus, because no entropy has been measured yet."""
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 1e9, "entropy_coef_delta": 0.5}
    trainer = make_library_trainer(Voting(2, prompts=SUMS), policy="ip", updates="per_batch", **options)
    trainer.update(trainer.model, trainer.prepare_rows(episodes_of(trainer.workflow.roles)))
    steps = {"generator": 2, "aggregator": 1}
    assert trainer.entropy_coef == pytest.approx({name: min(1.0, 0.1 + 0.5 * n) for name, n in steps.items()})
    assert all(entropy < 10 for entropy in trainer._last_world_entropy.values())
