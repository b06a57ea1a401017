"""The packages import each other in one direction only, and the library type-checks."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import processes
import pytest
from command_lines import RUN_COMMAND

from multirole_study.__main__ import COMMANDS
from multirole_study.experiment.hardware import driver

ROOT = Path(__file__).parents[1]


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_imports_keep_the_contracts_of_pyproject():
    done = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()")
    assert done.returncode == 0, done.stdout


def test_the_docs_list_the_rooms_of_the_library_in_the_order_of_their_layers():
    """Each file and folder of it once; the rooms of one layer in any order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The rooms of the library\n")[2].partition("\n## ")[0]
    rooms = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)(?:\.py|/)`", line.split("|")[1] if line[:1] == "|" else "")
    ]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [
        c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c.get("containers") == ["multirole"]
    ]
    number = {name: i for i, layer in enumerate(layers) for name in layer.split(" | ")}
    assert [number[name] for name in rooms] == sorted(number.values())
    there = {
        path.stem
        for path in (ROOT / "src/multirole").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(rooms) == sorted(there - {"__init__", "__main__", "old_names"})


def test_the_code_is_formatted_and_has_no_lint():
    for command in (["check"], ["format", "--check"]):
        done = run(sys.executable, "-m", "ruff", *command)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_library_type_checks():
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout


COMMAND_LINES = f"""{RUN_COMMAND}
from multirole_study.__main__ import main
for line in json.loads(sys.stdin.read()):
    code, printed = run_command(main, line)
    heavy = ("torch", "trl", "transformers", "datasets", "matplotlib", "pandas", "pyarrow")
    print(json.dumps((line, code, printed, [name for name in heavy if name in sys.modules], sum(os.times()[:2]))))
"""
PLAN = "plan -p workflow voting -p policy ip"
REFUSED = {  # what it says
    "trian": "Did you mean 'train'?",
    "train -p iteratons 3": "Did you mean 'max_steps'?",
    "plan -p learning_rate -1e-3": "`learning_rate` must be greater than or equal to 0, got -0.001",
    "doctor -p max_steps 0": "got 0",
    "evaluate -p n_rollout 2": "Did you mean 'num_generations_eval'?",
    "evaluate -p results_dir nowhere": "is not finished. Train it first",
    "pack nowhere": "nowhere holds no finished run",
    "paper nowhere": "nowhere/grid.json does not exist",
    "inspect nowhere": "nowhere contains no finished run",
}


def test_help_refusals_and_the_plan_load_no_framework():
    """All commands run in one process, so that an import by one command is also noticed in the later ones."""
    helps = [f"{name} --help".strip() for name in ("", *COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND_LINES], input=json.dumps([*helps, PLAN, *REFUSED]), capture_output=True, text=True, check=False
    )  # fmt: skip
    ended = {line: rest for line, *rest in map(json.loads, done.stdout.splitlines())}
    for line in helps:
        code, printed, heavy, _ = ended[line]
        assert code == 0 and printed.startswith("usage: multirole") and not heavy, line
    assert ended[helps[-1]][-1] < 0.5 * len(helps)  # CPU-seconds
    assert ended[PLAN][0] == 0 and ("torch" not in ended[PLAN][2] or driver() is not None)
    for line, words in REFUSED.items():
        code, printed, heavy, _ = ended[line]
        assert code == 2 and words in printed and "Traceback" not in printed, (line, printed)
        assert not {"torch", "trl", "transformers", "datasets"} & set(heavy) or line.startswith("inspect"), (
            line,
            heavy,
        )


def no_vllm() -> None:
    assert "multirole.trainer" in sys.modules and "vllm" not in sys.modules


def test_training_without_vllm_does_not_import_it(tmp_path):
    """In a process that has imported what training and the doctor need."""
    assert processes.run(tmp_path / "log", no_vllm) == 0
