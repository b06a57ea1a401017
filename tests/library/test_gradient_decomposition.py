"""The gradient split by role and slot: constructed cases with known answers, and parts that sum to the applied gradient, bit for bit."""

import functools
import math

import pytest
import torch
from trainers import diagnostics_of, episodes_of, rows_of

from multirole.callbacks import MultiRoleCallback
from multirole.metrics.episodes import text_metrics
from multirole.roles.diagnostics import sample_rows
from multirole.roles.gradient_parts import GradientParts
from multirole.update import adapter_gradient as adapter_update
from multirole.update.rows import Row
from multirole.workflows import Voting


def parts_of(**vectors: list[list[float]]) -> GradientParts:
    """role=[gradient of slot 0, of slot 1, ...] as one optimizer step."""
    parts = [(role, slot) for role, slots in vectors.items() for slot in range(len(slots))]
    sums = GradientParts()
    sums.add_step(parts, torch.tensor([vector for slots in vectors.values() for vector in slots]))
    return sums


def test_identical_slots_are_coherent():
    voters = parts_of(generator=[[1.0, 2.0], [1.0, 2.0]]).of_role("generator")
    assert voters == pytest.approx({"grad_share": 1.0, "coherence": 1.0})


def test_opposed_and_orthogonal_slots():
    assert parts_of(generator=[[3.0, 0.0], [-1.0, 0.0]]).of_role("generator")["coherence"] == pytest.approx(-1.0)
    three = parts_of(generator=[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]).of_role("generator")
    assert three["coherence"] == pytest.approx(0.0)
    assert math.isnan(parts_of(aggregator=[[1.0, 1.0]]).of_role("aggregator")["coherence"])


def test_a_slot_without_a_gradient_has_no_direction():
    slots = [[1.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 2.0]]
    assert parts_of(generator=slots).of_role("generator")["coherence"] == pytest.approx(1 / 3)
    assert math.isnan(parts_of(generator=slots[:2]).of_role("generator")["coherence"])


def test_shares_sum_to_one_and_a_role_without_gradient_has_none():
    parts = parts_of(generator=[[2.0, 0.0], [1.0, 1.0]], aggregator=[[0.0, 1.0]], evaluator=[[0.0, 0.0]])
    shares = {role: parts.of_role(role)["grad_share"] for role in ("generator", "aggregator", "evaluator")}
    # the whole is (3, 2): generator (3, 1) . (3, 2) = 11, aggregator (0, 1) . (3, 2) = 2, of 13
    assert shares == pytest.approx({"generator": 11 / 13, "aggregator": 2 / 13, "evaluator": 0.0})
    cosines = {(a, b): cosine for a, b, cosine in parts.cosines()}
    assert cosines["generator", "aggregator"] == pytest.approx(1 / math.sqrt(10))
    assert math.isnan(cosines["generator", "evaluator"])
    opposed = parts_of(generator=[[3.0]], aggregator=[[-1.0]])
    assert opposed.of_role("generator")["grad_share"] == pytest.approx(1.5)
    assert opposed.of_role("aggregator")["grad_share"] == pytest.approx(-0.5)


def test_steps_add_up_and_each_step_has_its_norm():
    parts = GradientParts()
    first = parts.add_step([("generator", 0), ("generator", 1)], torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    second = parts.add_step([("generator", 1)], torch.tensor([[6.0, 8.0]]))
    assert first == pytest.approx({"generator": 5.0}) and second == pytest.approx({"generator": 10.0})
    assert parts.products[("generator", 1), ("generator", 1)] == pytest.approx(16 + 100)


class Parts(MultiRoleCallback):
    """Keeps the parts of the last optimizer step's gradient."""

    def on_gradient_parts(self, trainer, adapter, parts, gradients):
        self.parts, self.matrix = parts, gradients.clone()


@pytest.mark.parametrize("policy", ["sp", "ip"])
def test_the_parts_sum_to_the_applied_gradient_bit_for_bit(make_diagnosed_trainer, policy, monkeypatch):
    seen = Parts()
    trainer = make_diagnosed_trainer(Voting(), callbacks=[seen], policy=policy)
    episodes = episodes_of(trainer.workflow.roles)
    rows = [row for row in rows_of(trainer, episodes) if row.adapter == trainer.adapters[0]]
    plain_set, applied = adapter_update.set_gradient, []

    def apply(params, gradient):
        plain_set(params, gradient)
        applied.append(torch.cat([p.grad.flatten() for p in params]))

    monkeypatch.setattr(adapter_update, "set_gradient", apply)
    trainer.optimizer_step(trainer.model, trainer.adapters[0], rows, len(rows), 1e-3)
    n_parts = 4 if policy == "sp" else 3
    assert len(seen.parts) == len(seen.matrix) == n_parts and seen.matrix.abs().sum(1).min() > 0
    assert functools.reduce(torch.add, seen.matrix).equal(applied[0])
    parts = diagnostics_of(trainer).gradients[trainer.adapters[0]]
    assert sum(parts.of_role(role)["grad_share"] for role in {r.turn.role for r in rows}) == pytest.approx(1.0)


class Surgery(MultiRoleCallback):
    """Doubles the first voter's part and removes the aggregator's."""

    def on_gradient_parts(self, trainer, adapter, parts, gradients):
        factors = [{("generator", 0): 2.0, ("aggregator", 0): 0.0}.get(part, 1.0) for part in parts]
        gradients.mul_(torch.tensor(factors)[:, None])


def test_a_callback_may_change_the_parts(make_diagnosed_trainer):
    """Later callbacks and the step itself get the changed gradient; earlier callbacks have seen the gradient of the rows."""
    before = Parts()
    trainer = make_diagnosed_trainer(Voting(), callbacks=[before, Surgery()])
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    step, _ = trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 0.0)
    part = dict(zip(before.parts, before.matrix, strict=True))
    expected = 2 * part["generator", 0] + part["generator", 1] + part["generator", 2]
    assert part["aggregator", 0].norm() > 0
    assert step.grad_norm == pytest.approx(expected.norm().item(), rel=1e-4)


