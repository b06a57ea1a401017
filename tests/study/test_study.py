"""A study's runs are the grid's with one thing changed; its tables pair them by seed and problem, by hand."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from notebook_cells import computed, drawn, linked
from scipy.stats import ttest_1samp

from multirole.credit import ESTIMATORS
from multirole_study.compare.intervals import Interval
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run_folder import folder_of, write_done
from multirole_study.experiment.storage import write_text
from multirole_study.paper import variants
from multirole_study.paper.claims import DECLARED as CLAIMS
from multirole_study.paper.grid import Declaration, Grid, Study, Variant, as_fields
from multirole_study.paper.output import number
from multirole_study.paper.pack import pack
from multirole_study.paper.results import Results, Run
from multirole_study.paper.variants import Twins, is_unstable, twins, vote

ROOT = Path(__file__).parents[2]
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
        "A/A": {"question": "aa", "parameters": {"micro_batch_tokens": 512}, "cells": ["voting ip math"]},
    },
}
STEPS = {"updates": "tokens", "step_tokens": 750}
ARMS = {  # what falls: four steps
    "1 step of 64 rows, four times the rate": {"learning_rate": 0.008},
    "4 steps of 16 rows, a quarter of the rate": STEPS | {"learning_rate": 0.0005},
    "4 steps of 16 rows, the rate": STEPS,
    "4 steps of 64 rows, the rate": STEPS | {"n_problems": 32, "step_tokens": 3000},
}
FALLING = {(4, 16), (4, 64)}
FACTORIAL = {
    "seeds": [0, 1, 2, 3, 4],
    "variants": {
        name: {"question": "factorial", "parameters": parameters, "cells": ["single sp math"], "seeds": [0, 1, 2]}
        for name, parameters in ARMS.items()
    },
}


@pytest.fixture(scope="module")
def results(grid_results, tmp_path_factory):
    """Every variant ends with all answers right under IP and like its twin under SP; otherwise it equals its twin."""
    folder = tmp_path_factory.mktemp("results") / grid_results.name
    shutil.copytree(grid_results, folder)
    results = Results(folder)
    usual = {cell.id for cell in results.grid.cells()}
    for cell in (cell for cell in Study(results.grid, **GIVEN).cells() if cell.id not in usual):
        twin = folder_of(cell, folder.parent)
        shutil.copytree(
            folder_of(results.grid.cell(cell.workflow, cell.policy_name, cell.task, cell.seed), folder.parent), twin
        )
        write_text(twin / "config.json", json.dumps(cell.to_dict()))
        table = pd.read_parquet(twin / "eval.parquet")
        if cell.policy_name == "ip":
            table.loc[table["step"] == table["step"].max(), "correct"] = True
        table.to_parquet(twin / "eval.parquet")
        write_done(twin)
    pack(folder)
    return Results(folder)


class MadeUp(Run):
    """A run with these validation accuracies, of 100 problems."""

    def __init__(self, cell: Cell, accuracies: list[float]) -> None:
        super().__init__(cell, ROOT)
        ranks = np.arange(100)[:, None] / 100
        self.correct = pd.DataFrame((ranks < accuracies).astype(float), columns=[0, 10, 20, 30])

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        return pd.DataFrame({"iteration": [1, 1, 2, 2], "chi2": [0.1, 0.2, 0.4, 0.3]})


def linked_copy(results: Path, folder: Path) -> Path:
    """Linked results whose declarations a test may replace."""
    linked(results, folder)
    for path in folder.glob("*.json"):
        text = path.read_text()
        path.unlink()
        path.write_text(text)
    return folder


def values_of(folder: Path, study: Study, *items: str) -> dict:
    """What the notebook writes for a study of these results."""
    study.write(folder.parent)
    return computed("study", folder, *items)


@pytest.fixture
def arm_results(monkeypatch, tmp_path) -> Results:
    """Arms of four steps fall in every seed, except at a quarter of the rate."""

    def made_up(self: Results, cell: Cell) -> Run | None:
        if cell.workflow != "single":
            return None
        steps = 4 if cell.updates == "tokens" else 1
        falls = steps == 4 and cell.learning_rate >= 2e-3
        return MadeUp(cell, [0.25, 0.5, 1.0, 0.25] if falls else [0.25, 0.5, 0.75, 1.0])

    monkeypatch.setattr(Results, "find", made_up)
    return Results(linked_copy(ROOT / "results/tiny-r", tmp_path / "tiny-r"))


def test_the_arms_of_the_factorial_by_hand(arm_results):
    study = Study(arm_results.grid, **FACTORIAL)
    table = values_of(arm_results.folder, study, "factorial")["factorial"].values
    values = table.set_index(["steps", "rows", "rate", "number"])["value"]
    unstable = values[:, :, :, "unstable"]
    assert len(unstable) == 5 and (1, 64, "1") in unstable.index  # with the grid's own run
    assert {arm[:2] for arm in unstable[unstable == 1].index} == FALLING
    recovered = [SimpleNamespace(falls=True, ends_fallen=False)] * 3
    assert is_unstable(recovered) and not is_unstable(recovered, "ends_fallen")
    assert values[4, 16, "0.25", "runs"] == 3 and values[4, 16, "1", "falls"] == 3
    assert values[4, 16, "1", "steps per iteration"] == 2 and values[4, 16, "1", "end"] == pytest.approx(0.25)


@pytest.fixture(scope="module")
def study(results):
    return Study(results.grid, **GIVEN)


def test_predictors_of_unstable_arms_by_hand(arm_results):
    study = Study(arm_results.grid, **FACTORIAL)
    table = values_of(arm_results.folder, study, "factorial_predictors")["factorial_predictors"].values
    values = table.set_index(["quantity", "number"])["value"]
    assert (values[:, "arms"] == 5).all() and (values[:, "unstable arms"] == 2).all()
    # steps >= 4 is wrong of the quarter, rate x steps >= 4 of one step at four times the rate
    assert (values["steps", "threshold"], values["steps", "arms misjudged"]) == (4, 1)
    assert values["rate × steps (displacement)", "arms misjudged"] == 1
    assert values["steps", "arms misjudged, terminal falls"] == 1  # the made-up falls are all terminal


def ends(results, policy):
    return [results.runs_of("voting", policy, "math")[seed].accuracy.iloc[-1] for seed in (0, 1)]


def test_gains_are_paired_by_seed_and_problem(results, study):
    rows = values_of(results.folder, study, "matched_updates")["matched_updates"].values
    values = rows[rows["variant"] == "one step"].set_index(["policy", "number"])["value"]
    assert values["ip", "end"] == 1.0 and values["ip", "end, twin"] == pytest.approx(sum(ends(results, "ip")) / 2)
    assert values["ip", "change at the end"] == pytest.approx(1 - sum(ends(results, "ip")) / 2)
    assert values["sp", "change at the end"] == 0


def test_an_arm_protects_a_role_by_the_declared_rule(monkeypatch, results, study):
    """Its gain is decided above zero after Holm's correction, and the end lies at most 3 points below the control's."""
    measured = {"keeps": (0.3, 0.001, -0.02), "costs accuracy": (0.3, 0.001, -0.04), "undecided": (0.3, 0.04, 0.0),
                "harms": (-0.3, 0.001, 0.0)}  # fmt: skip

    def measured_of(name: str, usual: object, changed: object, keys: dict, unit: str = "accuracy") -> list[dict]:
        change, p, end = measured[keys["variant"]]
        gain = Interval(change, -1, 1, p, 0.9, 0.1, 3) if name == "gain" else Interval(end, -1, 1, 0.9, 0.9, 0.1, 3)
        return [number(f"change {'of' if name == 'gain' else 'at'} the {name}", gain, "difference", **keys)]

    def arms(packed: Results, study: Study, *questions: str, control: str | None = None) -> list[Twins]:
        return [Twins("voting", "sp", "math", name, [], []) for name in measured] if "judges" in questions else []

    monkeypatch.setattr(variants, "beside_twin", measured_of)
    monkeypatch.setattr(variants, "twins", arms)
    values = values_of(results.folder, study, "judges")["judges"].values
    assert values[values["number"] == "protects"].set_index("variant")["value"].to_dict() == {
        "keeps": 1, "costs accuracy": 0, "undecided": 0, "harms": 0,
    }  # fmt: skip


def test_a_variant_may_have_seeds_of_its_own_and_is_no_twin_of_itself(results):
    """Such an arm is compared with another arm, which is not compared with itself."""
    declaration = GIVEN | {"variants": {
        "control": {"question": "judges", "parameters": {"updates": "one"}, "cells": ["voting sp math"]},
        "arm": {"question": "judges", "parameters": {"beta": 0.1}, "cells": ["voting sp math"], "seeds": [1, 7]},
    }}  # fmt: skip
    study = Study(results.grid, **declaration)
    assert [(name, cell.seed) for name, _, cell in study.runs("judges")] == [
        ("control", 0), ("control", 1), ("arm", 1), ("arm", 7),
    ]  # fmt: skip
    held = {cell.id: Run(cell, results.folder) for cell in [*study.cells(), study.cell("control", "voting sp math", 7)]}
    with_all = SimpleNamespace(find=lambda cell: held.get(cell.id))
    (twin,) = twins(with_all, study, "judges", control="control")
    assert twin.variant == "arm" and [run.cell.seed for run in twin.usual] == [1, 7]


def test_controls_count_what_was_spent(results, study):
    declaration = GIVEN | {"variants": GIVEN["variants"] | {
        "more": {"question": "controls", "parameters": {"num_generations": 16}, "cells": ["single sp math"]},
        "the same": {"question": "controls", "parameters": {"num_generations": 8}, "cells": ["single sp math"]},
    }}  # fmt: skip
    made = values_of(results.folder, Study(results.grid, **declaration), "controls")
    values = made["controls"].values.set_index(["run", "number"])["value"]
    cell = results.grid.cell("voting", "sp", "math", 0)
    steps = pd.read_parquet(folder_of(cell, results.folder.parent) / "ledger.parquet")
    assert values["Voting-SP", "optimizer steps"] == len(steps)
    assert "Single agent, more" not in values  # not trained here
    peaks = {name: results.accuracy(name, "sp", "math", "best")[[0, 1]].mean() for name in ("voting", "single")}
    assert values["Voting-SP", "peak − the same"] == pytest.approx(peaks["voting"] - peaks["single"])
    assert not values_of(results.folder, study, "controls")  # asked of no task


def test_a_vote_by_hand():
    box = "\\boxed{%d}".__mod__
    answers = pd.DataFrame(
        [("a", 0, box(1), False), ("a", 1, box(2), True), ("a", 2, box(2), True),  # two against one
         ("b", 0, box(3), True), ("b", 1, box(4), False), ("b", 2, "no box", False),  # a tie: the first
         ("c", 0, "none", False), ("c", 1, "none", False), ("c", 2, box(5), True)],  # a reply without an answer does not vote
        columns=["problem", "rollout", "answer", "correct"],
    )  # fmt: skip
    answers["extracted"] = answers["answer"].map(Cell("single", "sp").make_task().extract)
    assert vote(answers, 3).to_dict() == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert vote(answers, 2).to_dict() == {"a": 0.0, "b": 1.0, "c": 0.0}


@pytest.mark.slow
def test_a_workflow_is_compared_with_the_votes_of_as_many_tokens(tmp_path):
    """Both sides have the same seeds, so the paired difference is that of the means. The votes are the next smaller and the next larger in tokens."""
    lines = computed("study", linked(ROOT / "results/tiny-r", tmp_path / "tiny-r"), "inference")["inference"].values
    table = lines.pivot_table("value", "run", "number", sort=False)
    is_vote = table.index.str.match("Single agent, (once|vote)")
    votes, workflows = table[is_vote], table[~is_vote & ~table.index.str.contains("oracle")]
    counted = {"vote": "sampled tokens per problem", "vote, prompts counted": "with prompts"}
    assert len(workflows) == 6
    assert table.loc[is_vote, [column for column in table if column.startswith("minus")]].isna().all(axis=None)
    for name, row in workflows.iterrows():
        assert row["with prompts"] > 1.5 * row["sampled tokens per problem"], "a judge reads what others wrote"
        for label, tokens in counted.items():
            beside = {
                "smaller": votes[votes[tokens] <= row[tokens]][-1:],
                "larger": votes[votes[tokens] >= row[tokens]][:1],
            }
            for which, one in beside.items():
                column = f"minus the next {which} {label}"
                if one.empty:  # more tokens than all answers that were drawn
                    assert np.isnan(row[column])
                else:
                    expected = row["accuracy"] - one["accuracy"].squeeze()
                    assert row[column] == pytest.approx(expected, abs=1e-5), (name, column)


def test_phenomena_of_a_variant_are_those_of_its_own_runs_beside_its_twins(results, study):
    """The fixture's variants reply as their twins do."""

    def change(variant: str, policy: str, seed: int) -> float:
        roles = results.find(study.cell(variant, f"voting {policy} math", seed)).table("roles")
        lengths = roles[roles["role"] == "aggregator"].set_index("iteration")["length_mean"]
        return lengths[-5:].mean() / lengths[:5].mean() - 1

    table = values_of(results.folder, study, "phenomena_elsewhere")["phenomena_elsewhere"].values
    table = table.query("phenomenon == 'the aggregator grows verbose'")
    assert set(table["variant"]) == {"one step", "clock"}
    for variant, rows in table.groupby("variant"):
        rows = rows.set_index("number")
        gaps = [change(variant, "sp", seed) - change(variant, "ip", seed) for seed in GIVEN["seeds"]]
        assert rows.loc["SP − IP", "value"] == pytest.approx(np.mean(gaps))
        assert rows.loc["SP − IP", "p"] == pytest.approx(ttest_1samp(gaps, 0).pvalue)
        assert rows.loc["SP − IP, twin", "value"] == pytest.approx(np.mean(gaps))
        assert np.isnan(rows.loc["SP − IP, twin", "p"]), "tested in `phenomena`"


