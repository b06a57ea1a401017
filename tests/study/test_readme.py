"""README's links lead somewhere, its commands exist, and its numbers are those of committed tables. Its wording is free.

`CITED` has every number of the findings that is no line of a table, such as a count or a range; it is computed from the tables. The
tests at the end check what the findings say in words: if one fails, the findings must be written anew.
"""

import json
import math
import re
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from multirole_study.__main__ import COMMANDS
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.progress import result_lines
from multirole_study.falls import FALL
from multirole_study.paper.grid import Grid
from multirole_study.paper.questions import answers, difference_of_bases
from multirole_study.paper.results import Results
from multirole_study.paper.statistics import ALPHA, MARGIN, corrected, t_interval

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FINDINGS = re.sub(r"\]\([^)]*\)", "]", README.partition("\n## Findings\n")[2].partition("\n## ")[0]).replace("−", "-")
"""The section without the targets of its links."""
PROSE = re.sub(r"\s+", " ", FINDINGS)
TABLES = ROOT / "results" / "tiny-r" / "tables"
WORKFLOWS, NAMES, POLICIES = (
    ("eval_opt", "voting", "orch_workers"),
    ("Eval-Opt", "Voting", "Orch-Workers"),
    ("IP", "SP"),
)
EVERY_CELL = [f"{name}-{policy}" for name in NAMES for policy in POLICIES]
HARDER = "four times the problems, four steps"
"""The single agent with as many steps as a workflow and four times the problems."""
AGENTS = ("as many iterations", "four steps", HARDER)


def test_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_every_command_that_it_names_exists():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named and named <= targets
    commands = set(re.findall(r"(?:`|^|to see it +)multirole ([a-z_]+)", README, re.MULTILINE))
    assert commands and commands <= set(COMMANDS)


def test_every_papermill_call_is_of_a_notebook_and_a_cell():
    calls = re.findall(r"^papermill (.+)$", README, re.MULTILINE)
    assert calls
    for words in map(str.split, calls):
        (notebook, *_) = [word for word in words if word.endswith(".ipynb")]
        (declared,) = [
            cell for cell in json.loads((ROOT / notebook).read_text())["cells"] if "parameters" in cell["metadata"].get("tags", [])
        ]  # fmt: skip
        given = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-p"}
        assert all(re.search(rf"^{name}\b[\w: ]* = ", "".join(declared["source"]), re.MULTILINE) for name in given)
        Cell.from_parameters(given)


def test_the_output_of_make_cell_is_what_the_run_printed():
    """Its last lines are those that the record of one `make cell` gives. If this fails, paste the expected lines into the README."""
    outcomes = pd.read_parquet(ROOT / "tests" / "data" / "make_cell" / "eval.parquet")
    run = "runs/tiny-r/voting-sp-math-s0"
    printed = [
        "voting-sp-math-s0 is finished",
        *result_lines(outcomes),
        f"  folder      {run}",
        f"  to see it   multirole inspect {run}",
        f"  inspector   {run}/inspector.html",
        "  notebook    runs/tiny-r/voting-sp.html",
    ]
    assert "\n".join(["```", *printed, "```"]) in README


# ---- numbers


def rows(table: str, **where: object) -> pd.DataFrame:
    """Return lines of a committed table, with their verdicts after its correction."""
    lines = corrected(pd.read_csv(TABLES / f"{table}.csv"))
    return lines[(lines[list(where)] == list(where.values())).all(axis=1)]


def points(table: str, *columns: str, **where: object) -> list[float]:
    """Return numbers of one row of a table in percentage points: value, low and high, or the named columns."""
    row = rows(table, **where).squeeze()
    return [100 * row[column] for column in columns or ("value", "low", "high")]


def judged(claim: str, regime: str, verdict: str) -> list[float]:
    """Return a claim's mean over cells with its t interval over seeds, in points. Its verdict must be `verdict`."""
    numbers = rows("claims", claim=claim, regime=regime)
    assert set(numbers["verdict"]) == {verdict}
    return [100 * number for number in t_interval(numbers.groupby("seed")["value"].mean())[:3]]


@cache
def intervals() -> list[list[float]]:
    """Return (value, low, high) of every line of every committed table, in its unit and in percent, and of the claims' means."""
    found = [
        judged("ip_has_the_higher_ceiling", "paper", "equivalent"),
        judged("ip_falls_back", "stress", "fails"),
        judged("ip_falls_back", "stress, one step", "fails"),
    ]
    for path in (ROOT / "results").rglob("*.csv"):
        table = pd.read_csv(path) if path.read_text().strip() else pd.DataFrame()
        for name in ("value", "difference", "mean"):
            if {name, "low", "high"} <= set(table):
                numbers = table[[name, "low", "high"]].apply(pd.to_numeric, errors="coerce").dropna()
                found += [*numbers.to_numpy().tolist(), *(100 * numbers).to_numpy().tolist()]
    return found + [[-value, -high, -low] for value, low, high in found]


