"""The rooms of the house import each other in one direction, and the library type-checks."""

import subprocess
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_imports_keep_the_contracts_of_pyproject():
    done = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()")
    assert done.returncode == 0, done.stdout


def test_the_code_is_formatted_and_has_no_lint():
    for command in (["check"], ["format", "--check"]):
        done = run(sys.executable, "-m", "ruff", *command)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_library_type_checks():
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout


def test_importing_the_package_and_its_command_line_loads_no_framework():
    code = "import sys, multirole, multirole.__main__; print([m for m in ('torch', 'trl', 'transformers', 'pandas') if m in sys.modules])"
    assert run(sys.executable, "-c", code).stdout.strip() == "[]"


def no_vllm() -> None:
    assert "multirole.core.trainer" in sys.modules and "vllm" not in sys.modules


def test_training_without_vllm_does_not_import_it(tmp_path):
    """In a process that has imported what training and the doctor need."""
    assert processes.run(tmp_path / "log", no_vllm) == 0
