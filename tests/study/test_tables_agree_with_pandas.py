"""Tables against an independent recomputation: plain pandas over the Parquet files, found by their config.json."""

import json
import re
import subprocess
from dataclasses import replace
from functools import cache
from math import isnan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from notebook_cells import computed, linked
from paper_results import recorded, without, without_iterations
from scipy.stats import t, ttest_1samp
from statsmodels.regression.mixed_linear_model import MixedLM
from statsmodels.stats.multitest import multipletests

from multirole_study.compare import corrections, intervals
from multirole_study.compare.measures import MEASURES, split_half_outcomes
from multirole_study.paper.captions import DECLARED, sentences
from multirole_study.paper.claims import claims
from multirole_study.paper.dynamics import amplitudes
from multirole_study.paper.grid import Grid
from multirole_study.paper.output import Table, formatted, pivoted
from multirole_study.paper.output import number as row_of
from multirole_study.paper.results import Results

CELLS = [(t, w) for t in ("math", "code") for w in ("eval_opt", "voting", "orch_workers")]


@pytest.fixture(scope="module")
def folder(grid_results) -> Path:
    return grid_results


OF_ROLES = ("skills", "phenomena", "trivial_twins", "role_gradients")


@pytest.fixture(scope="module")
def built_tables(folder, tmp_path_factory) -> dict[str, Table]:
    packed = linked(folder, tmp_path_factory.mktemp("built") / "tiny-r")
    return computed("tables", packed) | computed("mechanisms", packed, *OF_ROLES)


@cache
def files(folder: Path, table: str, kind: str | None = None) -> pd.DataFrame:
    """A table of every run, or of every evaluation whose folder's name begins with `kind`, with its coordinates."""
    frames = []
    for config in folder.glob("*/config.json") if kind is None else folder.glob("evaluations/*/*/config.json"):
        about = json.loads(config.read_text())
        cell = about.get("cell", about)
        if kind in (None, about.get("adapters")) and (config.parent / f"{table}.parquet").exists():
            policy = "ip" if len(set(cell["policy"].values())) > 1 else "sp"
            frame = recorded(config.parent / f"{table}.parquet")
            names = {"workflow": cell["workflow"], "policy": policy, "task": cell["task"], "seed": cell["seed"]}
            frames.append(frame.assign(**names))
    return pd.concat(frames)


def by_step(folder: Path) -> pd.DataFrame:
    """Validation accuracy, (workflow, policy, task, seed) x step."""
    return files(folder, "eval").groupby(["workflow", "policy", "task", "seed", "step"])["correct"].mean().unstack()


def number(values: pd.DataFrame, name: str, **where: str) -> pd.Series:
    """The one row of a tidy table."""
    rows = values[(values[list(where)] == list(where.values())).all(axis=1) & (values["number"] == name)]
    assert len(rows) == 1
    return rows.iloc[0]


def test_table_1(folder, built_tables):
    steps = by_step(folder)
    base, peak = steps[0], steps[[s for s in steps if s > 0]].max(axis=1)
    for task, workflow in CELLS:
        expected = {
            "base": base[workflow, "sp", task],
            "SA-RL": peak["single", "sp", task],
            "IP": peak[workflow, "ip", task],
            "SP": peak[workflow, "sp", task],
            "IP − SA-RL": peak[workflow, "ip", task] - peak["single", "sp", task],
            "SP − SA-RL": peak[workflow, "sp", task] - peak["single", "sp", task],
        }
        for name, by_seed in expected.items():
            row = number(built_tables["table_1"].values, name, task=task, workflow=workflow)
            assert row["value"] == pytest.approx(by_seed.mean()) and row["seeds"] == 3
            if by_seed.std() < 1e-9:
                assert isnan(row["low"]) and isnan(row["high"])
                continue
            low, high = ttest_1samp(by_seed, 0).confidence_interval()
            if name.startswith(("IP −", "SP −")):
                assert (row["low"], row["high"]) == pytest.approx((low, high))
            else:
                assert (row["low"], row["high"]) == pytest.approx((max(0, low), min(1, high)))


def test_table_1_checks(folder, built_tables):
    steps = by_step(folder)
    for (workflow, policy, task), runs in steps.groupby(level=[0, 1, 2]):
        row = number(built_tables["table_1_checks"].values, "final − peak", task=task, workflow=workflow, policy=policy)
        trained = runs.drop(columns=0)
        assert row["value"] == pytest.approx((trained[20] - trained.max(axis=1)).mean())
        halves = number(
            built_tables["table_1_checks"].values, "split-half peak", task=task, workflow=workflow, policy=policy
        )
        assert halves["value"] <= trained.max(axis=1).mean()
    collapsed = number(
        built_tables["table_1_checks"].values, "final − peak", task="math", workflow="voting", policy="ip"
    )
    assert collapsed["value"] < -0.5


