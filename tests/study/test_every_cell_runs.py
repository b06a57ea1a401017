"""All of 4 workflows x {sp, ip, a custom map} x 2 tasks run to DONE, with both engines.

The whole matrix takes a quarter of an hour; `make test` runs one of its cells, `make test-all` all.
"""

import pytest
from trainers import slow_but, table

from multirole.workflows import WORKFLOWS
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done

CUSTOM = {
    "single": "generator=mine", "eval_opt": "generator=a,evaluator=b", "voting": "generator=a,aggregator=b",
    "orch_workers": "orchestrator=lead,worker=hand,synthesizer=lead",
}  # fmt: skip
SMALL = {
    "max_steps": 2, "n_problems": 2, "num_generations": 4, "n_validation": 4, "n_train": 64, "eval_steps": 2,
    "warmup_steps": 1, "save_steps": 2, "max_completion_length": 48,
}  # fmt: skip
CELLS = [(w, p, t) for w in WORKFLOWS for p in ("sp", "ip", "map") for t in ("math", "code")]
MATRIX = [(engine, *cell) for engine in ("transformers", "vllm") for cell in CELLS]
ALWAYS = [("transformers", "orch_workers", "map", "math")]


@pytest.mark.parametrize(("engine", "workflow", "policy", "task"), slow_but(ALWAYS, MATRIX))
def test_the_cell_runs_to_done(engine, workflow, policy, task, tmp_path):
    cell = Cell(workflow, CUSTOM[workflow] if policy == "map" else policy, task, engine=engine, **SMALL)
    folder = run_cell(cell, tmp_path)
    assert is_done(folder)
    roles = table(folder, "roles")
    assert set(roles["role"]) == set(cell.make_workflow().roles)
    # the learning rate is 0 in the first iteration: what differs there is the engine's rounding
    assert roles[roles["iteration"] == 1]["max_logprob_gap"].max() < 5e-5
    assert set(table(folder, "eval")["step"]) == {0, 2}


def test_a_cell_with_the_options_of_the_released_code_runs_to_done(tmp_path):
    cell = Cell("eval_opt", "ip", "code", preset="released_code", old_logprobs="recomputed", **SMALL)
    folder = run_cell(cell, tmp_path)
    ledger = table(folder, "ledger")
    assert set(table(folder, "eval")["reward"]) <= {0.0, 1.0}  # all tests or nothing
    assert ledger.iloc[0]["lr"] == 0 and ledger[ledger["iteration"] == 2]["lr"].min() > 0
    first = ledger[ledger["iteration"] == 1].groupby("adapter", sort=False)["lr"].first()
    assert first.iloc[0] == 0 < first.iloc[1]  # the schedule ticks between the adapters
