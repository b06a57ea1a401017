"""A study's runs are the grid's with one thing changed; its tables pair them by seed and problem, by hand."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from paper_results import make_results

from multirole.experiment.cell import Cell
from multirole.experiment.folders import folder_of, write_done
from multirole.experiment.storage import write_text
from multirole.paper.grid import Grid
from multirole.paper.ledger import TOLERANCE, compared, ledger_values, predicted, rate_error
from multirole.paper.pack import pack
from multirole.paper.results import Key, Results, key_of
from multirole.paper.study import Study
from multirole.paper.study_tables import controls, matched_updates, policies, remedies, setup, vote
from multirole.paper.tables import tables_of_study
from multirole.paper.twins import run_of

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
def results(tmp_path_factory):
    """Every variant ends all right on IP and as its twin on SP; else it is its twin."""
    folder = make_results(tmp_path_factory.mktemp("results"))
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


def test_the_change_of_the_difference_between_policies(results, study):
    values = policies(results, study).set_index(["variant", "at", "number"])["value"]["one step"]
    ip, sp = sum(ends(results, "ip")) / 2, sum(ends(results, "sp")) / 2
    assert values["end", "IP − SP, grid"] == pytest.approx(ip - sp)
    assert values["end", "IP − SP, variant"] == pytest.approx(1 - sp)
    assert values["end", "change"] == pytest.approx(1 - ip)


def test_a_remedy_shows_its_falls_and_what_it_changes(results, study):
    values = remedies(results, study).set_index(["variant", "number"])
    assert set(values.index.get_level_values("variant")) == {"KL anchor", "one step"}
    assert values["value"]["KL anchor", "falls, grid"] == 2 and values["low"]["KL anchor", "change at the end"] > 0
    table = {table.name: table for table in tables_of_study(results, study)}["remedies"]
    assert table.shown["change at the end"].str.endswith("*").all()  # the interval excludes zero


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
        "ledger", "matched_updates", "setup", "policies", "remedies",
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
    assert "clock" in set(policies(results, study)["variant"])


def test_a_ledger_of_other_steps_than_the_options_ask_for_is_told(results, study):
    """The variant's files are its twin's, which took three steps."""
    run = run_of(study.cell("one step", "voting ip math", 0), results.folder.parent)
    both = compared(run, run.table("ledger"))[lambda table: table["adapter"] == "generator"]
    assert set(both["steps"]) == {1} and set(both["steps recorded"]) == {3}
    values = ledger_values(results, study).query("number == 'counts that differ'")
    values = values.set_index(["variant", "workflow", "policy"])["value"]
    assert values["one step", "voting", "ip"] >= len(both) and values["as the grid", "single", "sp"] == 0


def test_steps_of_one_call_at_other_rates_and_calls_that_are_missing_are_told():
    grid = Grid.read(ROOT / "results/tiny-s")
    run = run_of(grid.cell("voting", "ip", "math", 0), ROOT / "results")
    steps = run.table("ledger")
    assert rate_error(compared(run, steps)) <= TOLERANCE
    several = steps.index[steps["step"] == 1][-1]
    assert rate_error(compared(run, steps.assign(lr=steps["lr"].mask(steps.index == several, 1e-3)))) == math.inf
    assert rate_error(compared(run, steps[steps["iteration"] < 60])) == math.inf


def test_a_prediction_by_hand():
    cell = Cell(
        "voting", "ip", n_problems=2, n_episodes=4, updates="tokens", step_tokens=100, learning_rate=8e-3, warmup_iterations=4,
        lr_clock="update_call", lr_schedule="constant", on_alarm="rollback", rollback_rate=0.5,
    )  # fmt: skip
    rows = [(1, "generator", 24, 240), (1, "aggregator", 8, 90), (3, "generator", 24, 200), (3, "aggregator", 8, 901)]
    found = predicted(cell, pd.DataFrame(rows, columns=["iteration", "role", "rows", "tokens"]), rollbacks=[2, 3])
    assert found.values.tolist() == [
        [1, "generator", 3, 24, 240, 0.0],  # call 0 of 4 warm-up ticks
        [1, "aggregator", 1, 8, 90, 2e-3],
        [3, "generator", 2, 24, 200, 4e-3],  # call 4, after one rollback
        [3, "aggregator", 8, 8, 901, 4e-3],  # ten steps of 100 tokens, but eight rows
    ]


def test_the_committed_ledgers_are_as_predicted():
    grid = Grid.read(ROOT / "results/tiny-s")
    values = ledger_values(Results(ROOT / "results/tiny-s"), Study.read(grid, ROOT / "results/tiny-s"))
    values = values.pivot(index=["workflow", "policy", "variant"], columns="number", values="value")
    assert len(values) == 34 and values["calls"].sum() > 10_000
    assert not values["counts that differ"].any() and not values["learning rate off by"].any()
