"""Read a run's folder for the notebooks and the page: settings, tables, curves and facts of the run.

Any table may be missing, be short or contain NaN, so that interrupted runs can be read. METRICS.md defines the columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from statsmodels.stats.proportion import confint_proportions_2indep

from multirole_study.experiment.cell import policy_name, preset_values
from multirole_study.experiment.run_folder import is_done, outcome_of
from multirole_study.falls import first_fall, wilson
from multirole_study.labels import cell_name


@dataclass(frozen=True)
class Panel:
    """A recorded column, drawn over the iterations in which a run has it.

    `scale` is "linear", "rate" (0 to 1), "log", or "divergence": zero or more up to noise, drawn symmetric-logarithmic from 0.
    A column of `roles` has one curve per role, a column of `metrics` has one.
    """

    column: str
    name: str
    unit: str = ""
    scale: str = "linear"
    group: str = "main"
    table: str = "roles"


PANELS = (
    Panel("reward", "training reward", "mean", table="metrics"),
    Panel("accuracy", "training accuracy", "fraction", "rate", table="metrics"),
    Panel("zero_variance_groups", "training groups of equal rewards", "fraction", "rate", table="metrics"),
    Panel("chi2", "chi2, trainer against engine", "log axis above 0.0001", "divergence"),
    Panel("perplexity", "perplexity", scale="log"),
    Panel("entropy", "entropy", "nats per token"),
    Panel("grad_norm", "gradient norm", "per optimizer step"),
    Panel("length_mean", "completion length, mean", "tokens"),
    Panel("length_p95", "completion length, 95th percentile", "tokens"),
    Panel("unparsed_rate", "unparsed turns", "fraction", "rate"),
    Panel("truncated_rate", "truncated turns", "fraction", "rate"),
    Panel("grad_share", "share of its adapter's gradient", "fraction", group="gradients"),
    Panel("token_mass", "share of its adapter's tokens", "fraction", "rate", "gradients"),
    Panel("coherence", "coherence of same-role slots", "mean cosine", group="gradients"),
    Panel("chi2_after", "chi2 after the update", "", "divergence", "gradients"),
    Panel("boxed_rate", "turns with a box", "fraction", "rate", "signatures"),
    Panel("box_retention", "first turns with a box", "fraction", "rate", "signatures"),
    Panel("verdict_rate", "turns with a verdict", "fraction", "rate", "signatures"),
    Panel("correct_verdict_rate", 'turns that say "correct"', "fraction", "rate", "signatures"),
    Panel("hedging_rate", "hedging turns", "fraction", "rate", "signatures"),
    Panel("terse_rate", "terse turns", "fraction", "rate", "signatures"),
    Panel("code_fence_rate", "turns with a code fence", "fraction", "rate", "signatures"),
    Panel("bare_stamp_rate", "turns with a bare verdict", "fraction", "rate", "signatures"),
    Panel("unique_openers", "distinct 3-word openers", "count", group="signatures"),
    Panel("jaccard", "3-gram overlap of slots", "Jaccard", "rate", "signatures"),
    Panel("chi2_raw", "chi2, raw log-probabilities", "", "divergence", "more"),
    Panel("clip_fraction", "clipped tokens", "fraction", group="more"),
    Panel("kl", "KL, k1 estimate", "nats per token", "divergence", "more"),
    Panel("k3_kl", "KL, k3 estimate", "nats per token", "divergence", "more"),
    Panel("max_logprob_gap", "largest log-probability gap", "nats", group="more"),
    Panel("reward", "reward of the role's rows", "mean", group="more"),
    Panel("advantage_abs", "advantage, mean size", "standard deviations", group="more"),
    Panel("length_p50", "completion length, median", "tokens", group="more"),
    Panel("optimizer_steps", "optimizer steps", "per iteration", group="more"),
)


def load(folder: str | Path, table: str) -> pd.DataFrame:
    """Load one table of a run, such as "metrics", "roles", "eval" or "turns" (all steps together); empty if it was not written."""
    paths = sorted(Path(folder).glob("turns/step_*.parquet" if table == "turns" else f"{table}.parquet"))
    tables = [table for table in map(pd.read_parquet, paths) if len(table)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def state(folder: Path) -> str:
    """Describe the run's state: unfinished or finished, how it ended, and whether a file differs from its checksum in DONE."""
    if not (folder / "DONE").exists():
        return "not finished"
    if not is_done(folder):
        return "changed after it finished"
    outcome = outcome_of(folder)
    return f"{outcome['state']} at iteration {outcome['iteration']}" if outcome else "finished"


def title(config: dict) -> str:
    """Return a run's display name, such as "Voting-IP, code · seed 0"."""
    cell = cell_name(str(config.get("workflow")), policy_name(config["policy"]), config.get("task"))
    return f"{cell} · seed {config.get('seed', '?')}"


def regime(config: dict) -> str:
    """Return the scale and the settings that differ from its preset, such as "tiny-r, learning_rate 0.006, lr_schedule constant"."""
    usual = preset_values(*(config.get(name) for name in ("workflow", "task", "scale", "preset", "data")))
    changed = [f"{name} {config[name]}" for name in usual if config.get(name, usual[name]) != usual[name]]
    return ", ".join([str(config.get("scale")), *(changed or ["the preset's settings"])])


def number(value: float) -> float | None:
    """Convert a number for JSON, with 7 significant digits; None for NaN, infinities and missing values."""
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


def numbers(values: pd.Series) -> list[float | None]:
    """Convert numbers for JSON."""
    return [number(value) for value in values.astype(float)]


