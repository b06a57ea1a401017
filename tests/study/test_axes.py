"""The sizes that a study varies besides the matrix: voters, rounds, workers and the adapter's rank."""

import json

import pytest

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.inspector.run_figures import load

SMALL = {"max_steps": 1, "n_problems": 2, "num_generations": 2, "n_validation": 2, "n_train": 16, "warmup_steps": 0,
         "lora_r": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("workflow", "size", "role", "slots"),
    [pytest.param("voting", {"n_voters": 5}, "generator", 5, marks=pytest.mark.slow),
     ("eval_opt", {"rounds": 4}, "evaluator", 1),
     pytest.param("orch_workers", {"n_workers": 2}, "worker", 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_cell_runs_at_another_size(tmp_path, workflow, size, role, slots):
    cell = Cell(workflow, "ip", **SMALL | size)
    assert cell.make_workflow().roles[role] == slots
    folder = run_cell(cell, tmp_path)
    rows = load(folder, "roles").set_index("role")["rows"]
    if workflow == "voting":
        assert rows.to_dict() == {"generator": 20, "aggregator": 4}
    else:
        most = 16 if workflow == "eval_opt" else 8
        assert 4 <= rows[role] <= most
    for path in folder.glob("adapters/step_*/*/adapter_config.json"):
        assert json.loads(path.read_text())["r"] == 4
