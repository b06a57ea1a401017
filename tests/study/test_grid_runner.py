"""The Snakefile runs each missing cell and evaluation once, with the grid's own parameters, and never one that is DONE."""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import processes
import pytest
import yaml

from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.presets import MODELS, TINY
from multirole_study.experiment.run_folder import folder_of
from multirole_study.experiment.settings import UserError
from multirole_study.paper.declarations import declaration_of, declare
from multirole_study.paper.grid import Grid

ROOT = Path(__file__).parents[2]
GRID = Grid("tiny-r", [0, 3], {"max_steps": 2, "learning_rate": 2e-5, "lr_schedule": "constant"}, base_rollouts=2)
CONFIG = ("seeds=[0, 3]", "parameters={max_steps: 2, learning_rate: 2e-5, lr_schedule: constant}", "base_rollouts=2")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the grid runner reads, apart from the package."""
    for name in ("Snakefile", "grid.yaml", "studies", "profiles", "notebooks"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    """Snakemake's imports take seconds. Where the server has been started before, each process imports them itself."""
    processes.SERVER.set_forkserver_preload([*processes.IMPORTED, "snakemake.cli"])


def main(folder: Path, *words: str) -> None:
    """Do what `python -m snakemake` does in a folder."""
    from snakemake.cli import main

    os.chdir(folder)
    sys.argv[:] = ["snakemake", *words]
    main()


