"""A cell's `max_failed_episodes`: episodes whose workflow raises are counted and are in no table of outcomes."""

import pandas as pd

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import is_done
from multirole_study.inspector import inspect_run

FILE = """
from multirole import Answer, user
from multirole_study import Task

class Unsteady:
    name, roles = "unsteady", {"solver": 1}

    async def run(self, problem, call):
        turn = await call("solver", [user(problem.question)])
        if "Compute" in problem.question and "1" in turn.text and turn.text != "\\\\boxed{1}":
            raise RuntimeError("no tool")
        return Answer(turn.text)

class Down(Unsteady):
    name = "down"

    async def run(self, problem, call):
        turn = await call("solver", [user(problem.question)])
        if turn.text not in ("", "\\\\boxed{1}"):  # not in the trial before the run
            raise RuntimeError("no tool")
        return Answer(turn.text)

ROWS = [{"prompt": f"Compute left to right: {a}+{a % 5}-3"} for a in range(4, 36)]
task = Task("sums", ROWS, ROWS[:8], lambda prompts, completions, **_: [len(text) % 2 for text in completions])
"""


def test_failing_episodes_are_counted_and_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text(FILE)
    cell = Cell("flow.py:Unsteady", "ip", "flow.py:task", n_problems=4, num_generations=2, n_validation=8, max_steps=1,
                warmup_steps=0, max_failed_episodes=8)  # fmt: skip
    assert cell.id != Cell("flow.py:Unsteady", "ip", "flow.py:task", n_problems=4, num_generations=2, n_validation=8,
                           max_steps=1, warmup_steps=0).id  # fmt: skip
    folder = run_cell(cell, tmp_path / "runs")
    episodes, metrics, outcomes = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("episodes", "metrics", "eval")
    )
    (failed,) = metrics["failed_episodes"]
    assert 0 < failed <= 8 and episodes["reward"].isna().sum() == failed and len(episodes) == 8
    assert episodes["question"].str.startswith("Compute").all()
    assert outcomes["reward"].notna().all() and set(outcomes.groupby("step").size()) <= set(range(1, 8))


def test_a_run_whose_episodes_all_fail_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text(FILE)
    cell = Cell("flow.py:Down", "ip", "flow.py:task", n_problems=1, num_generations=2, n_validation=2, max_steps=2,
                warmup_steps=0, max_failed_episodes=2)  # fmt: skip
    folder = run_cell(cell, tmp_path / "runs")
    metrics = pd.read_parquet(folder / "metrics.parquet")
    assert is_done(folder) and metrics["failed_episodes"].tolist() == [2, 2]
    assert metrics[["turns", "optimizer_steps"]].eq(0).all(axis=None) and metrics["reward"].isna().all()
    assert inspect_run(folder).exists()
