"""A study is one YAML file: declared here, answered from the made-up grid, and compared with numbers worked out by hand."""

import math

import pandas as pd
import pytest
import yaml
from notebook_cells import computed, linked
from paper_results import without

from multirole_study.compare.answers import Question, judged
from multirole_study.compare.arms import of_whole_seeds
from multirole_study.compare.estimates import ESTIMATES
from multirole_study.compare.intervals import NO_UNITS, t_interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import MEASURES
from multirole_study.compare.study import CompareStudy
from multirole_study.compare.verdicts import Rule, any_in_all, any_of, decide, inside, side
from multirole_study.experiment.cell import Cell
from multirole_study.paper.compared_study import answer_table
from multirole_study.paper.declarations import declare
from multirole_study.paper.grid import Grid
from multirole_study.paper.notebooks import notebooks_of
from multirole_study.paper.results import Results

STUDY = """\
# Does isolating roles pay on the miniature's first tests? Written before the runs that it judges.
arms: # changes of the grid's cells; an arm without a workflow is one of each of `workflows`
  isolated: {policy: ip}
  shared: {policy: sp}
  single agent: {workflow: single}
workflows: [voting, eval_opt]
tasks: [math]
seeds: [0, 1, 2] # runs are paired by seed
looks: {2: 0.01, 3: 0.05} # numbers of seeds at which a line is read, and the level of both sides at that look
margin: 0.05 # of equivalence, in accuracy
correction: holm # over the lines of a question
questions:
  - {name: end, question: "Do isolated policies end above a shared one?", measure: end, arm: isolated, minus: shared}
  - {name: single, question: "Does sharing peak above the single agent?", measure: peak, arm: shared, minus: single agent}
  - {name: falls, question: "Does isolation end fallen more often?", measure: falls, estimate: shares, arm: isolated, minus: shared}
"""
"""The example of docs/extending.md."""


def declared(**changed: object) -> CompareStudy:
    return CompareStudy(**yaml.safe_load(STUDY) | changed)


def two_sided(mean: float, sd: float) -> float:
    """Student's p with 2 degrees of freedom, of three values."""
    t = abs(mean) * math.sqrt(3) / sd
    return 1 - t / math.sqrt(t**2 + 2)


def by_line(study: CompareStudy, folder) -> pd.DataFrame:
    return study.table(Results(folder)).set_index(["question", "workflow"])


def test_a_study_in_yaml_gets_its_table_of_verdicts(grid_results, tmp_path):
    """Of 16 problems isolated Voting ends 13, 10 and 11 below the shared one, isolated Eval-Opt 3, 3 and 2 above."""
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    table = by_line(CompareStudy.from_yaml(path), grid_results)
    assert list(table.index) == [(name, w) for name in ("end", "single", "falls") for w in ("voting", "eval_opt")]
    voting, eval_opt = table.loc[("end", "voting")], table.loc[("end", "eval_opt")]
    assert (voting["value"], eval_opt["value"]) == (pytest.approx(-34 / 48), pytest.approx(8 / 48))
    below, above = two_sided(34 / 3, math.sqrt(7 / 3)), two_sided(8 / 3, math.sqrt(1 / 3))
    assert below < above and (voting["p"], eval_opt["p"]) == (pytest.approx(2 * below), pytest.approx(above))  # Holm
    half = 4.302653 * math.sqrt(1 / 3) / math.sqrt(3) / 16
    assert (eval_opt["low"], eval_opt["high"]) == (pytest.approx(8 / 48 - half), pytest.approx(8 / 48 + half))
    assert (voting["verdict"], eval_opt["verdict"]) == ("no", "yes")
    falls = table.loc["falls"]
    assert list(falls["value"]) == [pytest.approx(1 / 3), 0.0] and set(falls["verdict"]) == {"undecided"}
    assert set(table["seeds"]) == {3} and set(table["task"]) == {"math"}


def test_the_margin_and_the_correction_are_the_study_s(grid_results):
    """The shared Eval-Opt peaks 2, 2 and -2 of 16 above the single agent: p of |mean| >= 0.5 is .0127."""
    of_margin = {margin: by_line(declared(margin=margin), grid_results) for margin in (0.05, 0.5)}
    lines = {margin: table.loc[("single", "eval_opt")] for margin, table in of_margin.items()}
    assert [lines[margin]["verdict"] for margin in (0.05, 0.5)] == ["undecided", "equivalent"]
    alone = by_line(declared(correction="none"), grid_results).loc[("end", "voting")]
    assert alone["p"] == pytest.approx(two_sided(34 / 3, math.sqrt(7 / 3)))