def snakemake(checkout: Path, *options: str, study: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    words, log = [*options, "--cores", "1", "--config", *CONFIG, *study], checkout / "log"
    return subprocess.CompletedProcess(words, processes.run(log, main, checkout, *words), log.read_text())


def grid_status(checkout: Path, *variables: str) -> str:
    shutil.copyfile(ROOT / "Makefile", checkout / "Makefile")
    environment = f"VENV={sys.prefix}", f"--old-file={sys.prefix}/setup.stamp"
    return subprocess.check_output(["make", "grid-status", *environment, *variables], cwd=checkout, text=True)


def folders(checkout: Path) -> dict[Path, object]:
    """Results folder -> what belongs there, for all of the grid."""
    cells = {checkout / folder_of(cell, "runs"): cell for cell in GRID.cells()}
    return cells | {checkout / evaluation.folder("runs"): evaluation for evaluation in GRID.evaluations()}


def finish(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "DONE").write_text("{}")
    return folder / "DONE"


def commands(output: str) -> dict[str, tuple[str, dict[str, object]]]:
    """Executed notebook -> its source and its parameters, as papermill's command line would read them."""
    from papermill.cli import _resolve_type as papermill_value  # its imports take seconds, of every worker at the top

    commands_by_folder = {}
    for line in re.findall(
        r"^(?:Shell command: )?(?:JPY_SESSION_NAME=.* )?(exec flock .*) < /dev/null$", output, re.MULTILINE
    ):
        words = shlex.split(line)
        source, executed, *words = words[words.index("600") + 1 :]
        commands_by_folder[executed] = (
            source,
            {
                name: text if flag == "-r" else papermill_value(text)
                for flag, name, text in zip(words[::3], words[1::3], words[2::3], strict=True)
            },
        )
    return commands_by_folder


def test_a_fresh_grid_is_every_cell_and_evaluation_once_with_its_parameters(checkout):
    done = snakemake(checkout, "--dry-run", "--printshellcmds")
    assert done.returncode == 0, done.stdout[-3000:]
    counts = dict(re.findall(r"^(train|evaluate|paper|total) +(\d+)$", done.stdout, re.MULTILINE))
    trained = 2 * 2 * (3 * 2 + 1)  # seeds, tasks, workflows x policies and the single agent
    evaluated = 2 * 4 + trained + 2 * 2 * 3 * 2  # base, own, transfer to one role or to all
    assert counts == {
        "train": str(trained),
        "evaluate": str(evaluated),
        "paper": "1",
        "total": str(trained + evaluated + 1),
    }
    planned = commands(done.stdout)
    assert planned == {
        f"{folder_of(cell, 'runs')}/train.ipynb": (
            "notebooks/train_cell.ipynb",
            GRID.parameters_of(cell) | {"results_dir": "runs", "n_processes": 1},
        )
        for cell in GRID.cells()
    } | {
        f"{evaluation.folder('runs')}/eval.ipynb": (
            "notebooks/eval_cell.ipynb",
            GRID.parameters_of(evaluation) | {"results_dir": "runs"},
        )
        for evaluation in GRID.evaluations()
    }
    assert {type(parameters["learning_rate"]) for _, parameters in planned.values()} == {float}
    assert not (checkout / "runs").exists(), "a dry run leaves nothing"


def test_only_missing_jobs_run_and_never_while_another_process_runs_them(checkout):
    """Edits and file times do not cause anything to run again."""
    everything = folders(checkout)
    missing = next(
        folder
        for folder, job in everything.items()
        if job == Evaluation(GRID.cell("voting", "sp", "math", 3), "transfer")
    )
    for age, folder in enumerate(everything):
        if folder != missing:
            stamp = 1e9 - age  # a trained cell is newer than the evaluations of it
            os.utime(finish(folder), (stamp, stamp))
    for path in (checkout / "Snakefile", *checkout.glob("notebooks/*_cell.ipynb")):
        path.write_text(path.read_text().replace("papermill", "papermill ", 1))
    (checkout / "Snakefile").write_text((checkout / "Snakefile").read_text() + "# a comment\n")
    missing.mkdir(parents=True)
    notebook = missing / "eval.ipynb"
    with notebook.open("w") as other:
        other.write("of the other process")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        done = snakemake(checkout, "trained", "evaluated")
    assert done.returncode != 0 and "failed to get lock" in done.stdout, done.stdout[-3000:]
    assert re.findall(r"^evaluate +(\d+)$", done.stdout, re.MULTILINE) == ["1"]
    assert not re.search(r"^train +\d", done.stdout, re.MULTILINE)
    assert notebook.read_text() == "of the other process"
    assert {path.parent for path in checkout.glob("runs/**/DONE")} == set(everything) - {missing}
    assert Grid.read(checkout / "runs" / "tiny-r") == GRID


@pytest.mark.parametrize("has_folder", [True, False])
def test_packed_results_count_as_done_and_nothing_is_trained_again(checkout, has_folder):
    """A packed run has no adapters, so an evaluation of it that is missing is made only where its folder is."""
    cell = GRID.cell("voting", "ip", "math", 3)
    names = [
        *(job.id for job in GRID.cells()),
        *(f"{job.name}/{job.cell.id}" for job in GRID.evaluations()),
    ]
    names.remove(f"own/{cell.id}")
    (checkout / "runs" / "tiny-r").mkdir(parents=True)
    pd.DataFrame({"run": names}).to_parquet(checkout / "runs" / "tiny-r" / "runs.parquet")
    if has_folder:
        finish(checkout / folder_of(cell, "runs"))
    done = snakemake(checkout, "trained", "evaluated", "--dry-run", "--printshellcmds")
    assert done.returncode == 0, done.stdout[-3000:]
    made = {f"runs/tiny-r/evaluations/own/{cell.id}/eval.ipynb"} if has_folder else set()
    assert set(commands(done.stdout)) == made
    assert ("1 evaluations are left out" in done.stdout) == (not has_folder)


def test_the_snakefile_imports_neither_torch_nor_trl():
    imports = "\n".join(re.findall(r"^(?:from|import) .*", (ROOT / "Snakefile").read_text(), re.MULTILINE))
    check = "import sys; sys.exit(bool({'torch', 'trl', 'transformers', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", f"{imports}\n{check}"], check=False).returncode == 0