def test_ip_against_sp_pools_over_cells(folder, built_tables):
    steps, values = by_step(folder), built_tables["ip_against_sp"].values
    gaps = [(steps.loc[(w, "ip", t), 20] - steps.loc[(w, "sp", t), 20]).mean() for t, w in CELLS]
    pooled = number(values, "IP − SP", workflow="all cells", at="end")
    assert pooled["value"] == pytest.approx(np.mean(gaps)) and pooled["seeds"] == 6
    assert pooled["p"] == pytest.approx(ttest_1samp(gaps, 0).pvalue)


def test_an_interval_over_seeds_and_problems_by_hand():
    """Two seeds, two problems, no interaction: the mean squares are 1 of seeds, 9 of problems and 0, each of one degree of freedom."""
    interval = intervals.crossed_interval(np.array([[0.0, 3.0], [1.0, 4.0]]))
    half = t.ppf(0.975, (1 + 9) ** 2 / (1 + 9**2)) * np.sqrt((1 + 9) / 4)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2, 2 - half, 2 + half))
    assert interval.seeds == 2 and isnan(interval.p) and isnan(interval.p_match)


def test_an_interval_over_seeds_and_problems_covers_problems_that_nobody_has_seen():
    rng, crossed, of_seeds, draws = np.random.default_rng(0), 0, 0, 400
    for _ in range(draws):  # whose true mean is 0
        values = rng.normal(0, 1, (6, 1)) + rng.normal(0, 4, (1, 40)) + rng.normal(0, 4, (6, 40))
        low, high = intervals.t_interval(values.mean(axis=1))[1:3]
        of_seeds += low <= 0 <= high
        low, high = intervals.crossed_interval(values)[1:3]
        crossed += low <= 0 <= high
    assert of_seeds / draws < 0.92 < crossed / draws < 0.98


def test_differences_over_problems_are_those_of_table_1(folder, built_tables):
    values = built_tables["over_problems"].values.query("regime == 'paper' and at == 'peak'")
    for task, workflow in CELLS:
        for name in ("IP − SA-RL", "SP − SA-RL"):
            where = {"task": task, "workflow": workflow}
            seeds, both = (
                number(values, over, **where, difference=name) for over in ("over seeds", "over seeds and problems")
            )
            usual = number(built_tables["table_1"].values, name, **where)
            assert (seeds["value"], seeds["low"], seeds["high"]) == pytest.approx(
                tuple(usual[["value", "low", "high"]])
            )
            assert both["value"] == pytest.approx(seeds["value"]) and both["low"] <= seeds["low"] + 1e-12
            wide = number(values, "times as wide", **where, difference=name)["value"]
            assert wide == pytest.approx((both["high"] - both["low"]) / (seeds["high"] - seeds["low"]))


def test_a_grid_at_the_preset_is_the_regime_paper(folder, built_tables):
    values, accuracy = (
        built_tables["table_1_regimes"].values,
        by_step(folder).loc["voting", "sp", "code"],
    )  # seed x step
    for name, expected in (("base", accuracy[0]), ("peak", accuracy.max(axis=1)), ("end", accuracy.iloc[:, -1])):
        row = number(values, name, regime="paper", task="code", workflow="voting", policy="sp")
        assert row["value"] == pytest.approx(expected.mean())
    assert set(values["regime"]) == {"paper"}


def test_trivial_twins_are_the_first_turns(folder, built_tables):
    outcomes = files(folder, "eval", "own").query(
        "workflow == 'voting' and policy == 'sp' and task == 'code' and step == 20"
    )
    twins = {
        "candidate 1": outcomes["slots_correct"].map(lambda slots: bool(slots[0])),
        "most candidates right": outcomes["slots_correct"].map(lambda slots: sum(slots) >= 2),
    }
    for name, right in twins.items():
        where = {"task": "code", "workflow": "voting", "policy": "sp", "twin": name}
        of_seeds = right.groupby(outcomes["seed"]).mean()
        row = number(built_tables["trivial_twins"].values, "end, twin", **where)
        assert row["value"] == pytest.approx(of_seeds.mean())
        gain = number(built_tables["trivial_twins"].values, "gain at the end", **where)
        assert gain["value"] == pytest.approx((outcomes.groupby("seed")["correct"].mean() - of_seeds).mean())


