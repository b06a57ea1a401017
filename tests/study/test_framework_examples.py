"""Agents of five frameworks train unmodified, each in at most 40 lines of its own idiom."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pandas as pd
import processes
import pytest

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.inspector import inspect_run

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
EXAMPLES = {
    "openai_voting": ("openai", ["solver", "judge"]),
    "langgraph_review": ("langgraph", ["writer", "critic"]),
    "agents_sdk_pipeline": ("agents", ["planner", "solver"]),
    "ag2_dialogue": ("ag2", ["student", "teacher"]),
    "smolagents_tool": ("smolagents", ["coder"]),
}
"""script -> the package that it needs, and its roles."""


def script(name: str, folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(FOLDER))  # as `python FILE` does
    sys.argv = [name]
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_agent_of_a_framework_trains(name, tmp_path):
    package, roles = EXAMPLES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make frameworks")
    code = processes.run(tmp_path / "log", script, name, tmp_path)
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed[-3000:]
    assert all(f"'{role}/rows'" in printed for role in roles)
    (saved,) = (tmp_path / "out").iterdir()
    assert {f"adapter_{role}" for role in roles} <= {path.name for path in saved.iterdir()}


def test_an_agent_trains_as_a_cell_and_is_recorded(tmp_path):
    """Named by its file, as in a shell or a notebook."""
    sizes = {"iterations": 2, "n_problems": 2, "n_episodes": 2, "n_validation": 4, "n_train": 8, "eval_every": 1}
    cell = Cell(f"{FOLDER / 'openai_voting.py'}:voting", "ip", max_response_tokens=24, warmup_iterations=0, **sizes)
    folder = run_cell(cell, tmp_path)
    turns = pd.read_parquet(folder / "turns" / "step_00002.parquet")
    assert set(turns["role"]) == {"solver", "judge"} and set(turns[turns["role"] == "solver"]["slot"]) == {0, 1, 2}
    assert {"solves", "selects"} <= set(pd.read_parquet(folder / "skills.parquet")["measure"])
    assert inspect_run(folder).stat().st_size > 10_000


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_framework_needs_few_lines(name):
    lines = (FOLDER / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40
