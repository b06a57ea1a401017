"""What is done with a finished run uses the base model that the run was trained on, or says which one is missing."""

import json
import shutil

import pytest

from multirole.serve import load_server
from multirole_study.__main__ import inspect, pack, plan, serve, signal
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.record import Recorder
from multirole_study.experiment.run import check_inputs
from multirole_study.experiment.run_folder import SIGNAL_FILE, is_done, newest_intact, write_done
from multirole_study.experiment.settings import UserError
from multirole_study.experiment.storage import write_table
from multirole_study.measurements.runs import cell_of
from multirole_study.serve import roles_of_run

TINY = locate(Cell("single", "sp"))


def edit(run, file, **values):
    path = run / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def other_base(run_folder, tmp_path):
    """A copy of the finished run, made to look trained on the folder `mybase`, and that folder: tiny-r, which it was trained on."""
    run = shutil.copytree(run_folder, tmp_path / "run")
    edit(run, "config.json", model="mybase")
    return run, shutil.copytree(TINY, tmp_path / "mybase")


def test_a_run_names_its_scale_s_base(run_folder):
    assert cell_of(run_folder).model is None


def test_a_base_of_the_user_s_must_be_passed_and_is_checked(other_base):
    run, base = other_base
    with pytest.raises(
        ValueError,
        match="was trained on the base model 'mybase'. Pass this model, a folder or a GGUF file, with `--model`",
    ):
        cell_of(run)
    assert locate(cell_of(run, str(base))) == base
    with (base / "model.safetensors").open("ab") as file:
        file.write(b"0")
    with pytest.raises(
        ValueError, match="was trained on the base model 'tiny-r', and the weights in .*mybase are others"
    ):
        cell_of(run, str(base))


@pytest.mark.parametrize("setting", [{"workflow_sha256": "0" * 64}, {"data": "rows.jsonl"}])
def test_a_run_of_the_user_s_code_or_rows_cannot_be_made_again_from_its_record(run_folder, tmp_path, setting):
    run = shutil.copytree(run_folder, tmp_path / "run")
    edit(run, "config.json", **setting)
    with pytest.raises(ValueError, match="with a workflow, a task or rows of your own"):
        cell_of(run)


def test_an_empty_name_of_a_base_is_refused():
    with pytest.raises(ValueError, match="`model` must be an existing folder or GGUF file.*got ''"):
        Cell("voting", "sp", model="")


def test_an_embedded_base_is_taken_from_the_record(run_folder, tmp_path):
    """The record says tiny-r-vain, and the weights are those of tiny-r."""
    run = shutil.copytree(run_folder, tmp_path / "run")
    edit(run, "config.json", model="tiny-r-vain")
    with pytest.raises(ValueError, match="the weights in .*tiny-r-vain are others"):
        cell_of(run)


@pytest.mark.parametrize("command", [serve, signal])
def test_the_commands_say_which_base_is_missing(other_base, command, capsys):
    with pytest.raises(UserError, match="'mybase'. Pass this model, a folder or a GGUF file, with `--model`"):
        command([str(other_base[0])])


def test_a_run_is_served_with_its_own_sampling_at_the_last_step_or_the_one_that_is_asked_for(run_folder):
    saved, first = roles_of_run(run_folder, None, None), roles_of_run(run_folder, 1, None)
    assert {folder.parent.name for folder in saved.folders.values()} == {"step_00004"}
    assert {folder.parent.name for folder in first.folders.values()} == {"step_00001"}
    server = load_server(saved)
    assert server.policy == {"generator": "generator", "aggregator": "aggregator"}
    assert server.sampling.max_tokens == 24 and server.engine.weights.keys() == {None, "generator", "aggregator"}
    with pytest.raises(ValueError, match=r"`--step` must be one of the saved steps .*, got 99"):
        roles_of_run(run_folder, 99, None)


def test_an_open_address_is_refused_before_anything_is_loaded(run_folder, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"can be reached from other machines.*export VLLM_API_KEY="):
        serve([str(run_folder), "--host", "0.0.0.0"])
    with pytest.raises(UserError, match="`--step` chooses among the evaluations of a run"):
        serve([str(run_folder / "adapters" / "step_00001"), "--step", "1"])


def test_a_folder_without_a_run_or_measurements_is_named(tmp_path):
    with pytest.raises(UserError, match="is not the folder of a run: it has no config.json.* such as runs/tiny-r/"):
        signal([str(tmp_path)])
    with pytest.raises(UserError, match="is not the folder of a run: there is no such folder"):
        serve([str(tmp_path / "misspelt")])
    for name in ("evaluations/own", "voting-sp-math-s0"):
        (tmp_path / "tiny-r" / name).mkdir(parents=True)
        (tmp_path / "tiny-r" / name / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "tiny-r"):  # a folder of runs is no run, and one of them is named
        with pytest.raises(UserError, match=f"of one run, such as {tmp_path}/tiny-r/voting-sp-math-s0."):
            signal([str(folder)])
    with pytest.raises(UserError, match="nowhere contains no finished run: there is no such folder"):
        inspect([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="holds no measurements of `multirole signal`"):
        pack([str(tmp_path), "--measurements"])


@pytest.mark.parametrize(("content", "message"), [
    ("[1, 2]", r"must hold an object of parameters, such as {\"seed\": 1}, got \[1, 2\]"),
    ("{", "parameters.json is not a valid JSON file"),
])  # fmt: skip
def test_a_file_of_parameters_that_holds_none_is_named(tmp_path, content, message):
    path = tmp_path / "parameters.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        plan(["--parameters", str(path)])


def test_a_finished_run_of_another_base_with_the_same_name_is_not_taken_for_this_one(other_base):
    run, base = other_base
    cell = cell_of(run, str(base))
    check_inputs(run, cell)
    with (base / "model.safetensors").open("ab") as file:
        file.write(b"0")
    with pytest.raises(ValueError, match="the weights in .*mybase are others"):
        check_inputs(run, cell)


def test_a_resumed_run_keeps_what_was_measured_on_it(run_folder, tmp_path):
    """And a measurement does not make a finished run a changed one."""
    run = shutil.copytree(run_folder, tmp_path / "run")
    write_table(run / SIGNAL_FILE, [{"step": 0}])
    write_done(run)
    write_table(run / SIGNAL_FILE, [{"step": 0}, {"step": 1}])
    assert is_done(run)
    Recorder(run).rewind(newest_intact(run))
    assert (run / SIGNAL_FILE).is_file() and (run / "metrics.parquet").is_file()
    assert {path.name for path in run.glob("*.parquet")} >= {SIGNAL_FILE, "eval.parquet"}