NUMBER = r"[+-]?\d+(?:\.\d+)?"
INTERVAL = rf"({NUMBER})[ \w%]*? \[({NUMBER}), ({NUMBER})(?:\]|, )"


def is_shown_as(text: str, number: float) -> bool:
    """Return whether `text` is the number, rounded to as many decimals."""
    return float(text) == round(number, len(text.partition(".")[2]))


def test_every_interval_of_the_findings_is_a_line_of_a_table():
    stated = re.findall(INTERVAL, PROSE)
    assert len(stated) >= 10 and len(stated) == len(re.findall(rf"\[{NUMBER}, {NUMBER}", PROSE))
    untraced = [
        triple
        for triple in stated
        if not any(all(map(is_shown_as, triple, numbers)) for numbers in intervals())
    ]  # fmt: skip
    assert untraced == []


def rates_answers() -> pd.DataFrame:
    answered = pd.read_csv(ROOT / "results/rates/tiny-r/tables/rates_answers.csv")
    assert set(answered["seeds"]) == {10}
    return answered.set_index(["question", "arm"])


def clock_counts(workflow: str, task: str, rate: str) -> pd.DataFrame:
    """Return the numbers of runs by arm."""
    falls = pd.read_csv(ROOT / "results/clock/tiny-r/tables/clock_falls.csv", dtype={"rate": str})
    here = falls[(falls[["workflow", "task", "rate"]] == [workflow, task, rate]).all(axis=1)]
    return here.pivot_table("value", "arm", "number")


ABOVE = [cell for cell in EVERY_CELL if cell not in ("Voting-IP", "Eval-Opt-SP")]
"""Cells that end above the agent of one step at tuned rates."""
CLOCK_PLACES = [("voting", "math", "0.006"), ("voting", "code", "0.006"), ("eval_opt", "code", "0.006"), ("voting", "math", "0.005")]  # fmt: skip


@cache
def cited() -> dict[str, list[float]]:
    """Return what is cited without an interval -> its numbers, in points or percent, or counts."""
    tuned, smollm2 = rates_answers(), ROOT / "results/smollm2"
    sums = [100 * row["mean"] for row in answers(Results(smollm2)) if row["question"] == "gain"]
    programs = {row["line"]: row for row in answers(Results(ROOT / "results/programs/smollm2"), "code")}
    table_1 = [points("table_1", "value", task="math", workflow=name, number=policy)[0] for name in WORKFLOWS for policy in POLICIES]  # fmt: skip
    agents = [points("controls", "value", run=f"Single agent, {name}", number="peak")[0] for name in AGENTS]
    of_clock = [clock_counts(*place) for place in CLOCK_PLACES]
    tuning = pd.read_csv(ROOT / "results/rates/tiny-r/tables/rates_tuning.csv").query("arm == 'single agent, one step'")
    gains = 100 * tuned.loc["step"].loc[ABOVE, "difference"]
    losses = -100 * tuned.loc["problems"].loc[EVERY_CELL, "difference"]
    return {
        "peaks": [*table_1, *agents],
        "gains over one step at tuned rates": [gains.min(), gains.max()],
        "losses to four times the problems at tuned rates": [losses.min(), losses.max()],
        "SmolLM2's agent above workflows": [-max(sums), -min(sums)],
        "and on programs": [-100 * programs[f"Voting, {policy}"]["mean"] for policy in POLICIES],
        "runs that end fallen under a clock that wraps": [counts.loc["IP, wrapping", "end fallen"] for counts in of_clock],
        "and in all": [counts.loc["IP, wrapping", "runs"] for counts in of_clock],
        "what a rate of 4e-3 gives": [100 * (tuning.set_index("rate")["accuracy"][0.004] - tuning.set_index("rate")["accuracy"][0.002])],
        "equivalence, a fall, equivalence of other bases": [100 * MARGIN, 100 * FALL, 5],
        "the intervals": [95],
    }  # fmt: skip


def test_every_other_number_with_a_unit_is_computed_from_the_tables():
    left = re.sub(INTERVAL, "", PROSE)
    with_unit = rf"(?:(?<!\w)({NUMBER}) (?:to|and|or|of) )?({NUMBER})(?: %|e-3)?(?: points| %| Voting| t intervals)"
    stated = [text for pair in re.findall(with_unit, left) for text in pair if text]
    stated += re.findall(r"\| (\d+\.\d) ", left)  # the table's
    known = [number for numbers in cited().values() for number in numbers]
    assert stated and [text for text in stated if not any(is_shown_as(text, number) for number in known)] == []