def test_longer_training_is_drawn_beside_the_runs_of_its_seeds(results, study, monkeypatch):
    study.write(results.folder.parent)
    assert not drawn("study", results.folder, "long")
    parameters = {"max_steps": 100, "eval_steps": 10, "save_steps": 10}
    long = Variant("setup", parameters, ["voting ip math", "voting sp math"], seeds=[0, 1])
    study = Study(results.grid, [0, 1], study.variants | {"long": long})
    ends = {(20, 0): 0.5, (20, 1): 0.7, (20, 2): 0.6, (100, 0): 0.8, (100, 1): 0.9}
    monkeypatch.setattr(
        Results, "find", lambda self, cell: MadeUp(cell, [0.25, 0.5, 0.5, ends[cell.max_steps, cell.seed]])
    )
    study.write(results.folder.parent)
    plate = drawn("study", results.folder, "long")["long"]
    ends_drawn = [[line.get_ydata()[-1] for line in axes.lines[:6]] for axes in plate.figure.axes[:2]]
    assert ends_drawn == [pytest.approx([0.5, 0.7, 0.6, 0.8, 0.9, 0.85])] * 2
    labels = [text.get_text() for text in plate.figure.legends[0].get_texts()]
    assert (
        labels[:2] == ["20 iterations, as in the grid (mean)", "100 iterations (mean)"]
        and "2 seeds of both" in plate.caption
    )


