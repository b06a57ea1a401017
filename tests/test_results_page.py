"""Every number with a unit on docs/results.md, but for what the errata quote, is that of a committed table or of the code."""

import json
import random
import re
from pathlib import Path

import pandas as pd
import pytest

from multirole.paper.results import Results
from multirole.paper.statistics import MARGIN, RULES
from multirole.tasks.tiny_code import TinyCode, parse, run_steps

ROOT = Path(__file__).parents[1]
SCALE = ROOT / "results" / "tiny-s"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
NUMBER = r"[+−]?\d+(?:\.\d+)?"
WITH_UNIT = rf"(?:{NUMBER},? (?:to|and|or) )?{NUMBER}(?: %| points)"


def rows(table: str, **where: object) -> pd.DataFrame:
    found = pd.read_csv(SCALE / "tables" / f"{table}.csv")
    return found[(found[list(where)] == list(where.values())).all(axis=1)]


def same_functions() -> float:
    """The share of validation specifications that compute on 100 lists what a training one computes."""
    rng = random.Random(0)
    inputs = [[rng.randint(-60, 60) for _ in range(rng.randint(0, 14))] for _ in range(100)]

    def outputs(question: str) -> tuple[int, ...]:
        steps, reducer = parse(question)
        return tuple(reducer.run(run_steps(steps, xs)) for xs in inputs)

    cell = Results(SCALE).grid.cell("single", "sp", "code", 0)
    train, validation = (
        TinyCode().problems(split, n) for split, n in (("train", cell.n_train), ("validation", cell.n_validation))
    )
    known = {outputs(problem.question) for problem in train}
    return sum(outputs(problem.question) in known for problem in validation) / len(validation)