def test_the_table_has_the_peaks_of_its_rows():
    lines = re.findall(r"^\|([^|]*)\|(.*\d\.\d.*)\|$", FINDINGS, re.MULTILINE)
    shown = {name.strip(): re.findall(r"\d+\.\d", cells) for name, cells in lines}
    for name, workflow in zip(NAMES, WORKFLOWS, strict=True):
        of_row = [points("table_1", "value", task="math", workflow=workflow, number=policy)[0] for policy in POLICIES]
        assert all(map(is_shown_as, shown.pop(name), of_row)), name
    agents = [points("controls", "value", run=f"Single agent, {name}", number="peak")[0] for name in AGENTS]
    assert all(is_shown_as(text, number) for (text,), number in zip(shown.values(), agents, strict=True))


# ---- what the findings say in words


def is_decided(table: str, **where: object) -> bool:
    """Return whether every such line differs from zero after the correction."""
    return bool((rows(table, **where)["p_holm"] < ALPHA).all())


def is_undecided(table: str, **where: object) -> bool:
    """Return whether every such line is neither different from zero nor equivalent to it after the correction."""
    chosen = rows(table, **where)
    return bool(len(chosen) and (chosen["p_holm"] >= ALPHA).all() and not (chosen["p_match_holm"] < ALPHA).any())


def verdicts_of(question: str, base: str = "smollm2", task: str = "math") -> dict[str, str]:
    """Return line -> verdict of a declared question."""
    return {row["line"]: row["verdict"] for row in answers(Results(ROOT / "results" / base), task) if row["question"] == question}  # fmt: skip


def test_workflows_win_at_equal_iterations_which_is_not_equal_training():
    for policy in POLICIES:
        assert is_decided("table_1", task="math", number=f"{policy} − SA-RL")
    assert set(rows("table_1", task="math", number="IP")["seeds"]) == {10}
    more_steps, against = (f"peak − {agent}" for agent in ("four steps", HARDER))
    for cell in ["all cells", *EVERY_CELL]:
        assert is_undecided("controls", run=cell, number=more_steps)
    for cell in EVERY_CELL:
        assert is_decided("controls", run=cell, number=against)
        assert points("controls", "value", run=cell, number=against)[0] < 0
    pooled = {"run": "all cells, four times the problems", "number": against}
    by_cell = [f"{cell}, four times the problems" for cell in EVERY_CELL]
    assert sum(is_decided("controls", run=cell, number=against) for cell in by_cell) == 3
    assert is_decided("controls", **pooled) and rows("controls", **pooled)["seeds"].item() == 5
    steps = rows("controls", number="optimizer steps").set_index("run")["value"]
    assert steps[["Single agent, four steps", f"Single agent, {HARDER}"]].min() >= steps[EVERY_CELL].max()


def test_the_controls_before_an_arm_was_added():
    """docs/results.md gives the verdicts of the table without the arm that was added last, and one of them with it."""
    number = "peak − four steps"
    before = pd.read_csv(TABLES / "controls.csv")
    before = corrected(before[~before["run"].str.endswith("one step")]).query("number == @number").set_index("run")
    decided = before.index[before["p_holm"] < ALPHA]
    assert list(decided) == ["Orch-Workers-IP", "Orch-Workers-SP"]
    now = rows("controls", run="Orch-Workers-SP", number=number)["p_holm"].item()
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert all(f"{p:.3f}" in page for p in [*before["p_holm"][decided], now])


def test_the_single_agent_ends_above_workflows_on_smollm2():
    gains = verdicts_of("gain")
    assert len(gains) == 6 and set(gains.values()) == {"no"}
    programs = verdicts_of("gain", "programs/smollm2", "code")
    assert {programs[f"Voting, {policy}"] for policy in POLICIES} == {"no"}


def test_only_orch_workers_on_code_is_decided_between_the_policies():
    cells = rows("ip_against_sp", at="peak").query("workflow != 'all cells'")
    (decided,) = cells[cells["p_holm"] < ALPHA].itertuples()
    assert (decided.workflow, decided.task) == ("orch_workers", "code")


