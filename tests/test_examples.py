"""The examples run as a reader would run them, from another folder, and do what they say."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_own_workflow_rows_and_reward(tmp_path):
    assert len((EXAMPLES / "debate.py").read_text().splitlines()) <= 60
    output = run("debate.py", tmp_path)
    assert "eval_reward" in output
    assert {"adapter_a", "adapter_b"} <= {path.name for path in (tmp_path / "out" / "debate").iterdir()}


def test_a_stock_script_becomes_multi_role_in_under_ten_lines(tmp_path):
    scripts = [(EXAMPLES / name).read_text().splitlines() for name in ("grpo_stock.py", "grpo_multirole.py")]
    changed = [line for line in difflib.ndiff(*scripts) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) < 10
    output = run("grpo_multirole.py", tmp_path)
    assert "aggregator/rows" in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_stock.py", "partial_sharing.py"])
def test_the_other_examples(name, tmp_path):
    output = run(name, tmp_path)
    assert "reward" in output
