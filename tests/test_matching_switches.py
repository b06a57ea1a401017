"""What makes comparisons fair: steps of equal tokens, how the loss is averaged, and learning rates in closed form."""

import math

import pytest
import torch
from conftest import make_episodes
from test_gradients import gradient

from multirole.core.rows import Row, token_batches
from multirole.core.schedule import lr_factor
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.experiment.cell import Cell
from multirole.plan import plan


def rows_of(*tokens: int) -> list[Row]:
    cell = Cell("single", "sp", n_episodes=len(tokens))
    turns = [episode.turns[0] for episode in make_episodes(cell, n_problems=1)]
    for turn, n in zip(turns, tokens, strict=True):
        turn.completion_ids = [1] * n
    return [Row(None, turn, "shared", 0.0) for turn in turns]


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
    rows = rows_of(*tokens)
    steps = token_batches(rows, step_tokens)
    assert [row for step, _ in steps for row in step] == rows
    assert [len(step) for step, _ in steps] == [divisor for _, divisor in steps] == sizes
    cell = Cell("single", "sp", updates="tokens", step_tokens=step_tokens)
    assert cell.n_steps(len(rows), sum(tokens)) == len(sizes)


def test_plans_count_steps_of_tokens():
    cell = Cell("voting", "ip", n_problems=2, n_episodes=4, max_response_tokens=64, updates="tokens", step_tokens=256)
    steps = plan(cell).optimizer_steps()
    assert steps == {"generator": (1, 6), "aggregator": (1, 2)}  # 24 and 8 replies of 1 to 64 tokens
    frozen = Cell("voting", "sp", n_problems=2, n_episodes=4, train_after="generator=60")
    assert plan(frozen).optimizer_steps() == {"shared": (1, 1)}  # the aggregator's 8 rows alone
    late = Cell("voting", "sp", n_problems=2, n_episodes=4, train_after="generator=59")
    assert plan(late).optimizer_steps() == {"shared": (1, 4)}


def plain_logprobs(model, row: Row, temperature: float) -> torch.Tensor:
    """(C,) from whole logits of one unpadded row."""
    ids = torch.tensor([row.turn.prompt_ids + row.turn.completion_ids])
    logits = model.get_base_model()(ids).logits[0, len(row.turn.prompt_ids) - 1 : -1] / temperature  # (C, V)
    return logits.log_softmax(-1).gather(1, torch.tensor(row.turn.completion_ids)[:, None])[:, 0]


def reference_gradient(trainer, rows: list[Row], aggregate) -> torch.Tensor:
    """The clipped surrogate, token by token and row by row; `aggregate` makes one loss of the rows' token losses."""
    cell, model = trainer.cell, trainer.model
    losses = []
    for row in rows:
        ratio = (plain_logprobs(model, row, cell.temperature) - torch.tensor(row.turn.logprobs)).exp()
        clipped = ratio.clamp(1 - cell.clip_low, 1 + cell.clip_high)
        losses.append(-torch.minimum(ratio * row.advantage, clipped * row.advantage))
    named = [(name, p) for name, p in sorted(model.named_parameters()) if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(aggregate(losses), [p for _, p in named])])


AGGREGATES = {
    "grpo": lambda losses: torch.stack([loss.mean() for loss in losses]).mean(),
    "token": lambda losses: torch.cat(losses).mean(),
    "dr_grpo": lambda losses: torch.cat(losses).sum() / (len(losses) * 96),
}


@pytest.mark.parametrize("kind", AGGREGATES)
def test_the_loss_is_averaged_as_chosen_whatever_the_micro_batches(make_trainer, kind):
    found = []
    for tokens in (1, 100, 100_000):
        cell = Cell("voting", "sp", loss_aggregation=kind, micro_batch_tokens=tokens, max_grad_norm=1e9)
        trainer = make_trainer(cell)
        rows = trainer._rows(make_episodes(cell))
        found.append(gradient(trainer, "shared", rows))
    assert found[0].norm() > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-6, rtol=0)
    torch.testing.assert_close(found[0], reference_gradient(trainer, rows, AGGREGATES[kind]), atol=1e-6, rtol=0)


