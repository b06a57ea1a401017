"""Reads a run's folder back: tables, learning curves, per-role curves, episodes as a page. Computes nothing new."""

import html
import json
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure
from statsmodels.stats.proportion import proportion_confint
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from multirole.experiment.cell import Cell

logger = logging.getLogger(__name__)

ROLE_PANELS = (
    ("chi2", "chi2 (trainer vs engine)", "symlog"),
    ("perplexity", "perplexity", "log"),
    ("entropy", "entropy (nats per token)", "linear"),
    ("grad_norm", "gradient norm (per optimizer step)", "linear"),
    ("length_mean", "completion length (tokens)", "linear"),
    ("unparsed_rate", "unparsed turns (fraction)", "linear"),
)
GRADIENT_PANELS = (
    ("grad_share", "share of its adapter's gradient", "linear"),
    ("token_mass", "share of its adapter's tokens", "linear"),
    ("coherence", "coherence of same-role slots (cosine)", "linear"),
    ("amplification", "amplification (slots x coherence)", "linear"),
    ("chi2_after", "chi2 after the update", "symlog"),
    ("cosine_previous", "cosine of successive updates", "linear"),
)
ROLE_COLOURS = dict(zip(("generator", "aggregator", "evaluator", "orchestrator", "worker", "synthesizer"),
                        sns.color_palette("colorblind", 6).as_hex(), strict=True))  # fmt: skip


def load(folder: str | Path, table: str) -> pd.DataFrame:
    """One table of a run: "metrics", "roles", "ledger" or "eval" (see `record`)."""
    return pd.read_parquet(Path(folder) / f"{table}.parquet")


def describe(cell: Cell) -> pd.DataFrame:
    """The cell's configuration, two fields per row."""
    values = [(name, str(value)) for name, value in (cell.to_dict() | {"policy": cell.policy_name}).items()]
    half = (len(values) + 1) // 2
    left, right = values[:half], values[half:] + [("", "")] * (2 * half - len(values))
    table = pd.DataFrame(
        [a + b for a, b in zip(left, right, strict=True)], columns=["field", "value", "field ", "value "]
    )
    return table.set_index("field")


def validation(folder: str | Path) -> pd.DataFrame:
    """Validation accuracy per evaluated step with its 95 % Wilson interval over problems (fractions)."""
    by_step = load(folder, "eval").groupby("step")["correct"].agg(["mean", "sum", "count"])
    low, high = proportion_confint(by_step["sum"], by_step["count"], method="wilson")
    columns = {"accuracy": by_step["mean"], "low": low, "high": high, "n": by_step["count"]}
    return pd.DataFrame(columns).reset_index()


def plot_learning(folder: str | Path) -> Figure:
    """Training reward and accuracy per iteration, and validation accuracy with its interval."""
    metrics, points = load(folder, "metrics"), validation(folder)
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    axes.plot(metrics["iteration"], metrics["reward"], color="0.6", lw=1, label="training reward")
    axes.plot(metrics["iteration"], metrics["accuracy"], color="C0", lw=1, alpha=0.7, label="training accuracy")
    error = (points["accuracy"] - points["low"], points["high"] - points["accuracy"])
    label = f"validation accuracy ({points['n'].iloc[0]} problems, 95 % Wilson)"
    axes.errorbar(points["step"], points["accuracy"], yerr=error, fmt="o-", color="C3", capsize=3, label=label)
    axes.axhline(points["accuracy"].iloc[0], color="C3", lw=0.8, ls=":", label="untrained workflow")
    axes.set(xlabel="iteration", ylabel="fraction", ylim=(min(0.0, metrics["reward"].min()), 1.0))
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    sns.despine(figure)
    return figure


def plot_roles(folder: str | Path) -> Figure:
    """Six per-role curves over the iterations: what the paper's monitoring advice asks for (A.6.2)."""
    return _plot_panels(folder, ROLE_PANELS)


def plot_gradients(folder: str | Path) -> Figure:
    """Six per-role curves of the gradients themselves: who owns an adapter, and whether same-role slots pull together."""
    return _plot_panels(folder, GRADIENT_PANELS)


def alarms(folder: str | Path) -> pd.DataFrame:
    """The run's alarms, in order; empty where there was none."""
    path = Path(folder) / "alarms.parquet"
    names = ["iteration", "alarm", "role", "message"]
    return (pd.read_parquet(path)[names] if path.exists() else pd.DataFrame(columns=names)).set_index("iteration")


