"""Adapters of earlier runs keep their names: checkpoints, policy maps and the ids of runs that are on disk still fit."""

import json

import pytest

from multirole.policy import UNPREFIXED, parse_policy
from multirole.saving.checkpoints import check_checkpoint
from multirole.saving.layout import saved_adapters, saved_args
from multirole.workflows import WORKFLOWS

ON_DISK = {  # the maps that `trainer_state.json`, `serving.json` and `config.json` of saved runs have
    "ip": [
        {"generator": "generator", "evaluator": "evaluator"},
        {"generator": "generator", "aggregator": "aggregator"},
        {"orchestrator": "orchestrator", "worker": "worker", "synthesizer": "synthesizer"},
        {"solver": "adapter_solver", "judge": "adapter_judge"},
        {"generator": "generator", "critic": "adapter_critic"},
    ],
    "sp": [{"generator": "shared", "aggregator": "shared"}, {"solver": "shared", "judge": "shared"}],
}


def checkpoint(folder, policy: dict[str, str]):
    """Write the parts of a checkpoint that tell whose it is."""
    for adapter in set(policy.values()):
        (folder / adapter).mkdir(parents=True)
        (folder / adapter / "adapter_config.json").write_text("{}")
    state = {"stateful_callbacks": {"PolicyMap": {"args": {"policy": policy}, "attributes": {}}}}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(("name", "saved"), [(name, saved) for name, maps in ON_DISK.items() for saved in maps])
def test_a_checkpoint_of_an_earlier_run_fits_its_policy(name, saved, tmp_path):
    policy = parse_policy(name, list(saved))
    assert policy == saved and parse_policy(saved, list(saved)) == saved
    folder = checkpoint(tmp_path / "checkpoint-4", saved)
    check_checkpoint(folder, policy, set(policy.values()), is_sharded=False)
    assert set(saved_adapters(folder)) == set(policy.values()) and saved_args(folder)["policy"] == policy


def test_the_roles_of_the_librarys_workflows_are_the_names_without_a_prefix():
    """A role of a new workflow of the library would rename the adapters of a user's role that is called the same."""
    assert UNPREFIXED == {"shared", "generator", "evaluator", "aggregator", "orchestrator", "worker", "synthesizer"}
    for workflow in WORKFLOWS.values():
        assert set(workflow().roles) == set(workflow.structure.duties)
