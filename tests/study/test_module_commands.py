"""Both packages run the command line with `python -m`; without the study it says how to install it."""

import subprocess
import sys

import pytest

from multirole.__main__ import main


@pytest.mark.parametrize("package", ["multirole", "multirole_study"])
def test_the_command_line_runs_as_a_module(package):
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("multirole ")


def test_the_library_alone_says_how_to_install_the_command_line(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("multirole_study", "pydantic")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(SystemExit, match=r"needs the package pydantic.*pip install '\.\[study\]'"):
        main()
