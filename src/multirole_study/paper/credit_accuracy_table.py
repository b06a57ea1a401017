"""Table and figure of bias and variance of credit estimators, by the rules of `credit_accuracy.yaml`.

The measurement is `multirole credit`; `<results_dir>/<scale>/credit_accuracy.parquet` holds its rows of all runs.
"""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml

from multirole_study.labels import BASE_COLOURS, BASE_NAMES, MARKERS, cell_name
from multirole_study.measurements.credit_moments import PARTS, Moments, parts_of
from multirole_study.paper.gradient_signal_table import CELL_KEYS as CELL
from multirole_study.paper.gradient_signal_table import (
    first_columns,
    tasks_of,
    unmeasured,
    verdict,
    without_single_task,
)
from multirole_study.paper.output import STYLE, Plate, Table, bounded, how_many, say_below

DECLARED = yaml.safe_load(Path(__file__).with_name("credit_accuracy.yaml").read_text(encoding="utf-8"))
EVERY = "all"
"""Label of the line for all turns together, in place of a role."""
CAPTION = (
    "Not in the paper. Each estimator's advantage is compared with the exact effect of a turn's reply on the reward, at fixed weights, at {scale} on {task}: "
    "the turns of one episode of each of {problems} training problems ({declared} were declared), {replies} replies to each prompt, {tails} draws of what follows each reply. "
    "Columns split the advantage's mean square, in percent: its part proportional to the exact effect; its bias, the part that depends on the "
    "reply in another way; its baseline, which depends on what the reply answers and adds variance only; and noise. Baseline and noise are estimated without bias and may be "
    "negative. Tokens are sampled tokens per trained row, forks included, relative to {reference}. Brackets are 95 % percentile bootstrap intervals "
    "over problems, of one seed: {seeds}. {placebo} is a placebo. Not measured: {missing}. Rules: credit_accuracy.yaml, version {version}."
)


def statistics(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every statistic with its bootstrap interval over problems, by cell, checkpoint, role (`EVERY` for all turns) and estimator.

    The statistics are the parts, `scale`, `tokens` (relative), `effect_gain` and `effect_gain_per_token` against the reference.
    """
    estimates = []
    for key, cell in rows.groupby(CELL, sort=False):
        for role in [EVERY, *cell["role"].unique()]:
            turns = cell if role == EVERY else cell[cell["role"] == role]
            keys = dict(zip(CELL, key, strict=True)) | {"role": role}
            estimates += [keys | row for row in _bootstrapped(turns)]
    return pd.DataFrame(estimates)


def _bootstrapped(turns: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield every statistic of some turns. Each turn weighs the same; problems are drawn with replacement."""
    names = list(turns["estimator"].unique())
    moments = list(Moments._fields)
    table = turns.assign(turns=1.0).pivot_table(["turns", *moments], "problem", "estimator", "sum", sort=False)
    sums = np.stack([table[moment][names] for moment in moments], axis=-1)  # (problems, estimators, moments)
    counts = table["turns"][names].to_numpy()  # (problems, estimators)
    n = len(table)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=DECLARED["resamples"])
    weights = np.concatenate([np.ones((1, n)), draws])  # the first line is the estimate
    means = np.einsum("rp,pem->rem", weights, sums) / np.einsum("rp,pe->re", weights, counts)[..., None]
    parts = {name: parts_of(Moments(*means[:, i].T)) for i, name in enumerate(names)}
    tokens = turns.groupby("estimator")["tokens_per_row"].mean()
    tokens = tokens / tokens[DECLARED["reference"]]
    reference_effect = parts[DECLARED["reference"]]["effect"]
    for name in names:
        gains = {
            "effect_gain": parts[name]["effect"] - reference_effect,
            "effect_gain_per_token": parts[name]["effect"] / tokens[name] - reference_effect,
        }
        for statistic, values in (parts[name] | gains).items():
            tail = 100 * (1 - DECLARED["level"]) / 2
            low, high = np.nanpercentile(values[1:], [tail, 100 - tail]) if np.isfinite(values[0]) else (np.nan, np.nan)
            unit = "ratio" if statistic == "scale" else "difference" if statistic in gains else "rate"
            yield {"estimator": name, "statistic": statistic, "value": values[0], "low": low, "high": high, "unit": unit}  # fmt: skip
        yield {"estimator": name, "statistic": "tokens", "value": tokens[name], "low": np.nan, "high": np.nan, "unit": "ratio"}  # fmt: skip


def answers(values: pd.DataFrame) -> pd.DataFrame:
    """Return the verdict on every declared question, of all turns together."""
    decided = []
    for name, question in DECLARED["questions"].items():
        chosen = values[(values["role"] == EVERY) & (values["statistic"] == question["statistic"])]
        if question["statistic"].startswith("effect_gain"):
            chosen = chosen[chosen["estimator"] != DECLARED["reference"]]
        texts = [verdict(row.low, row.high, question["above"]) for row in chosen.itertuples()]
        decided.append(chosen.assign(question=name, verdict=texts))
    return pd.concat(decided, ignore_index=True)