def test_skills_are_of_every_run_of_a_regime(folder, built_tables):
    skills = files(folder, "skills").query("measure == 'judges' and task == 'math'")
    gain = (
        (skills["skill"] - skills["trivial"])
        .groupby([skills["policy"], skills["seed"], skills["step"]])
        .mean()
        .unstack()
    )
    change = gain[[15, 20]].mean(axis=1) - gain[0]
    row = number(built_tables["skills"].values, "change", regime="paper", role="judges", task="math")
    assert row["value"] == pytest.approx(change.mean()) and row["seeds"] == 3


def test_the_accuracy_beside_a_skill_is_of_the_same_runs(folder, tmp_path):
    """The seed 2 has a run of one policy alone, and so no gain."""
    now = computed("mechanisms", without(folder, [("eval_opt", "ip", "math", 2)], tmp_path), "skills")["skills"].values
    ends = by_step(folder)[[15, 20]].mean(axis=1)
    expected = np.mean([ends["eval_opt", policy, "math", seed] for policy in ("ip", "sp") for seed in (0, 1)])
    row = number(now, "accuracy, end", regime="paper", role="judges", task="math")
    assert row["value"] == pytest.approx(expected)


def test_tables_have_a_run_that_diverged_in_its_first_iteration(folder, tmp_path):
    run = without_iterations(folder, tmp_path / "tiny-r", "voting", "ip", "math", 2)
    table_2 = computed("tables", run.folder, "table_2", "compute")["table_2"].values
    assert table_2.query("workflow == 'voting' and policy == 'ip' and task == 'math'")["seeds"].max() == 2
    phenomena = computed("mechanisms", run.folder, "phenomena", "claims")["phenomena"].values
    assert number(phenomena, "seeds", task="math", phenomenon="the aggregator grows verbose")["value"] == 2


def test_table_2_of_a_role_and_of_a_shared_adapter(folder, built_tables):
    roles, ledger = files(folder, "roles"), files(folder, "ledger")
    values = built_tables["table_2"].values.set_index(["task", "workflow", "policy", "role", "number"]).sort_index()
    mine = roles.query("workflow == 'voting' and policy == 'ip' and task == 'math' and role == 'generator'")
    ratios, steps, norms = [], [], []
    for _, run in mine.groupby("seed"):
        chi2 = run.set_index("iteration")["chi2"]
        ratios.append(chi2.max() / np.median(np.abs(chi2.loc[1:5])))
        steps.append(chi2.idxmax())
        norms.append(run["grad_norm"].max() / run["grad_norm"].iloc[0])
    numbers = values.loc["math", "voting", "ip", "generator"]
    assert numbers.loc["chi2 peak / first", ["low", "value", "high"]].tolist() == pytest.approx(sorted(ratios))
    assert numbers.loc["chi2 peak at iteration", "value"] == np.median(steps)
    assert numbers.loc["grad-norm peak / first", "value"] == pytest.approx(np.median(norms))

    of_shared = values.loc["math", "voting", "sp", "all roles (shared)"]
    peaks, rises, norms = [], [], []
    for seed, run in roles.query("workflow == 'voting' and policy == 'sp' and task == 'math'").groupby("seed"):
        run = run.assign(c=run["chi2"] * run["tokens"], p=run["perplexity"] * run["rows"]).groupby("iteration").sum()
        perplexity = run["p"] / run["rows"]
        peaks.append((run["c"] / run["tokens"]).max())
        rises.append(perplexity.max() / perplexity.loc[1])
        steps = ledger.query(f"workflow == 'voting' and policy == 'sp' and task == 'math' and seed == {seed}")
        norm = steps.groupby("iteration")["grad_norm"].mean()
        norms.append(norm.max() / norm.loc[1])
    assert of_shared.loc["chi2 peak", "value"] == pytest.approx(np.median(peaks))
    assert of_shared.loc["perplexity peak / first", "value"] == pytest.approx(np.median(rises))
    assert of_shared.loc["grad-norm peak / first", "value"] == pytest.approx(np.median(norms))


def test_a_role_of_one_step_has_no_ratio(built_tables):
    shown = built_tables["table_2"].shown
    aggregator = shown[(shown["role"] == "aggregator") & (shown["policy"] == "IP")]
    assert len(aggregator) == 2 and (aggregator["χ² peak / first"] == "undefined").all()
    assert (aggregator["χ² after the update, peak"] != "undefined").all()


