"""A study's runs are the grid's with one thing changed; its tables pair them by seed and problem, by hand."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from multirole.experiment.cell import Cell
from multirole.experiment.folders import folder_of, write_done
from multirole.experiment.storage import write_text
from multirole.paper.grid import Grid
from multirole.paper.pack import pack
from multirole.paper.results import Key, Results, key_of
from multirole.paper.study import Study
from multirole.paper.study_tables import controls, matched_updates, remedies, setup, vote
from multirole.paper.tables import tables_of_study

ROOT = Path(__file__).parents[1]
GIVEN = {
    "seeds": [0, 1],
    "variants": {
        "one step": {
            "question": "updates",
            "parameters": {"updates": "one"},
            "cells": ["voting ip math", "voting sp math"],
        },
        "clock": {
            "question": "setup",
            "parameters": {"lr_clock": "update_call"},
            "cells": ["voting ip math", "voting sp math"],
        },
        "KL anchor": {"question": "remedies", "parameters": {"kl_anchor": 0.1}, "cells": ["voting ip math"]},
    },
}


@pytest.fixture(scope="module")
def results(grid_results, tmp_path_factory):
    """Every variant ends all right on IP and as its twin on SP; else it is its twin."""
    folder = tmp_path_factory.mktemp("results") / grid_results.name
    shutil.copytree(grid_results, folder)
    results = Results(folder)
    for cell in Study.of(results.grid, GIVEN).cells():
        twin = folder_of(cell, folder.parent)
        shutil.copytree(folder_of(results.grid.cell(*key_of(cell)), folder.parent), twin)
        write_text(twin / "config.json", json.dumps(cell.to_dict()))
        table = pd.read_parquet(twin / "eval.parquet")
        if cell.policy_name == "ip":
            table.loc[table["step"] == table["step"].max(), "correct"] = True
        table.to_parquet(twin / "eval.parquet")
        write_done(twin)
    pack(folder)
    return Results(folder)


@pytest.fixture(scope="module")
def study(results):
    return Study.of(results.grid, GIVEN)


def ends(results, policy):
    return [results.correct(Key("voting", policy, "math", seed)).iloc[:, -1].mean() for seed in (0, 1)]


def test_gains_are_paired_by_seed_and_problem(results, study):
    values = matched_updates(results, study).set_index(["policy", "number"])["value"]
    assert values["ip", "end"] == 1.0 and values["ip", "end, grid"] == pytest.approx(sum(ends(results, "ip")) / 2)
    assert values["ip", "change at the end"] == pytest.approx(1 - sum(ends(results, "ip")) / 2)
    assert values["sp", "change at the end"] == 0


def test_a_remedy_shows_its_falls_and_what_it_changes(results, study):
    values = remedies(results, study).set_index(["variant", "number"])
    assert set(values.index.get_level_values("variant")) == {"KL anchor", "one step"}
    assert values["value"]["KL anchor", "falls, grid"] == 2 and values["value"]["KL anchor", "change at the end"] > 0


def test_controls_count_what_was_spent(results, study):
    given = GIVEN | {"variants": GIVEN["variants"] | {
        "more": {"question": "controls", "parameters": {"n_episodes": 16}, "cells": ["single sp math"]},
    }}  # fmt: skip
    values = controls(results, Study.of(results.grid, given)).set_index(["run", "number"])["value"]
    cell = results.grid.cell("voting", "sp", "math", 0)
    steps = pd.read_parquet(folder_of(cell, results.folder.parent) / "ledger.parquet")
    assert values["Voting-SP", "optimizer steps"] == len(steps)
    assert "Single agent, more" not in values  # not trained here
    assert not len(controls(results, study))  # asked of no task


def test_a_vote_by_hand():
    box = "\\boxed{%d}".__mod__
    answers = pd.DataFrame(
        [("a", 0, box(1), False), ("a", 1, box(2), True), ("a", 2, box(2), True),  # two against one
         ("b", 0, box(3), True), ("b", 1, box(4), False), ("b", 2, "no box", False),  # a tie: the first
         ("c", 0, "none", False), ("c", 1, "none", False), ("c", 2, box(5), True)],  # silence does not vote
        columns=["problem", "rollout", "answer", "correct"],
    )  # fmt: skip
    answers["extracted"] = answers["answer"].map(Cell("single", "sp").make_task().extract)
    assert vote(answers, 3).to_dict() == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert vote(answers, 2).to_dict() == {"a": 0.0, "b": 1.0, "c": 0.0}


def test_a_grid_without_a_study_has_none(results, study, tmp_path):
    assert Study.read(results.grid, results.folder) is None
    study.write(tmp_path)
    assert Study.read(results.grid, tmp_path / "tiny-s") == study
    assert [t.name for t in tables_of_study(results, study)] == [
        "matched_updates", "setup", "remedies", "power", "coverage",
    ]  # fmt: skip


def test_the_shipped_study_changes_what_it_says_and_nothing_else():
    grid = Grid.read(ROOT / "results/tiny-s")
    study = Study.of(grid, yaml.safe_load((ROOT / "study.yaml").read_text()))
    for name, where, cell in study.runs():
        usual, parameters = grid.cell(*where.split(), cell.seed), dict(study.variants[name].parameters)
        if where.split()[1] == "sp":
            parameters.pop("lr_clock", None)
        changed = {field for field in vars(cell) if vars(cell)[field] != vars(usual)[field]}
        assert changed == set(parameters), name
        assert Cell(**study.parameters_of(cell)) == cell
    assert len({cell.id for cell in study.cells()} | {cell.id for cell in grid.cells()}) == len(study.cells()) + len(
        grid.cells()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": [0, 7]}, "must be seeds of the grid"),
        ({"variants": {"x": {"question": "why", "parameters": {}, "cells": []}}}, "updates.*setup.*remedies.*controls"),
        (
            {"variants": {"x": {"question": "updates", "parameters": {"updates": "two"}, "cells": ["voting ip math"]}}},
            "updates",
        ),
    ],
)
def test_bad_studies_are_refused(results, change, said):
    with pytest.raises(ValueError, match=said):
        Study.of(results.grid, GIVEN | change)


def test_a_variant_under_both_clocks_is_the_grids_own_run_where_one_adapter_has_all_roles(results, study):
    cells = {where: cell for name, where, cell in study.runs("setup") if cell.seed == 0}
    assert cells["voting sp math"] == study.grid.cell("voting", "sp", "math", 0)
    assert cells["voting sp math"].id not in {cell.id for cell in study.cells()}
    assert set(setup(results, study)["policy"]) == {"ip"}


def test_the_committed_tables_show_the_noise():
    """An arm that is no treatment is undecided everywhere, and two seeds of one cell end far apart."""
    tables = {
        name: pd.read_csv(ROOT / f"results/tiny-s/tables/{name}.csv")
        for name in ("matched_updates", "remedies", "power", "coverage")
    }
    for name in ("matched_updates", "remedies"):
        placebo = tables[name][(tables[name]["variant"] == "A/A") & tables[name]["number"].str.startswith("change")]
        assert len(placebo) == 2 and (placebo["p"] > 0.05).all()
    floor = tables["power"].query(
        "compared.str.startswith('noise floor') and at == 'end' and number == 'SD (points)'", engine="python"
    )
    assert floor["value"].item() > 20
    covered = tables["coverage"].query("number == 't'")["value"]
    assert covered.between(0.93, 0.97).all()
