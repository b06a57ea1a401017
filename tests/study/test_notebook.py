"""The README's command at toy size: papermill runs the notebook to DONE; a misspelt name or value stops it at once."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from nbformat import NotebookNode
from notebook_cells import linked
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from multirole_study.experiment.cell import cell_parameters
from multirole_study.experiment.evaluation import evaluation_parameters
from multirole_study.experiment.settings import UserError
from multirole_study.notebook import link, use_root_of_clone
from multirole_study.paper.declarations import declare
from multirole_study.paper.grid import Grid
from multirole_study.paper.notebooks import notebooks_of, remove_what_differs, run_notebooks

ROOT = Path(__file__).parents[2]


def papermill(tmp_path, **parameters):
    values = {"results_dir": str(tmp_path / "runs")} | parameters
    command = [sys.executable, "-m", "papermill", "-k", "python3", "--stdout-file", "-"]
    command += [str(ROOT / "notebooks" / "train_cell.ipynb"), str(tmp_path / "out.ipynb")]
    for name, value in values.items():
        command += ["-p", name, str(value)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("notebook", "listed"), [("train_cell", cell_parameters()), ("eval_cell", evaluation_parameters())]
)
def test_the_parameter_cell_lists_every_setting_with_its_default_and_help(notebook, listed):
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    source = next(cell["source"] for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    assert not [line for line in source if "=" in line.partition("#")[2]]  # papermill would not know the parameter
    lines = [line.rstrip("\n") for line in source if not line.startswith("#") and line.strip()]
    assert lines == [str(parameter) for parameter in listed]


@pytest.mark.slow
def test_a_toy_cell_runs_to_done_and_its_notebook_stays_small(tmp_path):
    done = papermill(
        tmp_path, workflow="eval_opt", policy="ip", max_steps=2, n_problems=2, num_generations=2, n_validation=4, eval_steps=2
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("runs/tiny-r/eval_opt-ip-math-s0-*/DONE"))
    out = tmp_path / "out.ipynb"
    assert out.stat().st_size < 1_000_000
    outputs = [o for cell in json.loads(out.read_text())["cells"] for o in cell.get("outputs", [])]
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 3
    printed = "".join("".join(o.get("text", "")) for o in outputs)
    assert "is finished" in printed and "iteration 1/2" not in printed  # the live lines are replaced
    assert "iteration 1/2   reward" in done.stdout and "validation at iteration 2" in done.stdout
    shown = "".join("".join(o.get("data", {}).get("text/plain", "")) for o in outputs)
    assert "GiB per process" in shown  # the plan, and not in the terminal, where the README says how `make cell` ends
    assert "GiB per process" not in printed + done.stdout


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"worklow": "voting", "policy": "sp"}, "`worklow` is not a known parameter"),
        pytest.param({"workflow": "votin"}, "'votin'. Did you mean 'voting'?", marks=pytest.mark.slow),
    ],
)
def test_a_misspelt_name_never_trains_the_default_cell(tmp_path, parameters, message):
    done = papermill(tmp_path, **parameters)
    assert done.returncode == 1 and message in done.stderr
    (error,) = [o for c in json.loads((tmp_path / "out.ipynb").read_text())["cells"] for o in c.get("outputs", [])
                if o["output_type"] == "error"][:1]  # fmt: skip
    assert len(error["traceback"]) == 1 and message in error["traceback"][0]
    assert not (tmp_path / "runs").exists()


def make(*arguments):
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("variable", ["ITERATION=3", "workflow=eval_opt", "RESULT_DIR=x"])
def test_an_unknown_make_variable_is_refused(variable):
    done = make("cell", variable)
    assert done.returncode == 2 and f"{variable.partition('=')[0]}= is not a variable" in done.stderr
    assert make("cell", "ITERATIONS=3", "OMP_NUM_THREADS=2").returncode == 0


@pytest.mark.parametrize(
    "words", [("cell", "SEEDS=1,2"), ("grid", "SEED=3"), ("study", "ITERATIONS=3"), ("paper", "SEEDS=1")]
)
def test_a_variable_of_another_target_is_refused(words):
    """`make grid ITERATIONS=3` would train the whole grid with 60."""
    done = make(*words)
    assert done.returncode == 2
    assert f"{words[1].partition('=')[0]}= is not a variable of make {words[0]}. Variables are " in done.stderr
    assert make("grid", "SEEDS=1,2", "JOBS=2", "SCALE=smollm2", "STUDY=studies/main.yaml").returncode == 0


@pytest.mark.parametrize("target", ["grid", "study", "grid-status"])
def test_a_grid_is_not_given_the_parameters_of_a_cell(target):
    """Snakemake has another -p, and would look for a file called learning_rate."""
    done = make(target, "ARGS=-p learning_rate 1e-3")
    assert done.returncode == 2 and "ARGS=\"'parameters={NAME: VALUE}'\"" in done.stderr
    assert make("cell", "ARGS=-p learning_rate 1e-3").returncode == 0


def test_make_variables_reach_papermill_as_they_are():
    variables = {"WORKFLOW": "x'; touch y", "RESULTS_DIR": 'a b"c', "SEED": "7"}
    script = make("cell", *(f"{name}={value}" for name, value in variables.items())).stdout
    command = script[script.index("$RUN_PAPERMILL") : script.index("< /dev/null")].replace('$RUN_PAPERMILL"', "", 1)
    words = shlex.split(command.replace("\\\n", ""))
    parameters = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word in ("-p", "-r")}
    assert parameters == {
        "workflow": variables["WORKFLOW"],
        "policy": "sp",
        "seed": "7",
        "results_dir": variables["RESULTS_DIR"],
    }


def test_a_scale_for_gpus_does_not_install_the_cpu_environment(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements-cpu.lock", "requirements-clone.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--dry-run", "-C", str(tmp_path), "grid", "SCALE=1.7b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "write VENV=path/to/that/environment" in done.stderr
    assert subprocess.run([*command, "VENV=.venv"], capture_output=True, check=False).returncode == 0


def test_paths_begin_at_the_root_of_the_clone_where_jupyter_starts_in_its_notebooks(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT / "notebooks")
    use_root_of_clone()
    assert Path.cwd() == ROOT
    use_root_of_clone()
    assert Path.cwd() == ROOT
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")  # another project's
    use_root_of_clone()
    assert Path.cwd() == tmp_path / "notebooks"


@pytest.mark.parametrize("notebook", ["runs/tiny-r/page.ipynb", "elsewhere/of mine/page.ipynb", None])
def test_the_link_to_the_inspector_works_where_the_page_lies(notebook, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = Path("runs/tiny-r/a #1/inspector.html")
    page.parent.mkdir(parents=True)
    page.write_text("")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if notebook is not None:
        monkeypatch.setenv("JPY_SESSION_NAME", notebook)
    base = (tmp_path / (notebook or "page.ipynb")).as_uri()
    href = re.search('href="([^"]*)"', link(page).data)[1]
    assert href.startswith("file:") == (notebook is None)
    assert Path(unquote(urlsplit(urljoin(base, href)).path)).samefile(page)


def test_an_executed_notebook_holds_nothing_that_differs_from_run_to_run():
    path = str(ROOT / "notebooks" / "tables.ipynb")
    executed = [
        parameterize_notebook(load_notebook_node(path), {"results": "results/tiny-r"}, report_mode=True)
        for _ in range(2)
    ]
    for i, notebook in enumerate(executed):
        notebook.metadata.papermill.update({"duration": i, "start_time": str(i)})
        notebook.metadata.language_info.version = f"3.1{i}"
        for cell in notebook.cells:
            cell.metadata.update({"papermill": {"duration": i}, "execution": {"iopub.status.idle": str(i)}})
        code = next(cell for cell in notebook.cells if cell.cell_type == "code")
        code.outputs = [NotebookNode(output_type="stream", name="stderr", text=f"This is machine {i}.")]
    assert executed[0] != executed[1]
    for notebook in executed:
        remove_what_differs(notebook)
    assert executed[0] == executed[1]
    assert executed[0].metadata.papermill.parameters == {"results": "results/tiny-r"}


@pytest.mark.slow
def test_one_cell_of_a_notebook_is_run_by_its_name(grid_results, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = linked(grid_results, tmp_path / "tiny-r")
    with pytest.raises(UserError, match="computes 'table_11'. Did you mean 'table_1'?"):
        run_notebooks(folder, ["table_11"])
    assert run_notebooks(folder, ["table_7"]) == [], "no executed notebook, which would lack the other tables"
    assert sorted(path.name for path in folder.glob("*/*")) == ["table_7.csv", "table_7.md", "table_7.tex"]


def test_a_parameter_that_no_notebook_to_be_run_has_is_refused(grid_results, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="`folder` is not a parameter of the notebooks to be run, tables"):
        run_notebooks(grid_results, ["table_7"], {"folder": "runs/tiny-r"})
    with pytest.raises(UserError, match="`results` is not a parameter"):  # it is the folder
        run_notebooks(grid_results, ["table_7"], {"results": "runs/tiny-r"})


def test_a_study_has_the_notebooks_of_its_kind():
    kinds = {
        place: notebooks_of(ROOT / "results" / place)
        for place in ("tiny-r", "clock/tiny-r", "rates/tiny-r", "credit/tiny-r")
    }
    assert list(kinds.values()) == [
        ("tables", "figures", "mechanisms", "study", "questions", "overview"),
        ("clock",),
        ("rates",),
        ("credit",),
    ]


def test_results_outside_a_clone_or_without_a_run_are_refused(grid_results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="in the root of a clone"):
        run_notebooks(grid_results)
    monkeypatch.chdir(ROOT)
    Grid("tiny-r").write(tmp_path)
    with pytest.raises(UserError, match="holds no finished run"):
        run_notebooks(tmp_path / "tiny-r")


def test_a_study_of_runs_that_are_packed_elsewhere_needs_none_of_its_own(grid_results, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    question = {"name": "q", "question": "?", "measure": "end", "arm": "shared"}
    study = {
        "arms": {"shared": {}},
        "tasks": ["math"],
        "seeds": [0, 1],
        "workflows": ["voting"],
        "questions": [question],
    }
    declare(Grid.read(grid_results), study | {"packed_in": [str(grid_results)]}).write(tmp_path)
    assert run_notebooks(tmp_path / "tiny-r", ["compare"])
    assert "| 2   |" in (tmp_path / "tiny-r/tables/compare.md").read_text(encoding="utf-8")