def test_table_3(folder, built_tables):
    for column, kind in (("transfer", "transfer"), ("transfer to all", "transfer_all")):
        accuracy = files(folder, "eval", kind).groupby(["workflow", "task"])["correct"].mean()
        for task, workflow in CELLS:
            row = number(built_tables["table_3"].values, column, task=task, workflow=workflow)
            assert row["value"] == pytest.approx(accuracy[workflow, task]) and row["seeds"] == 3
            base = number(built_tables["table_1"].values, "base", task=task, workflow=workflow)["value"]
            if kind == "transfer":
                gap = number(
                    built_tables["table_3_differences"].values, "transfer − base", task=task, workflow=workflow
                )
                assert gap["value"] == pytest.approx(row["value"] - base)


def test_signatures(folder, built_tables):
    """Panel C1 at the end, and Panel A1's first turns, from the texts themselves."""
    turns = files(folder, "turns", "own").query("step == 20")
    values = signatures(built_tables["table_4"])
    said = turns.query("workflow == 'voting' and policy == 'ip' and task == 'math'")
    voters, aggregator = said[said["role"] == "generator"], said[said["role"] == "aggregator"]
    of_voters = values["C1", "terminal", "generator"]
    assert of_voters["boxed_rate"] == pytest.approx(voters["text"].str.contains(r"\\boxed\{\d+\}").mean())
    assert of_voters["hedging_rate"] == pytest.approx(voters["text"].str.contains(r"\bwait\b").mean())
    assert of_voters["truncated_rate"] == pytest.approx((voters["finish_reason"] == "length").mean())
    medians = aggregator.groupby("seed")["completion_tokens"].median()
    assert values["C1", "terminal", "aggregator", "length_p50"] == pytest.approx(medians.mean())
    shared = voters.groupby(["seed", "problem"])["text"].apply(lambda texts: pairwise(list(texts)))
    assert of_voters["jaccard"] == pytest.approx(shared.groupby("seed").mean().mean())

    judged = turns.query(
        "workflow == 'eval_opt' and policy == 'sp' and task == 'code' and role == 'evaluator' and round == 0"
    )
    a1 = signatures(built_tables["table_5"])["A1", "terminal"]
    fenced = judged["text"].str.startswith("```python")
    assert 0 < fenced.mean() < 1 and len(judged) < len(turns.query("workflow == 'eval_opt' and role == 'evaluator'"))
    assert a1["evaluator", "first_code_fence_rate"] == pytest.approx(fenced.mean())
    assert a1["evaluator", "first_bare_stamp_rate"] == pytest.approx(1 - fenced.mean())


def signatures(table: Table) -> pd.Series:
    """Means by panel, checkpoint, role and signature."""
    name_of = {label: name for name, (_, label) in DECLARED["signatures"].items()}
    values = table.values.assign(signature=table.values["signature"].map(name_of))
    return values.set_index(["panel", "number", "role", "signature"])["value"].sort_index()


def pairwise(texts: list[str]) -> float:
    """Mean 3-gram Jaccard of three texts."""
    grams = [{tuple(words[i : i + 3]) for i in range(len(words) - 2)} for words in (text.split() for text in texts)]
    pairs = [(a, b) for i, a in enumerate(grams) for b in grams[i + 1 :]]
    return float(np.mean([len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs]))


def test_compute(folder, built_tables):
    metrics, values = files(folder, "metrics"), built_tables["compute"].values
    for (task, workflow, policy), run in metrics.groupby(["task", "workflow", "policy"]):
        cell = {"task": task, "workflow": workflow, "policy": policy}
        assert number(values, "tokens sampled (M)", **cell)["value"] == run["completion_tokens"].sum()
        assert number(values, "runs", **cell)["value"] == 3
        seconds = run["rollout_seconds"].sum() + run["update_seconds"].sum()
        assert number(values, "wall-clock (h)", **cell)["value"] == pytest.approx(seconds)
    assert number(values, "runs", task="training, sum")["value"] == 42
    played = files(folder, "eval", "transfer")["prompt_tokens"].sum()
    assert number(values, "tokens read (M)", task="evaluations, transfer")["value"] == played


def test_table_7_shows_the_grid_beside_the_paper(built_tables):
    rows = built_tables["table_7"].values.set_index("setting")
    assert tuple(rows.loc["Training steps (iterations)"]) == ("500", "500", "20")
    assert tuple(rows.loc["Learning rate"]) == ("2e-5", "2e-5", "0.002")
    for setting, row in rows[rows["paper"].str.fullmatch(r"[\d.]+")].iterrows():
        if re.match(r"[\d.]+", row["preset"]):
            assert float(row["paper"]) == float(re.match(r"[\d.]+", row["preset"])[0]), setting


