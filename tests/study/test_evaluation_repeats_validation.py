"""An evaluation plays a run's own checkpoints as its validation did, the base without adapters, a transfer with one adapter."""

import json
import re
from dataclasses import replace

import pandas as pd
import pytest
from paper_rows import write

from multirole.files import sha256
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation, named_steps, solver_of, steps_by_name, steps_of
from multirole_study.experiment.run import check_files, run_cell, run_evaluation
from multirole_study.experiment.run_folder import folder_of, is_done, write_done
from multirole_study.experiment.settings import UserError
from multirole_study.paper.evaluation_tables import accuracy, judging
from multirole_study.paper.grid import Grid

SMALL = {"max_steps": 2, "n_problems": 2, "num_generations": 4, "n_train": 64, "n_validation": 12, "eval_steps": 1, "save_steps": 1,
         "learning_rate": 2e-2, "warmup_steps": 0, "max_completion_length": 40}  # fmt: skip


@pytest.fixture(scope="module")
def results_dir(tmp_path_factory):
    """A Voting run and the single-agent run of the same options, both trained far enough to differ from the base."""
    folder = tmp_path_factory.mktemp("results")
    run_cell(Cell("voting", "ip", **SMALL), folder)
    run_cell(Cell("single", "sp", **SMALL), folder)
    return folder


def test_own_checkpoints_repeat_the_runs_validation_problem_by_problem(results_dir, capsys):
    cell = Cell("voting", "ip", **SMALL)
    evaluation = Evaluation(cell, "own", "0,1,terminal")
    folder = run_evaluation(evaluation, results_dir)
    played = pd.read_parquet(folder / "eval.parquet").set_index(["step", "problem"])
    validated = pd.read_parquet(folder_of(cell, results_dir) / "eval.parquet").set_index(["step", "problem"])
    assert (
        set(played.index) == set(validated.index)
        and played.loc[0, "answer"].tolist() != played.loc[2, "answer"].tolist()
    )
    pd.testing.assert_frame_equal(played.loc[validated.index, ["correct", "answer"]], validated[["correct", "answer"]])
    assert is_done(folder) and evaluation.folder(results_dir) == folder and folder.parent.name == "own-0_1_terminal"
    before = (folder / "DONE").stat().st_mtime_ns
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"  adapters    own, at iterations 0, 1 \(.*\), 2 \(.*terminal\)", printed[1])
    lines = [line for line in printed if line.startswith("evaluation at iteration")]
    assert len(lines) == 3 and all(line.endswith("95 % interval over 12 episodes") for line in lines)
    assert run_evaluation(evaluation, results_dir) == folder and (folder / "DONE").stat().st_mtime_ns == before
    assert capsys.readouterr().out.splitlines() == [*lines, f"{folder} is already finished."]
    (folder / "eval.parquet").write_bytes(b"altered")
    assert not is_done(folder)


def test_a_run_records_the_skill_of_its_roles(results_dir):
    run = folder_of(Cell("voting", "ip", **SMALL), results_dir)
    skills, right = pd.read_parquet(run / "skills.parquet"), pd.read_parquet(run / "eval.parquet")
    whole = skills[skills["measure"] == "workflow"].set_index("step")["skill"]
    assert whole.to_dict() == pytest.approx(right.groupby("step")["correct"].mean().to_dict())
    at_end = skills[skills["step"] == 2].set_index("measure")
    assert set(at_end.index) == {"solves", "selects", "workflow"} and at_end.loc["solves", "cases"] == 36
    judged = judging(run_evaluation(Evaluation(Cell("voting", "ip", **SMALL)), results_dir)).loc[2]
    assert judged["cases"] == at_end.loc["selects", "cases"] and judged["valid"] == at_end.loc["selects", "valid"]


def test_the_base_is_the_untrained_workflow_and_rollouts_differ(results_dir):
    folder = run_evaluation(Evaluation(Cell("voting", "ip", **SMALL), "base", num_generations_eval=2), results_dir)
    played = pd.read_parquet(folder / "eval.parquet")
    validated = pd.read_parquet(folder_of(Cell("voting", "ip", **SMALL), results_dir) / "eval.parquet")
    first = played[played["rollout"] == 0].set_index("problem")["answer"]
    start = validated[validated["step"] == 0].set_index("problem")["answer"]
    assert first.to_dict() == start.to_dict()
    assert first.tolist() != played[played["rollout"] == 1]["answer"].tolist()
    shown = accuracy(folder).loc[0]
    assert shown["rollouts"] == 2 and shown["accuracy"] == pytest.approx(played["correct"].mean())
    assert shown["one slot"] <= shown["any slot"] == pytest.approx(played["slots_correct"].map(any).mean())
    assert shown["pass@2"] == pytest.approx(played.groupby("problem")["correct"].any().mean())