def test_a_grid_of_a_user_supplied_workflow_and_task():
    user_file = str(ROOT / "examples/debate.py")
    grid = Grid("tiny-r", workflows=[f"{user_file}:Debate"], policies=["sp"], tasks=[f"{user_file}:task"])
    assert [cell.workflow_name for cell in grid.cells()] == ["debate", "single"]
    assert grid.parameters_of(grid.cells()[0])["workflow"] == f"{user_file}:Debate"
    assert grid.unshown == [f"{user_file}:Debate"] and not Grid("tiny-r").unshown
    assert {evaluation.name for evaluation in grid.evaluations()} == {"base", "own", "transfer", "transfer_all"}


def test_every_scale_of_the_configuration_is_a_grid():
    scales = yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"]
    default = scales.pop("default")
    assert set(scales) <= {TINY, *MODELS}
    for scale, settings in scales.items():
        chosen = default | settings
        assert set(chosen) - {"tasks"} == {"seeds", "parameters", "base_rollouts", "gpus"}
        del chosen["gpus"]
        assert Grid(scale, **chosen).cells()


def test_the_study_is_one_of_the_default_grid():
    declared = yaml.safe_load((ROOT / "grid.yaml").read_text())
    grid = Grid(declared["scale"], **declared["scales"][declared["scale"]])
    study = declare(grid, yaml.safe_load((ROOT / "studies/main.yaml").read_text()))
    assert study.command == "paper" and len(study.cells()) > len(grid.cells())


CONFIGURATION = yaml.safe_load((ROOT / "grid.yaml").read_text())
VARIANT = {"question": "setup", "parameters": {"learning_rate": 0.006}, "cells": ["voting sp math"]}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeds": ["a"]}, "`seeds.0` must be a valid integer, got 'a'."),
        ({"seeds": 3}, "`seeds` must be a valid list, got 3."),
        ({"seeds": [0, 0]}, "`seeds` must not repeat, got [0, 0]."),
        ({"scale": "tiny"}, "`scale` must be .*, got 'tiny'. Did you mean 'tiny-r'?"),
        ({"workflow": ["voting"]}, "`workflow` is not an option of a grid. Did you mean 'workflows'?"),
        ({"jobs": 3}, "`jobs` is not an option of a grid. Options are scale, results_dir, study, gpus, .*."),
        ({"learning_rate": "1e-3"}, "`learning_rate` is a setting of the cells. Write 'parameters={learning_rate: 1e-3}'."),
        ({"parameters": {"iteration": 3}}, "`iteration` is not a known parameter. Did you mean 'max_steps'?"),
        ({"parameters": "iterations"}, "`parameters` must be a map such as {max_steps: 60}, got 'iterations'."),
        ({"gpus": "two"}, "`gpus` must be a number of GPUs, got 'two'."),
        ({"study": "no-such.yaml"}, "STUDY must name a file such as studies/main.yaml, got 'no-such.yaml', which is looked for in .*."),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(UserError) as error:
        declaration_of(CONFIGURATION | options)
    assert re.fullmatch(re.sub(r"([\[\]{}?])", r"\\\1", sentence), str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grid: [", "is not a valid YAML file"),
        ("- a", "must hold a map of fields"),
        ("grid: [1]", "must hold a map of fields"),
        ({"seeds": [0], "variant": {"fast": VARIANT}}, "`variants` is missing.\n`variant` is not a known field."),
        ({"seeds": [0], "variants": {"fast": VARIANT | {"question": "set"}}}, "`variants.fast.question` must be 'updates'"),
        ({"seeds": [0], "variants": {"fast": VARIANT | {"cells": ["voting-sp-math"]}}},
         "`cells` of the variant 'fast' must be written 'workflow policy task', such as 'voting sp math', got 'voting-sp-math'."),
    ],
)  # fmt: skip
def test_a_study_that_cannot_work_is_refused_in_a_sentence(text, sentence, tmp_path):
    study = tmp_path / "mine.yaml"
    study.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    with pytest.raises(UserError) as error:
        declaration_of(CONFIGURATION | {"study": str(study)})
    assert sentence in str(error.value) and "pydantic" not in str(error.value)


