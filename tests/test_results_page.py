"""Every number with a unit on docs/results.md, and every verdict on results/README.md, is that of a committed table or of the code."""

import re
from pathlib import Path

import pandas as pd

from multirole.diagnostics.falls import FALL
from multirole.paper.statistics import MARGIN, RULES, corrected

ROOT = Path(__file__).parents[1]
SCALE = ROOT / "results" / "tiny-r"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
RESULTS = re.sub(r"\s+", " ", (ROOT / "results" / "README.md").read_text(encoding="utf-8"))
NUMBER = r"[+−]?\d+(?:\.\d+)?"
WITH_UNIT = rf"(?:{NUMBER},? (?:to|and|or) )?{NUMBER}(?: %| points)"


def rows(table: str, **where: object) -> pd.DataFrame:
    found = pd.read_csv(SCALE / "tables" / f"{table}.csv")
    return found[(found[list(where)] == list(where.values())).all(axis=1)]


def expected() -> dict[str, list[float]]:
    """Sentence, "N" standing for a number -> the numbers."""
    return {
        "at most N times as wide": [rows("over_problems", number="times as wide")["value"].max()],
        "equivalence within N points": [100 * MARGIN],
        "an evaluation N points below the best": [100 * FALL],
        "difference of N or N points": [100 * effect for effect in RULES["effects"]],
    }


def test_every_number_on_the_page_is_that_of_its_table():
    left = PAGE
    for sentence, values in expected().items():
        pattern = re.escape(sentence).replace("N", f"({NUMBER})")
        match = re.search(pattern, left)
        assert match, sentence
        for text, value in zip(match.groups(), values, strict=True):
            decimals = len(text.partition(".")[2])
            assert float(text.replace("−", "-")) == round(value, decimals), sentence
        left = left.replace(match[0], "")
    untraced = re.findall(WITH_UNIT, left)
    assert not untraced, f"no table is named for {untraced}"


def test_what_the_page_of_results_says_are_the_verdicts():
    """A line of its table names a claim, and its verdicts by policy at the preset's rate and under stress."""
    page = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    table = pd.read_csv(SCALE / "tables" / "claims.csv")
    said = {
        (regime, claim, policy.lower()): word
        for claim, *cells in re.findall(r"`(\w+)`: ([^|]+) \| ([^|]+) \|", page)
        for regime, words in zip(("paper", "stress"), cells, strict=True)
        for policy, word in re.findall(r"(IP − SP|IP|SP) (\w+)", words)
    }
    table = table[table["regime"].isin(["paper", "stress"]) & (table["verdict"] != "–")]
    assert said == {(row.regime, row.claim, row.policy): row.verdict for row in table.itertuples()}


def test_what_the_page_of_results_says_of_the_aggregators_worth():
    said = re.search(rf"SP − IP ({NUMBER}) points \[({NUMBER}), ({NUMBER})\]\).*? \(p (0\.\d+)\)", RESULTS)
    lines = corrected(pd.read_csv(SCALE / "tables" / "phenomena.csv"))
    (line,) = lines.query(
        "task == 'math' and phenomenon == \"the aggregator's selections\" and number == 'SP − IP'"
    ).to_dict("records")
    assert [float(one) for one in said.groups()[:3]] == [round(100 * line[of], 1) for of in ("value", "low", "high")]
    assert float(said[4]) == round(line["p_holm"], 3) > 0.05
    counts = corrected(pd.read_csv(SCALE / "tables" / "trivial_twins.csv")).query("twin == 'most candidates right'")
    counts = counts[counts["number"].str.startswith("gain")]
    better = counts[(counts["p_holm"] < 0.05) & (counts["value"] > 0)]
    assert better.empty and "No aggregator is shown to beat a count of most candidates" in RESULTS
    said = re.search(rf"by ({NUMBER}) points \[({NUMBER}), ({NUMBER})\] at the peak \(decided, nine seeds\)", RESULTS)
    (line,) = counts.query("task == 'code' and policy == 'ip' and number == 'gain at the peak'").to_dict("records")
    assert [float(one) for one in said.groups()] == [round(-100 * line[of], 1) for of in ("value", "high", "low")]
    assert line["p_holm"] < 0.05 and line["seeds"] == 9


def test_what_the_page_of_results_says_of_one_step_under_stress():
    lines = rows("table_1_regimes", task="math", number="end").query("workflow != 'single'")

    def ends(regime: str, policy: str) -> list[float]:
        values = 100 * lines[(lines["regime"] == regime) & (lines["policy"] == policy)]["value"]
        return [round(values.min(), 1), round(values.max(), 1)]

    said = re.search(
        r"SP then ends at N to N %, where with four or five steps it ended at N to N %, and IP at N to N %".replace(
            "N", f"({NUMBER})"
        ),
        RESULTS,
    )
    expected = ends("stress, one step", "sp") + ends("stress", "sp") + ends("stress, one step", "ip")
    assert [float(one) for one in said.groups()] == expected
    (fall,) = re.findall(rf"SP falls ({NUMBER}) points \[{NUMBER}, {NUMBER}\] farther than IP \(undecided", RESULTS)
    by_seed = rows("claims", claim="ip_falls_back", regime="stress, one step")
    assert float(fall) == round(-100 * by_seed.groupby("seed")["value"].mean().mean(), 1)
    assert set(by_seed["verdict"]) == {"undecided"} and by_seed["seed"].nunique() == 5
    runs = rows("setup", task="math", variant="stress, one step").groupby("number")["value"].sum()
    assert f"all {runs['falls']:.0f} runs fall, {runs['ending fallen']:.0f} of them for good" in RESULTS
    assert runs["runs"] == runs["falls"]