def test_a_look_has_its_own_level_and_nothing_is_decided_before_the_first(grid_results, tmp_path):
    """With two seeds isolated Eval-Opt ends 3 and 3 above (no spread, no test), and Voting 13 and 10 below: p = .083."""
    two = by_line(declared(), without(grid_results, [("voting", "sp", "math", 2)], tmp_path / "two")).loc["end"]
    assert two.loc["voting", "seeds"] == 2 and two.loc["voting", "verdict"] == "undecided"
    one = without(grid_results, [("voting", "sp", "math", seed) for seed in (1, 2)], tmp_path / "one")
    assert by_line(declared(), one).loc["end"].loc["voting", "verdict"] == "unfinished"
    none = without(grid_results, [("voting", "sp", "math", seed) for seed in (0, 1, 2)], tmp_path / "none")
    assert by_line(declared(), none).loc["end"].loc["voting", "verdict"] == "not run"
    numbers = pd.DataFrame({"workflow": "w", "task": "t", "seed": range(3), "value": [0.2, 0.3, 0.25]})  # p = .013
    verdicts = [
        judged(Question(MEASURES["end"], looks=Looks((3,), alphas=(alpha,))), [numbers])[0].verdict
        for alpha in (0.05, 0.01)
    ]
    assert verdicts == ["yes", "undecided"]


def pooled(folder, **question: object) -> pd.DataFrame:
    usual = {"name": "q", "question": "?", "measure": "end", "arm": "isolated", "minus": "shared"}
    return declared(questions=[usual | question], looks=[2, 3]).table(Results(folder))


def test_a_pooled_question_has_one_number_per_seed(grid_results, tmp_path):
    """Of 16 problems isolated Voting ends 13, 10 and 11 below the shared one, isolated Eval-Opt 3, 3 and 2 above: -5, -3.5 and -4.5 on average."""
    (line,) = pooled(grid_results, pooled="places").to_dict("records")
    assert (line["workflow"], line["task"], line["arm"], line["minus"]) == ("all cells", "math", "isolated", "shared")
    assert line["value"] == pytest.approx(-13 / 48) and line["seeds"] == 3
    assert line["p"] == pytest.approx(two_sided(13 / 3, math.sqrt(7 / 12))) and line["verdict"] == "no"
    apart = without(grid_results, [("voting", "sp", "math", 1)], tmp_path / "apart")
    (line,) = pooled(apart, pooled="places").to_dict("records")
    assert line["seeds"] == 2 and line["value"] == pytest.approx(-9.5 / 32)  # seed 1 lacks a cell


def test_a_question_may_pool_its_arms_as_well(grid_results):
    """The mean over both policies and workflows minus the single agent; its lines apart have the same mean."""
    both = {"arm": ["isolated", "shared"], "minus": "single agent", "measure": "peak"}
    (line,) = pooled(grid_results, pooled="arms", **both).to_dict("records")
    assert (line["arm"], line["minus"], line["seeds"]) == ("isolated, shared", "single agent", 3)
    lines = pooled(grid_results, **both)
    assert len(lines) == 4 and line["value"] == pytest.approx(lines["value"].mean())
    by_arm = pooled(grid_results, pooled="places", **both)
    assert list(by_arm["arm"]) == ["isolated", "shared"] and line["value"] == pytest.approx(by_arm["value"].mean())


def test_paired_falls_are_tested_by_mcnemar_s_test(grid_results):
    """Only the discordant pairs count: five of five on one side have p = 2 / 2^5, seven of eight 2 * 9 / 2^8."""

    def p(*differences: int) -> float:
        numbers = pd.DataFrame({"workflow": "w", "task": "t", "seed": range(len(differences)), "value": differences})
        return ESTIMATES["paired_shares"](numbers.assign(minus=0)).interval.p

    assert p(1, 1, 1, 1, 1, 0, 0) == pytest.approx(2 / 2**5)
    assert p(1, 1, 1, 1, 1, 1, 1, -1) == pytest.approx(2 * 9 / 2**8) and p(0, 0, 0) == 1.0
    (line,) = pooled(grid_results, measure="falls", estimate="paired_shares", pooled="places").to_dict("records")
    assert (line["seeds"], line["p"], line["verdict"]) == (
        6,
        1.0,
        "undecided",
    )  # pairs of two workflows and three seeds
    assert line["value"] == pytest.approx(1 / 6)  # one of the three of isolated Voting