def test_a_grid_without_a_study_has_none(results, study, tmp_path):
    study.write(tmp_path)
    Declaration(study.grid).write(tmp_path)
    assert Study.read(tmp_path / "tiny-r") == study, "a grid that the study fits leaves it"
    Declaration(Grid("tiny-r", [7])).write(tmp_path)  # the study's seeds are not of this grid
    assert Study.read(tmp_path / "tiny-r") is None


def test_a_study_has_the_tables_whose_runs_are_there(results, study):
    made = values_of(results.folder, study)
    assert set(made) == {
        "matched_updates", "setup", "phenomena_elsewhere", "power",
    }  # fmt: skip


def test_the_shipped_study_changes_what_it_says_and_nothing_else():
    grid = Grid.read(ROOT / "results/tiny-r")
    study = Study(grid, **yaml.safe_load((ROOT / "studies/main.yaml").read_text()))
    for name, where, cell in study.runs():
        usual, parameters = grid.cell(*where.split(), cell.seed), study.variants[name].parameters
        changed = {field for field in Cell.model_fields if getattr(cell, field) != getattr(usual, field)}
        assert changed == set(as_fields(parameters)) or "preset" in parameters, name
        assert Cell(**study.parameters_of(cell)) == cell
    assert [cell.id for cell in study.cells()][: len(grid.cells())] == [cell.id for cell in grid.cells()]
    assert len({cell.id for cell in study.cells()}) == len(study.cells())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seeds": [0, 7]}, "must be seeds of the grid"),
        ({"variants": {"x": {"question": "why", "parameters": {}, "cells": []}}}, "updates.*setup.*controls"),
        (
            {"variants": {"x": {"question": "updates", "parameters": {"updates": "two"}, "cells": ["voting ip math"]}}},
            "updates",
        ),
    ],
)
def test_bad_studies_are_refused(results, change, words):
    with pytest.raises(ValueError, match=words):
        Study(results.grid, **GIVEN | change)


