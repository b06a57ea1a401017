"""The benchmarks behind docs/speed.md and docs/speed_update.md run, at small sizes and in this process: they are scripts of no package."""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src" / "multirole_study" / "models" / "tiny-r"


@pytest.fixture
def run(monkeypatch):
    """run(name, *arguments, **constants) -> what the benchmark of this name prints; its own processes are calls of its `main`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # of this process

    def printed(module: ModuleType, arguments: tuple[str, ...]) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            module.main()
        return output.getvalue()

    def run(name: str, *arguments: str, **constants: object) -> str:
        module = importlib.import_module(name)
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)

        def alone(script: str, *options: str, checkout: Path = ROOT, python: str = sys.executable) -> dict:
            assert Path(script).stem == name and checkout == ROOT
            return json.loads(printed(module, options).splitlines()[-1])

        monkeypatch.setattr(module, "alone", alone, raising=False)
        return printed(module, arguments)

    return run


@pytest.mark.slow
def test_engines(run):
    printed = run(
        "bench_engine", *["--pairs", "1", "--problems", "1", "--tokens", "3", "--rivals", "generate", "defaults"]
    )
    rows = [line for line in printed.splitlines() if "| tiny-r, float32 |" in line]
    assert len(rows) == 8  # two rivals, groups and turns, base and adapter
    assert all(float(cell) > 0 for row in rows for cell in row.split("|")[5:8])


@pytest.mark.slow
def test_updates_and_their_gradients(run, tmp_path):
    """This checkout stands for the other one, too; the rows of the updates are those that the gradients are computed of."""
    options = ["--model", str(TINY), "--rows", str(tmp_path)]
    small = {"N_PROBLEMS": 2, "N_EPISODES": 2, "N_TOKENS": 4, "STOCK": [("float32", 2)]}
    printed = run("bench_update", str(ROOT), *options, "--pairs", "1", "--workflows", "single", "voting", **small)
    assert printed.count("stock TRL") == 2 and "with its head mended" in printed
    assert "share of the update's time" in printed and "share of the rollout's time" in printed
    stored = json.loads((tmp_path / "single.json").read_text())
    for i, episode in enumerate(stored):  # else no row has a gradient: all replies are wrong
        episode["advantage"] = 1.0 - 2 * (i % 2)
    (tmp_path / "single.json").write_text(json.dumps(stored))
    printed = run("bench_gradient", *options, "--workflows", "single")
    cosines = [float(line.split("|")[4]) for line in printed.splitlines() if line.startswith("| single, ")]
    assert len(cosines) == 6 and min(cosines) > 0.5


@pytest.mark.slow
def test_commits(run):
    printed = run("bench_commits", str(ROOT), "--pairs", "1", "--cells", "single sp math", N_PROBLEMS=2, N_EPISODES=2)
    assert "other / this: start" in printed


@pytest.mark.slow
def test_rivals(run):
    small = {"n_train": 8, "n_validation": 2, "n_problems": 2, "num_generations": 2, "max_completion_length": 16}
    rivals = {
        "trl update 2": ("update", "trl_update 2"), "trl iteration 2": ("iteration", "trl_iteration 2"), "generate": ("engine", "generate"),
    }  # fmt: skip
    printed = run("bench_rivals", "--pairs", "1", SIZES=small, RIVALS=rivals)
    assert [line.split("per")[0].strip() for line in printed.splitlines()] == list(rivals)


@pytest.mark.slow
def test_endpoint(run):
    assert json.loads(run("bench_endpoint", "--pairs", "1"))["ratio"]["median"] > 0