def test_the_same_results_give_the_same_bytes(folder, tmp_path):
    """Apart from the footer, which names the folder."""
    items = ("table_1", "table_3", "table_4")
    for name in "ab":
        computed("tables", linked(folder, tmp_path / name / "tiny-r"), *items)
    one, other = (tmp_path / name / "tiny-r" / "tables" for name in "ab")
    assert sorted(path.stem for path in one.glob("*.csv")) == sorted(items)
    for path in one.iterdir():
        texts = [(folder / path.name).read_text() for folder in (one, other)]
        assert texts[0].replace(str(tmp_path / "a"), "") == texts[1].replace(str(tmp_path / "b"), ""), path.name
        assert str(tmp_path) not in texts[0].partition("Computed in cell")[0]


def test_one_packed_row_changes_the_table(folder, tmp_path):
    """A right answer of one run's last checkpoint becomes wrong: the mean of three seeds and 16 problems falls by 1 / 48."""
    results, changed = linked(folder, tmp_path / "a" / "tiny-r"), linked(folder, tmp_path / "b" / "tiny-r")
    run = Grid.read(folder).cell("voting", "sp", "code", 1).id
    rows = pd.read_parquet(folder / "eval.parquet")
    is_there = (rows["run"] == run) & (rows["step"] == 20) & rows["correct"]
    rows.loc[is_there.idxmax(), "correct"] = False
    (changed / "eval.parquet").unlink()
    rows.to_parquet(changed / "eval.parquet")
    before, after = (
        computed("tables", path, "table_1_regimes")["table_1_regimes"].values for path in (results, changed)
    )
    differs = before["value"] != after["value"]
    where = {"regime": "paper", "task": "code", "workflow": "voting", "policy": "sp"}
    lines = [number(values, "end", **where)["value"] for values in (before, after)]
    assert differs.sum() >= 1 and (before.loc[differs, list(where)] == list(where.values())).all(axis=None)
    assert lines[0] - lines[1] == pytest.approx(1 / 48)
    texts = [(path / "tables" / "table_1_regimes.md").read_text() for path in (results, changed)]
    checksums = [re.search("SHA-256 ([0-9a-f]{12})", text)[1] for text in texts]
    assert checksums[0] != checksums[1]


def test_the_footer_names_the_cell_the_inputs_and_the_command(folder, tmp_path):
    packed = linked(folder, tmp_path / "tiny-r")
    computed("tables", packed, "table_7")
    footer = (packed / "tables" / "table_7.md").read_text().rstrip().rpartition("\n")[2]
    command = "(LC_ALL=C; cat *.json *.parquet | sha256sum)"
    printed = subprocess.run(command, shell=True, cwd=packed, capture_output=True, text=True, check=True).stdout
    assert footer == (
        f"Computed in cell `table_7` of `notebooks/tables.ipynb` from `{packed}` (SHA-256 {printed[:12]}): "
        f"`multirole paper {packed} --only table_7`"
    )


def test_captions_name_the_regime_the_sample_and_the_intervals(built_tables):
    for name, table in built_tables.items():
        if name != "table_7":
            assert "0.45M parameters" in table.caption and "Regime" in table.caption
            assert "learning rate 2e-3, cosine schedule, the preset's rate" in table.caption
        if name.startswith(("table_1", "table_3", "ip_", "trivial")):
            assert "95 % t intervals over seeds" in table.caption and "Rules: claims.yaml, version" in table.caption
            assert "All runs are finished" in table.caption


@pytest.mark.parametrize(
    ("parameters", "regime"),
    [
        ({"learning_rate": 6e-3, "lr_schedule": "constant"},
         "Regime `stress`: learning rate 6e-3, constant schedule, 3 times the preset's rate;"),
        ({"learning_rate": 6e-3, "lr_schedule": "constant", "updates": "one"}, "Regime `stress, one step`: learning rate 6e-3"),
        ({"max_steps": 30}, "Regime `paper`: learning rate 2e-3, cosine schedule, the preset's rate;"),
        ({"learning_rate": 1e-3}, "A regime of its own: learning rate 1e-3, cosine schedule, 0.5 times the preset's rate;"),
        ({"learning_rate": 6e-3}, "A regime of its own: learning rate 6e-3, cosine schedule, 3 times the preset's rate;"),
        ({"lr_schedule": "constant"}, "A regime of its own: learning rate 2e-3, constant schedule, the preset's rate;"),
        ({"updates": "one"}, "A regime of its own: learning rate 2e-3"),
    ],
)  # fmt: skip
def test_a_regime_has_its_name_only_with_its_own_rate_schedule_and_steps(parameters, regime, tmp_path):
    Grid("tiny-r", [0], parameters).write(tmp_path)
    said = sentences(Results(tmp_path / "tiny-r"))
    assert regime in said["regime"] and "seed 0 alone." in said["regime"]
    assert f"The grid is {regime[0].lower() + regime[1:].partition(':')[0]}".replace("regime `", "`") in said["regimes"]