def test_transfer_adapts_the_solver_alone_and_transfer_all_every_role(results_dir):
    cell = Cell("voting", "sp", **SMALL)
    texts = {}
    for adapters in ("base", "transfer", "transfer_all"):
        folder = run_evaluation(Evaluation(cell, adapters, "terminal"), results_dir)
        turns = pd.read_parquet(folder / "turns.parquet").set_index(["problem", "role", "slot"])["text"]
        texts[adapters] = turns.sort_index()
    solver = solver_of(cell)
    assert (
        Evaluation(cell, "transfer").policy() == {"generator": "shared", "aggregator": None} and solver == "generator"
    )
    voters = {name: turns.xs(solver, level="role").tolist() for name, turns in texts.items()}
    assert voters["transfer"] == voters["transfer_all"] != voters["base"]
    sums = json.loads((folder / "provenance.json").read_text())["adapters_sha256"]
    assert list(sums) == ["step_00002/shared/adapter_model.safetensors"]


def test_a_transfer_looks_for_the_single_agent_run_of_its_own_preset():
    """At the paper's scales the single agent has other length caps, which must not become options of its cell."""
    source = Evaluation(Cell("voting", "ip", scale="1.7b", max_steps=10), "transfer", "best").source
    assert source == Cell("single", "sp", scale="1.7b", max_steps=10) and source.max_prompt_tokens == 15360


@pytest.mark.parametrize(
    ("policy", "options"),
    [("ip", {"role_order": "generator,aggregator"}), ("generator=a,aggregator=past:a", {"past_every": 5})],
)
def test_what_fits_one_map_alone_does_not_carry_over(policy, options):
    """The base and the single agent have neither an order of roles nor past selves."""
    cell = Cell("voting", policy, **options)
    assert Evaluation(cell, "base").cell.id == Evaluation(Cell("voting", "sp"), "base").cell.id
    assert Evaluation(cell, "transfer").source.id == Cell("single", "sp").id


def test_a_transfer_is_of_the_run_without_the_settings_of_other_workflows(tmp_path):
    cell = Cell("voting", "sp", n_voters=5, box_rule="last_box", rounds=2, learning_rate=1e-3)
    evaluation = Evaluation(cell, "transfer")
    assert evaluation.source.id == Cell("single", "sp", learning_rate=1e-3).id
    with pytest.raises(ValueError, match="Train it first.* -p workflow single -p policy sp and the other parameters"):
        steps_of(evaluation, tmp_path)


def test_a_warm_up_that_fits_the_map_s_clock_alone_is_left_out():
    """Isolated policies tick twice per iteration; the base and the single agent once."""
    clock = {"lr_clock": "update_call", "max_steps": 60}
    for adapters in ("base", "transfer"):
        made = Evaluation(Cell("voting", "ip", warmup_steps=100, **clock), adapters)
        assert made.cell == Cell("voting", "sp", **clock)
        assert Evaluation(Cell("voting", "ip", warmup_steps=50, **clock), adapters).cell.warmup_steps == 50


def test_without_accuracy_the_best_step_is_that_of_the_highest_reward(tmp_path):
    rows = [
        {"step": step, "correct": None, "reward": reward} for step, reward in ((0, 0.9), (5, 0.1), (10, 0.6), (15, 0.4))
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "eval.parquet")
    assert steps_by_name(tmp_path) == {"early": 5, "best": 10, "terminal": 15}


def test_a_finished_evaluation_of_adapters_that_were_trained_again_is_refused(tmp_path):
    evaluation = Evaluation(Cell("voting", "sp"), "own", "5")
    folder, name = evaluation.folder(tmp_path), "step_00005/shared/adapter_model.safetensors"
    adapter = folder_of(evaluation.cell, tmp_path) / "adapters" / name
    adapter.parent.mkdir(parents=True)
    adapter.write_bytes(b"first")
    folder.mkdir(parents=True)
    pd.DataFrame({"step": [5], "reward": [1.0], "correct": [True]}).to_parquet(folder / "eval.parquet")
    (folder / "provenance.json").write_text(json.dumps({"adapters_sha256": {name: sha256(adapter)}}))
    write_done(folder)
    assert run_evaluation(evaluation, tmp_path) == folder
    adapter.write_bytes(b"second")
    with pytest.raises(UserError, match="evaluated other adapters than .*step_00005.* was trained again since"):
        run_evaluation(evaluation, tmp_path)


def test_rows_of_another_file_with_the_run_s_name_are_not_evaluated(tmp_path):
    """`own` repeats the validation, so its rows must be the run's."""
    file = tmp_path / "rows.jsonl"
    cell = Cell(
        "voting", "sp", scale="0.6b", data=str(write(file, [{"prompt": f"{i}?", "solution": "1"} for i in range(20)]))
    )
    (tmp_path / "provenance.json").write_text(json.dumps({"dataset": cell.make_task().describe()}))
    check_files(tmp_path, cell)
    write(file, [{"prompt": f"{i}!", "solution": "1"} for i in range(20)])
    with pytest.raises(ValueError, match="was trained on other rows of a file with the same name"):
        check_files(tmp_path, cell)


