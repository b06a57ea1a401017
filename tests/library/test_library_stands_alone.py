"""What `pip install` of the wheel brings is enough: without vLLM and without any package that the wheel does not ask for.

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
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from command_lines import RUN_COMMAND
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from multirole_study.__main__ import COMMANDS as COMMAND_LINE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = packages_distributions()
README, PAGE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/own_workflow.md"))


def closure(texts: list[str], extras: tuple[str, ...] = ()) -> set[str]:
    """Return the installed distributions that requirements ask for, directly or indirectly."""
    reached: set[tuple[str, str]] = set()
    todo = [(Requirement(text), extras) for text in texts]
    while todo:
        requirement, of_extras = todo.pop()
        name = canonicalize_name(requirement.name)
        is_needed = not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in ("", *of_extras))
        new = {(name, extra) for extra in ("", *requirement.extras)} - reached
        if not is_needed or not new:
            continue
        try:
            further = distribution(name).requires or []
        except PackageNotFoundError:  # a marker of another platform
            continue
        reached |= new
        todo += [(Requirement(text), tuple(requirement.extras)) for text in further]
    return {name for name, _ in reached}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: setuptools leaves and reads build/
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """environment(*extras) -> a folder for sys.path with the wheel and all that it requires."""

    def build(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment") / "site-packages"  # the name by which dill knows packages
        folder.mkdir()
        texts = PROJECT["dependencies"] + [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
        for name in closure(texts):
            package = distribution(name)
            for top in {path.parts[0] for path in package.files if path.parts[0] not in ("..", "__pycache__")}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(package.locate_file(top))
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
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
    """Return the distributions that a package's modules import, without this one."""
    files = (ROOT / "src" / package).rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    modules = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"math_numbers"}  # the sandbox's
    return {canonicalize_name(DISTRIBUTIONS.get(name, [name])[0]) for name in modules} - {"multirole"}


