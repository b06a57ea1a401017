"""A run killed right before any file operation, or at any moment, and then resumed ends like one that was not killed."""

import pytest
from kill_run import sweep

from multirole_study.experiment.cell import Cell

CELL = Cell(
    "voting", "ip", max_steps=3, n_problems=2, num_generations=2, n_validation=4, n_train=8, save_steps=1, eval_steps=1,
    max_completion_length=24, learning_rate=5e-3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("n_points", "n_moments"),
    [pytest.param(1, 0, marks=pytest.mark.slow), pytest.param(None, 10, marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_a_killed_run_resumes_to_the_same_files(n_points, n_moments, tmp_path):
    n_operations, n_attempts, failed = sweep(CELL, tmp_path, n_points, n_moments)
    assert failed == {} and n_attempts == (n_points or n_operations) + n_moments
    assert n_operations > 200, "fewer operations than a run has files: the operations are no longer counted"