def test_duplicate_voters_are_measured_as_coherent(make_diagnosed_trainer):
    """Slots 1 and 2 repeat slot 0, so their gradients have one direction."""
    trainer = make_diagnosed_trainer(Voting(), policy="ip")
    episodes = episodes_of(trainer.workflow.roles)
    for episode in episodes:
        first, *others = [turn for turn in episode.turns if turn.role == "generator"]
        for turn in others:
            turn.prompt_ids, turn.completion_ids, turn.logprobs = first.prompt_ids, first.completion_ids, first.logprobs
    rows = [row for row in rows_of(trainer, episodes) if row.turn.role == "generator"]
    trainer.optimizer_step(trainer.model, "generator", rows, len(rows), 1e-3)
    numbers = diagnostics_of(trainer).gradients["generator"].of_role("generator")
    assert numbers["coherence"] == pytest.approx(1.0, abs=1e-5)


def test_a_role_without_advantage_has_no_share(make_diagnosed_trainer):
    trainer = make_diagnosed_trainer(Voting())
    rows = rows_of(trainer, episodes_of(trainer.workflow.roles))
    for row in rows:
        row.advantage *= row.turn.role != "aggregator"
    trainer.optimizer_step(trainer.model, "shared", rows, len(rows), 1e-3)
    parts = diagnostics_of(trainer).gradients["shared"]
    assert parts.of_role("aggregator")["grad_share"] == 0.0
    assert parts.of_role("generator")["grad_share"] == pytest.approx(1.0)


def as_sampled(trainer, n_problems: int) -> list[Row]:
    """Return rows whose sampled log-probs equal the trainer's to the last digit."""
    rows = trainer.prepare_rows(episodes_of(trainer.workflow.roles, n_problems=n_problems))
    for row, logps in zip(rows, trainer.logprobs_of(rows), strict=True):
        row.turn.logprobs = logps.tolist()
    return rows


def test_chi2_after_sees_what_a_single_step_moved(make_diagnosed_trainer):
    """An aggregator takes one step per iteration. Its chi2 is zero during that step and positive afterwards."""
    trainer = make_diagnosed_trainer(Voting(), policy="ip", old_logprobs="recomputed")
    rows, diagnostics = as_sampled(trainer, 4), diagnostics_of(trainer)
    aggregator_rows = [row for row in rows if row.adapter == "aggregator"]
    trainer.optimizer_step(trainer.model, "aggregator", aggregator_rows, len(aggregator_rows), 3e-2)
    sample = sample_rows(rows)
    diagnostics.add_after(sample, trainer.logprobs_of(sample))
    assert {row.turn.role for row in sample} == {"generator", "aggregator"} and len(sample) < len(rows)
    assert abs(diagnostics.tokens["aggregator"].summary()["chi2"]) < 1e-5
    assert diagnostics.chi2_after["aggregator"] > 1e-3 and abs(diagnostics.chi2_after["generator"]) < 1e-5


def test_a_second_step_is_measured_with_the_weights_that_the_first_has_moved(make_diagnosed_trainer):
    trainer = make_diagnosed_trainer(Voting(), old_logprobs="recomputed")
    rows, diagnostics = as_sampled(trainer, 4), diagnostics_of(trainer)
    read = {role: text_metrics([row for row in rows if row.turn.role == role]) for role in trainer.policy}
    for half, has_moved in ((rows[: len(rows) // 2], False), (rows[len(rows) // 2 :], True)):
        trainer.optimizer_step(trainer.model, rows[0].adapter, half, len(half), 3e-2)
        assert all((abs(of.summary()["chi2"]) > 1e-5) == has_moved for of in diagnostics.tokens.values())
    for role, values in diagnostics.per_role(rows).items():
        sums = diagnostics.tokens[role].sums
        assert (sums["tokens"], sums["rows"]) == (read[role]["tokens"], read[role]["rows"])
        assert values["optimizer_steps"] == 2
