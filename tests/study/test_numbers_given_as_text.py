"""Numbers that arrive as text make the same cell: from YAML 1.1 (papermill -y and -f, grid.yaml, studies/main.yaml), -p, JSON and -r.

hiyouga/LlamaFactory#4014 and determined-ai/determined#2688: YAML 1.1 reads 1e-3 as text.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.settings import read_number, value
from multirole_study.paper.grid import Grid, Study

ROOT = Path(__file__).parents[2]
NUMERIC = {
    (group, name): field.annotation
    for group in (Cell, Launch, Evaluation)
    for name, field in group.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)}
}


@pytest.mark.parametrize(("group", "name"), NUMERIC, ids=[f"{group.__name__}.{name}" for group, name in NUMERIC])
def test_every_numeric_parameter_takes_its_number_as_text(group, name):
    kinds = {NUMERIC[group, name], *get_args(NUMERIC[group, name])}
    forms = ["1e-1", "0.1", ".1", "+1.0E-1"] if float in kinds else ["64", "6.4e1", " 64 ", "64.0", 64.0, "+64"]
    due = 0.1 if float in kinds else 64
    for form in forms:
        number = read_number(form, NUMERIC[group, name])
        assert number == due and type(number) is type(due)


@pytest.mark.parametrize("text", ["1e-3", "1.e-3", "+1e-3", "0.001", ".001", "1E-3"])
def test_a_learning_rate_in_yaml_is_the_number(text):
    usual = Cell("voting", "sp", learning_rate=1e-3)
    loaded = yaml.safe_load(f"learning_rate: {text}")["learning_rate"]
    for form in (loaded, text, value(text), json.loads(f'"{text}"')):
        cell = Cell.from_parameters({"learning_rate": form})[0]
        assert cell == usual and cell.id == usual.id and cell.to_dict() == usual.to_dict()


@pytest.mark.parametrize(
    "weights",
    [
        "{'aggregator': 1e-1}",
        '{"aggregator": 0.1}',
        {"aggregator": "1e-1"},
        {"aggregator": 0.1},
        "aggregator=0.1",
        " aggregator = 1e-1",
    ],
)
def test_a_map_of_weights_takes_text_too(weights):
    assert Cell("voting", "sp", role_beta=weights).id == Cell("voting", "sp", role_beta={"aggregator": 0.1}).id
    assert Cell("voting", "sp", beta="1e-1").id == Cell("voting", "sp", beta=0.1).id


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("learning_rate", "much"), ("learning_rate", "nan"), ("learning_rate", "inf"), ("learning_rate", "1e999"),
        ("learning_rate", "1,5"), ("learning_rate", ""), ("learning_rate", "True"), ("learning_rate", "[1e-3]"),
        ("max_steps", "1.5"), ("max_steps", 1.5), ("max_steps", "1e-3"), ("max_steps", "ten"), ("max_steps", "True"),
        ("max_steps", "010"), ("n_train", "none"), ("n_train", "None"), ("max_steps", "1e30"), ("role_beta", "{'aggregator': 'much'}"),
    ],
)  # fmt: skip
def test_text_that_is_not_a_number_of_the_field_is_refused_as_given(name, text):
    with pytest.raises(ValueError, match=f"`{name}`"):
        Cell("voting", "sp", **{name: text})


def test_words_of_yaml_stay_words():
    cell = Cell("voting", "sp", scale="tiny-r", updates="one", lr_schedule="constant", allow_unsafe_code="false")
    assert (cell.updates, cell.allow_unsafe_code) == ("one", False)
    assert Launch(results_dir="2024").results_dir == "2024"


def test_a_grid_and_a_study_in_yaml_are_those_of_the_numbers():
    text = "seeds: ['0', 1]\nparameters: {learning_rate: 1e-3, n_validation: '8', role_beta: {aggregator: 1e-1}}\n"
    text += "workflows: [voting]\ntasks: [math]\n"
    parameters = {"learning_rate": 1e-3, "n_validation": 8, "role_beta": {"aggregator": 0.1}}
    with pytest.raises(ValueError, match="role_beta"):  # of the single agent, who aggregates nothing
        Grid("tiny-r", **yaml.safe_load(text))
    text, parameters = text.replace(", role_beta: {aggregator: 1e-1}", ""), {**parameters}
    del parameters["role_beta"]
    grid = Grid("tiny-r", **yaml.safe_load(text))
    assert [cell.id for cell in grid.cells()] == [
        cell.id for cell in Grid("tiny-r", [0, 1], parameters, 1, ["voting"], tasks=["math"]).cells()
    ]
    study = Study(
        grid,
        **yaml.safe_load(
            "seeds: ['0']\nvariants:\n  slow: {question: setup, parameters: {learning_rate: 1e-4}, cells: [voting sp math]}"
        ),
    )
    assert [cell.learning_rate for _, _, cell in study.runs()] == [1e-4]


def test_a_home_folder_in_yaml_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Launch(results_dir="~/runs").results_dir == f"{tmp_path}/runs"


def test_a_relative_path_that_is_missing_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"got 'examples/debate.py:Debate', which is looked for in {tmp_path}\."):
        Cell("examples/debate.py:Debate", "sp")
    with pytest.raises(
        ValueError, match=rf"`model` must be .* got 'my/models/mine', which is looked for in {tmp_path}\."
    ):
        Cell("voting", "sp", scale="0.6b", model="my/models/mine")


@pytest.mark.slow
def test_commands_of_the_grid_quote_folders_with_spaces(tmp_path):
    folder = tmp_path / "mit Leerzeichen ü"
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "trained",
        "--dry-run",
        "--printshellcmds",
        "--nolock",
        "--cores",
        "1",
        "--config",
    ]
    config = [
        f"results_dir={folder}",
        "seeds=[0]",
        "tasks=[math]",
        "workflows=[voting]",
        "parameters={learning_rate: 1e-3}",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([*command, *config], cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.strip() for line in done.stdout.splitlines() if "-m papermill" in line]
    assert shown and all(f"--verbose '{folder}/tiny-r/" in line and "-p learning_rate 0.001" in line for line in shown)


@pytest.mark.parametrize("text", ["1j", "b'x'", "{1, 2}", "{{}}", "(0, 30)"])
def test_constants_that_no_parameter_takes_stay_text(text):
    """So that the error names them, or a text parameter has them."""
    assert value(text) == text
