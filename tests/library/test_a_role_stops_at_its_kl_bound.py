"""`target_kl`: once a role's policy is farther from the one that sampled than the bound, its rows take no more steps in the iteration."""

import math

import pytest
import torch
from trainers import episodes_of

from multirole.options import MultiRoleGRPOConfig
from multirole.types import Episode, Problem, Turn
from multirole.update.kl_bound import KLBound
from multirole.update.rows import Row
from multirole.workflows import Voting

SMALL = {"num_generations": 4, "generation_batch_size": 8}


def row(role: str, sampled: list[float]) -> Row:
    turn = Turn(role, 0, 0, [1], [2] * len(sampled), sampled, "", "stop", "answered")
    return Row(Episode(Problem("0", None, "", None), 0), turn, "shared")


def test_the_kl_by_hand():
    """Log-ratios of ln 2 and 0 have k3 of (2 - 1 - ln 2) / 2 = .1534 per token; a NaN is no token."""
    rows = [row("solver", [-1.0, -1.0]), row("judge", [-1.0, math.nan])]
    now = {id(rows[0]): torch.tensor([-1.0 + math.log(2), -1.0]), id(rows[1]): torch.tensor([-1.0, 5.0])}
    expected = (1 - math.log(2)) / 2

    def logprobs_of(asked):
        return [now[id(r)] for r in asked]

    wide, narrow = KLBound(expected + 1e-6), KLBound(expected - 1e-6)
    assert wide.within(rows, logprobs_of) == rows
    assert narrow.within(rows, logprobs_of) == rows[1:] and narrow.within(rows, logprobs_of) == rows[1:]
    assert wide.largest == pytest.approx({"solver": expected, "judge": 0.0})
    assert narrow.metrics()["solver"] == {"kl_before_step": pytest.approx(expected), "rows_beyond_kl": 2.0}
    assert narrow.metrics()["judge"]["rows_beyond_kl"] == 0.0
    narrow.begin()
    assert narrow.metrics() == {} and narrow.within(rows[:1], lambda asked: [torch.tensor([-1.0, -1.0])]) == rows[:1]


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for name, p in trainer.peft_model.named_parameters() if "lora_" in name])


def updated(make, policy, **options):
    trainer = make(Voting(), policy=policy, **SMALL, **options)
    steps, _ = trainer.update(trainer.model, trainer.prepare_rows(episodes_of(trainer.workflow.roles, n_episodes=4)))
    return trainer, steps


def test_a_bound_that_is_not_reached_changes_nothing(make_library_trainer):
    free, steps = updated(make_library_trainer, "ip")
    bound, same = updated(make_library_trainer, "ip", target_kl=1e6)
    assert len(steps) == len(same) == 4 and torch.equal(weights(free), weights(bound))


@pytest.mark.parametrize(("policy", "least"), [("ip", 2), ("sp", 1)])
def test_beyond_the_bound_an_adapter_takes_its_first_step_alone(make_library_trainer, policy, least):
    """Under IP the generator has three steps, of which two are left out, and the aggregator one; a shared adapter has four."""
    trainer, steps = updated(make_library_trainer, policy, target_kl=1e-12)
    assert len(steps) == least and len({step.adapter for step in steps}) == least
    left_out = {role: values["rows_beyond_kl"] for role, values in trainer.kl_bound.metrics().items()}
    assert sum(left_out.values()) == 32 - sum(len(step.rows) for step in steps)


def test_a_bound_that_is_no_number_of_nats_is_refused():
    for bound in (0, -1.0):
        with pytest.raises(ValueError, match="`target_kl` must be a positive number of nats per token"):
            MultiRoleGRPOConfig("unused", use_cpu=True, target_kl=bound)
    with pytest.raises(ValueError, match="`updates='one'` takes one step. Leave it out"):
        MultiRoleGRPOConfig("unused", use_cpu=True, target_kl=0.1, updates="one")