def test_what_the_page_of_results_says_of_roles_under_stress():
    skills = corrected(pd.read_csv(SCALE / "tables" / "skills.csv")).query("regime == 'stress'")
    changes, ends = (skills[skills["number"] == number].set_index("role") for number in ("change", "gain, end"))
    assert changes["p_holm"].max() < 0.05 and changes["value"].max() < 0
    said = {
        "selections end at N points [N, N]": ("selects", 1),
        "plans at N [N, N]": ("plans", 1),
        "merges at N [N, N]": ("merges", 1),
        "end N points [N, N] below a coin": ("judges", -1),
        "than it mends wrong ones, by N points [N, N]": ("repairs", -1),
    }
    for sentence, (role, sign) in said.items():
        match = re.search(re.escape(sentence).replace("N", f"({NUMBER})"), RESULTS)
        assert match, sentence
        value, *interval = (100 * sign * ends.loc[role, ["value", "low", "high"]].astype(float)).round(1)
        assert [float(one.replace("−", "-")) for one in match.groups()] == [value, *sorted(interval)], sentence
    assert f"({ends.loc['merges', 'seeds']:.0f} seeds" in RESULTS


def test_what_the_page_of_results_says_of_treatments():
    """Of `setup` and `judges`: a change in points, its interval, and whether it is decided."""
    judges, setup = (corrected(pd.read_csv(SCALE / "tables" / f"{name}.csv")) for name in ("judges", "setup"))

    def line(table: pd.DataFrame, variant: str, workflow: str, number: str) -> dict:
        chosen = (table["variant"] == variant) & (table["workflow"] == workflow) & (table["number"] == number)
        (found,) = table[chosen].to_dict("records")
        return found

    reward = "one step, process_reward 0.5"
    said = {
        "raises accuracy at the end by N points [N, N] in Voting": (judges, reward, "voting", "change at the end"),
        "and by N [N, N] in Eval-Opt, the first decided": (judges, reward, "eval_opt", "change at the end"),
        "selections gain changes by N points [N, N] (decided)": (judges, reward, "voting", "change of the gain"),
        "verdicts by N [N, N] (undecided)": (judges, reward, "eval_opt", "change of the gain"),
        "peaks N points [N, N] above": (setup, "policy map, worker apart", "orch_workers", "change at the peak"),
        "ends N [N, N] above": (setup, "policy map, worker apart", "orch_workers", "change at the end"),
        "moves the peak by N points [N, N]": (setup, "A/A", "voting", "change at the peak"),
        "and the end by N [N, N], which is equivalent": (setup, "A/A", "voting", "change at the end"),
    }
    for sentence, where in said.items():
        match = re.search(re.escape(sentence).replace("N", f"({NUMBER})"), RESULTS)
        assert match, sentence
        found = line(*where)
        assert [float(one.replace("−", "-")) for one in match.groups()] == [
            round(100 * found[of], 1) for of in ("value", "low", "high")
        ], sentence
        assert (found["p_holm"] < 0.05) == ("changes" in sentence or "raises" in sentence)
    (found,) = re.findall(r"\(no line of this arm is decided, in a family of (\d+)\)", RESULTS)
    elsewhere = corrected(pd.read_csv(SCALE / "tables" / "phenomena_elsewhere.csv"))
    assert int(found) == elsewhere["p_holm"].count()
    assert elsewhere[elsewhere["variant"] == "one step"]["p_holm"].min() >= 0.05
    selections = elsewhere[elsewhere["phenomenon"] == "the aggregator's selections"]
    (line,) = selections[(selections["variant"] == "released code") & (selections["number"] == "SP − IP")].to_dict(
        "records"
    )
    (p,) = re.findall(r"is decided there \(p (0\.\d+)\)", RESULTS)
    assert float(p) == round(line["p_holm"], 3)
    anchored = judges[judges["variant"].str.contains("anchored")]
    assert len(anchored["p_holm"].dropna()) == 4 and anchored["p_holm"].min() > 0.05
    assert not judges[judges["number"] == "protects"]["value"].any()


def test_what_the_page_of_results_says_of_five_times_the_iterations():
    lines = corrected(pd.read_csv(SCALE / "tables" / "setup.csv")).query("variant == 'long'")
    sums = lines.groupby("number")["value"].sum()
    assert sums["ending fallen"] == 0 and f"none of the {sums['runs']:.0f} runs ends in a fall" in RESULTS
    fallen = lines[(lines["number"] == "falls") & (lines["value"] > 0)]
    assert {(one.workflow, one.policy): one.value for one in fallen.itertuples()} == {
        ("eval_opt", "sp"): 5, ("eval_opt", "ip"): 1, ("voting", "ip"): 1, ("voting", "sp"): 1,
    }  # fmt: skip
    assert "All five of Eval-Opt-SP fall by 5 points on the way and recover, and one of each other cell" in RESULTS
    changes = lines[lines["number"] == "change at the peak"].set_index("workflow")[["value", "low", "high"]] * 100
    peaks = changes["value"].drop("all cells").round(1)
    said = re.search(rf"({NUMBER}) on average \[({NUMBER}), ({NUMBER})\] \(mean of four cells\)", RESULTS)
    assert [float(one) for one in said.groups()] == changes.loc["all cells"].round(1).tolist()
    said = re.search(rf"Cells peak ({NUMBER}) to ({NUMBER}) points above their twins", RESULTS)
    assert [float(one) for one in said.groups()] == [min(peaks), max(peaks)]
    assert lines["p_holm"].min() >= 0.05
    assert set(lines[lines["number"] == "runs"]["value"]) == {5} and "the five declared seeds" in RESULTS