def test_sharing_costs_stability_at_three_times_the_rate():
    falls = rows("setup", task="math", variant="stress").pivot_table("value", ["workflow", "policy"], "number")
    assert (falls["falls"] == falls["runs"]).all(), "a run of a workflow did not fall"
    assert rows("claims", claim="ip_falls_back", regime="stress, one step")["seed"].nunique() == 10
    lines = answers(Results(ROOT / "results/smollm2"))
    real = [row for row in lines if row["question"] == "farther" and "−" in row["line"]]
    assert len(real) == 2 and all(row["mean"] < 0 and row["verdict"] == "undecided" for row in real)
    for claim in ("sp_fails_too", "ip_falls_more_often"):
        assert not rows("claims", regime="paper", claim=claim)["value"].any(), "a run ends fallen at the preset"


def test_a_shared_aggregator_talks_more():
    talk = {"task": "math", "phenomenon": "the aggregator grows verbose"}
    assert is_decided("phenomena", **talk, number="change, SP") and is_decided("phenomena", **talk, number="SP − IP")
    assert len(rows("phenomena_elsewhere", **talk, number="SP − IP")) == 6
    assert is_undecided("phenomena_elsewhere", **talk, number="SP − IP")
    assert verdicts_of("verbose")["Voting, aggregator, SP − IP"] == "undecided"


def test_where_deriving_costs_a_shared_aggregator_does_not_talk_more():
    """The declared reading of studies/vain.yaml: not yes there, and SP − IP lies below that on tiny-r."""
    here, there = (pd.DataFrame(answers(Results(ROOT / "results" / name))) for name in ("vain/tiny-r", "tiny-r"))
    gaps = difference_of_bases(there, here).set_index(["question", "line"])
    gap = gaps.loc[("verbose", "Voting, aggregator, SP − IP")]
    lines = here[here["question"] == "verbose"].set_index("line")
    assert lines["verdict"]["Voting, aggregator, SP − IP"] == "undecided" and gap["high"] < 0 and gap["seeds"] == 10
    shown = lines.loc[[f"Voting, aggregator, {policy}" for policy in POLICIES], ["mean", "low", "high"]]
    assert not (shown["low"] > 0).any()
    page = (ROOT / "results/README.md").read_text(encoding="utf-8").replace("−", "-")
    of_gap = -gap[["mean", "high", "low"]]
    for triple in [*shown.to_numpy(), lines.loc["Voting, aggregator, SP − IP", ["mean", "low", "high"]], of_gap]:
        value, low, high = (f"{100 * number:.0f}" for number in triple)
        assert re.search(rf"{value} (?:%|points) \[{low}, {high}\]", page), triple


def test_a_mini_batch_gradient_is_nearly_all_noise():
    """Slots of one role are exchangeable: the cosine of their gradients is the part of one slot's that is signal."""
    grid = {cell.id for cell in Grid.read(ROOT / "results" / "tiny-r").cells()}
    roles = pd.read_parquet(ROOT / "results" / "tiny-r" / "roles.parquet", columns=["run", "role", "coherence"])
    by_run = roles[roles["run"].isin(grid)].dropna().groupby(["run", "role"])["coherence"].mean()
    assert len(by_run) == 80 and by_run.abs().max() < 0.05


def test_a_clock_can_make_the_late_cliff():
    verdicts = pd.read_csv(ROOT / "results/clock/tiny-r/tables/clock_verdicts.csv", dtype={"rate": str})
    verdicts = verdicts.set_index(["workflow", "task", "rate", "question"])
    first, *elsewhere = CLOCK_PLACES
    assert verdicts.loc[(*first, "clock_makes_falls"), "verdict"] == "yes"
    assert verdicts.loc[(*first, "picture"), "verdict"] == "within IP only"
    counts = clock_counts(*first)
    assert counts.loc["IP, one clock", "end fallen"] == 0
    assert counts.loc["SP", "end fallen"] > counts.loc["SP", "runs"] / 2
    for place in elsewhere:
        assert verdicts.loc[(*place, "picture"), "verdict"] == "made by the clock"
        assert clock_counts(*place).loc["SP", "end fallen"] == 0
    read = verdicts[verdicts["seeds"] >= 5].xs("clock_makes_falls", level="question")["verdict"]
    assert set(read["eval_opt"]) == {"yes"} and len(read["eval_opt"]) == 4
    assert set(read["orch_workers"]) == {"undecided"} and len(read["orch_workers"]) == 4
    counts = clock_counts("eval_opt", "math", "0.006")
    assert counts.loc["SP", "end fallen"] > counts.loc["SP", "runs"] / 2 and set(counts["runs"]) == {10}


def test_replies_to_one_prompt_hold_more_credit():
    measured = pd.read_csv(TABLES / "credit_accuracy.csv")
    place = "workflow == 'voting' and step == 30 and role == 'all' and statistic == 'effect'"
    shares = measured.query(place).drop_duplicates("estimator").set_index("estimator")["value"]
    assert shares["leave_one_out"] >= 2 * shares["outcome"]