def _plot_panels(folder: str | Path, panels: tuple[tuple[str, str, str], ...]) -> Figure:
    roles = load(folder, "roles")
    figure, grid = plt.subplots(2, 3, figsize=(10.5, 5.2), layout="constrained", sharex=True)
    for axes, (name, title, scale) in zip(grid.flat, panels, strict=True):
        for role, rows in roles.groupby("role", sort=False):
            axes.plot(rows["iteration"], rows[name], lw=1.3, color=ROLE_COLOURS.get(role), label=role)
        axes.set_yscale(scale, **({"linthresh": 1e-4} if scale == "symlog" else {}))
        if scale == "symlog":
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, -1e-3), max(high, 1e-2))
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[1]:
        axes.set_xlabel("iteration", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    sns.despine(figure)
    return figure


def ledger_summary(folder: str | Path) -> pd.DataFrame:
    """Per adapter: optimizer steps per iteration, rows and tokens in all, and the peak learning rate."""
    ledger = load(folder, "ledger")
    summary = ledger.groupby("adapter").agg(
        optimizer_steps=("step", "size"), rows=("rows", "sum"), tokens=("tokens", "sum"), peak_lr=("lr", "max")
    )
    summary.insert(0, "steps_per_iteration", summary["optimizer_steps"] / ledger["iteration"].nunique())
    return summary


def episodes_page(folder: str | Path, step: int | None = None, n_episodes: int = 3) -> str:
    """The first validation episodes at an evaluated step (default: the last) as HTML, turn by turn."""
    files = sorted(Path(folder, "turns").glob("step_*.parquet"))
    turns = pd.read_parquet(files[-1] if step is None else Path(folder, "turns", f"step_{step:05d}.parquet"))
    style = "margin:2px 0 6px 0;padding:6px 10px;border-left:3px solid {};white-space:pre-wrap;overflow-wrap:anywhere"
    page = []
    for problem in turns["problem"].unique()[:n_episodes]:
        episode = turns[turns["problem"] == problem]
        first = episode.iloc[0]
        page.append(f"<h4>step {first['step']}: {html.escape(first['question'])} &rarr; {first['reason']}</h4>")
        for turn in episode.to_dict("records"):
            colour = ROLE_COLOURS.get(turn["role"], "#888888")
            about = f"{turn['role']} {turn['slot'] + 1}, round {turn['round'] + 1}: {turn['outcome']}"
            page.append(
                f"<div><small style='color:{colour}'>{about}, {turn['completion_tokens']} tokens</small>"
                f"<pre style='{style.format(colour)}'>{html.escape(turn['text'])}</pre></div>"
            )
    return "\n".join(page)


def files_written(folder: str | Path) -> pd.DataFrame:
    """Every file of the run except checkpoints, with its size in kB."""
    paths = [p for p in sorted(Path(folder).rglob("*")) if p.is_file() and "checkpoints" not in p.parts]
    sizes = [round(path.stat().st_size / 1000, 1) for path in paths]
    return pd.DataFrame({"file": [str(path.relative_to(folder)) for path in paths], "kB": sizes})


class Progress(TrainerCallback):
    """One line, updated in place in a notebook and logged at each evaluation elsewhere: it stays small in the file."""

    def __init__(self) -> None:
        self.accuracy = float("nan")
        self.display = None
        if get_ipython() is not None:
            self.display = display({"text/plain": "starting"}, raw=True, display_id=True)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict, **_: object
    ) -> None:
        self.accuracy = metrics["eval_accuracy"]
        logger.info("iteration %d: validation accuracy %.3f", state.global_step, self.accuracy)
        self._show(state, args)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._show(state, args)

    def _show(self, state: TrainerState, args: TrainingArguments) -> None:
        if self.display is not None:
            line = f"iteration {state.global_step} of {args.max_steps}, validation accuracy {self.accuracy:.3f}"
            self.display.update({"text/plain": line}, raw=True)


def summary_line(folder: str | Path) -> str:
    """The result in one sentence: base, best and final validation accuracy, n and interval."""
    points = validation(folder)
    best, last = points.loc[points["accuracy"].idxmax()], points.iloc[-1]
    config = json.loads((Path(folder) / "config.json").read_text())

    def show(row: pd.Series) -> str:
        return f"{row['accuracy']:.1%} [{row['low']:.1%}, {row['high']:.1%}] at iteration {int(row['step'])}"

    return (
        f"{Path(folder).name} ({config['scale']}, seed {config['seed']}): untrained {show(points.iloc[0])}; "
        f"best {show(best)}; final {show(last)} (n={int(last['n'])} problems, 95 % Wilson interval)."
    )