def test_pooled_shares_count_runs(grid_results):
    """All six isolated runs end fallen, and five of the six shared ones."""
    (line,) = pooled(grid_results, measure="falls", estimate="shares", pooled="places").to_dict("records")
    assert (line["seeds"], line["value"]) == (6, pytest.approx(1 / 6))
    alone = {"measure": "falls", "estimate": "share", "pooled": "places", "minus": None}
    (line,) = pooled(grid_results, arm="shared", **alone).to_dict("records")
    assert (line["seeds"], line["value"]) == (6, pytest.approx(5 / 6))


def test_runs_of_another_folder_serve_as_an_arm(grid_results, tmp_path):
    """Without the shared runs of its own a study reads those of `packed_in`, trains them no more, and has the same answers."""
    isolated = [("voting", "sp", "math", seed) for seed in (0, 1, 2)]
    apart, both = without(grid_results, isolated, tmp_path / "apart"), by_line(declared(), grid_results)
    assert by_line(declared(), apart).loc[("end", "voting"), "verdict"] == "not run"
    read = declared(packed_in=[str(grid_results)]).table(Results(apart, [grid_results]))
    pd.testing.assert_frame_equal(read.set_index(["question", "workflow"]), both)
    study = declare(Grid.read(apart), yaml.safe_load(STUDY) | {"packed_in": [str(grid_results)]})
    assert study.packed_elsewhere() >= {cell.id for cell in study.cells()}
    assert not declare(Grid.read(apart), yaml.safe_load(STUDY)).packed_elsewhere()


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"measure": "peek"}, "`measure` of the question 'q' is 'peek', which is none. Did you mean 'peak'"),
        ({"measure": "coherence"}, "needs .'role'."),
        ({"role": "generator"}, "has no ..role... Leave it out"),
        ({"minus": "split"}, "Questions name the arms .'split'., which `arms` does not have"),
        ({"arm": ["shared", "isolated"], "minus": ["shared"]}, "must be one arm, or one for each of"),
        ({"estimate": "shares", "minus": None}, "Write the other arm as `minus`"),
        ({"estimate": "paired_shares", "minus": None}, "Write the other arm as `minus`"),
        (
            {
                "arm": ["isolated", "everywhere"],
                "minus": ["shared", "everywhere"],
                "estimate": "paired_shares",
                "pooled": "places",
                "measure": "falls",
            },
            "pools runs of .1, 2. places in its lines",
        ),
        ({"at": 0.1}, "decided by its 95 % interval, so that its level is 0.05"),
        ({"measure": "only_ip_falls", "minus": None}, "compares a run with one of another arm"),
        ({"measure": "only_ip_falls", "estimate": "shares"}, "has one number for a pair of runs"),
        ({"measure": "falls", "estimate": "share"}, "the share of one arm, which `minus` has no part in"),
        ({"estimate": "shares"}, "'peak' of the question 'q' is a number and no pattern"),
        ({"enough": 0.1, "tested": False}, "is not tested, so that no bound applies"),
        ({"measure": "end", "last": 0}, "greater than or equal to 1"),
        ({"measure": "change", "role": "generator"}, "needs `metric` or `gain`"),
    ],
)
def test_a_study_that_cannot_work_is_refused(question, message):
    usual = {"name": "q", "question": "?", "measure": "peak", "arm": "isolated", "minus": "shared"}
    arms = yaml.safe_load(STUDY)["arms"]
    if "pooled" in question:
        arms |= {name: arms[name] | {"workflow": "voting"} for name in ("isolated", "shared")}
        arms |= {"everywhere": {"policy": "sp"}}
    with pytest.raises(ValueError, match=message):
        declared(questions=[usual | question], arms=arms)


def test_a_name_or_a_seed_that_is_declared_twice_is_refused():
    question = {"name": "q", "question": "?", "measure": "end", "arm": "isolated"}
    with pytest.raises(ValueError, match=r"The names of `questions` must not repeat, got \['q', 'q'\]"):
        declared(questions=[question, question | {"measure": "peak"}])
    with pytest.raises(ValueError, match=r"`seeds` must not repeat, got \[0, 0, 1, 2\]"):
        declared(seeds=[0, 0, 1, 2])


ROLE = {"name": "q", "question": "?", "measure": "change", "arm": "isolated"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"questions": [ROLE | {"metric": "length_mean", "role": "aggregator"}]}, "'aggregator', which eval_opt does not have"),
        ({"questions": [ROLE | {"gain": "select"}]}, "the gain 'select', which voting does not have. Its gains are .'selects'"),
        ({"arms": {"isolated": {"policy": "ip", "parameters": {"task": "code"}}}}, r"`parameters` cannot set \['task'\]"),
        ({"arms": {"isolated": {"policy": "ip", "parameters": {"policy": "sp"}}}}, r"`parameters` cannot set \['policy'\]"),
    ],
)  # fmt: skip
def test_a_study_of_roles_or_coordinates_that_its_cells_do_not_have_is_refused(changed, message):
    study = yaml.safe_load(STUDY) | {"questions": [ROLE | {"measure": "end"}]} | changed
    with pytest.raises(ValueError, match=message):
        declare(Grid("tiny-r"), study)