def expected() -> dict[str, list[float]]:
    """Sentence, "N" standing for a number -> the numbers."""
    covered = rows("coverage", number="t")["value"]
    bootstrap = rows("coverage", number="percentile bootstrap")
    bootstrap = bootstrap[bootstrap["units"] == "3 seeds"]["value"]
    peaks = rows("table_1", number="SA-RL").groupby("task")["value"].first()
    return {
        "coverage at N to N %": [100 * covered.min(), 100 * covered.max()],
        "equivalence within N points": [100 * MARGIN],
        "difference of N or N points": [100 * effect for effect in RULES["effects"]],
        "reaches N % on arithmetic and N % on programs": [100 * peaks["math"], 100 * peaks["code"]],
        "three seeds covers N to N %": [100 * bootstrap.min(), 100 * bootstrap.max()],
        "N % of the former compute on 100 lists what": [100 * same_functions()],
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
    untraced = re.findall(WITH_UNIT, left.partition("## Errata")[0])
    assert not untraced, f"no table is named for {untraced}"


def test_what_the_page_says_of_the_factorial():
    by = rows("factorial_predictors").set_index(["quantity", "number"])["value"]
    judged, errors = by[:, "arms"].iloc[0], by[:, "arms misjudged"].astype(int)
    assert f"Of its {judged:.0f} arms {by[:, 'unstable arms'].iloc[0]:.0f} are unstable" in PAGE
    assert errors.idxmin() == "rate × steps / √rows"
    both, moved, noise, steps = errors[
        ["rate × steps / √rows", "rate × steps (displacement)", "rate / √rows (noise)", "steps"]
    ]
    assert (
        f"misjudges {both} of them, learning rate × steps, how far an iteration can move the weights, {moved}," in PAGE
    )
    assert f"the noise of a step, {noise}, and the number of steps alone {steps}:" in PAGE
    counts = pd.concat([rows("factorial", number=name) for name in ("falls", "runs")]).astype({"value": float})
    counts = counts.groupby(["steps", "rate", "number"])["value"].sum().astype(int)
    one, four = (f"{counts[*at, 'falls']} of {counts[*at, 'runs']}" for at in ((1, 4.0), (4, 0.25)))
    assert f"falls in {one} runs, and four steps at a quarter of the rate in {four}" in PAGE
    change = rows("factorial_contrasts").set_index(["contrast", "number"])["value"].unstack()
    more = change["falls after"] - change["falls before"]
    assert more["four steps for one at four times the rate"] <= 0
    shown = (SCALE / "tables" / "factorial_contrasts.md").read_text()
    assert "*" not in shown.partition("\n\n")[2].partition("\n\n")[0]


def test_what_the_page_says_of_dual_clip_on_the_single_agent():
    """By the declared rule it helps if its pairs of arms have fewer falls in total and none has more."""
    clip = rows("factorial_contrasts", contrast="dual clip").set_index("number")["value"].astype(int)
    assert clip["falls after"] < clip["falls before"] and clip["pairs with more falls"] == 0
    assert (
        f"With it {clip['falls after']} runs of {clip['runs of each']} fall there, without it {clip['falls before']}"
        in PAGE
    )


def test_what_the_page_says_of_the_judges():
    shown = rows("judges")
    assert (shown[shown["number"] == "protects"]["value"] == 0).all()
    gains = shown[(shown["number"] == "change of the gain") & (shown["variant"] != "A/A")].set_index("variant")["value"]
    assert gains.idxmax() == "one step, judge anchored 0.1 (evaluator)"
    text = (SCALE / "tables" / "judges.md").read_text()
    assert "*" not in text.partition("\n\n")[2].partition("\n\n")[0] and "18 of 18 runs" in text
    again = rows("judges_confirmed").query("variant != 'A/A'").set_index("number")
    assert again.loc["protects", "value"] == 1 and again.loc["change of the gain", "seeds"] == 6
    assert again.loc["change at the end", "p"] < 0.05 / 4 and again.loc["change at the end", "value"] > 0


def test_what_the_page_says_of_dual_clip_on_the_workflows():
    of_all = rows("setup", workflow="all cells", variant="dual clip").set_index("number")
    assert of_all.loc["change at the peak", "p_match"] < 0.025  # two lines of all cells in the table
    assert of_all.loc["change at the end", "p"] > 0.05
    cells = rows("setup", variant="dual clip").query("workflow != 'all cells'").set_index("number")["value"]
    assert cells["change at the end"].min() < 0 < cells["change at the end"].max()
    assert cells["runs"].sum() == cells["falls"].sum() == 18 and cells["falls, twin"].sum() == 16


def test_what_the_page_says_of_the_remedies_and_of_peaks():
    results = Results(SCALE)
    if not (SCALE / "tables" / "remedies_checked.csv").exists():
        pytest.skip("`make paper` has not written it yet")
    checked = rows("remedies_checked")
    changes = checked[checked["number"].str.startswith("change")]
    assert len(changes) and (checked[checked["number"] == "runs"]["value"] == 3).all()  # every rollback chose alone
    shown = (SCALE / "tables" / "remedies_checked.md").read_text()
    assert "*" not in shown.partition("\n\n")[2].partition("\n\n")[0]
    keys = [key for key in results.runs if key.workflow != "single"]
    assert (
        0.4 < sum(results.run(key).steps["best"] == 10 for key in keys) / len(keys) < 0.6
    )  # half of the multi-agent runs


def test_no_score_announces_falls_better_than_rate_times_steps():
    scores = json.loads((ROOT / "results/bench/alarms.json").read_text())["scores"]
    ahead = {one["score"]: one["j"] for one in scores if one["target"] == "ahead"}
    assert max(ahead, key=ahead.get) == "baseline: rate x steps"


def test_what_the_page_of_results_says_of_tiny_r_are_the_verdicts():
    """A line of its table names a claim and its verdict by policy."""
    page = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    table = pd.read_csv(ROOT / "results" / "tiny-r" / "tables" / "claims.csv").query("regime == 'paper'")
    said = {
        (claim, policy.lower()): word
        for claim, words in re.findall(r"`(\w+)`: ([^|]+) \|", page)
        for policy, word in re.findall(r"(IP − SP|IP|SP) (\w+)", words)
    }
    found = {(row.claim, row.policy): row.verdict for row in table.itertuples()}
    assert len(said) >= 12 and said == {key: found[key] for key in said}
