"""The README's links lead somewhere, and its commands exist."""

import re
from itertools import product
from pathlib import Path

import pandas as pd

from multirole.experiment.progress import iteration_line, result_lines, validation_line
from multirole.paper.statistics import corrected

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]
    assert sum(any(map(str.isalnum, word)) for word in README.split()) <= 920


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
        iteration_line(number, number, last["reward"], last["accuracy"], seconds, 0, dict(said["tokens"] / said["rows"])),
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
SAID = re.sub(r"\s+", " ", README)
WORKFLOWS, NAMES, POLICIES = (
    ("eval_opt", "voting", "orch_workers"),
    ("Eval-Opt", "Voting", "Orch-Workers"),
    ("IP", "SP"),
)


def finding(pattern: str) -> list[float]:
    """The numbers of one sentence of the README; "N" stands for one."""
    match = re.search(pattern.replace("N", NUMBER), SAID)
    assert match, pattern
    return [float(number.replace("−", "-")) for number in match.groups()]


def rows(table: str, **where: str) -> pd.DataFrame:
    """Lines of a committed table."""
    found = pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv")
    return found[(found[list(where)] == list(where.values())).all(axis=1)]


def points(table: str, *columns: str, **where: str) -> list[float]:
    """Numbers of a row of a table in percentage points: its value, low and high, or those of these columns."""
    row = rows(table, **where).squeeze()
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
        return [table_1(task, policy, workflow) for workflow in WORKFLOWS for policy in POLICIES]

    def phenomenon(name: str, policy: str) -> list[float]:
        return points("phenomena", task="math", phenomenon=name, number=f"change, {policy}")

    def against_vote(label: str, name: str, policy: str) -> float:
        return points("inference", "value", task="math", run=f"{name}-{policy}, peak", number=label)[0]

    lines = {
        name: [float(one) for one in re.findall(r"\d+\.\d", cells)]
        for name, cells in re.findall(r"^\| ([\w -]+?[\w ,]*) \|(.*\d\.\d.*)\|$", README, re.MULTILINE)
    }
    for name, workflow in zip(NAMES, WORKFLOWS, strict=True):
        assert lines[name] == [table_1("math", policy, workflow) for policy in POLICIES]
    more, steps = "four times the episodes", "four steps"
    agents = [
        points("controls", "value", run=f"Single agent, {variant}", number="peak")[0]
        for variant in ("as many iterations", steps, f"{more}, {steps}")
    ]
    said = ("as many iterations", "more optimizer steps", "also four times the problems")
    assert [lines[f"single agent, {one}"] for one in said] == [[one] for one in agents]
    against = f"peak − {more}, {steps}"
    cells = [f"{name}-{p}" for name in NAMES for p in POLICIES]
    behind = sorted(-points("controls", "value", run=cell, number=against)[0] for cell in cells)
    assert finding("it is N to N points above every workflow") == [behind[0], behind[-1]]
    value, low, high = points("controls", run="all cells, four times the problems", number=against)
    assert finding(r"and N \[N, N\] above workflows with as many problems") == [-value, -high, -low]
    gains = sorted(
        points("table_1", "value", task="code", workflow=w, number=f"{p} − SA-RL")[0]
        for w in WORKFLOWS
        for p in POLICIES
    )
    assert finding("On programs gains are N to N points over N %") == [
        gains[0], gains[-1], table_1("code", "SA-RL")
    ]  # fmt: skip
    claims = (ROOT / "results" / "tiny-r" / "tables" / "claims.md").read_text(encoding="utf-8")
    interval = rf"{NUMBER} \[{NUMBER}, {NUMBER}\]"
    (line,) = [line for line in claims.splitlines() if "IP peaks above SP" in line]
    *_, gap = re.finditer(rf"\*\*(\w+)\*\*: {interval}, (\d+ \w+)", line)  # the last regime is the grid's
    said = re.search(rf"over the \[six cells\]\(\S+\) is {interval} \((\d+ \w+)\): (\w+)", SAID)
    assert said.groups() == (*gap.groups()[1:], gap[1])
    change, verbose = r"N % \[N, N\]", "the aggregator grows verbose"
    talk = finding(rf"Its replies grow by {change} under SP and by {change} under IP")
    assert talk == phenomenon(verbose, "SP") + phenomenon(verbose, "IP")
    here = {"variant": "one step", "task": "math", "phenomenon": verbose}
    said = finding("by N and N % \\(5 seeds, undecided\\)")
    assert said == [points("phenomena_elsewhere", "value", **here, number=f"change, {p}")[0] for p in ("SP", "IP")]
    assert rows("phenomena_elsewhere", **here, number="seeds")["value"].squeeze() == 5
    one_step = {"variant": "one step", "task": "math", "number": "peak"}
    at = [
        points("matched_updates", "value", **one_step, workflow=w, policy=p.lower())[0]
        for w in ("voting", "eval_opt")
        for p in POLICIES
    ]
    assert finding("Voting peaks at N and N % .*?, Eval-Opt at N and N %, decidedly") == at
    larger = "minus the next larger vote"
    found = finding("Orch-Workers peaks N and N points higher .*, Eval-Opt N and N .*, Voting N and N lower")
    apart = [against_vote(larger, name, p) for name in ("Orch-Workers", "Eval-Opt", "Voting") for p in POLICIES]
    assert found == [*apart[:4], -apart[4], -apart[5]]