def test_the_rules_were_committed_before_the_runs_that_they_judge():
    """The commit that the grid's runs of a task were made from has that task in its grid, and the lines that judge it."""
    packed = pd.read_parquet(ROOT / "results/tiny-r/runs.parquet").set_index("run")
    grid = Grid.read(ROOT / "results/tiny-r")
    for task in grid.tasks:
        made = {
            json.loads(packed.loc[cell.id, "provenance"])["git_sha"]
            for cell in grid.cells()
            if cell.task == task and cell.id in packed.index
        }
        for commit in made:
            shown = [
                subprocess.run(
                    ["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True, check=False
                )
                for path in ("grid.yaml", "src/multirole_study/paper/claims.yaml")
            ]
            if any(one.returncode for one in shown):
                pytest.skip("a shallow clone")
            declared, rules = (yaml.safe_load(one.stdout) for one in shown)
            assert task in declared["scales"]["tiny-r"]["tasks"]
            assert rules["phenomena"] == CLAIMS["phenomena"] and rules["claims"] == CLAIMS["claims"]


def test_the_leaderboard_of_credit_trains_every_estimator_on_the_same_seeds():
    """All take the same number of optimizer steps: one per iteration, the single agent too. Sampled tokens are measured, not planned."""
    declared = yaml.safe_load((ROOT / "studies/credit.yaml").read_text())
    grid = Grid("tiny-r", **declared.pop("grid"))
    cells = Study(grid, **declared).cells()
    assert {cell.updates for cell in cells} == {"one"} and {cell.max_steps for cell in cells} == {60}
    arms = {(cell.workflow, cell.credit, cell.n_problems, cell.num_generations) for cell in cells}
    assert len(cells) == 10 * len(arms)  # the same ten seeds of every arm
    same_in_voting = {"agent", "agent_turn", "mean_over_turns"}
    assert {credit for workflow, credit, *_ in arms if workflow == "eval_opt"} == set(ESTIMATORS)
    assert {credit for workflow, credit, *_ in arms if workflow == "voting"} == set(ESTIMATORS) - same_in_voting


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("smollm2", "smollm2", [{"voting", "single"}, {"eval_opt"}, {"orch_workers"}, {"voting", "eval_opt"}]),
        ("programs", "smollm2", [{"voting", "single"}, {"eval_opt"}, {"orch_workers"}, {"voting", "eval_opt"}]),
        ("vain", "tiny-r", [{"voting"}, {"single"}, {"voting"}]),
    ],
)
def test_a_declared_order_is_that_of_the_lines(name, scale, expected):
    """The first lines of the files say it: three times the rate comes last, a control with its single agent."""
    grid = yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"]["default"]
    grid |= yaml.safe_load((ROOT / "grid.yaml").read_text())["scales"][scale]
    declared = yaml.safe_load((ROOT / f"studies/{name}.yaml").read_text())
    grid |= declared.pop("grid", {})
    study = Study(Grid(scale, **{key: value for key, value in grid.items() if key != "gpus"}), **declared)
    *lines, rest = study.cells_by_line()
    assert not rest and [{cell.workflow for cell in line.values()} for line in lines] == expected
    assert {cell.id for cell in study.cells()} == {cell.id for line in lines for cell in line.values()}
    assert [{cell.lr_schedule for cell in line.values()} for line in lines[-2:]] == [{"cosine"}, {"constant"}]
    with pytest.raises(ValueError, match=r"`order` must name workflows of the grid and variants, .* got \['votes'\]"):
        Study(study.grid, **declared | {"order": [["votes"]]})