def test_a_folder_without_packed_runs_is_refused():
    study = declare(Grid("tiny-r"), yaml.safe_load(STUDY) | {"packed_in": ["results/tinyr"]})
    with pytest.raises(
        ValueError, match="`packed_in` must name folders of packed runs, .* got 'results/tinyr', which is looked for in"
    ):
        study.packed_elsewhere()


def test_a_metric_that_no_run_has_is_named(grid_results):
    study = declared(questions=[ROLE | {"metric": "length_meen", "role": "generator"}])
    with pytest.raises(ValueError, match=r"has no metric 'length_meen' of 'generator'\. Did you mean 'length_mean'\?"):
        study.table(Results(grid_results))


def test_a_measure_that_no_run_has_is_not_measured():
    numbers = pd.DataFrame({"workflow": "w", "task": "t", "seed": range(3), "value": math.nan})
    answers = judged(Question(MEASURES["end"], looks=Looks((3,))), [numbers, numbers.iloc[:0]])
    assert [answer.verdict for answer in answers] == ["not measured", "not run"]


def test_runs_without_a_number_are_in_no_share():
    """Two of the three runs of one arm fall, one of them late; no run of the other one falls."""
    late = [1.0, 0.0, math.nan]
    numbers = pd.DataFrame({"workflow": "w", "task": "t", "seed": range(3), "value": late, "minus": late})
    assert ESTIMATES["shares"](numbers).text.startswith("1 of 2 against 1 of 2")
    assert math.isnan(ESTIMATES["shares"](numbers.assign(minus=math.nan)).interval.low)
    assert (
        len(of_whole_seeds([numbers], [0, 1, 2], counts_missing=True)) == 3
        and len(of_whole_seeds([numbers], [0, 1, 2])) == 2
    )


def test_looks_beyond_the_seeds_are_refused():
    with pytest.raises(ValueError, match=r"`looks` must be numbers of seeds, from 2 to 3, got \[5\]"):
        declared(looks=[3, 5])


# ---- looks and verdicts


def test_a_verdict_is_of_the_last_look_that_is_reached():
    looks = Looks((5, 10), shows_unfinished=False)
    assert [looks.read(n) for n in (0, 4, 5, 7, 10, 12)] == [0, 0, 5, 5, 10, 10]
    assert [looks.missing(n) for n in (0, 4, 5)] == ["not run", "unfinished", ""]
    assert Looks((5,)).read(4) == 4 and Looks().read(4) == 4


def test_a_later_stage_is_read_only_where_the_first_decides_nothing():
    question = Question(MEASURES["end"], looks=Looks(stages=((0, 1, 2), (3, 4))))

    def seeds(*values: float) -> list[int]:
        numbers = pd.DataFrame({"workflow": "w", "task": "t", "seed": range(len(values)), "value": values})
        return list(judged(question, [numbers])[0].numbers["seed"])

    assert seeds(0.10, 0.11, 0.12, 0.5, 0.5) == [0, 1, 2]  # decided
    assert seeds(-0.1, 0.0, 0.1, 0.5, 0.5) == [0, 1, 2, 3, 4]
    assert seeds(-0.1, 0.0, 0.1, 0.5) == [0, 1, 2]  # the second stage is not complete
    assert seeds(-0.1, 0.0) == [0, 1]  # nor the first one


def test_an_interval_decides_by_the_side_it_lies_on():
    assert [side(*limits) for limits in ((0.01, 0.2), (-0.2, -0.01), (-0.1, 0.1))] == ["yes", "no", "undecided"]
    assert side(-0.02, 0.01, 0.0, -0.03) == "yes"  # not 3 points below is enough to match
    assert side(-0.02, -0.01, 0.0, -0.03) == "yes" and side(-0.2, -0.01, 0.0, -0.03) == "no"
    limits = ((-0.05, 0.09), (-0.05, 0.11), (0.11, 0.2), (-0.3, -0.2))
    assert [inside(*pair, 0.1) for pair in limits] == ["yes", "undecided", "no", "no"]