def test_comparisons_at_tuned_rates():
    """The questions of studies/rates.yaml that the README answers; results/README.md.jinja takes all of them from the table."""
    verdicts = rates_answers()["verdict"]
    step = dict.fromkeys(ABOVE, "better") | {"Voting-IP": "equivalent", "Eval-Opt-SP": "undecided"}
    steps = dict.fromkeys(EVERY_CELL, "undecided") | {"Voting-IP": "worse"}
    for question, expected in (("step", step), ("steps", steps), ("problems", dict.fromkeys(EVERY_CELL, "worse"))):
        assert verdicts[question][list(expected)].to_dict() == expected, question
    assert verdicts["sharing", "Voting-IP"] == "worse"


def test_more_credit_is_not_shown_to_train_better():
    """The leaderboard of studies/credit.yaml; results/README.md.jinja takes all arms from the tables."""
    tables = ROOT / "results/credit/tiny-r/tables"
    names = [f"leaderboard_{workflow}_sp_math_accuracy.csv" for workflow in ("voting", "eval_opt")]
    ends = pd.concat(pd.read_csv(tables / name) for name in names).set_index(["workflow", "arm"])
    assert set(ends["seeds"]) == {10} and "better" not in set(ends["verdict"])
    assert ends["verdict"]["voting", "leave_one_out in Voting"] == "undecided"
    assert ends["verdict"]["eval_opt", "leave_one_out in Eval-Opt"] == "worse"
    # results/README.md says how many tokens more or fewer than `outcome` these sampled
    tokens = (100 * (ends["tokens"] - 1)).round()
    assert list(tokens["voting"][["critic", "shapley", "single agent, Voting's tokens"]]) == [23, -23, 23]
    arms = ["branches in Eval-Opt", "mean_over_turns", "single agent, Eval-Opt's tokens"]
    assert list(tokens["eval_opt"][arms]) == [-14, 23, 37]


def test_what_two_other_builds_of_the_base_say():
    """The declared reading of studies/seed1.yaml: each of the README's statements holds, is contradicted, or is not known on both builds."""
    table = pd.read_csv(ROOT / "results/seed1/tiny-r/questions.csv")
    judged = table[table["base"] != "tiny-r"].set_index(["base", "question", "line"])

    def verdicts(question: str, *lines: str) -> dict[tuple[str, str], str]:
        """Return (line, base) -> verdict."""
        here = judged.xs(question, level="question").loc[list(product(("tiny-r-seed1", "tiny-r-seed2"), lines))]
        assert set(here["seeds"]) == {5}
        return {(line, base[-1]): verdict for (base, line), verdict in here["verdict"].items()}

    cells = [f"{workflow}, {policy}" for workflow in NAMES for policy in POLICIES]
    odd = dict.fromkeys([("Eval-Opt, IP", "1"), ("Orch-Workers, IP", "2"), ("Orch-Workers, SP", "2")], "undecided")
    assert verdicts("iterations", *cells) == dict.fromkeys(verdicts("iterations", *cells), "yes") | odd
    odd = {("Voting, SP", "2"): "equivalent"}
    assert verdicts("gain", *cells) == dict.fromkeys(verdicts("gain", *cells), "no") | odd
    assert "yes" not in verdicts("steps", *cells).values()
    assert set(verdicts("verbose", "Voting, aggregator, SP − IP", "Eval-Opt, evaluator, SP − IP").values()) == {"yes"}
    assert verdicts("farther", "Voting, SP − IP") == {
        ("Voting, SP − IP", "1"): "yes",
        ("Voting, SP − IP", "2"): "undecided",
    }
    sharing = [f"{workflow}, SP − IP" for workflow in NAMES]
    of_sharing = ["equivalent", "yes", "no", "equivalent", "yes", "equivalent"]
    assert list(verdicts("sharing", *sharing).values()) == of_sharing


@pytest.mark.parametrize("name", ["seed1", "seed2"])
def test_the_table_of_answers_is_that_of_the_packed_runs(name):
    table = pd.read_csv(ROOT / "results/seed1/tiny-r/questions.csv")
    here = table[table["base"] == f"tiny-r-{name}"]
    for row, now in zip(here.to_dict("records"), answers(Results(ROOT / "results" / name / "tiny-r")), strict=True):
        assert (row["verdict"], row["seeds"]) == (now["verdict"], now["seeds"])
        assert now["seeds"] == 0 or math.isclose(row["value"], now["mean"], rel_tol=1e-4, abs_tol=1e-6)
