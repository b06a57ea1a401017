"""The README's links lead somewhere, and its commands exist."""

import re
from pathlib import Path

import pandas as pd

from multirole.experiment.progress import iteration_line, result_lines, validation_line

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]
    assert len(README.split()) <= 900


def test_every_make_target_that_it_names_exists():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= targets


def test_the_output_of_make_cell_is_what_the_run_printed():
    """Its lines are those that a run prints, of the record of one `make cell`. If this fails, paste what is expected here."""
    metrics, roles, outcomes, skills = (
        pd.read_parquet(ROOT / "tests" / "data" / "make_cell" / f"{name}.parquet")
        for name in ("metrics", "roles", "eval", "skills")
    )
    last = metrics.iloc[-1]
    number, seconds = int(last["iteration"]), last["rollout_seconds"] + last["update_seconds"]
    said = roles[roles["iteration"] == number].set_index("role")
    end = outcomes[outcomes["step"] == number]
    run = "runs/tiny-s/voting-sp-math-s0"
    printed = [
        iteration_line(
            number, number, last["reward"], last["accuracy"], seconds, 0, dict(said["tokens"] / said["rows"]), []
        ),
        validation_line(
            number, end["reward"].mean(), end["correct"].mean(), len(end),
            skills[skills["step"] == number].to_dict("records"),
        ),
        "voting-sp-math-s0 is finished",
        *result_lines(outcomes),
        f"  folder      {run}",
        f"  to see it   multirole inspect {run}",
        f"  inspector   {run}/inspector.html",
        "  notebook    runs/tiny-s/voting-sp.html",
    ]  # fmt: skip
    assert "\n".join(["```", *printed, "```"]) in README


NUMBER = r"([+−]?\d+\.\d)"


def finding(pattern: str) -> list[float]:
    """The numbers of one sentence of the README; "N" stands for one."""
    match = re.search(pattern.replace("N", NUMBER), re.sub(r"\s+", " ", README))
    assert match, pattern
    return [float(number.replace("−", "-")) for number in match.groups()]


def points(table: str, *columns: str, **where: str) -> list[float]:
    """Numbers of a row of a table in percentage points: its value, low and high, or those of these columns."""
    rows = pd.read_csv(ROOT / "results" / "tiny-s" / "tables" / f"{table}.csv").fillna({"task": ""})
    row = rows[(rows[list(where)] == list(where.values())).all(axis=1)].squeeze()
    return [round(100 * row[column], 1) for column in columns or ("value", "low", "high")]


def test_the_findings_on_skill_are_the_numbers_of_the_table():
    def skill(regime, role, task, number, *columns):
        return points("skills", *columns, regime=regime, role=role, task=task, number=number)

    judges = ("stress, one step", "judges", "math")
    assert finding("Eval-Opt ends at N %") == skill(*judges, "accuracy, end", "value")
    start, end = (skill(*judges, f"gain, {place}", "value")[0] for place in ("start", "end"))
    assert finding("from N points above a coin to N below") == [start, -end]
    assert finding(r"a change of N \[N, N\] \(3 seeds") == skill(*judges, "change")
    paper = [skill("paper", "judges", task, "gain, end", "value")[0] for task in ("math", "code")]
    assert finding("it ends at N on arithmetic, at N on programs") == paper
    anchored = {"variant": "one step, judge anchored 0.1 (evaluator), fresh seeds"}
    gained, lost = (
        points("judges_confirmed", **anchored, number=f"change {of}") for of in ("of the gain", "at the end")
    )
    found = finding(
        r"ends N points higher \[N, N\] and accuracy N higher \[N, N\], decided on 6 fresh seeds of that cell"
    )
    assert found == gained + lost
    (protects,) = points("judges_confirmed", "value", **anchored, number="protects")
    assert protects == 100


def test_the_findings_on_steps_and_policies_are_the_numbers_of_the_tables():
    step = {"workflow": "all cells", "variant": "one step"}
    ends = points("matched_updates", **step, number="change at the end")
    assert finding(r"ends N points higher \[N, N\] than one per batch") == ends
    assert finding(r"as the single agent does \(N \[N, N\]\)") == points(
        "matched_updates", **step, number="peak − SA-RL"
    )
    gaps = [points("ip_against_sp", workflow="all cells", at=place) for place in ("end", "peak")]
    assert finding(r"isolated ones end N points higher \[N, N\] and peak N higher \[N, N\]") == gaps[0] + gaps[1]
    floor = points("power", "value", cell="all cells", at="end", number="SD (points)")
    assert finding("Two seeds of one cell differ by N points") == [round(floor[0] / 100, 1)]
    table = pd.read_csv(ROOT / "results" / "tiny-s" / "tables" / "factorial_predictors.csv")
    counts = table.pivot_table("value", "quantity", "number")
    of, alone = counts.loc["rate × steps / √rows"], counts.loc["steps"]
    misjudged = re.search(
        r"\((\d+) of (\d+) misjudged, threshold fitted on them\); steps alone misjudge (\d+)",
        re.sub(r"\s+", " ", README),
    )
    assert [*map(int, misjudged.groups())] == [of["arms misjudged"], of["arms"], alone["arms misjudged"]]