def declared(texts: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_what_is_imported_is_required_and_nothing_else():
    library, extras = declared(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    optional = declared([*extras["openai"], *extras["server"], *extras["cpu"]])
    assert imported("multirole") == library | optional
    assert imported("multirole_sandbox") == set()
    of_notebooks = {"ipykernel", "jupyterlab"}
    assert imported("multirole_study") - library == declared(extras["study"]) - of_notebooks


TRAIN = """
import os
from importlib.util import find_spec
assert find_spec("vllm") is None and find_spec("tabulate") is None

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

given, readme, page = given
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
exec(compile(readme, "README.md", "exec"))
assert trainer.state.global_step == 1
print(json.dumps(("trained", sorted(trainer.adapters), "")))

import multirole
assert multirole.__file__.startswith(site), multirole.__file__
exec(compile(page, "own_workflow.md", "exec"))
assert trainer.state.global_step == 1 and os.path.exists("out/review/adapter_reviewer/adapter_model.safetensors")

assert "vllm" not in sys.modules
from trl.trainer import grpo_trainer
try:  # what `use_vllm=True` makes of stock TRL
    grpo_trainer.VLLMGeneration(None, trainer.accelerator, False, None)
except ImportError as error:
    assert "vLLM is not available" in str(error), error
else:
    raise AssertionError("TRL found a vLLM")
from multirole.engines import check_engine
for name, use in (("from_openai", lambda: multirole.from_openai), ("engine", lambda: check_engine("vllm_server"))):
    try:
        use()
    except (ModuleNotFoundError, ValueError) as error:
        print(json.dumps((name, type(error).__name__, str(error))))
"""


def replaced(code: str, changes: dict[str, str]) -> str:
    for original, instead in changes.items():
        assert original in code
        code = code.replace(original, instead)
    return code


COMMANDS = f"""{RUN_COMMAND}
from multirole.__main__ import main
for line in given:
    print(json.dumps((line, *run_command(main, line))))
"""
CELL = "-p workflow voting -p policy ip"
ARGUMENTS = {
    "plan": CELL, "doctor": CELL, "fetch": "tiny-r", "train": f"{CELL} -p max_steps 1", "evaluate": CELL, "inspect": "nowhere",
    "role_value": CELL, "signal": "nowhere", "credit": "nowhere", "serve": "nowhere", "vllm_server": CELL, "pack": "nowhere",
    "paper": "nowhere", "questions": "nowhere", "clock": "--power", "leaderboard": "nowhere", "rates": "nowhere",
    "notebooks": "nowhere",
}  # fmt: skip


def ended(printed: str) -> dict[str, tuple[object, str]]:
    """Return command -> its exit code and what it said."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('["')]
    return {line.split()[0]: (code, said) for line, code, said in lines}


@pytest.fixture(scope="module")
def alone(environment, tmp_path_factory) -> dict[str, tuple[object, str]]:
    """What the library alone says: it trains, and then every command runs in the same process, which saves imports."""
    (readme,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    readme = replaced(readme, {
        '"Qwen/Qwen3-0.6B"': '"model"',
        'load_dataset("trl-lib/tldr", split="train")': '__import__("datasets").Dataset.from_list([{"prompt": f"{i}+1"} for i in range(4)])',
        "max_steps=500, per_device_train_batch_size=64, num_generations=8": 'max_steps=1, per_device_train_batch_size=8, num_generations=2, max_completion_length=8, report_to="none"',
    })  # fmt: skip
    (page,) = re.findall(r"```python\n(import re\n\nfrom datasets.*?)```", PAGE, re.DOTALL)
    page = replaced(
        page, {"max_steps=10": "max_steps=1", "per_device_train_batch_size=64": "per_device_train_batch_size=16"}
    )
    given = [[f"{command} {words}" for command, words in ARGUMENTS.items()], readme, page]
    return ended(run(environment(), TRAIN + COMMANDS, tmp_path_factory.mktemp("elsewhere"), *given))


def test_the_library_alone_trains_the_workflows_of_the_pages(alone):
    """README's on a model with random weights; the whole script of docs/own_workflow.md as it is, but for its length."""
    assert alone["trained"][0] == ["adapter_editor", "adapter_writer"]
    for name, extra in (("from_openai", "openai"), ("engine", "server")):
        assert re.search(
            rf"needs the package \w+, which is not installed: run `pip install '\.\[{extra}\]'", alone[name][1]
        )


def test_every_command_works_or_says_in_a_sentence_what_to_install(alone):
    assert ARGUMENTS.keys() == COMMAND_LINE.keys()
    commands = dict(alone)
    assert commands["fetch"][0] == 0
    for name in ("plan", "doctor", "train", "questions", "clock", "leaderboard", "rates", "vllm_server", "notebooks"):
        code, said = commands[name]
        extra = "cuda" if name == "vllm_server" else "study"
        assert code == 2 and said.count("\n") == 1, (name, said)
        assert re.fullmatch(rf"`multirole {name}` needs the package \w+, .*pip install '\.\[{extra}\]'.*\.\n", said), (
            said
        )
    for name in ("evaluate", "inspect", "role_value", "signal", "credit", "serve", "pack", "paper"):
        code, said = commands[name]
        assert code == 2 and re.search(
            "is not finished|no finished run|not the folder of a run|does not exist", said
        ), said


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
    printed = run(environment("study"), WALK + COMMANDS, tmp_path, f"plan {CELL}", "clock --power", "paper nowhere")
    commands = ended(printed)
    assert commands.pop("plan")[0] == commands.pop("clock")[0] == 0 and commands.pop("paper")[0] == 2
    extras = PROJECT["optional-dependencies"]
    del commands["multirole_study.tasks.math_compare"]  # only the sandbox's workers import it
    needs = {module: missing for module, (missing, _) in commands.items()}
    assert set(needs.values()) <= declared([*extras["openai"], *extras["server"]]), needs
    assert all(re.search(r"\.endpoint\.|\.vllm_serve|\.serve$", module) for module in needs), needs


@pytest.mark.slow
def test_the_study_alone_trains_and_shows_a_cell(environment, tmp_path):
    lines = [
        f"train {CELL} -p max_steps 1 -p n_problems 2 -p num_generations 2 -p n_validation 4 -p n_train 8",
        "inspect runs/tiny-r",
        "pack runs/tiny-r",
    ]
    for code, said in ended(run(environment("study"), COMMANDS, tmp_path, *lines)).values():
        assert code == 0, said
