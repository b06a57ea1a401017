"""Settings have TRL's names; earlier names still work in commands, files and records, and ids of runs stay what they are."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
from trl import GRPOConfig, ModelConfig

from multirole.inputs.arguments import kl_weights
from multirole_study.__main__ import main
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import ARGUMENTS, training_args
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.old_names import OLD_NAMES, merged, with_current_names
from multirole_study.experiment.run_folder import differing_options, read_config
from multirole_study.experiment.settings import UserError
from multirole_study.paper.grid import Grid

ROOT = Path(__file__).parents[2]
VALUES = {
    "iterations": 7, "n_episodes": 6, "max_response_tokens": 40, "warmup_iterations": 2, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0,
    "eval_every": 3, "save_every": 2, "lora_rank": 4, "kl_anchor": 0.1,
}  # fmt: skip
RENAMED = {OLD_NAMES[name]: value for name, value in VALUES.items()}
PACKED = sorted(ROOT.glob("results/**/runs.parquet"))


def test_the_names_are_those_of_trl():
    known = {option.name for option in (*fields(GRPOConfig), *fields(ModelConfig))}
    assert set(OLD_NAMES.values()) <= known and not OLD_NAMES.keys() & known
    of_settings = {*Cell.model_fields, *Launch.model_fields, *Evaluation.model_fields}
    assert set(OLD_NAMES.values()) <= of_settings and not OLD_NAMES.keys() & of_settings


def test_both_names_give_one_cell_with_one_id():
    one, other = Cell("voting", "ip", **VALUES), Cell("voting", "ip", **RENAMED)
    assert one == other and one.id == other.id
    assert (
        Cell.from_parameters(VALUES | {"policy": "ip", "max_steps": None})[0] == one
    )  # as papermill adds to the notebook's
    assert Cell("voting", "ip").replace(**VALUES) == one
    assert not OLD_NAMES.keys() & one.parameters().keys() and not OLD_NAMES.keys() & one.to_dict().keys()
    assert (
        Cell("voting", "sp", kl_anchor={"aggregator": 0.1}).id == Cell("voting", "sp", role_beta={"aggregator": 0.1}).id
    )
    assert Cell.from_parameters({"vllm_memory": 0.3})[1].vllm_gpu_memory_utilization == 0.3
    assert Evaluation.from_parameters({"n_rollouts": 4, "num_generations_eval": None})[0].name == "own-n4"


def test_the_trainer_gets_the_settings_under_their_names(tmp_path):
    cell = Cell("voting", "sp", role_beta={"aggregator": 0.5}, **RENAMED)
    args = training_args(cell, str(tmp_path))
    assert {name: getattr(args, name) for name in RENAMED if name in ARGUMENTS} == {
        n: v for n, v in RENAMED.items() if n != "lora_r"
    }
    assert kl_weights(args, cell.policy) == {"generator": 0.1, "aggregator": 0.5} and args.role_beta == {
        "aggregator": 0.5
    }


def test_a_setting_with_both_names_is_refused():
    for given in (
        {"max_steps": 3, "iterations": 4},
        {"iterations": 4, "max_steps": 3},
        {"iterations": 3, "max_steps": 3},
    ):
        with pytest.raises(
            ValueError,
            match="`iterations` is an earlier name of `max_steps`, and both have a value. Write 'max_steps' only",
        ):
            Cell("voting", "ip", **given)
        with pytest.raises(UserError, match="both have a value"):
            Cell.from_parameters(given)
    with pytest.raises(UserError, match="`n_rollouts` is an earlier name of `num_generations_eval`"):
        Evaluation.from_parameters({"n_rollouts": 4, "num_generations_eval": 2})
    with pytest.raises(ValueError, match="`kl_anchor` is an earlier name of `role_beta`"):
        Cell("voting", "sp", kl_anchor={"aggregator": 0.1}, role_beta={"aggregator": 0.1})


def test_no_parameter_that_was_renamed_has_a_default_in_a_notebook():
    """Papermill adds an earlier name to the parameters that stand there, so that both would have a value."""
    for name in ("train_cell", "eval_cell"):
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        source = "".join(next(cell["source"] for cell in cells if "parameters" in cell["metadata"].get("tags", [])))
        defaults = dict(re.findall(r"^(\w+): \w+ = (\S+)", source, re.MULTILINE))
        renamed = defaults.keys() & set(OLD_NAMES.values())
        assert len(renamed) >= 12 and {defaults[parameter] for parameter in renamed} == {"None"}


def test_none_is_no_value():
    assert Cell("voting", "ip", max_steps=None, iterations=4) == Cell("voting", "ip", iterations=4)
    assert Cell("voting", "ip", max_steps=4).replace(max_steps=None) == Cell("voting", "ip")
    assert with_current_names({"iterations": None}) == {
        "max_steps": None
    }  # a grid's variant removes a parameter with it


def test_the_later_of_two_groups_decides_whatever_their_names():
    assert merged({"iterations": 3, "seed": 1}, {"max_steps": 4}) == {"max_steps": 4, "seed": 1}
    assert merged({"max_steps": 3}, {"iterations": None}) == {"max_steps": None}
    grid = Grid("tiny-r", [0], {"iterations": 4, "vllm_memory": 0.3}, tasks=["math"])
    assert {cell.max_steps for cell in grid.cells()} == {4}
    assert grid.cell("voting", "sp", "math", 0, max_steps=9).max_steps == 9
    assert grid.cell("voting", "sp", "math", 0, iterations=None).max_steps == 60
    assert grid.parameters_of(grid.cells()[0])["max_steps"] == 4


@pytest.mark.parametrize("path", PACKED, ids=lambda path: str(path.parent.relative_to(ROOT / "results")))
def test_recorded_runs_keep_their_ids(path):
    """The records are of versions that had the earlier names, and are read, not rewritten."""
    runs = pd.read_parquet(path, columns=["run", "kind", "settings"])
    records = [json.loads(text) for text in runs["settings"]]
    ids = [Cell.from_record(record.get("cell", record)).id for record in records]
    assert ids == [run.rpartition("/")[2] for run in runs["run"]]


def test_an_unfinished_run_of_an_earlier_version_is_continued(tmp_path):
    cell = Cell("voting", "ip", **RENAMED)
    earlier = {name: old for old, name in OLD_NAMES.items()}
    recorded = {earlier.get(name, name): value for name, value in cell.to_dict().items() if name != "role_beta"}
    assert recorded["iterations"] == 7 and "max_steps" not in recorded
    assert not differing_options(recorded, cell.to_dict())
    assert differing_options(recorded | {"iterations": 8}, cell.to_dict()) == ["max_steps"]
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    assert Cell.from_record(read_config(tmp_path)) == cell
    evaluation = {"n_rollouts": 4, "cell": recorded}
    (tmp_path / "config.json").write_text(json.dumps(evaluation))
    config = read_config(tmp_path, may_be_evaluation=True)
    assert config["num_generations_eval"] == 4 and config["cell"]["max_steps"] == 7


def test_commands_take_either_name_and_print_the_same(monkeypatch, capsys, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"iterations": 5, "n_problems": 4}))
    printed = []
    for words in (
        ["-p", "iterations", "3", "-p", "n_problems", "4"],
        ["--parameters", str(tmp_path / "p.json"), "-p", "max_steps", "3"],
    ):
        monkeypatch.setattr("sys.argv", ["multirole", "plan", "-p", "workflow", "voting", *words])
        main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and Cell("voting", "sp", max_steps=3, n_problems=4).id in printed[0]


def test_the_docs_list_every_earlier_name():
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:-1] for line in text.splitlines() if "earlier name" not in line and line.startswith("| `")
    ]
    cells = [re.findall(r"`(\w+)`", cell) for row in rows if len(row) == 4 for cell in row]
    listed = {old[0]: names[0] for names, old in zip(cells[::2], cells[1::2], strict=True) if old}
    assert listed == OLD_NAMES
