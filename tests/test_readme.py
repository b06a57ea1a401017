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


def seeds(table: str, **where: str) -> str:
    """How many seeds the rows of a table have, as the README says it."""
    rows = pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv")
    found = rows[(rows[list(where)] == list(where.values())).all(axis=1)]["seeds"].dropna().astype(int)
    return f"{found.min()} seeds" if found.min() == found.max() else f"{found.min()} to {found.max()} seeds"


def test_the_findings_are_the_numbers_of_the_tables():
    def table_1(task: str, number: str, workflow: str = "voting") -> float:
        return points("table_1", "value", task=task, workflow=workflow, number=number)[0]

    def peaks(task: str) -> list[float]:
        cells = [(workflow, policy) for workflow in ("eval_opt", "voting", "orch_workers") for policy in ("IP", "SP")]
        return [table_1(task, policy, workflow) for workflow, policy in cells]

    def phenomenon(name: str, policy: str) -> list[float]:
        return points("phenomena", task="math", phenomenon=name, number=f"change, {policy}")

    assert finding("On arithmetic one trained agent peaks at N %") == [table_1("math", "SA-RL")]
    assert finding("Eval-Opt at N and N, Voting at N and N, Orch-Workers at N and N") == peaks("math")
    programs = finding("On programs, .* the agent peaks at N and they at N and N, N and N, N and N")
    assert programs == [table_1("code", "SA-RL"), *peaks("code")]
    claims = (ROOT / "results" / "tiny-r" / "tables" / "claims.md").read_text(encoding="utf-8")
    interval = rf"{NUMBER} \[{NUMBER}, {NUMBER}\]"
    gap = re.search(rf"IP peaks above SP .* \*\*(\w+)\*\*: {interval}, (\d+ \w+)", claims)
    said = re.search(rf"over the six cells is {interval} \((\d+ \w+)\): (\w+)", re.sub(r"\s+", " ", README))
    assert said.groups() == (*gap.groups()[1:], gap[1])
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
        points("inference", "value", task="math", run=f"{name}-{policy}, peak", number="minus the nearest vote")[0]
        for name in ("Voting", "Eval-Opt", "Orch-Workers")
        for policy in ("IP", "SP")
    ]
    assert found == [-apart[0], -apart[1], *apart[2:]]


def test_the_seeds_that_it_names_are_those_of_the_tables():
    said = re.sub(r"\s+", " ", README)
    assert f"({seeds('table_1', task='math')}; every gain is decided)" in said
    assert f"({seeds('table_1', task='code')}" in said
    voting = seeds("phenomena", task="math", workflow="voting", number="SP − IP")
    assert f"(arithmetic, {voting}; the difference is decided, Holm)" in said and f"({voting}; undecided once" in said
    assert f"the preset's learning rate; {seeds('phenomena', task='math', number='SP − IP')}, 95 % t intervals" in said


def test_what_is_called_decided_is_so_after_correction():
    def p_holm(table: str, **where: str) -> float:
        rows = corrected(pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv"))
        return rows[(rows[list(where)] == list(where.values())).all(axis=1)]["p_holm"].max()

    for number in ("IP − SA-RL", "SP − SA-RL"):
        assert p_holm("table_1", task="math", number=number) < 0.05
    assert p_holm("inference", task="math", number="minus the nearest vote") < 0.05
    for workflow, number in (("eval_opt", "IP − SA-RL"), ("eval_opt", "SP − SA-RL"), ("orch_workers", "IP − SA-RL")):
        assert p_holm("table_1", task="code", workflow=workflow, number=number) < 0.05
    assert p_holm("phenomena", task="math", phenomenon="the aggregator grows verbose", number="SP − IP") < 0.05
    for name in ("the evaluator re-solves at length", "the aggregator's selections"):
        assert p_holm("phenomena", task="math", phenomenon=name, number="SP − IP") > 0.05
