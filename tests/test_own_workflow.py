"""The example's own workflow and own task train as a cell, named by their file; nothing has to be registered."""

from pathlib import Path

from conftest import table

from multirole.experiment.cell import Cell
from multirole.experiment.run import run_cell

DEBATE = Path(__file__).parents[1] / "examples" / "debate.py"


def test_the_debate_of_the_examples_trains(tmp_path):
    cell = Cell(
        f"{DEBATE}:Debate", "debater=a,judge=b", f"{DEBATE}:task", iterations=3, n_problems=4, n_validation=8, eval_every=3,
        save_every=3, warmup_iterations=1,
    )  # fmt: skip
    folder = run_cell(cell, tmp_path)
    assert folder.name == cell.id and folder.name.startswith("debate-map-sums-s0-")
    roles = table(folder, "roles")
    assert set(roles["role"]) == {"debater", "judge"}
    assert set(roles[roles["role"] == "debater"]["rows"]) == {4 * 8 * 4}  # two debaters, two rounds
    ledger = table(folder, "ledger")
    assert (ledger[ledger["iteration"] == 1]["adapter"].value_counts()).to_dict() == {"adapter_a": 4, "adapter_b": 1}
    evaluated = table(folder, "eval")
    assert set(evaluated["step"]) == {0, 3} and set(evaluated["reward"]) <= {0.0, 1.0}