def test_the_aggregations_are_three_different_gradients(make_trainer):
    found = []
    for kind in AGGREGATES:
        trainer = make_trainer(Cell("voting", "sp", loss_aggregation=kind, max_grad_norm=1e9))
        found.append(gradient(trainer, "shared", trainer._rows(make_episodes(trainer.cell))))
    cosines = [torch.cosine_similarity(a, b, dim=0).item() for a, b in ((found[0], found[1]), (found[0], found[2]))]
    assert max(cosines) < 0.99 and found[1].norm() > 2 * found[2].norm()


def test_a_partial_step_of_the_released_code_is_smaller_under_every_aggregation(make_trainer):
    """minibatch_split="sequential" divides by the full number of rows."""
    for kind in AGGREGATES:
        cell = Cell("voting", "sp", loss_aggregation=kind, minibatch_split="sequential", max_grad_norm=1e9)
        trainer = make_trainer(cell)
        rows = trainer._rows(make_episodes(cell))[:12]
        whole, partial = (gradient(trainer, "shared", rows, divisor) for divisor in (12, 48))
        torch.testing.assert_close(partial, whole / 4, atol=1e-6, rtol=0)


@pytest.mark.parametrize("limit", [1e-2, 1e9])
def test_the_ledger_has_the_norm_before_and_after_clipping(make_trainer, limit):
    cell = Cell("voting", "sp", max_grad_norm=limit)
    trainer = make_trainer(cell)
    rows, seen = trainer._rows(make_episodes(cell)), {}
    trainer.optimizer.step = lambda: seen.update(
        norm=math.sqrt(sum(p.grad.square().sum().item() for p in trainer.model.parameters() if p.grad is not None))
    )
    diagnostics = IterationDiagnostics(rows, 0.2, 0.28)
    trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 0.0, diagnostics)
    (entry,) = diagnostics.ledger
    assert entry["grad_norm_clipped"] == pytest.approx(seen["norm"], rel=1e-5)
    assert entry["grad_norm_clipped"] == pytest.approx(min(entry["grad_norm"], limit), rel=1e-4)
    assert entry["grad_norm"] > 1e-2


def closed_form(schedule: str, tick: int, warmup: int, horizon: int) -> float:
    """The schedules in half-angle form: (1 + cos(pi x)) / 2 = cos(pi x / 2) ** 2, with period 2 in x."""
    if tick < warmup:
        return tick / warmup
    if schedule == "constant":
        return 1.0
    x = (tick - warmup) / (horizon - warmup)
    x = min(x, 1.0) if schedule == "cosine" else abs((x + 1) % 2 - 1)
    return math.cos(math.pi * x / 2) ** 2


@pytest.mark.parametrize("clock", ["iteration", "update_call"])
@pytest.mark.parametrize("schedule", ["cosine", "constant", "cosine_wrap"])
@pytest.mark.parametrize(
    ("workflow", "policy", "n_calls"), [("voting", "sp", 1), ("voting", "ip", 2), ("orch_workers", "ip", 3)]
)
def test_learning_rates_follow_their_closed_form(schedule, clock, workflow, policy, n_calls):
    """Over the paper's 500 iterations, every update call: the released code's clock ticks n_calls times an iteration."""
    cell = Cell(workflow, policy, scale="0.6b", lr_schedule=schedule, lr_clock=clock)
    for iteration in range(500):
        for call in range(n_calls):
            tick = iteration if clock == "iteration" else iteration * n_calls + call
            expected = closed_form(schedule, tick, 15, 500)
            assert lr_factor(cell, iteration, call, n_calls) == pytest.approx(expected, abs=1e-12)


def test_the_legacy_clock_starts_at_zero_and_warms_up_in_half_of_the_iterations():
    cell = Cell("voting", "ip", scale="0.6b", preset="released_code")
    trace = [2e-5 * lr_factor(cell, iteration, call, 2) for iteration in range(10) for call in range(2)]
    assert trace == pytest.approx([2e-5 * min(1.0, k / 15) for k in range(20)], abs=1e-17)
