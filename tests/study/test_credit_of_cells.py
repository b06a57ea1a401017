"""A cell's `credit` reaches the rows that are trained, and its default is the run without it."""

import pytest
from trainers import slow_but, table

from multirole.credit import ESTIMATORS, load_estimator
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell

SMALL = {
    "max_steps": 1, "n_problems": 2, "num_generations": 2, "n_validation": 2, "n_train": 4, "eval_steps": 1, "save_steps": 1,
    "max_completion_length": 24,
}  # fmt: skip


def test_the_default_leaves_ids_as_they_are():
    assert (
        Cell("voting", "ip").id == Cell("voting", "ip", credit="outcome", credit_branches=4).id == "voting-ip-math-s0"
    )
    assert Cell("voting", "ip", credit="agent").id != "voting-ip-math-s0"


def test_credit_and_advantage_groups_exclude_each_other():
    with pytest.raises(
        ValueError, match="decides what is compared, so `advantage_group` must be 'episode', got 'role'"
    ):
        Cell("voting", "sp", credit="agent", advantage_group="role")


@pytest.mark.parametrize("name", slow_but(["leave_one_out"], [n for n in ESTIMATORS if n != "outcome"]))
def test_every_estimator_trains_a_cell(name, tmp_path):
    folder = run_cell(Cell("voting", "ip", credit=name, credit_branches=2, **SMALL), tmp_path)
    ledger, roles = table(folder, "ledger"), table(folder, "roles")
    estimator = load_estimator(name)
    branches = 2 if estimator.has_branches else 1
    assert ledger["rows"].sum() == branches * 4 * (3 + 1)  # episodes, and turns of each
    assert set(roles["role"]) == {"generator", "aggregator"} and roles["advantage_abs"].notna().all()
    metrics = table(folder, "metrics")
    assert ("sampled_tokens" in metrics) == estimator.replays_episodes
    if (
        name == "leave_one_out"
    ):  # an episode, and a fork of each of its turns, which samples that turn and those after it
        extra = metrics["sampled_tokens"][0] - metrics["completion_tokens"][0]
        assert 0 < extra <= 24 * 4 * (3 * 2 + 1)
