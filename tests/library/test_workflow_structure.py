"""A workflow declares what its roles do, once: diagnostics read it, and an invalid declaration is refused."""

from types import SimpleNamespace

import pandas as pd
import pytest

from multirole import SkillWatch
from multirole.credit.turn_grading import grade_by_duty
from multirole.roles.skill import frame_of, role_skills
from multirole.types import Answer, Duty, Edge, Episode, Problem, Reward, Structure, Turn, check_workflow
from multirole.workflows import WORKFLOWS, EvalOpt, OrchWorkers


class Debate:
    name, roles = "debate", {"debater": 2, "referee": 1}
    structure = Structure({"debater": Duty("solves"), "referee": Duty("selects", "debater")})

    async def run(self, problem, call):
        raise NotImplementedError


def right_is_right(episodes):
    """Score the text "right" as correct."""
    for episode in episodes:
        is_right = episode.answer.text == "right"
        episode.reward = Reward(float(is_right), is_correct=is_right)


def turn(role: str, slot: int, round: int, text: str, outcome: str | None = None) -> Turn:
    return Turn(role, slot, round, [1], [2, 3], [0.0, 0.0], text, "stop", outcome)


def debate(first: list[str], last: list[str], picked: int) -> Episode:
    turns = [
        turn("debater", slot, round, text)
        for round, texts in enumerate((first, last))
        for slot, text in enumerate(texts)
    ]
    turns.append(turn("referee", 0, 0, "", str(picked + 1)))
    right = last[picked] == "right"
    return Episode(Problem("p", "t", "?", None), 0, turns, Answer(last[picked]), Reward(float(right), is_correct=right))


def test_the_skills_of_a_declared_workflow_by_hand():
    episodes = [
        debate(["wrong", "wrong"], ["right", "wrong"], 0),  # one repaired; the referee picks the right one
        debate(["right", "wrong"], ["right", "wrong"], 1),  # nothing repaired; it picks the wrong one
        debate(["right", "right"], ["right", "right"], 0),  # nothing to select
    ]
    grade_by_duty(episodes, right_is_right, Debate.structure)
    rows = {row["measure"]: row for row in role_skills(frame_of(episodes), Debate.structure)}
    assert rows["solves"]["skill"] == pytest.approx(3 / 6)  # of the first replies
    assert (rows["repairs"]["skill"], rows["repairs"]["trivial"]) == (pytest.approx(1 / 3), 0.0)
    assert (rows["selects"]["skill"], rows["selects"]["trivial"], rows["selects"]["cases"]) == (0.5, 0.5, 2)
    assert rows["workflow"]["skill"] == pytest.approx(2 / 3)


def test_a_script_gets_the_skills_from_a_public_callback():
    """Cells add it themselves; a script's evaluation has no skill without it."""
    trainer = SimpleNamespace(workflow=Debate(), score=right_is_right)
    metrics = {}
    episodes = [debate(["right", "wrong"], ["right", "wrong"], 1), debate(["wrong", "wrong"], ["right", "wrong"], 0)]
    SkillWatch().on_episodes_evaluated(trainer, episodes, metrics, "eval")
    assert metrics == pytest.approx(
        {"eval_debater_solves": 1 / 4, "eval_debater_repairs": 1 / 3, "eval_referee_selects": 1 / 2}
    )


def test_what_has_no_grade_is_no_case():
    """It is neither right nor wrong: the reward function set no `is_correct` there."""
    graded = [debate(["wrong", "right"], ["right", "wrong"], 0), debate(["wrong", "wrong"], ["wrong", "wrong"], 0)]
    unknown = [debate(["lost", "lost"], ["lost", "lost"], 0), debate(["wrong", "right"], ["lost", "wrong"], 0)]

    def score(episodes):
        right_is_right(episodes)
        for episode in episodes:
            if episode.answer.text == "lost":
                episode.reward = None

    grade_by_duty(graded, score, Debate.structure)
    expected = role_skills(frame_of(graded), Debate.structure)
    score(unknown)
    grade_by_duty(unknown[:1], score, Debate.structure)
    for row, same in zip(role_skills(frame_of(graded + unknown[:1]), Debate.structure), expected, strict=True):
        assert {name: row[name] for name in ("skill", "trivial", "cases")} == pytest.approx(
            {name: same[name] for name in ("skill", "trivial", "cases")}, nan_ok=True
        )
    grade_by_duty(unknown[1:], score, Debate.structure)
    rows = {row["measure"]: row for row in role_skills(frame_of(unknown[1:]), Debate.structure)}
    assert (rows["solves"]["skill"], rows["solves"]["cases"]) == (0.5, 2)
    assert rows["repairs"]["cases"] == 0 and rows["repairs"]["trivial"] == 1.0
    assert rows["selects"]["cases"] == rows["workflow"]["cases"] == 0


def test_a_role_that_selects_twice_has_one_skill_for_the_episode():
    episodes = [debate(["right", "wrong"], ["right", "wrong"], picked) for picked in (0, 1)]
    for i, episode in enumerate(episodes):
        episode.problem = Problem(str(i), "t", "?", None)
        episode.turns.append(turn("referee", 1, 0, "", "1"))
    grade_by_duty(episodes, right_is_right, Debate.structure)
    rows = {row["measure"]: row for row in role_skills(frame_of(episodes), Debate.structure)}
    assert (rows["selects"]["skill"], rows["selects"]["cases"]) == (0.5, 2)


