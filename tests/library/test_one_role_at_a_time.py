"""`role_order` trains one role per iteration: the others' adapters do not move, the ledger counts its steps alone, and on stale rows it is IP's update."""

import pytest
import torch
from trainers import diagnostics_of, episodes_of

from multirole.options import MultiRoleGRPOConfig
from multirole.workflows import OrchWorkers, Voting

SMALL = {"num_generations": 4, "generation_batch_size": 8}


def weights(trainer, adapter=".") -> torch.Tensor:
    named = trainer.peft_model.named_parameters()
    return torch.cat(
        [
            p.detach().flatten()
            for name, p in named
            if "lora_" in name and f".{adapter}." in name or adapter == "." and "lora_" in name
        ]
    )


def one_update(trainer, episodes, iteration):
    trainer.state.global_step = iteration
    return trainer.update(trainer.model, trainer.prepare_rows(episodes))[0]


def test_the_order_decides_whose_adapter_moves(make_diagnosed_trainer):
    """Two iterations of the worker, then one of the synthesizer; the orchestrator is in no iteration."""
    order = ["worker", "worker", "synthesizer"]
    trainer = make_diagnosed_trainer(OrchWorkers(), policy="ip", role_order=order, **SMALL)
    slots = trainer.workflow.roles
    for iteration, role in enumerate(order * 2):
        before = {adapter: weights(trainer, adapter) for adapter in trainer.adapters}
        steps = one_update(trainer, episodes_of(slots, n_episodes=4, seed=iteration), iteration)
        moved = [adapter for adapter in trainer.adapters if not torch.equal(before[adapter], weights(trainer, adapter))]
        assert moved == [role] and {step.adapter for step in steps} == {role}
        ledger = diagnostics_of(trainer).ledger
        assert [(entry["adapter"], entry["rows"]) for entry in ledger] == [(role, 8)] * slots[role]  # a step per slot


def test_a_shared_adapter_takes_one_role_s_rows(make_diagnosed_trainer):
    trainer = make_diagnosed_trainer(Voting(), policy="sp", role_order="aggregator, generator", **SMALL)
    assert trainer.args.role_order == ["aggregator", "generator"]
    trainer.args.role_order = "aggregator,generator"  # set later, it stays text
    for iteration, (role, steps) in enumerate((("aggregator", 1), ("generator", 3))):
        taken = one_update(trainer, episodes_of(trainer.workflow.roles, n_episodes=4), iteration)
        assert len(taken) == steps and {row.turn.role for step in taken for row in step.rows} == {role}


def test_roles_in_turn_on_stale_rows_are_ip_s_update(make_library_trainer):
    """Without a new rollout between them, the updates of the roles one after another are those of an iteration that trains all roles."""
    together = make_library_trainer(Voting(), policy="ip", **SMALL)
    in_turn = make_library_trainer(Voting(), policy="ip", role_order=["generator", "aggregator"], **SMALL)
    assert torch.equal(weights(together), weights(in_turn))
    episodes = episodes_of(together.workflow.roles, n_episodes=4)
    rows = together.prepare_rows(episodes)
    steps, _ = together.update(together.model, rows)
    taken = []
    for iteration in range(2):
        in_turn.state.global_step = iteration
        taken += in_turn.update(in_turn.model, rows)[0]
    assert [(a.adapter, len(a.rows)) for a in steps] == [(b.adapter, len(b.rows)) for b in taken]
    assert torch.equal(weights(together), weights(in_turn))


@pytest.mark.parametrize(
    ("order", "message"),
    [([], "must be a list of roles"), ([1], "must be a list of roles")],
)
def test_an_order_that_is_none_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        MultiRoleGRPOConfig("unused", use_cpu=True, role_order=order)


def test_an_unknown_role_is_refused(make_library_trainer):
    with pytest.raises(
        ValueError, match=r"`role_order` names \['judge'\], but the roles are \['generator', 'aggregator'\]"
    ):
        make_library_trainer(Voting(), policy="ip", role_order=["generator", "judge"])


@pytest.mark.parametrize(
    ("option", "value"),
    [("role_beta", {"aggregator": 0.1}), ("teacher", {"aggregator": "frozen"})],
    ids=["role_beta", "teacher"],
)
def test_a_role_without_an_iteration_has_no_penalty_and_no_teacher(make_library_trainer, option, value):
    with pytest.raises(ValueError, match=rf"`{option}` .*\['aggregator'\], to which `role_order` gives no iteration"):
        make_library_trainer(Voting(), policy="ip", role_order=["generator"], **{option: value}, **SMALL)