def test_a_refused_grid_ends_without_a_traceback(checkout):
    done = snakemake(checkout, "--dry-run", study=("seeds=[a]",))
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1 and last == "`seeds.0` must be a valid integer, got 'a'.", done.stdout
    assert "File " not in done.stdout


@pytest.mark.parametrize("study", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_tasks_have_the_rows_that_each_declared_study_validates_on(study):
    scale = re.search(r"make study SCALE=(\S+)", study.read_text())
    declaration, _ = declaration_of(CONFIGURATION | {"scale": scale[1] if scale else "tiny-r", "study": str(study)})
    declaration.check_rows()


def test_a_study_with_more_validation_problems_than_its_task_has_is_refused_before_any_run(checkout):
    options = ("scale=qwen-0.5b", "tasks=[code]", "parameters={n_validation: 1000}")
    done = snakemake(checkout, "--dry-run", study=options)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1, done.stdout
    assert "cannot run: The validation split holds 146 problems, got count=1000. Write 1 <= count <= 146" in last


def test_no_rows_of_the_hub_are_read_before_a_run(monkeypatch):
    monkeypatch.setattr("multirole_study.tasks.sources.Source.load", lambda *_: pytest.fail("rows are read"))
    declaration, _ = declaration_of(CONFIGURATION | {"scale": "1.7b"})
    declaration.check_rows()


@pytest.mark.parametrize("name", ["default", "slurm"])
def test_every_profile_looks_at_done_files_only(name):
    profile = yaml.safe_load((ROOT / "profiles" / name / "config.yaml").read_text())
    assert profile["rerun-triggers"] == "mtime" and profile["ignore-incomplete"] and profile["keep-going"]


@pytest.mark.parametrize(("variables", "folder"), [([], "results/tiny-r"), (["RESULTS_DIR=x", "SCALE=4b"], "x/4b")])
def test_make_paper_reads_one_folder_and_trains_nothing(variables, folder):
    done = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/setup.stamp", "paper", *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f'multirole_study paper "{folder}"' in done.stdout
    assert not re.search("snakemake|_cell|pip install", done.stdout)


@pytest.mark.parametrize(
    ("variables", "folder"), [([], "'mine/smollm2'"), (["SCALE=tiny-r", "RESULTS_DIR=x"], "'x/tiny-r'")]
)
def test_make_grid_has_the_scale_and_the_folder_of_grid_yaml(variables, folder, tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "grid.yaml").write_text("# scale: 4b\nscale: smollm2  # a remark\nresults_dir: mine\n")
    command = ["make", "--dry-run", "--old-file=.venv/setup.stamp", "grid", *variables]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "setup.stamp").touch()
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    results, scale = folder.strip("'").split("/")
    assert f"scale='{scale}' results_dir='{results}'" in printed and folder in printed


def test_a_study_of_credit_trains_its_arms_and_evaluates_nothing(checkout):
    """Its own grid's runs and the variants, all in one line, without evaluations, which a leaderboard does not read."""
    about = yaml.safe_load((ROOT / "studies/credit.yaml").read_text())
    about |= {
        "seeds": [0, 3],
        "variants": {name: about["variants"][name] for name in ("permuted, a placebo", "agent")},
        "order": [],
    }
    (checkout / "studies/credit.yaml").write_text(yaml.safe_dump(about))
    done = snakemake(checkout, "--dry-run", "--printshellcmds", study=("study=studies/credit.yaml",))
    assert done.returncode == 0, done.stdout[-3000:]
    counts = dict(re.findall(r"^(train|evaluate|paper) +(\d+)$", done.stdout, re.MULTILINE))
    assert counts == {"train": str(2 * (3 + 3)), "paper": "1"}
    assert "multirole_study paper runs/tiny-r" in done.stdout