def test_an_unfinished_grid_pairs_the_seeds_that_both_have(folder, built_tables, tmp_path):
    gone = [("orch_workers", "ip", "code", seed) for seed in (0, 1, 2)]
    gone += [("voting", "ip", "math", 0), ("single", "sp", "math", 1)]
    now = computed("tables", without(folder, gone, tmp_path), "table_1")["table_1"]
    shown = now.shown.set_index(["task", "workflow"])
    assert shown.loc[("code", "Orch-Workers"), "IP"] == "–" == shown.loc[("code", "Orch-Workers"), "IP − SA-RL"]
    assert shown.loc[("code", "Orch-Workers"), "SP"] != "–" and "Not finished: 5 of 42 runs" in now.caption
    peak = by_step(folder).drop(columns=0).max(axis=1)
    row = number(now.values, "SA-RL", task="math", workflow="voting")
    assert row["value"] == pytest.approx(peak["single", "sp", "math"].drop(1).mean()) and row["seeds"] == 2
    gap = number(now.values, "IP − SA-RL", task="math", workflow="voting")
    assert gap["value"] == pytest.approx(peak["voting", "ip", "math", 2] - peak["single", "sp", "math", 2])
    assert gap["seeds"] == 1


def test_captions_name_a_second_base_of_a_task(folder, tmp_path):
    """Two nodes of one grid may have different bases: one reached the Hub, and the other did not."""
    mixed = without(folder, [], tmp_path)
    assert "bases differ" not in sentences(Results(mixed))["finished"]
    runs = pd.read_parquet(mixed / "runs.parquet")
    is_other = runs["run"].str.startswith("voting-ip-math-s0")
    other = json.dumps({"model": {"name": "hub", "sha256": {"model.safetensors": "f" * 64}, "dtype": "float32"}})
    runs.assign(provenance=runs["provenance"].mask(is_other, other)).to_parquet(mixed / "runs.parquet")
    finished = sentences(Results(mixed))["finished"]
    assert (
        "The bases differ on math: " in finished
        and f"{is_other.sum()} runs and evaluations of hub, ffffffffffff, float32" in finished
    )
    assert "on code" not in finished


def test_a_grid_without_a_finished_run_has_dashes(tmp_path):
    Grid("tiny-r", [0, 1, 2]).write(tmp_path)
    made = computed("tables", tmp_path / "tiny-r")
    assert {"table_1", "table_7"} <= set(made) and "over_problems" not in made, "a table without lines"
    for name, table in made.items():
        assert name == "table_7" or "Not finished: 42 of 42 runs" in table.caption
    assert (made["table_1"].shown["IP"] == "–").all()


@pytest.mark.slow
def test_a_grid_of_one_task_has_the_tables_of_that_task(folder, built_tables, tmp_path):
    """An example is scale tiny-r, whose base knows only arithmetic."""
    one = without(folder, [], tmp_path)
    replace(Grid.read(one), tasks=["math"]).write(tmp_path)
    results, shown = Results(one), computed("tables", one) | computed("mechanisms", one, *OF_ROLES)
    for table in [*shown.values(), claims(results, sentences(results))]:
        values = table.values
        assert "task" not in values or "code" not in set(values["task"]), table.name
    both = built_tables["table_1"].values.query(
        "task == 'math'"
    )  # whose differences are corrected together with those of programs
    assert shown["table_1"].values["value"].tolist() == both["value"].tolist()
    settings = shown["table_7"].shown.set_index("setting")["grid"]
    assert settings["Voting, code (prompt / response tokens)"] == "–"


def test_all_cells_are_those_of_the_grid(folder, tmp_path):
    one = without(folder, [], tmp_path)
    replace(Grid.read(one), workflows=["voting"], tasks=["math"]).write(tmp_path)
    values = computed("tables", one, "ip_against_sp")["ip_against_sp"].values
    every, voting = (number(values, "IP − SP", workflow=name, at="end")["value"] for name in ("all cells", "voting"))
    assert every == voting


