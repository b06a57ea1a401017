"""docs/recipe.md, README and the preset `recommended` say what the committed study of recipes shows."""

import re
from pathlib import Path

import pandas as pd
import pytest

from multirole.types import Answer, user
from multirole_study.experiment.cell import COORDINATES, Cell
from multirole_study.experiment.presets import TINY

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "results" / "recipe" / "tiny-r" / "tables"
PAGE = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
CELLS = [f"{workflow}{task}" for task in ("", ", programs") for workflow in ("Voting", "Eval-Opt", "Orch-Workers")]
ANSWERS = pd.read_csv(TABLES / "rates_answers.csv")
SCORES = pd.read_csv(TABLES / "rates_scores.csv").set_index(["arm", "number"])["value"]


def points(number: float) -> str:
    return f"{100 * number:+.1f}".replace("-", "−")


def answered(question: str, arm: str) -> tuple[str, str]:
    """Return the interval of a line, and its verdict."""
    ((difference, low, high, verdict),) = ANSWERS[(ANSWERS["question"] == question) & (ANSWERS["arm"] == arm)][
        ["difference", "low", "high", "verdict"]
    ].to_numpy()
    return f"{points(difference)} [{points(low)}, {points(high)}]".replace("+", ""), verdict


def test_the_table_is_that_of_the_committed_runs():
    """If this fails, paste the expected lines into the page."""
    rows = []
    for cell in CELLS:
        ends = [f"{100 * SCORES[f'{arm}, {cell}', 'accuracy']:.1f}" for arm in ("IP", "SP", "critic")]
        end, skill = answered("cells_sp", f"critic, {cell}"), answered("skill_sp", f"critic, {cell}")
        rows.append(f"| {cell} | {' | '.join(ends)} | {end[0]} | {end[1]} | {skill[0]} | {skill[1]} |")
    assert "\n".join(rows) in PAGE, "\n".join(rows)


def test_what_the_recipe_costs():
    """Sampled tokens are the budget's. Tokens read and optimizer steps, relative to SP's in the same cell."""
    for number, text in (
        ("tokens read", "{:.2f} to {:.2f} times the tokens"),
        ("optimizer steps", "{:.2f} to {:.2f} times the optimizer steps"),
    ):
        ratios = [SCORES[f"critic, {cell}", number] / SCORES[f"SP, {cell}", number] for cell in CELLS]
        expected = text.format(min(ratios), max(ratios))
        assert expected in " ".join(PAGE.split()), expected


def test_the_preset_is_the_papers_but_for_what_the_study_chose():
    """And it stands only while the study's primary question is answered yes."""
    assert answered("recipe_sp", "6 arms, pooled")[1] == "yes"
    for scale in (TINY, "smollm2", "qwen-0.5b", "1.7b"):
        for workflow in ("single", "voting", "eval_opt", "orch_workers"):
            paper, recommended = (
                Cell(workflow, "sp", "code", scale, preset=preset) for preset in ("paper", "recommended")
            )
            differs = {name for name, value in recommended if value != dict(paper)[name]} - set(COORDINATES)
            assert differs == {"credit"} and recommended.credit == "critic" and recommended.changed() == {}
            assert recommended.id == f"{paper.id}-recommended"


class Pair:
    """A workflow that declares no duties."""

    name, roles = "pair", {"solver": 1, "referee": 1}

    async def run(self, problem, call):
        return Answer((await call("referee", [user((await call("solver", [user(problem.question)])).text)])).text)


def test_the_preset_is_refused_for_a_workflow_whose_turns_it_cannot_pay():
    assert Cell(Pair(), "sp").credit == "outcome"
    with pytest.raises(
        ValueError, match=r"no role of the workflow 'pair' has one.* Declare them, .* or write another `credit`"
    ):
        Cell(Pair(), "sp", preset="recommended")
    own = Cell(Pair(), "sp").changed()
    assert Cell(Pair(), "sp", preset="recommended", credit="outcome").changed() == own | {"credit": "outcome"}


def test_readme_names_the_preset_beside_its_evidence():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (finding,) = re.findall(r"- \*\*What to set\.\*\*.*?(?= - \*\*)", readme)
    assert "preset recommended" in finding and answered("recipe_sp", "6 arms, pooled")[0] in finding
