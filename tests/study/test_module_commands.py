"""Both packages run the command line with `python -m`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["multirole", "multirole_study"])
def test_the_command_line_runs_as_a_module(package):
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("multirole ")