def test_phenomena_are_changes_from_the_first_to_the_last_iterations(folder, built_tables):
    roles = files(folder, "roles").query("workflow == 'voting' and task == 'math' and role == 'aggregator'")
    length = roles.pivot(index=["policy", "seed"], columns="iteration", values="length_mean")
    change = length.loc[:, 16:].mean(axis=1) / length.loc[:, :5].mean(axis=1) - 1  # of 20 iterations
    line = {"task": "math", "phenomenon": "the aggregator grows verbose"}
    values = built_tables["phenomena"].values
    for policy in ("ip", "sp"):
        assert number(values, f"change, {policy.upper()}", **line)["value"] == pytest.approx(change[policy].mean())
    gap = number(values, "SP − IP", **line)
    assert gap["value"] == pytest.approx((change["sp"] - change["ip"]).mean())
    assert gap["p"] == pytest.approx(ttest_1samp(change["sp"] - change["ip"], 0).pvalue)
    skills = files(folder, "skills").query("measure == 'selects' and task == 'math' and policy == 'ip'")
    gain = skills.assign(gain=skills["skill"] - skills["trivial"]).pivot(index="seed", columns="step", values="gain")
    row = number(values, "change, IP", task="math", phenomenon="the aggregator's selections")
    assert row["value"] == pytest.approx((gain[[15, 20]].mean(axis=1) - gain[0]).mean())


def test_t_intervals_by_hand():
    interval = intervals.t_interval([0.1, 0.2, 0.3])
    assert (interval.mean, interval.sd, interval.seeds) == (pytest.approx(0.2), pytest.approx(0.1), 3)
    assert interval.high - interval.mean == pytest.approx(4.302653 * 0.1 / 3**0.5)
    assert interval.p == pytest.approx(ttest_1samp([0.1, 0.2, 0.3], 0).pvalue)
    assert isnan(intervals.t_interval([0.4]).low) and intervals.t_interval([0.4]).mean == 0.4


def test_equal_units_have_no_interval_and_no_test():
    """Three seeds that differ by 4 of 64 problems each are no proof that every seed does."""
    same = intervals.t_interval([4 / 64, 4 / 64, 4 / 64])
    assert (same.mean, same.sd, same.seeds) == (4 / 64, 0.0, 3)
    assert all(isnan(getattr(same, name)) for name in ("low", "high", "p", "p_match"))
    problems = np.zeros((3, 64))
    for seed in range(3):
        problems[seed, 4 * seed : 4 * seed + 4] = 1.0
    crossed = intervals.crossed_interval(problems)  # the problems differ no more than by chance
    assert crossed.mean == 4 / 64 and isnan(crossed.low) and isnan(crossed.high)


def test_a_mean_over_cells_is_the_mixed_models():
    """With as many seeds in every cell, REML's mean and its error are those of the cells' means."""
    rng = np.random.default_rng(0)
    values = 0.1 + rng.normal(0, 0.2, (8, 1)) + rng.normal(0, 0.1, (8, 3))
    fitted = MixedLM(values.ravel(), np.ones(24), np.repeat(np.arange(8), 3)).fit()
    interval = intervals.t_interval(values.mean(axis=1))
    assert (fitted.params[0], fitted.bse[0]) == pytest.approx((interval.mean, interval.sd / 8**0.5), rel=1e-3)


def test_equivalence_is_two_one_sided_tests():
    inside, outside = intervals.t_interval([0.001, -0.001, 0.002]), intervals.t_interval([0.03, 0.05, 0.04])
    assert inside.p_match == pytest.approx(ttest_1samp([0.001, -0.001, 0.002], 0.03, alternative="less").pvalue)
    assert inside.p_match < 0.05 < outside.p_match


