"""A user's file may import modules next to it, in every process that loads it; modules of equal names in two folders stay separate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multirole_study.experiment import user_files as own
from multirole_study.experiment.cell import Cell

WORKFLOW = """
from {helper} import SLOTS{more}
from multirole import Answer, user

class Own:
    name, roles = "own", {{"speaker": SLOTS}}

    async def run(self, problem, call):
        import {late}
        turn = await call("speaker", [user({late}.ask(problem.question))])
        return Answer(turn.text)
"""


@pytest.fixture(autouse=True)
def _unchanged_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own, "_loaded_siblings", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def project(folder: Path, slots: int = 1, helper: str = "pieces", late: str = "phrases", more: str = "") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{helper}.py").write_text(f"SLOTS = {slots}\n")
    (folder / f"{late}.py").write_text("def ask(question):\n    return question\n")
    (folder / "flow.py").write_text(WORKFLOW.format(helper=helper, late=late, more=more))
    return f"{folder}/flow.py:Own"


def test_modules_and_packages_beside_the_file_are_imported_without_bytecode(tmp_path):
    spec = project(tmp_path, slots=2)
    (tmp_path / "tools" / "deep").mkdir(parents=True)
    for package in ("tools", "tools/deep"):
        (tmp_path / package / "__init__.py").write_text("from pieces import SLOTS\n")
    (tmp_path / "phrases.py").write_text("from tools.deep import SLOTS\nask = str\n")
    assert Cell(spec, "sp").make_workflow().roles == {"speaker": 2}
    assert {name: len(paths) for name, paths in own.sibling_modules(tmp_path / "flow.py").items()} == {
        "phrases": 1, "pieces": 1, "tools": 2,
    }  # fmt: skip
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_change_in_a_module_beside_the_file_is_another_run_and_is_loaded(tmp_path):
    before = Cell(project(tmp_path, slots=1), "sp")
    assert Cell(project(tmp_path, slots=1), "sp").id == before.id
    after = Cell(project(tmp_path, slots=3), "sp")
    assert after.id != before.id and after.make_workflow().roles == {"speaker": 3}
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert Cell(f"{tmp_path}/flow.py:Own", "sp").id == after.id


def test_equal_files_in_two_folders_are_two_modules(tmp_path):
    source = "from pathlib import Path\nfrom multirole_study import Task\nrows = Path(__file__).parent / 'rows.jsonl'\n"
    source += "task = Task('own', rows, rows, lambda prompts, **_: [0.0] * len(prompts))\n"
    modules = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.py").write_text(source)
        (tmp_path / name / "rows.jsonl").write_text(f'{{"prompt": "{name}"}}\n')
        modules.append(
            Cell("single", "sp", f"{tmp_path}/{name}/task.py:task").make_task().problems("train")[0].question
        )
    assert modules == ["a", "b"]


@pytest.mark.parametrize("is_late", [False, True], ids=["imported at once", "imported in run"])
def test_two_files_whose_modules_have_equal_names_are_refused(tmp_path, is_late):
    names = {"late": "phrases", "helper": "pieces"}
    first = project(tmp_path / "a", slots=1, **names | ({"helper": "first"} if is_late else {"late": "first"}))
    second = project(tmp_path / "b", slots=2, **names | ({"helper": "second"} if is_late else {"late": "second"}))
    Cell(first, "sp")
    name = "phrases" if is_late else "pieces"
    with pytest.raises(
        ValueError, match=f"imports '{name}', which is {tmp_path}/b/{name}.py, but .* is {tmp_path}/a/{name}.py. Rename"
    ):
        Cell(second, "sp")
    assert Cell(first, "sp").make_workflow().roles == {"speaker": 1}


@pytest.mark.parametrize(
    ("name", "other"),
    [("statistics", "a module of Python"), ("random", "a module of Python"), ("numpy", "numpy/__init__.py"), ("nbconvert", "nbconvert/__init__.py")],
)  # fmt: skip
def test_a_module_that_would_replace_an_installed_one_is_refused(tmp_path, name, other, monkeypatch):
    monkeypatch.delitem(sys.modules, "nbconvert", raising=False)
    with pytest.raises(ValueError, match=f"imports '{name}'.*is .*{other}. Rename the module"):
        Cell(project(tmp_path, helper=name), "sp")


def test_a_module_in_the_working_directory_does_not_come_first(tmp_path, monkeypatch):
    project(tmp_path / "here", slots=5)
    monkeypatch.chdir(tmp_path / "here")
    sys.path.insert(0, "")
    assert Cell(project(tmp_path / "there", slots=2), "sp").make_workflow().roles == {"speaker": 2}


def test_an_error_in_a_module_beside_the_file_names_its_line(tmp_path):
    spec = project(tmp_path)
    (tmp_path / "pieces.py").write_text("\nSLOTS = 1 / 0\n")
    with pytest.raises(ValueError, match=r"flow.py cannot be imported: ZeroDivisionError(.|\n)*pieces.py\", line 2"):
        Cell(spec, "sp")


@pytest.mark.slow
def test_another_process_plays_what_it_imports_in_run(tmp_path):
    """Resumed, spawned and evaluating processes do this: they get the name of the file, load it again and run it."""
    spec = project(tmp_path / "files", slots=1)
    program = (
        "import sys\nfrom multirole_study.experiment.cell import Cell\nfrom multirole_study.experiment.preflight import dry_run\n"
        "from multirole.types import Problem\n"
        f"cell = Cell.from_parameters({{'workflow': {spec!r}, 'policy': 'sp'}})[0]\n"
        "dry_run(cell.make_workflow(), Problem('0', '', 'hello', {}))\nprint(sys.modules['phrases'].__file__)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, check=False, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"{tmp_path}/files/phrases.py", done.stderr
