"""A cell's `max_staleness`: its id, its refusals, and what the run records."""

import pytest
from trainers import table

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import blocking_problems, preflight_checks
from multirole_study.experiment.run import run_cell

SMALL = {
    "max_steps": 3, "n_problems": 2, "num_generations": 2, "n_validation": 4, "n_train": 8, "eval_steps": 2, "save_steps": 2,
    "max_completion_length": 24, "warmup_steps": 0,
}  # fmt: skip


def test_the_id_is_the_same_at_0():
    assert Cell("voting", "sp", max_staleness=0).id == Cell("voting", "sp").id == "voting-sp-math-s0"
    assert Cell("voting", "sp", max_staleness=1).id != Cell("voting", "sp").id


def test_a_run_records_its_staleness(tmp_path):
    metrics = table(run_cell(Cell("voting", "sp", max_staleness=1, **SMALL), tmp_path), "metrics")
    assert metrics["staleness/mean"].tolist() == metrics["staleness/max"].tolist() == [0, 1, 1]


@pytest.mark.parametrize("cell", [{"engine": "generate"}, {"engine": "transformers", "dtype": "bfloat16"}])
def test_engines_that_cannot_play_during_the_update_are_refused_before_a_model_is_loaded(cell):
    (message,) = blocking_problems(preflight_checks(Cell("voting", "sp", max_staleness=1, **cell)))
    assert message.startswith("rollouts during the update: max_staleness=1")
    assert not blocking_problems(preflight_checks(Cell("voting", "sp", max_staleness=1)))


def test_credit_that_replays_episodes_is_refused():
    with pytest.raises(ValueError, match="`credit='branches'` replays episodes under the weights that played them"):
        Cell("voting", "sp", max_staleness=1, credit="branches")
