"""The lines that a run prints to the terminal."""

import shlex
from types import SimpleNamespace

import pandas as pd

from multirole_study.experiment import progress
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.progress import conclude, introduce, iteration_line, result_lines, validation_line


def test_the_command_that_a_run_ends_with_can_be_copied(tmp_path, capsys):
    folder = tmp_path / "my runs" / "voting-sp-math-s0"
    folder.mkdir(parents=True)
    pd.DataFrame({"step": [0], "correct": [True]}).to_parquet(folder / "eval.parquet")
    conclude(folder, "is finished")
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  to see it"))
    assert shlex.split(command)[3:] == ["multirole", "inspect", str(folder)]


def test_a_run_begins_with_what_does_less_than_it_says(tmp_path, capsys):
    counts = {"train": 8, "train_overlong": 0, "validation": 4}
    for cell, n_notes in ((Cell("single", "sp", max_steps=4, n_voters=5), 2), (Cell("single", "sp"), 0)):
        introduce(cell, 1, tmp_path, counts, None)
        assert capsys.readouterr().out.count("\n  note        ") == n_notes


def test_the_lines_of_a_run_by_hand():
    tokens = {"generator": 33.6, "aggregator": 12.0}
    assert iteration_line(7, 60, 0.5, 0.4375, 3.05, 61, tokens) == (
        "iteration  7/60   reward 0.500   accuracy 43.8 %   3.0 s, 1:01 left   tokens generator 34, aggregator 12"
    )
    assert iteration_line(7, 60, 0.5, 0.4375, 3.05, 61, tokens, 0.156).endswith(
        "aggregator 12   16 % over max_prompt_tokens"
    )
    skills = [("generator", "solves", 0.9, None), ("aggregator", "selects", 0.75, 0.5), ("", "workflow", 0.9, 0.8)]
    rows = pd.DataFrame(skills, columns=["role", "measure", "skill", "trivial"]).to_dict("records")
    shown = "validation at iteration 10   reward 1.000   8 problems"
    assert validation_line(10, 1.0, None, 8, rows) == f"{shown}   skill aggregator selects +25.0"
    assert validation_line(10, 1.0, None, 8, rows[:1]) == shown
    outcomes = pd.DataFrame({"step": [0, 0, 10, 10, 20, 20], "correct": [False, True, True, True, True, False]})
    assert [line.split("(")[0] for line in result_lines(outcomes)] == [
        "  before      accuracy 50.0 % ", "  best        accuracy 100.0 % ", "  after       accuracy 50.0 % ",
    ]  # fmt: skip
    assert result_lines(outcomes.assign(correct=None)) == []


def test_the_time_left_is_that_of_a_budget_which_ends_the_run_before(monkeypatch, capsys):
    """Resumed at iteration 10 with 400 of 1000 tokens: 200 more took 20 s, so the other 400 take 40 s, and 89 of 100 iterations 1780 s."""
    monkeypatch.setattr(progress.time, "monotonic", iter([100.0, 120.0, 120.0]).__next__)
    lines, state = progress.Progress(), SimpleNamespace(global_step=10, max_steps=100)
    lines.on_train_begin(None, state, None)
    iteration = SimpleNamespace(number=11, episodes=[], roles={}, seconds={"rollout": 20.0}, sampled_tokens=200)
    for name in ("mean_reward", "accuracy", "overflow_rate"):
        monkeypatch.setattr(progress, name, lambda episodes: 0.0)
    budget = SimpleNamespace(budget=1000, spent={"sampled_tokens": 600})
    lines.on_iteration_end(SimpleNamespace(state=state, budget=budget), iteration)
    assert "0:40 left" in capsys.readouterr().out
    lines.sampled = 0
    lines.on_iteration_end(SimpleNamespace(state=state, budget=None), iteration)
    assert "29:40 left" in capsys.readouterr().out
