"""The README's links lead somewhere, and its commands exist."""

import re
from pathlib import Path

import pandas as pd

from multirole_study.experiment.progress import iteration_line, result_lines, validation_line
from multirole_study.paper.statistics import ALPHA, corrected, t_interval

ROOT = Path(__file__).parents[2]
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


NUMBER = r"([+−]?\d+(?:\.\d)?)"
INTERVAL = rf"{NUMBER} (?:points|%) \[{NUMBER}, {NUMBER}\]"
SAID = re.sub(r"\s+", " ", README)
WORKFLOWS, NAMES, POLICIES = (
    ("eval_opt", "voting", "orch_workers"),
    ("Eval-Opt", "Voting", "Orch-Workers"),
    ("IP", "SP"),
)
EVERY_CELL = [f"{name}-{policy}" for name in NAMES for policy in POLICIES]
HARDER = "four times the problems, four steps"
"""The single agent with as many steps as a workflow and four times the problems."""


def finding(pattern: str) -> list[float]:
    """The numbers of one sentence of the README: "N" stands for one, "I" for one with its interval."""
    match = re.search(re.sub(r"\b[NI]\b", lambda one: {"N": NUMBER, "I": INTERVAL}[one[0]], pattern), SAID)
    assert match, pattern
    return [float(number.replace("−", "-")) for number in match.groups()]


def rows(table: str, **where: object) -> pd.DataFrame:
    """Lines of a committed table, with what its correction makes of them."""
    found = corrected(pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / f"{table}.csv"))
    return found[(found[list(where)] == list(where.values())).all(axis=1)]


def points(table: str, *columns: str, digits: int = 1, **where: object) -> list[float]:
    """Numbers of a row of a table in percentage points: its value, low and high, or those of these columns."""
    row = rows(table, **where).squeeze()
    return [round(100 * row[column], digits) for column in columns or ("value", "low", "high")]


def is_decided(table: str, **where: object) -> bool:
    """Whether every such line differs from zero after the correction."""
    return bool((rows(table, **where)["p_holm"] < ALPHA).all())


def judged(claim: str, regime: str, verdict: str) -> list[float]:
    """A claim's mean over cells with its t interval over seeds, in points; its verdict must be this one."""
    numbers = rows("claims", claim=claim, regime=regime)
    assert set(numbers["verdict"]) == {verdict}
    return [round(100 * one, 1) for one in t_interval(numbers.groupby("seed")["value"].mean())[:3]]


def test_the_peaks_are_those_of_the_tables():
    lines = {
        name: [float(one) for one in re.findall(r"\d+\.\d", cells)]
        for name, cells in re.findall(r"^\| ([A-Z][\w-]+|single agent, [\w ]+) \|(.*\d\.\d.*)\|$", README, re.MULTILINE)
    }
    for name, workflow in zip(NAMES, WORKFLOWS, strict=True):
        assert lines.pop(name) == [
            points("table_1", "value", task="math", workflow=workflow, number=policy)[0] for policy in POLICIES
        ]
    variants = ("as many iterations", "four steps", HARDER)
    agents = [points("controls", "value", run=f"Single agent, {one}", number="peak") for one in variants]
    assert list(lines.values()) == agents
    assert set(rows("table_1", task="math", number="IP")["seeds"]) == {10} and "% (10 seeds)" in SAID


def test_workflows_win_at_equal_iterations_and_lose_at_equal_training():
    for policy in POLICIES:
        assert is_decided("table_1", task="math", number=f"{policy} − SA-RL")
    against = f"peak − {HARDER}"
    for cell in EVERY_CELL:
        assert is_decided("controls", run=cell, number=against)
        assert points("controls", "value", run=cell, number=against)[0] < 0
    pooled = {"run": "all cells, four times the problems", "number": against}
    value, low, high = points("controls", **pooled)
    assert finding(r"above workflows with as many problems by I \(N seeds\)") == [-value, -high, -low, 5]
    assert is_decided("controls", **pooled) and rows("controls", **pooled)["seeds"].item() == 5


def test_sharing_hardly_changes_the_peak():
    assert finding("IP − SP is I over") == judged("ip_has_the_higher_ceiling", "paper", "equivalent")
    cells = rows("ip_against_sp", at="peak").query("workflow != 'all cells'")
    (one,) = cells[cells["p_holm"] < ALPHA].itertuples()
    assert (one.workflow, one.task) == ("orch_workers", "code")
    said = finding("Orch-Workers on programs\\]\\(\\S+\\), I higher with isolated adapters")
    assert said == [round(100 * number, 1) for number in (one.value, one.low, one.high)]


def test_sharing_costs_stability():
    falls = rows("setup", task="math", variant="stress").pivot_table("value", ["workflow", "policy"], "number")
    assert (falls["falls"] == falls["runs"]).all(), "a run of a workflow did not fall"
    mean, low, high = judged("ip_falls_back", "stress", "fails")  # decidedly the other way
    assert finding("every run of a workflow falls\\]\\(\\S+\\) at some point, I farther") == [-mean, -high, -low]
    mean, low, high = judged("ip_falls_back", "stress, one step", "fails")
    assert rows("claims", claim="ip_falls_back", regime="stress, one step")["seed"].nunique() == 10
    assert finding("; I when every adapter takes one step") == [-mean, -high, -low]


def test_sharing_changes_the_roles():
    talk = {"task": "math", "phenomenon": "the aggregator grows verbose"}
    said = finding("A shared aggregator's replies grow by I, an isolated one's by I.")
    grown = [points("phenomena", digits=0, **talk, number=f"change, {policy}") for policy in ("SP", "IP")]
    assert said == [*grown[0], *grown[1]]
    assert is_decided("phenomena", **talk, number="change, SP") and is_decided("phenomena", **talk, number="SP − IP")
    one_step = talk | {"variant": "one step"}
    said = finding("they grow by N and N % \\(N seeds\\)")
    small = [
        points("phenomena_elsewhere", "value", digits=0, **one_step, number=f"change, {p}")[0] for p in ("SP", "IP")
    ]
    assert said == [*small, rows("phenomena_elsewhere", **one_step, number="seeds")["value"].item()]


def test_tokens_do_not_tell_who_owns_a_shared_adapter():
    where = {"task": "math", "workflow": "voting", "role": "aggregator"}
    written = points("role_gradients", "value", digits=0, **where, number="share of tokens")
    given = points("role_gradients", digits=0, **where, number="share of gradient")
    assert finding("An aggregator writes N % of its tokens and gives I of its") == [*written, *given]
    assert (rows("role_gradients", number="cosine")["value"] > -0.005).all()


def test_a_vote_of_the_single_agent():
    def minus_vote(cell: str, which: str = "larger vote") -> dict[str, object]:
        return {"task": "math", "run": f"{cell}, peak", "number": f"minus the next {which}"}

    for name, sign in (("Orch-Workers", 1), ("Eval-Opt", 1), ("Voting", -1)):
        for policy in POLICIES:
            where = minus_vote(f"{name}-{policy}")
            assert sign * points("inference", "value", **where)[0] > 0
            assert is_decided("inference", **where) == (f"{name}-{policy}" != "Eval-Opt-SP")
    with_prompts = [rows("inference", **minus_vote(cell, "smaller vote, prompts counted")) for cell in EVERY_CELL]
    assert not any(((line["value"] > 0) & (line["p"] < ALPHA)).any() for line in with_prompts)