def test_a_corrected_p_decides_a_question_about_zero_and_the_interval_all_others():
    values = t_interval([0.1, 0.11, 0.12])
    assert decide(values, Rule()) == "yes" and decide(values, Rule(sign=-1)) == "no"
    assert decide(values._replace(p=0.06), Rule()) == "undecided"
    assert decide(values._replace(p=0.06), Rule(at=0.05)) == "yes" and decide(values, Rule(at=0.11)) == "undecided"
    assert decide(values, Rule(least_seeds=4)) == "undecided"
    share = NO_UNITS._replace(mean=0.1, low=0.02, high=0.2, seeds=10)
    assert decide(share, Rule(at=0.5, sign=-1)) == "yes"  # smaller than one half
    assert (
        decide(share, Rule(at=0.01, at_most=0.3)) == "yes" and decide(share, Rule(at=0.01, at_most=0.1)) == "undecided"
    )
    same = t_interval([-0.001, 0.0, 0.001])
    assert decide(same, Rule(has_margin=True)) == "equivalent" and decide(same, Rule()) == "undecided"


def test_no_of_many_needs_a_verdict_on_each():
    assert any_of(["no", "yes", "not run"]) == "yes" and any_of(["no", "equivalent"]) == "no"
    assert any_of(["no", "not run"]) == "undecided" and any_of(["not run"]) == "not run"
    assert any_of(["unfinished", "not run"]) == "unfinished"
    assert any_in_all([["yes", "no"], ["yes", "yes"]]) == "yes" and any_in_all([["yes", "no"]]) == "no"
    assert any_in_all([["yes", "undecided"]]) == "undecided" and any_in_all([["yes", "not run"]]) == "not run"


# ---- its runs and its notebook


def test_a_study_trains_its_arms_seed_by_seed(grid_results):
    """Two arms of two workflows and the single agent, in three seeds; a workflow is not trained for an arm that names its own."""
    study = declare(Grid.read(grid_results), yaml.safe_load(STUDY))
    assert [len(stage) for stage in study.stages()] == [5, 5, 5] and not study.evaluations()
    assert {(cell.workflow, cell.policy_name) for cell in study.cells()} == {
        ("voting", "ip"), ("voting", "sp"), ("eval_opt", "ip"), ("eval_opt", "sp"), ("single", "sp"),
    }  # fmt: skip
    for cell in study.cells():
        assert Cell(**study.parameters_of(cell)) == cell


def test_the_notebook_of_a_study_computes_its_table(grid_results, tmp_path):
    study = declare(Grid.read(grid_results), yaml.safe_load(STUDY))
    folder = linked(grid_results, tmp_path / "tiny-r")
    study.write(tmp_path)  # compare.json
    assert notebooks_of(folder) == ("compare",)
    table = computed("compare", folder, "compare")["compare"]
    assert list(table.shown["verdict"][:2]) == ["**no**", "**yes**"]
    assert list(table.shown["value"][:2]) == ["−70.8 [−94.5, −47.1]", "+16.7 [+7.7, +25.6]"]
    assert "at 2 (p < 0.01), 3 (p < 0.05) seeds" in table.caption


def test_an_accuracy_without_another_arm_is_no_difference(grid_results):
    question = {"name": "q", "question": "?", "measure": "peak", "arm": "shared"}
    study = declare(Grid.read(grid_results), yaml.safe_load(STUDY) | {"questions": [question]})
    assert "+" not in answer_table(Results(grid_results), study).shown["value"].str.cat()


def test_a_question_that_is_not_tested_shows_its_number_alone(grid_results):
    ends = {"name": "end", "question": "?", "measure": "end", "arm": "isolated", "minus": "shared"}
    shown = declared(questions=[ends | {"tested": False}])
    one, other = by_line(shown, grid_results), by_line(declared(questions=[ends]), grid_results)
    assert set(one["verdict"]) == {"not tested"} and one["p"].isna().all() and not other["p"].isna().any()
    assert one[["seeds", "value", "low", "high"]].equals(other[["seeds", "value", "low", "high"]])
    table = answer_table(Results(grid_results), shown)
    assert table.caption.endswith("Nothing is tested.") and "verdict" not in table.shown


def test_the_record_of_a_study_goes_with_its_grid(tmp_path, caplog):
    """Its lines would read "not run" beside another grid, and replace the finished tables."""
    declare(Grid("tiny-r"), yaml.safe_load(STUDY)).write(tmp_path)
    declare(Grid("tiny-r", seeds=[1]), {}).write(tmp_path)
    assert (tmp_path / "tiny-r/compare.json").exists()
    declare(Grid("tiny-r", parameters={"learning_rate": 0.001}), {}).write(tmp_path)
    assert not (tmp_path / "tiny-r/compare.json").exists() and "compare.json is removed" in caplog.text
