"""What docs/extending.md shows works as it stands there."""

import os
import re
import sys
from pathlib import Path

import processes
import pytest

from multirole_study.__main__ import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def code_of(heading: str) -> str:
    """Return the first Python block below a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def train(folder: Path, words: list[str]) -> None:
    """Do what `multirole train` does in a folder."""
    os.chdir(folder)
    sys.argv[:] = ["multirole", "train", *words]
    sys.exit(main())


def test_the_workflow_and_the_task_of_the_page_train_as_files(tmp_path):
    (tmp_path / "relay.py").write_text(code_of("Add a workflow"))
    (tmp_path / "sums.py").write_text(code_of("Add a task"))
    settings = {
        "workflow": "relay.py:Relay", "policy": "ip", "task": "sums.py:task", "max_steps": "1", "n_problems": "2", "num_generations": "2",
        "n_validation": "4", "max_completion_length": "16", "results_dir": str(tmp_path / "runs"),
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("-p", name, value)]
    log = tmp_path / "log"
    assert processes.run(log, train, tmp_path, words) == 0, log.read_text()
    (run,) = (tmp_path / "runs").glob("*/*/DONE")
    adapters = {path.parent.name for path in run.parent.glob("adapters/**/*.safetensors")}
    assert adapters == {"adapter_writer", "adapter_editor"}


@pytest.mark.parametrize(("heading", "file"), [("Add an estimator of credit", "own_credit.py")])
def test_the_page_shows_the_code_of_the_example(heading, file):
    (class_text,) = re.findall(r"^class .*", code_of(heading), re.DOTALL | re.MULTILINE)
    assert class_text.strip() in (ROOT / "examples" / file).read_text(encoding="utf-8")