def test_the_falls_it_names_are_those_of_the_stressed_regime():
    stress = rows("table_1_regimes", regime="stress", task="math")
    ours, agent = stress[stress["workflow"] != "single"], stress[stress["workflow"] == "single"]

    def between(lines: pd.DataFrame, number: str) -> list[float]:
        values = sorted(round(100 * value, 1) for value in lines[lines["number"] == number]["value"])
        return [values[0], values[-1]]

    assert finding(r"from peaks\]\(.*\) of N to N % to") == between(ours, "peak")
    ends = {policy: between(ours[ours["policy"] == policy], "end") for policy in ("sp", "ip")}
    assert finding("N to N % under SP and N to N % under IP.") == ends["sp"] + ends["ip"]
    assert ends["sp"][1] < ends["ip"][0], "no longer farthest with a shared adapter"
    assert finding("The single agent falls from N to N %") == between(agent, "peak")[:1] + between(agent, "end")[:1]
    runs = stress[stress["number"] == "runs"]["value"].astype(int)
    n = f"{runs.min()} seeds" if runs.min() == runs.max() else f"{runs.min()} to {runs.max()} seeds"
    assert f"(arithmetic, {n})." in SAID
    falls = rows("setup", task="math", variant="stress").pivot_table("value", ["workflow", "policy"], "number")
    assert (falls["falls"] == falls["runs"]).all(), "a run of a workflow did not fall"
    assert set(rows("claims", regime="stress", claim="ip_falls_back")["verdict"]) == {
        "fails"
    }  # decidedly the other way
    claims = (ROOT / "results" / "tiny-r" / "tables" / "claims.md").read_text(encoding="utf-8")
    (line,) = [line for line in claims.splitlines() if "IP then falls back" in line]
    gap = re.search(rf"\*\*fails\*\*: {NUMBER} \[{NUMBER}, {NUMBER}\]", line)
    farther = [-float(one.replace("−", "-")) for one in (gap[1], gap[3], gap[2])]
    assert finding(r"SP falls N points \[N, N\] farther") == farther


def test_the_seeds_that_it_names_are_those_of_the_tables():
    assert f"points above every workflow ({seeds('controls', run='Voting-IP')})" in SAID
    assert f"({seeds('table_1', task='code')}; " in SAID
    voting = seeds("phenomena", task="math", workflow="voting", number="SP − IP")
    assert f"(arithmetic, {voting}; SP and the difference decided, IP not)" in SAID
    assert f"the preset's learning rate; {seeds('phenomena', task='math', number='SP − IP')}, 95 % t intervals" in SAID


def test_what_is_called_decided_is_so_after_correction():
    def p_holm(table: str, **where: str) -> float:
        rows = corrected(pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv"))
        return rows[(rows[list(where)] == list(where.values())).all(axis=1)]["p_holm"].max()

    for number in ("IP − SA-RL", "SP − SA-RL"):
        assert p_holm("table_1", task="math", number=number) < 0.05

    def p_vote(which: str, run: str) -> float:
        return p_holm("inference", task="math", run=run, number=f"minus the next {which}")

    for name, p in product(("Orch-Workers", "Voting"), POLICIES):
        assert p_vote("larger vote", f"{name}-{p}, peak") < 0.05
    assert p_vote("larger vote", "Eval-Opt-IP, peak") < 0.05 <= p_vote("larger vote", "Eval-Opt-SP, peak")
    smaller = rows("inference", task="math", number="minus the next smaller vote, prompts counted")
    assert not ((smaller["value"] > 0) & (smaller["p"] < 0.05)).any()
    words = ("none", "one", "two", "three", "four", "five", "all")
    against, problems = "peak − four times the episodes, four steps", ", four times the problems"
    cells = [f"{name}-{p}" for name in NAMES for p in POLICIES]
    assert all(p_holm("controls", run=cell, number=against) < 0.05 for cell in (*cells, f"all cells{problems}"))
    decided = [p_holm("controls", run=f"{cell}{problems}", number=against) < 0.05 for cell in cells]
    n = seeds("controls", run=f"Voting-IP{problems}")
    assert f"(mean of six cells, {n}; {words[sum(decided)]} cells decided)" in SAID
    for w, is_above in (("voting", False), ("eval_opt", True)):
        above = [
            p_holm("matched_updates", workflow=w, policy=p.lower(), number="peak − SA-RL") < 0.05 for p in POLICIES
        ]
        assert above == [is_above] * 2
    assert f"decidedly above it (arithmetic, {seeds('matched_updates', task='math', number='peak')})" in SAID
    talk = {"variant": "one step", "task": "math", "phenomenon": "the aggregator grows verbose"}
    assert all(p_holm("phenomena_elsewhere", **talk, number=f"change, {p}") >= 0.05 for p in POLICIES)
    decided = [
        p_holm("table_1", task="code", workflow=w, number=f"{p} − SA-RL") < 0.05 for w in WORKFLOWS for p in POLICIES
    ]
    assert f"{words[sum(decided)]} of six decided)" in SAID
    cells = corrected(pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / "ip_against_sp.csv")).query("at == 'peak'")
    (one,) = cells[(cells["workflow"] != "all cells") & (cells["p_holm"] < 0.05)].itertuples()
    assert (one.workflow, one.task) == ("orch_workers", "code")
    assert f"Orch-Workers on programs](results/tiny-r/tables/ip_against_sp.md), {100 * one.value:+.1f} [" in SAID
    grown = {
        number: p_holm("phenomena", task="math", phenomenon="the aggregator grows verbose", number=number)
        for number in ("change, SP", "change, IP", "SP − IP")
    }
    assert grown["change, SP"] < 0.05 > grown["SP − IP"] and grown["change, IP"] >= 0.05
