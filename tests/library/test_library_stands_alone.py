"""The wheel's library trains the README's own workflow with its own requirements alone: no study, no sandbox, none of their packages."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = ROOT / "src" / "multirole_study" / "models" / "tiny-r"

ALONE = """
import json, sys
allowed_path, code, forbidden = json.loads(sys.stdin.read())
sys.modules |= dict.fromkeys(forbidden)  # None: as if they were not installed
sys.path.insert(0, allowed_path)
exec(compile(code, "README.md", "exec"))
import multirole
assert multirole.__file__.startswith(allowed_path), multirole.__file__
assert trainer.state.global_step == 1 and set(trainer.adapters) == {"adapter_writer", "adapter_editor"}
"""


def required(name: str, names: set[str] | None = None) -> set[str]:
    """Return the distributions that a distribution requires without extras, directly or indirectly."""
    names = set() if names is None else names
    try:
        texts = requires(name) or []
    except PackageNotFoundError:
        return names
    for requirement in map(Requirement, texts):
        other = requirement.name.lower().replace("_", "-")
        needed = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
        )
        if needed and "extra ==" not in str(requirement.marker) and other not in names:
            names.add(other)
            required(other, names)
    return names


def imported(folder: Path) -> set[str]:
    """The packages that the modules of a folder import, without those of the standard library."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"multirole"}


def test_the_library_requires_what_it_imports_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = {Requirement(text).name for extra in ("openai", "server") for text in extras[extra]}
    optional |= {"vllm", "safetensors"}  # used only by the vLLM engine; vLLM requires safetensors
    required_names = {Requirement(text).name for text in project["dependencies"]}
    assert imported(ROOT / "src" / "multirole") == required_names | optional


@pytest.mark.slow
def test_the_wheel_alone_trains_the_readmes_workflow(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "build", "results", "runs"))
    subprocess.run([*build, str(source)], check=True, capture_output=True)  # a copy: setuptools leaves and reads build/
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site", [name for name in files.namelist() if name.startswith("multirole/")])
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    rows = '__import__("datasets").Dataset.from_list([{"prompt": f"{i}+1"} for i in range(4)])'
    for original, instead in (
        ('"Qwen/Qwen3-0.6B"', repr(str(MODEL))),
        ('load_dataset("trl-lib/tldr", split="train")', rows),
        ("per_device_train_batch_size=64, num_generations=8", 'per_device_train_batch_size=8, num_generations=2, max_steps=1, max_completion_length=8, report_to="none"'),
    ):  # fmt: skip
        assert original in code
        code = code.replace(original, instead)
    study = {Requirement(text).name.lower() for text in requires("multirole") if 'extra == "study"' in text}
    assert {"pydantic", "matplotlib", "math-verify", "papermill"} <= study
    forbidden = [
        module
        for module, names in packages_distributions().items()
        if {name.lower().replace("_", "-") for name in names} & (study - required("multirole"))
    ]
    forbidden += ["multirole_study", "multirole_sandbox"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input=json.dumps([str(tmp_path / "site"), code, forbidden]), cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