def skills_of(turns_by_episode: list[list[Turn]], structure: Structure) -> dict[str, tuple[float, float]]:
    """Measure -> (skill, trivial) of judged episodes with these turns and a wrong answer."""
    episodes = [
        Episode(Problem(str(i), "t", "?", None), 0, turns, Answer(""), Reward(0.0, is_correct=False))
        for i, turns in enumerate(turns_by_episode)
    ]
    grade_by_duty(episodes, right_is_right, structure)
    return {row["measure"]: (row["skill"], row["trivial"]) for row in role_skills(frame_of(episodes), structure)}


def test_a_judges_skill_is_the_mean_of_its_rates_on_right_and_on_wrong_drafts():
    drafts = ["right"] * 2 + ["wrong"] * 4
    verdicts = ["correct"] * 3 + ["incorrect"] * 3
    skills = skills_of(
        [
            [turn("generator", 0, 0, draft), turn("evaluator", 0, 0, "", verdict)]
            for draft, verdict in zip(drafts, verdicts, strict=True)
        ],
        EvalOpt.structure,
    )
    assert skills["judges"] == ((1 + 3 / 4) / 2, 0.5)


def test_a_plan_works_if_one_worker_is_right():
    skills = skills_of(
        [
            [turn("orchestrator", 0, 0, ""), *(turn("worker", slot, 0, text) for slot, text in enumerate(texts))]
            for texts in (["right", "wrong", "wrong"], ["wrong", "wrong", "wrong"])
        ],
        OrchWorkers.structure,
    )
    assert skills["plans"] == (0.5, pytest.approx(1 / 6))


def test_replies_of_an_undeclared_role_are_graded_as_answers():
    episode = Episode(Problem("0", "t", "?", None), 0, [turn("solver", 0, 0, "right"), turn("solver", 1, 0, "wrong")])
    grade_by_duty([episode], right_is_right, Structure())
    assert [one.is_right for one in episode.turns] == [True, False]


def test_a_verdict_on_a_reply_without_a_grade_is_neither_right_nor_wrong():
    episode = Episode(Problem("0", "t", "?", None), 0)
    episode.turns = [turn("planner", 0, 0, "plan"), turn("critic", 0, 0, "", "incorrect")]
    grade_by_duty([episode], right_is_right, Structure({"planner": Duty("plans"), "critic": Duty("judges", "planner")}))
    assert [one.is_right for one in episode.turns] == [None, None]


def test_a_role_without_a_duty_has_format_and_length_only():
    (row,) = role_skills(
        pd.DataFrame(frame_of([debate(["right"], ["right"], 0)]).query("role == 'referee'")), Structure()
    )
    assert (row["measure"], row["valid"], row["length"]) == ("other", 1.0, 2.0)


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure({"jury": Duty("solves")}), r"names the roles \['jury'\], but the workflow's roles are"),
        (Structure({"referee": Duty("selects", "jury")}), r"names the roles \['jury'\]"),
        (Structure(edges=(Edge("question", "jury"),)), r"names the roles \['jury'\]"),
        (Structure({"referee": Duty("selects")}), "all other duties name in `of`"),
        (Structure({"debater": Duty("solves", "referee")}), "'solves' takes no other role"),
        (Structure({"debater": "solves"}), "must be made of `multirole.Duty`, got 'solves'"),
        (Structure(edges=(("debater", "referee"),)), "must be made of `multirole.Edge`"),
        (
            Structure({"referee": Duty("judge", "debater")}),
            "The duty of 'referee' must be one of .*'judges'.*, got 'judge'",
        ),
        ({"debater": "solves"}, "must be a `multirole.Structure`"),
    ],
)
def test_a_structure_that_does_not_fit_is_refused(structure, words):
    workflow = Debate()
    workflow.structure = structure
    with pytest.raises((ValueError, TypeError), match=words):
        check_workflow(workflow)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (
            {"judge-2": 1},
            "has the role 'judge-2'. A role's name must begin with a letter and have letters, digits and '_'",
        ),
        ({1: 1}, "has the role 1. A role's name must begin"),
        ({"judge": 0}, "gives the role 'judge' the number of slots 0, which must be 1 or more"),
        ({"judge": None}, "gives the role 'judge' the number of slots None"),
    ],
)
def test_roles_that_cannot_be_played_are_refused(roles, words):
    workflow = Debate()
    workflow.roles = roles
    with pytest.raises(ValueError, match=words):
        check_workflow(workflow)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_built_in_workflows_declare_every_role_and_a_path_to_the_answer(name):
    workflow = WORKFLOWS[name]()
    check_workflow(workflow)
    structure, reached = workflow.structure, {"question"}
    assert set(structure.duties) == set(workflow.roles) and structure.solver is not None
    for _ in (*workflow.roles, "answer"):
        reached |= {edge.target for edge in structure.edges if edge.source in reached}
    assert reached == {"question", "answer", *workflow.roles}


def test_an_evaluation_without_turns_has_no_skills():
    """Every prompt was longer than the cap."""
    episode = Episode(Problem("p", "t", "?", None), 0, [], Answer(""), Reward(0.0, is_correct=False))
    assert role_skills(frame_of([episode]), Debate.structure) == []
