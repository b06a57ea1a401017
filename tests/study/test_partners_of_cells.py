"""Cells whose policy map has roles that are not trained: the record knows them, and only trained adapters are saved."""

import pytest
from trainers import table

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell


def test_a_cell_takes_frozen_roles_and_refuses_what_the_library_refuses():
    cell = Cell("voting", "generator=frozen,aggregator=a")
    assert cell.policy == {"generator": "frozen", "aggregator": "adapter_a"}
    assert cell.policy_name == "generator=frozen,aggregator=adapter_a" and Cell.from_record(cell.to_dict()) == cell
    assert cell.id != Cell("voting", "generator=a,aggregator=frozen").id
    with pytest.raises(ValueError, match="trains no role"):
        Cell("voting", "generator=frozen,aggregator=frozen")
    with pytest.raises(ValueError, match=r"weighs the KL penalty of \['generator'\], which `policy` does not train"):
        Cell("voting", "generator=frozen,aggregator=a", role_beta={"generator": 0.1})


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