def measured_problems(rows: pd.DataFrame) -> str:
    """Format how many problems every cell and checkpoint has; a measurement that was stopped has fewer."""
    return how_many(rows.groupby(CELL)["problem"].nunique())


def missing(rows: pd.DataFrame) -> str:
    """List the declared cells and checkpoints that have not been measured."""
    pairs = unmeasured(rows[CELL].drop_duplicates(), DECLARED)
    return "; ".join(f"{cell}, iteration {step}" for cell, step in pairs) or "nothing"


def accuracy_table(rows: pd.DataFrame, values: pd.DataFrame, decided: pd.DataFrame) -> Table:
    """Build the table of every estimator's parts, of all turns and by role: the `statistics` of `rows`, and the verdicts of `answers`."""
    shown = []
    for key, group in values.groupby([*CELL, "role", "estimator"], sort=False):
        role, estimator = key[-2:]
        by_statistic = group.set_index("statistic", drop=False)
        line = first_columns(group.iloc[0]) | {"turns": role, "estimator": estimator}
        for name in (*PARTS, "tokens"):
            row = by_statistic.loc[name]
            line[name] = bounded(row["value"], row["unit"], row["low"], row["high"])
        line_verdicts = decided[(decided[[*CELL, "role", "estimator"]] == list(key)).all(axis=1)]
        shown.append(
            line | {"verdicts": ", ".join(f"{row.question} {row.verdict}" for row in line_verdicts.itertuples())}
        )
    sizes = DECLARED["sizes"]
    caption = CAPTION.format(
        scale=DECLARED["scale"], task=tasks_of(rows), problems=measured_problems(rows), declared=DECLARED["problems"], replies=sizes["replies"],
        tails=sizes["tails"], seeds=", ".join(map(str, sorted(rows["seed"].unique()))), missing=missing(rows),
        reference=DECLARED["reference"], placebo=DECLARED["placebo"], version=DECLARED["version"],
    )  # fmt: skip
    numbers = values.merge(
        decided[[*CELL, "role", "estimator", "statistic", "question", "verdict"]],
        on=[*CELL, "role", "estimator", "statistic"], how="left",
    )  # fmt: skip
    shown_lines, numbers = (without_single_task(table, rows) for table in (pd.DataFrame(shown), numbers))
    return Table("credit_accuracy", "Bias and variance of credit estimators", caption, shown_lines, numbers)


def accuracy_figure(rows: pd.DataFrame, values: pd.DataFrame) -> Plate:
    """Draw the four parts of every estimator, of all turns, with one mark per cell and checkpoint; `values` are the `statistics` of `rows`."""
    values = values[values["role"] == EVERY]
    names = list(values["estimator"].unique())
    cells, has_several = list(values.groupby(CELL, sort=False).groups), rows["task"].nunique() > 1
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(PARTS), figsize=(10, 0.9 + 0.4 * len(names)), sharey=True, layout="constrained")  # fmt: skip
        for ax, part in zip(axes, PARTS, strict=True):
            ax.axvline(0, color="0.8", linewidth=0.8)
            for i, (workflow, policy, task, _, step) in enumerate(cells):
                here = values[(values[CELL] == list(cells[i])).all(axis=1) & (values["statistic"] == part)]
                drawn = 100 * here.set_index("estimator").loc[names, ["value", "low", "high"]]
                heights = np.arange(len(names)) + 0.7 * (i + 0.5) / len(cells) - 0.35
                label = f"{cell_name(workflow, policy, task if has_several else None)}, iteration {step}"
                colour = BASE_COLOURS[i % len(BASE_COLOURS)]
                ax.plot(drawn["value"], heights, MARKERS[i % 4], markersize=3.5, color=colour, label=label)
                ax.hlines(heights, drawn["low"], drawn["high"], color=colour, linewidth=1.2)
            ax.set_xlabel(f"{part} (% of the mean square)")
        axes[0].set_yticks(range(len(names)), names)
        axes[0].set_ylim(len(names) - 0.5, -0.5)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(cells))
        base = BASE_NAMES.get(DECLARED["scale"], DECLARED["scale"])
        about = f"{base}, {tasks_of(rows)}; one seed; lines are 95 % bootstrap intervals over {measured_problems(rows)} problems"
        say_below(figure, about)
    caption = (
        f"Parts of the mean square of every estimator's advantage, at {DECLARED['scale']} on {tasks_of(rows)}: proportional to the exact effect of the reply, bias, "
        f"baseline and noise. Lines are 95 % bootstrap intervals over {measured_problems(rows)} problems of one seed. {DECLARED['placebo']} is a placebo. Not measured: "
        f"{missing(rows)}."
    )
    return Plate("credit_accuracy", figure, caption)
