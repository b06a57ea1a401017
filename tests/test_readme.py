"""The README's links lead somewhere, and its commands exist."""

import re
from pathlib import Path

import pandas as pd

from multirole.experiment.progress import iteration_line, result_lines, validation_line
from multirole.paper.statistics import corrected

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
    run = "runs/tiny-r/voting-sp-math-s0"
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
        "  notebook    runs/tiny-r/voting-sp.html",
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
    rows = pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv").fillna({"task": ""})
    row = rows[(rows[list(where)] == list(where.values())).all(axis=1)].squeeze()
    return [round(100 * row[column], 1) for column in columns or ("value", "low", "high")]


def test_the_findings_are_the_numbers_of_the_tables():
    def table_1(number: str, workflow: str = "voting") -> float:
        return points("table_1", "value", workflow=workflow, number=number)[0]

    def phenomenon(name: str, policy: str) -> list[float]:
        return points("phenomena", phenomenon=name, number=f"change, {policy}")

    assert finding("One trained agent peaks at N %") == [table_1("SA-RL")]
    peaks = [
        table_1(policy, workflow) for workflow in ("eval_opt", "voting", "orch_workers") for policy in ("IP", "SP")
    ]
    assert finding("Eval-Opt at N and N, Voting at N and N, Orch-Workers at N and N") == peaks
    claims = (ROOT / "results" / "tiny-r" / "tables" / "claims.md").read_text(encoding="utf-8")
    gap = re.search(rf"IP peaks above SP .* \*\*equivalent\*\*: {NUMBER} \[{NUMBER}, {NUMBER}\], 6 seeds", claims)
    assert finding(r"over the three is N \[N, N\] \(6 seeds\): equivalent") == [
        float(one.replace("−", "-")) for one in gap.groups()
    ]
    verbose, solving = "the aggregator grows verbose", "the evaluator re-solves at length"
    change = r"N % \[N, N\]"
    talk = finding(rf"Its replies grow by {change} under SP and by {change} under IP")
    assert talk == phenomenon(verbose, "SP") + phenomenon(verbose, "IP")
    talk = finding(rf"The evaluator's: {change} and {change}")
    assert talk == phenomenon(solving, "SP") + phenomenon(solving, "IP")
    selections = finding(r"selections add changes by N points \[N, N\] under SP and N \[N, N\] under IP")
    worth = "the aggregator's selections"
    assert selections == phenomenon(worth, "SP") + phenomenon(worth, "IP")
    found = finding("Voting peaks N and N points lower .*, Eval-Opt N and N higher, Orch-Workers N and N")
    apart = [
        points("inference", "value", run=f"{name}-{policy}, peak", number="minus the nearest vote")[0]
        for name in ("Voting", "Eval-Opt", "Orch-Workers")
        for policy in ("IP", "SP")
    ]
    assert found == [-apart[0], -apart[1], *apart[2:]]


def test_what_is_called_decided_is_so_after_correction():
    def p_holm(table: str, **where: str) -> float:
        rows = corrected(pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv"))
        return rows[(rows[list(where)] == list(where.values())).all(axis=1)]["p_holm"].max()

    for number in ("IP − SA-RL", "SP − SA-RL"):
        assert p_holm("table_1", number=number) < 0.05
    assert p_holm("inference", number="minus the nearest vote") < 0.05
    for name in ("the aggregator grows verbose", "the aggregator's selections"):
        assert p_holm("phenomena", phenomenon=name, number="SP − IP") < 0.05
    assert p_holm("phenomena", phenomenon="the evaluator re-solves at length", number="SP − IP") > 0.05