def test_holm_is_that_of_statsmodels():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 180):
        p = rng.random(n) ** 3
        p[n // 2] = p[0]  # a tie
        assert list(corrections.holm(p)) == list(multipletests(p, method="holm")[1])


def test_holm_corrects_differences_alone_and_pooled_lines_apart():
    rows = [
        (0.01, "difference", "voting"),
        (0.04, "difference", "voting"),
        (0.001, "accuracy", "voting"),
        (0.04, "difference", "all cells"),
    ]
    table = pd.DataFrame(rows, columns=["p", "unit", "workflow"]).assign(p_match=1.0)
    assert corrections.corrected(table)["p_holm"].tolist() == pytest.approx([0.02, 0.04, np.nan, 0.04], nan_ok=True)


def test_seeds_needed_by_hand():
    assert intervals.seeds_needed(0.1, 0.1) == 10  # textbooks: d = 1, 80 %, two-sided 5 %
    assert intervals.seeds_needed(0.1, 0.05) == 34
    assert intervals.seeds_needed(1e-9, 0.05) == 2 and intervals.seeds_needed(1.0, 0.001) is None


def test_a_larger_spread_never_needs_fewer_seeds():
    """scipy's noncentral t has NaN in places; two seeds find 0.1 at a deviation of 0.008 with probability 0.83 (by integration)."""
    needed = [intervals.seeds_needed(sd, 0.1) for sd in np.linspace(0.004, 0.05, 200)]
    assert needed == sorted(needed) and intervals.seeds_needed(0.008, 0.1) == 2


def test_differences_are_paired_by_seed():
    before, after = pd.Series({0: 0.5, 1: 1.0, 2: 0.9}), pd.Series({1: 1.0, 0: 1.0, 3: 0.1})
    paired = intervals.difference(after, before)
    assert (paired.mean, paired.seeds) == (0.25, 2) and paired.sd == pytest.approx(0.5 / 2**0.5)
    nothing = intervals.difference(after, before[[2]])
    assert isnan(nothing.mean) and nothing.seeds == 0


def test_only_accuracies_can_be_equivalent():
    """A margin of 3 points does not apply to a length in percent."""
    rows = [{"unit": unit, "p": 0.5, "p_match": 0.01} for unit in ("difference", "change", "gain")]
    table = corrections.corrected(pd.DataFrame(rows))
    assert table["p_holm"].tolist() == pytest.approx([1.0, 1.0, np.nan], nan_ok=True)
    assert table["p_match_holm"].tolist() == pytest.approx([0.01, np.nan, np.nan], nan_ok=True)


def test_split_half_peak_is_read_where_it_was_not_chosen():
    """Step 10 is right on the even problems, step 20 on the odd ones: each half chooses what the other half fails."""
    correct = pd.DataFrame({0: [1.0] * 4, 10: [1.0, 0.0, 1.0, 0.0], 20: [0.0, 1.0, 0.0, 1.0]})
    assert split_half_outcomes(correct).tolist() == [0.0] * 4 and correct[10].mean() == 0.5
    agreed = pd.DataFrame({0: [0.0] * 4, 10: [0.0] * 4, 20: [1.0, 1.0, 1.0, 0.0]})
    assert split_half_outcomes(agreed).tolist() == [1.0, 1.0, 1.0, 0.0]
    agreed.iloc[3] = np.nan  # a problem without a grade
    assert MEASURES["split_half_peak"].compute(SimpleNamespace(correct=agreed)) == 1.0


def test_a_ratio_to_zero_is_undefined():
    """An iteration whose episodes all have the same reward has no gradient, and it may be the first one."""
    series = pd.DataFrame(
        {"chi2": 0.0, "chi2_after": 0.0, "perplexity": [1.5, 3.0], "grad_norm": [0.0, 2.0], "optimizer_steps": 1},
        index=[1, 2],
    )
    ratios = amplitudes(series)
    assert isnan(ratios["grad-norm peak / first"]) and ratios["perplexity peak / first"] == 2


def test_numbers_are_shown_by_their_unit():
    shown = [
        formatted(0.9157, "accuracy"),
        formatted(-0.036, "difference"),
        formatted(9000, "hours"),
        formatted(2.13e6, "million"),
    ]
    assert shown == ["91.6", "−3.6", "2.50", "2.13"]
    assert [formatted(x, "ratio") for x in (38096, 0.0609, 20.6, 0, 1.3e6, 2e-7)] == [
        "38,096", "0.0609", "20.6", "0", "1.3e6", "2.0e−7",
    ]  # fmt: skip


def test_a_table_has_a_line_per_key_and_a_column_per_number():
    gap = intervals.Interval(0.02, 0.01, 0.03, 0.001, 0.2, 0.004, 3)
    values = pd.DataFrame([
        row_of("IP − SP", gap, "difference", task="math", workflow="single", policy="sp"),
        row_of("IP", gap._replace(mean=0.99, high=1.2), "accuracy", task="math", workflow="single", policy="sp"),
        row_of("IP − SP", gap._replace(p=0.3, p_match=0.01), "difference", task="code", workflow="voting", policy="ip"),
    ])  # fmt: skip
    assert pivoted(values).to_numpy().tolist() == [
        ["math", "Single agent", "SA-RL", "+2.0 [+1.0, +3.0]*", "99.0 [1.0, 100.0]"],
        ["code", "Voting", "IP", "+2.0 [+1.0, +3.0] ≈", "–"],
    ]