def validation(folder: str | Path) -> pd.DataFrame:
    """Return validation accuracy per evaluated step with its 95 % Wilson interval over problems (fractions)."""
    outcomes = load(folder, "eval")
    outcomes = outcomes[outcomes["correct"].notna()] if len(outcomes) else outcomes  # a task may not define correctness
    if not len(outcomes):
        return pd.DataFrame(columns=["step", "accuracy", "low", "high", "n"])
    by_step = outcomes.astype({"correct": bool}).groupby("step")["correct"].agg(["mean", "sum", "count"])
    low, high = wilson(by_step["sum"], by_step["count"])
    columns = {"accuracy": by_step["mean"], "low": low, "high": high, "n": by_step["count"]}
    return pd.DataFrame(columns).reset_index()


def skills(folder: str | Path) -> list[dict]:
    """Return each role's skill over the evaluated steps, and its trivial twin's; one entry per role and measure."""
    table = load(folder, "skills")
    return [
        {"role": role, "measure": measure, "step": rows["step"].astype(int).tolist()}
        | {name: numbers(rows[name]) for name in ("skill", "trivial")}
        for (role, measure), rows in (table.groupby(["role", "measure"], sort=False) if len(table) else ())
        if rows["skill"].notna().any()
    ]


SKILLS = {
    "workflow": "right answers",
    "solves": "right turns in the first round",
    "judges": "right verdicts, balanced over right and wrong drafts",
    "repairs": "wrong drafts whose next draft is right",
    "selects": "right choices where the candidates differ",
    "merges": "right answers where the workers differ",
    "plans": "problems that some worker solves",
}
"""Measure of `skills.parquet` -> what is counted, in words."""


def role_changes(folder: str | Path) -> list[dict]:
    """Return each role's skill at its first and at its last evaluation, the whole workflow first; one entry per role and measure.

    `verdict` is "better" or "worse" where Newcombe's 95 % interval of the change, over the cases of both evaluations, lies above or below 0, else "". It is
    rough for a balanced accuracy. "trivial" is the last value of a trivial role in the same place, None if there is none.
    """
    table, changes = load(folder, "skills"), []
    if not len(table):
        return []
    table = table.dropna(subset=["skill"]).sort_values("step", kind="stable")
    for (role, measure), rows in sorted(
        table.groupby(["role", "measure"], sort=False), key=lambda item: item[0][1] != "workflow"
    ):
        first, last = rows.iloc[0], rows.iloc[-1]
        if measure not in SKILLS or first["step"] == last["step"]:
            continue
        shares = [figure for row in (last, first) for figure in (row["skill"] * row["cases"], row["cases"])]
        low, high = confint_proportions_2indep(*shares, method="newcomb")
        entry = {"role": role, "counted": SKILLS[measure], "from": int(first["step"]), "to": int(last["step"]), "cases": int(last["cases"])}  # fmt: skip
        entry |= {"before": number(first["skill"]), "after": number(last["skill"]), "trivial": number(last["trivial"])}
        changes.append(entry | {"verdict": "better" if low > 0 else "worse" if high < 0 else ""})
    return changes


VALUE_COLUMNS = ("before", "change", "change_low", "change_high", "moved", "moved_low", "moved_high", "token_share", "grad_share")  # fmt: skip
"""Columns of `role_value.parquet` that the page shows."""


def role_values(folder: str | Path) -> list[dict]:
    """Return what each role is worth, one entry per step, role and intervention; empty if `multirole role_value` was not run."""
    rows = load(folder, "role_value").to_dict("records")
    return [
        {name: row[name] for name in ("step", "role", "how", "problems")}
        | {name: number(row[name]) for name in VALUE_COLUMNS}
        for row in rows
    ]


def facts(folder: str | Path) -> pd.DataFrame:
    """Return the accuracy at the first, best and last evaluation and at the first fall.

    The columns are fact, iteration, value and detail. Facts that a run does not have are left out.
    """
    points = validation(folder).set_index("step")
    rows: list[tuple[str, int, str, str]] = []
    if len(points):
        fall = first_fall(points["accuracy"])
        named = {"start": points.index[0], "best": points["accuracy"].idxmax(), "end": points.index[-1]}
        for fact, step in (named | ({"first fall": fall.at} if fall else {})).items():
            at = points.loc[step]
            interval = f"{100 * at['low']:.1f} to {100 * at['high']:.1f} (95 %), n={at['n']:.0f}"
            best = points["accuracy"].loc[:step].max()
            if fact == "first fall" and at["low"] <= best <= at["high"]:
                interval += f"; its interval holds the best before it, {100 * best:.1f} %, so it may be noise"
            rows.append((fact, int(step), f"{100 * at['accuracy']:.1f}\N{NO-BREAK SPACE}%", interval))
    return pd.DataFrame(rows, columns=["fact", "iteration", "value", "detail"]).set_index("fact")


def curves(folder: str | Path, group: str | None = None) -> Iterator[tuple[Panel, dict[str, pd.Series]]]:
    """Return every panel (of a group) with numbers in this run, and its series by iteration: one per role, or one named ""."""
    tables = {name: load(folder, name) for name in ("roles", "metrics")}
    for panel in PANELS:
        table = tables[panel.table]
        if panel.column not in table or group not in (None, panel.group):
            continue
        if panel.column == "jaccard":
            table = table[table["slot_pairs"] > 0]  # otherwise nothing was compared
        table = table.assign(role=table.get("role", ""))
        values = table.pivot_table(panel.column, "iteration", "role", "last", sort=False)
        if values.size and (
            panel.group != "signatures" or values.any(axis=None)
        ):  # a workflow uses only some of the forms
            yield panel, {role: values[role] for role in values}