@pytest.mark.slow
def test_the_clock_study_trains_its_lines_in_order_and_nothing_of_the_grid(checkout):
    """Two lines of one run each: the second waits for the first, and the tables of the study come last."""
    about = yaml.safe_load((ROOT / "studies/clock.yaml").read_text())
    lines = [about["lines"][0] | {"arms": [arm], "seeds": [10]} for arm in ("sp", "ip, wrapping")]
    (checkout / "studies/clock.yaml").write_text(yaml.safe_dump(about | {"lines": lines}))
    done = snakemake(checkout, "--dry-run", "--printshellcmds", study=("study=studies/clock.yaml",))
    assert done.returncode == 0, done.stdout[-3000:]
    counts = dict(re.findall(r"^(train|evaluate|paper|total) +(\d+)$", done.stdout, re.MULTILINE))
    assert counts == {"train": "2", "paper": "1", "total": "3"}
    assert "multirole_study paper runs/tiny-r" in done.stdout
    assert grid_status(checkout, "STUDY=studies/clock.yaml") == "Missing: 2 runs and 0 evaluations.\n"
    first, second = declare(GRID, about | {"lines": lines}).cells()
    planned = {parameters["policy"]: parameters for _, parameters in commands(done.stdout).values()}
    assert planned["ip"]["lr_clock"] == "update_call_wrapped" and planned["sp"]["learning_rate"] == 0.006
    waiting = re.search(
        rf"^rule train:\n +input: runs/tiny-r/{first.id}/DONE\n +output: (\S+)$", done.stdout, re.MULTILINE
    )
    assert waiting is not None and waiting[1] == f"runs/tiny-r/{second.id}/DONE", done.stdout[-3000:]


def test_a_line_is_trained_seed_by_seed(checkout):
    """Both runs of the second seed wait for both of the first one; within a seed Snakemake may start any."""
    about = yaml.safe_load((ROOT / "studies/clock.yaml").read_text())
    line = about["lines"][0] | {"arms": ["sp", "ip, wrapping"], "seeds": [11, 10]}
    (checkout / "studies/clock.yaml").write_text(yaml.safe_dump(about | {"lines": [line]}))
    done = snakemake(checkout, "--dry-run", study=("study=studies/clock.yaml",))
    assert done.returncode == 0, done.stdout[-3000:]
    jobs = re.findall(r"^rule train:\n(?: +input: (.*)\n)? +output: (\S+)$", done.stdout, re.MULTILINE)
    before = {output: set(filter(None, inputs.split(", "))) for inputs, output in jobs}
    first, second = ({path for path in before if f"-s{seed}-" in path} for seed in (11, 10))
    assert len(first) == len(second) == 2, done.stdout[-3000:]
    assert before == {path: set() for path in first} | dict.fromkeys(second, first)


STUB = """\
mkdir -p running && touch running/$$ && ls running | wc -l >> counts
sleep 0.5
rm running/$$ && touch {output}
"""
ONE_BY_ONE = """\
arms: {sp: {policy: sp}, ip: {policy: ip}, single: {workflow: single}}
workflows: [voting]
tasks: [math]
seeds: [0, 1, 2, 3]
questions: [{name: end, question: "?", measure: end, arm: ip, minus: sp}]
"""


def test_no_more_jobs_run_at_once_than_cores_are_given(checkout):
    """Of three runs per seed the last is ready alone, whose core Snakemake 9.15 does not count but frees."""
    runner = checkout / "Snakefile"
    text = runner.read_text(encoding="utf-8")
    assert text.count('shell: "{params}"') == 2
    runner.write_text(text.replace('shell: "{params}"', f'shell: """{STUB}"""'))
    (checkout / "studies" / "three.yaml").write_text(ONE_BY_ONE)
    words = ("trained", "--nolock", "--cores", "2", "--config", "study=studies/three.yaml", "results_dir=runs")
    log = checkout / "log"
    assert processes.run(log, main, checkout, *words) == 0, log.read_text()[-3000:]
    counts = [int(line) for line in (checkout / "counts").read_text().split()]
    assert len(counts) == 12 and max(counts) == 2