def test_early_best_and_terminal_follow_the_released_rule():
    right = {0: [1, 1, 1, 1], 10: [0, 0, 0, 1], 20: [0, 0, 1, 1], 30: [0, 1, 1, 1], 40: [0, 1, 1, 1], 50: [0, 0, 0, 0]}
    assert named_steps(pd.DataFrame(right).mean()) == {"early": 20, "best": 30, "terminal": 50}


def test_judging_counts_verdicts_against_the_draft_they_judge(tmp_path):
    def turn(problem, role, round, outcome, turn_correct=None, slot=0, correct=False):
        return {"step": 1, "problem": problem, "role": role, "round": round, "slot": slot, "outcome": outcome,
                "turn_correct": turn_correct, "correct": correct, "completion_tokens": 5}  # fmt: skip

    turns = [
        turn("a", "generator", 0, "answered", False), turn("a", "evaluator", 0, "incorrect"),
        turn("a", "generator", 1, "answered", True), turn("a", "evaluator", 1, "unparsed"),
        turn("b", "generator", 0, "answered", True), turn("b", "evaluator", 0, "correct"),
    ]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"cell": {"workflow": "eval_opt"}}))
    pd.DataFrame(turns).to_parquet(tmp_path / "turns.parquet")
    row = judging(tmp_path).set_index("measure").loc["judges"]
    assert (row["skill"], row["trivial"], row["cases"], row["valid"]) == (0.75, 0.5, 3, pytest.approx(2 / 3))
    votes = [turn("a", "generator", 0, "answered", c, slot) for slot, c in enumerate((True, False, False))]
    votes += [turn("b", "generator", 0, "answered", True, slot) for slot in range(3)]
    votes += [turn("a", "aggregator", 0, "1", correct=True), turn("b", "aggregator", 0, "2", correct=True)]
    (tmp_path / "config.json").write_text(json.dumps({"cell": {"workflow": "voting"}}))
    pd.DataFrame(votes).to_parquet(tmp_path / "turns.parquet")
    row = judging(tmp_path).set_index("measure").loc["selects"]
    assert (row["cases"], row["skill"], row["trivial"]) == (1, 1.0, pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"adapters": "mine"}, "`adapters` must be 'own', 'base'"),
        ({"checkpoints": "best,last"}, "`checkpoints` must be 'all', or steps and names .* got 'best,last'"),
        ({"num_generations_eval": 0}, "`num_generations_eval` must be greater than or equal to 1, got 0"),
        (
            {"cell": Cell("single", "sp"), "adapters": "transfer"},
            "plays another workflow with the single agent's adapter, and `workflow` is 'single'",
        ),
    ],
)
def test_impossible_evaluations_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Evaluation(**{"cell": Cell("voting", "sp")} | wrong)


def test_a_run_or_checkpoint_that_does_not_exist_cannot_be_evaluated(tmp_path, results_dir):
    with pytest.raises(ValueError, match="is not finished. Train it first"):
        run_evaluation(Evaluation(Cell("voting", "sp", **SMALL)), tmp_path)
    with pytest.raises(ValueError, match=r"among \[1, 2\].* got \[3\]"):
        run_evaluation(Evaluation(Cell("voting", "ip", **SMALL), "own", "3"), results_dir)


def test_a_grid_is_the_whole_matrix_and_survives_its_file(tmp_path):
    grid = Grid("tiny-r", (0, 1), {"max_steps": 4}, 2)
    grid.write(tmp_path)
    assert Grid.read(tmp_path / "tiny-r") == grid
    assert len(grid.cells()) == 2 * 2 * (3 * 2 + 1) and len({cell.id for cell in grid.cells()}) == 28
    evaluations = grid.evaluations()
    assert len(evaluations) == 8 + 28 + 2 * 2 * 3 * 2
    assert len({e.folder(tmp_path) for e in evaluations}) == len(evaluations)
    for job in (*grid.cells(), *evaluations):  # the parameters rebuild the same cell or evaluation
        parameters = grid.parameters_of(job)
        made = (
            Cell.from_parameters(parameters)[0] if isinstance(job, Cell) else Evaluation.from_parameters(parameters)[0]
        )
        assert made == job
    for wrong in ({"seeds": ()}, {"seeds": (0, 0)}, {"parameters": {"seed": 3}}, {"parameters": {"max_steps": 0}}):
        with pytest.raises(ValueError):
            replace(grid, **wrong)


def test_a_problem_without_a_grade_is_left_out_of_the_accuracy(tmp_path):
    graded = {"correct": [True, False, None], "slots_correct": [[True], [False], []]}
    pd.DataFrame({"step": 0, "rollout": 0, "problem": ["a", "b", "c"]} | graded).to_parquet(tmp_path / "eval.parquet")
    assert accuracy(tmp_path).loc[0, "accuracy"] == 0.5
