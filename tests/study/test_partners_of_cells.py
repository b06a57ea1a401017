"""Cells whose policy map has roles that are not trained: the record knows them, and only trained adapters are saved."""

import pytest
from safetensors.torch import load_file
from trainers import table

from multirole_study import plan as planner
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.preflight import preflight
from multirole_study.experiment.record import frozen_checksums
from multirole_study.experiment.run import run_cell, run_evaluation


def test_a_cell_takes_frozen_roles_and_refuses_what_the_library_refuses():
    cell = Cell("voting", "generator=frozen,aggregator=a")
    assert cell.policy == {"generator": "frozen", "aggregator": "adapter_a"}
    assert cell.policy_name == "generator=frozen,aggregator=adapter_a" and Cell.from_record(cell.to_dict()) == cell
    assert cell.id != Cell("voting", "generator=a,aggregator=frozen").id
    with pytest.raises(ValueError, match="trains no role"):
        Cell("voting", "generator=frozen,aggregator=frozen")
    with pytest.raises(ValueError, match="`past_every=3` and `past_selves=4` are for roles that past selves play"):
        Cell("voting", "sp", past_every=3)
    with pytest.raises(ValueError, match=r"weighs the KL penalty of \['generator'\], which `policy` does not train"):
        Cell("voting", "generator=frozen,aggregator=a", role_beta={"generator": 0.1})
    with pytest.raises(
        ValueError, match=r"has an endpoint play \['aggregator'\], whose replies a resumed cell would ask for again"
    ):
        Cell("voting", {"generator": "a", "aggregator": {"url": "http://localhost:1/v1", "model": "large"}})


def test_the_record_names_the_bytes_of_a_frozen_adapter(tmp_path):
    cell = Cell("voting", f"generator=a,aggregator=frozen:{tmp_path}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    first = frozen_checksums(cell)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert (
        set(first) == {"aggregator"} and frozen_checksums(cell) != first and not frozen_checksums(Cell("voting", "ip"))
    )


def test_a_folder_without_an_adapter_is_refused_before_a_model_is_loaded(tmp_path):
    cell = Cell("voting", f"generator=a,aggregator=frozen:{tmp_path}")
    for check in (preflight, planner.check):
        with pytest.raises(
            ValueError, match="frozen adapters: not usable.* there is no adapter_config.json in this folder"
        ):
            check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "trained", "n"), [("generator=frozen,aggregator=a", "aggregator", 1), ("generator=a,aggregator=frozen", "generator", 3)])  # fmt: skip
def test_a_cell_with_frozen_roles_trains_the_others_alone(policy, trained, n, tmp_path):
    small = {
        "max_steps": 1, "n_problems": 2, "num_generations": 2, "n_validation": 2, "n_train": 4, "eval_steps": 1, "save_steps": 1,
        "max_completion_length": 24,
    }  # fmt: skip
    folder = run_cell(Cell("voting", policy, **small), tmp_path)
    ledger, roles = table(folder, "ledger"), table(folder, "roles").set_index("role")
    assert ledger["rows"].sum() == 4 * n and set(ledger["adapter"]) == {"adapter_a"}
    assert roles["rows"].dropna().to_dict() == {trained: 4 * n} and len(roles["turns"].dropna()) == 1
    assert [path.name for path in (folder / "adapters" / "step_00001").iterdir() if path.is_dir()] == ["adapter_a"]
    turns = table(folder / "turns", "step_00001")
    assert set(turns["role"]) == {"generator", "aggregator"}


@pytest.mark.slow
def test_a_cell_plays_past_selves_and_its_evaluation_plays_the_same_ones(tmp_path):
    """The copies are saved with each checkpoint's adapters; which of them an episode draws follows from its seed."""
    small = {
        "max_steps": 3, "n_problems": 2, "num_generations": 2, "n_validation": 6, "n_train": 4, "eval_steps": 1, "save_steps": 1,
        "max_completion_length": 24, "learning_rate": 2e-2, "warmup_steps": 0, "past_every": 1, "past_selves": 2,
    }  # fmt: skip
    cell = Cell("voting", "generator=past:a,aggregator=a", **small)
    folder = run_cell(cell, tmp_path)
    ledger, outcomes = table(folder, "ledger"), table(folder, "eval")
    assert set(ledger["adapter"]) == {"adapter_a"} and ledger["rows"].sum() == 12
    saved = sorted(path.name for path in (folder / "adapters" / "step_00003").iterdir() if path.is_dir())
    assert saved == ["adapter_a", "adapter_a_past_0", "adapter_a_past_1"]
    weights = [load_file(folder / "adapters" / place / "adapter_model.safetensors") for place in ("step_00003/adapter_a_past_1", "step_00003/adapter_a_past_0", "step_00002/adapter_a")]  # fmt: skip
    newest, older, then = weights
    assert all(newest[name].equal(value) for name, value in load_file(folder / "adapters/step_00003/adapter_a/adapter_model.safetensors").items())  # fmt: skip
    assert all(older[name].equal(value) for name, value in then.items())
    assert not all(older[name].equal(value) for name, value in newest.items())
    evaluated = run_evaluation(Evaluation(cell, "own", checkpoints="all"), tmp_path)
    again = table(evaluated, "eval").set_index(["step", "problem"])
    recorded = outcomes[outcomes["step"].isin(again.index.get_level_values("step"))].set_index(["step", "problem"])
    assert {1, 3} <= set(recorded.index.get_level_values("step"))
    assert again.loc[recorded.index, "answer"].tolist() == recorded["answer"].tolist()
