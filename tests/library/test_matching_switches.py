"""Options that make runs comparable: steps of equal tokens, and how the loss is averaged."""

import math

import pytest
import torch
from test_gradients import cut, gradient
from trainers import diagnostics_of, episodes_of, rows_of, slow_but

from multirole.callbacks import MultiRoleCallback
from multirole.update.rows import Row, token_batches
from multirole.workflows import Voting


def rows_with(*tokens: int) -> list[Row]:
    turns = [episode.turns[0] for episode in episodes_of({"generator": 1}, len(tokens), n_problems=1)]
    for turn, n in zip(turns, tokens, strict=True):
        turn.completion_ids = [1] * n
    return [Row(None, turn, "shared") for turn in turns]


@pytest.mark.parametrize(
    ("tokens", "step_tokens", "sizes"),
    [
        ((10, 10, 10, 10), 20, [2, 2]),
        ((10, 10, 10, 10), 15, [1, 2, 1]),  # 40 tokens make 3 steps; a third is 13.3, nearest ends are 10 and 30
        ((30, 1, 1, 1, 1), 17, [1, 4]),
        ((1, 1, 1, 1, 30), 17, [4, 1]),
        ((50, 1, 1), 10, [1, 1, 1]),  # 6 steps of about 9 tokens, but only 3 rows
        ((5, 5), 1000, [2]),
    ],
)
def test_rows_are_cut_by_tokens_in_their_order(tokens, step_tokens, sizes):
    rows = rows_with(*tokens)
    steps = token_batches(rows, step_tokens)
    assert [row for step, _ in steps for row in step] == rows
    assert [len(step) for step, _ in steps] == [divisor for _, divisor in steps] == sizes


def plain_logprobs(model, row: Row, temperature: float) -> torch.Tensor:
    """(C,) from whole logits of one unpadded row."""
    ids = torch.tensor([row.turn.prompt_ids + row.turn.completion_ids])
    logits = model.get_base_model()(ids).logits[0, len(row.turn.prompt_ids) - 1 : -1] / temperature  # (C, V)
    return logits.log_softmax(-1).gather(1, torch.tensor(row.turn.completion_ids)[:, None])[:, 0]


def reference_gradient(trainer, rows: list[Row], aggregate) -> torch.Tensor:
    """The clipped surrogate, token by token and row by row; `aggregate` makes one loss of the rows' token losses."""
    args, model = trainer.args, trainer.model
    losses = []
    for row in rows:
        ratio = (plain_logprobs(model, row, args.temperature) - torch.tensor(row.turn.logprobs)).exp()
        clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon_high)
        losses.append(-torch.minimum(ratio * row.advantage, clipped * row.advantage))
    named = [(name, p) for name, p in sorted(model.named_parameters()) if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(aggregate(losses), [p for _, p in named])])


AGGREGATES = {
    "grpo": lambda losses: torch.stack([loss.mean() for loss in losses]).mean(),
    "bnpo": lambda losses: torch.cat(losses).mean(),
    "dapo": lambda losses: torch.cat(losses).mean(),
    "dr_grpo": lambda losses: torch.cat(losses).sum() / (len(losses) * 96),
}


@pytest.mark.parametrize("kind", slow_but(["grpo", "dapo", "dr_grpo"], AGGREGATES))
def test_the_loss_is_averaged_as_chosen_whatever_the_micro_batches(make_library_trainer, kind):
    """On rows of several roles and slots."""
    trainer = make_library_trainer(Voting(), loss_type=kind)
    rows, gradients = rows_of(trainer, episodes_of(trainer.workflow.roles, 4)), []
    for tokens in (1, 100, 100_000):
        cut(trainer, rows, tokens)
        gradients.append(gradient(trainer, "shared", rows))
    assert gradients[0].norm() > 1e-3
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradients[0], reference_gradient(trainer, rows, AGGREGATES[kind]), atol=1e-6, rtol=0)


def test_the_aggregations_are_three_different_gradients(make_library_trainer):
    gradients = []
    for kind in ("grpo", "dapo", "dr_grpo"):
        trainer = make_library_trainer(Voting(), loss_type=kind)
        gradients.append(gradient(trainer, "shared", rows_of(trainer, episodes_of(trainer.workflow.roles, 4))))
    cosines = [
        torch.cosine_similarity(a, b, dim=0).item()
        for a, b in ((gradients[0], gradients[1]), (gradients[0], gradients[2]))
    ]
    assert max(cosines) < 0.99 and gradients[1].norm() > 2 * gradients[2].norm()


@pytest.mark.parametrize("kind", AGGREGATES)
def test_a_partial_step_of_the_released_code_is_smaller_under_every_aggregation(make_library_trainer, kind):
    """The partial step is divided by the number of rows of a full one (`RowCuts`)."""
    trainer = make_library_trainer(Voting(), loss_type=kind)
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))[:12]
    whole, partial = (gradient(trainer, "shared", rows, divisor) for divisor in (12, 48))
    torch.testing.assert_close(partial, whole / 4, atol=1e-6, rtol=0)


def test_old_logprobs_follow_the_steps_that_callbacks_have_cut(make_library_trainer):
    """Rows of all steps but an adapter's first have recomputed log-probs, also where a callback puts the last step first."""

    class LastFirst(MultiRoleCallback):
        def on_update_begin(self, trainer, rows, steps):
            for adapter, planned in steps.items():
                steps[adapter] = planned[::-1]

    trainer = make_library_trainer(Voting(), callbacks=[LastFirst()], old_logprobs="recomputed", policy="ip")
    trained: dict[str, list[list[Row]]] = {}
    take_step = trainer.optimizer_step

    def optimizer_step(model, adapter, rows, divisor, lr):
        trained.setdefault(adapter, []).append(rows)
        return take_step(model, adapter, rows, divisor, lr)

    trainer.optimizer_step = optimizer_step
    trainer.update(trainer.model, rows_of(trainer, episodes_of(trainer.workflow.roles, 4)))
    for first, *later in trained.values():
        assert all(row.old_logps is None for row in first)
        assert all(row.old_logps is not None for rows in later for row in rows)
    assert max(map(len, trained.values())) > 1


@pytest.mark.parametrize("limit", [1e-2, 1e9])
def test_the_ledger_has_the_norm_before_and_after_clipping(make_diagnosed_trainer, limit):
    trainer, seen = make_diagnosed_trainer(Voting(), max_grad_norm=limit), {}
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles, 4))
    trainer.optimizer.step = lambda: seen.update(
        norm=math.sqrt(sum(p.grad.square().sum().item() for p in trainer.model.parameters() if p.grad is not None))
    )
    step, _ = trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 0.0)
    (entry,) = diagnostics_of(trainer).ledger
    assert (entry["grad_norm"], entry["grad_norm_clipped"]) == (step.grad_norm, step.grad_norm_clipped)
    assert entry["grad_norm_clipped"] == pytest.approx(seen["norm"], rel=1e-5)
    assert entry["grad_norm_clipped"] == pytest.approx(min(entry["grad_norm"], limit), rel=1e-4)
    assert entry["grad_norm"] > 1e-2
