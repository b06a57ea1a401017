"""Measure whether a shared adapter falls first as staleness grows: Voting on tiny-r at the study's stress rate, SP against IP.

    python benchmarks/bench_staleness_falls.py --runs runs/staleness_falls --seconds 540     # train missing runs for at most so long
    python benchmarks/bench_staleness_falls.py --runs runs/staleness_falls --out results/bench/staleness_falls.json

Everything below was committed before the first of these runs.

Runs: the cell of `PARAMETERS`, studies/main.yaml's `stress` with a quarter of the problems and 24 iterations, for SP and IP, each `max_staleness` and each seed.
Old log-probs are the sampler's, the scale's default, so that the PPO ratio corrects for older rows. The order is fixed: for
the first five seeds `max_staleness` 0 and 4, seed by seed, then 1 and 2; then the same for the other seeds. Where time ends before the list
does, seeds that lack a run of a comparison are left out of it.

Depth of a run: its best validation accuracy minus its last one, in points. First fall: the iteration of `falls.first_fall`; a run without
one counts as falling one evaluation after its end. All differences are paired by seed, with 95 % t intervals over seeds.

Rule: let excess(k) be the depth under SP minus the depth under IP at `max_staleness` k. "A shared adapter falls first as staleness
grows" is decided yes if the interval of excess(4) - excess(0) lies above zero, no if it lies below zero, and undecided otherwise or
with fewer than 5 seeds. Everything else in the table is described and not tested.
"""

import argparse
import math
import os
import time
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from measuring import write

from multirole_study.compare.intervals import Interval, t_interval
from multirole_study.compare.verdicts import side
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import folder_of, is_done
from multirole_study.falls import first_fall

PARAMETERS = {
    "workflow": "voting", "task": "math", "scale": "tiny-r", "learning_rate": 0.006, "lr_schedule": "constant", "max_steps": 24,
    "n_problems": 2, "num_generations": 8, "n_validation": 128, "eval_steps": 4, "save_steps": 12,
}  # fmt: skip
SEEDS = [[200, 201, 202, 203, 204], [205, 206, 207]]
FEWEST = 5
"""Seeds below which nothing is decided."""
PHASES = [(0, 4), (1, 2)]
POLICIES = ("sp", "ip")


def ordered() -> list[tuple[int, str, int]]:
    """Return (staleness, policy, seed) of all runs in the order in which they are trained."""
    return [
        (staleness, policy, seed)
        for seeds in SEEDS
        for phase in PHASES
        for seed in seeds
        for staleness, policy in product(phase, POLICIES)
    ]


def cell_of(staleness: int, policy: str, seed: int) -> Cell:
    """Return the cell of a run."""
    return Cell(**PARAMETERS, policy=policy, seed=seed, max_staleness=staleness)


def train(runs: Path, seconds: float) -> None:
    """Train missing runs in order; none is begun after so many seconds."""
    give_up = time.monotonic() + seconds
    for run in ordered():
        cell = cell_of(*run)
        if is_done(folder_of(cell, str(runs))):
            continue
        if time.monotonic() > give_up:
            return
        run_cell(cell, runs)


def measured(runs: Path) -> pd.DataFrame:
    """Return one row per finished run."""
    rows = []
    for staleness, policy, seed in ordered():
        folder = folder_of(cell_of(staleness, policy, seed), str(runs))
        if not is_done(folder):
            continue
        accuracy = pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"].mean()
        metrics, fall = pd.read_parquet(folder / "metrics.parquet"), first_fall(accuracy)
        rows.append({
            "staleness": staleness, "policy": policy, "seed": seed, "best": 100 * accuracy.max(), "end": 100 * accuracy.iloc[-1],
            "depth": 100 * (accuracy.max() - accuracy.iloc[-1]), "falls": fall is not None,
            "first fall": PARAMETERS["max_steps"] + PARAMETERS["eval_steps"] if fall is None else fall.at,
            "cpu_seconds": metrics["cpu_seconds"].sum(), "accuracy": [round(100 * value, 3) for value in accuracy],
        })  # fmt: skip
    return pd.DataFrame(rows)


def by_seed(table: pd.DataFrame, staleness: int, policy: str, column: str) -> pd.Series:
    """Return a column of one arm, indexed by seed."""
    return (
        table[(table["staleness"] == staleness) & (table["policy"] == policy)].set_index("seed")[column].astype(float)
    )


def excess(table: pd.DataFrame, staleness: int, column: str = "depth") -> pd.Series:
    """Return SP minus IP at one staleness, by the seeds that have both."""
    return (by_seed(table, staleness, "sp", column) - by_seed(table, staleness, "ip", column)).dropna()


def growth(table: pd.DataFrame, staleness: int, policy: str) -> pd.Series:
    """Return the depth at a staleness minus that at staleness 0 under one policy, by the seeds that have both."""
    return (by_seed(table, staleness, policy, "depth") - by_seed(table, 0, policy, "depth")).dropna()


def verdict(interval: Interval) -> str:
    """Apply the rule."""
    if interval.seeds < FEWEST:
        return f"undecided by rule: {interval.seeds} of at least {FEWEST} seeds"
    return side(interval.low, interval.high)


def shown(values: pd.Series, sign: str = "+") -> str:
    """Format a mean with its interval and its number of seeds."""
    interval = t_interval(values)
    if not interval.seeds:
        return "–"
    brackets = "" if math.isnan(interval.low) else f" [{interval.low:{sign}.1f}, {interval.high:{sign}.1f}]"
    return f"{interval.mean:{sign}.1f}{brackets}, n = {interval.seeds}"


def summary(table: pd.DataFrame) -> tuple[str, dict]:
    """Return the table of the page and the intervals behind its sentence."""
    lines = [
        "| `max_staleness` | policy | best | end | best − end | runs that fall | first fall, iteration | best − end, minus that of 0 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    stalenesses = sorted({staleness for phase in PHASES for staleness in phase})
    for staleness, policy in product(stalenesses, POLICIES):
        arm = table[(table["staleness"] == staleness) & (table["policy"] == policy)]
        cells = [staleness, policy.upper(), *(shown(arm[name], "") for name in ("best", "end", "depth"))]
        cells += [f"{int(arm['falls'].sum())} of {len(arm)}", shown(arm["first fall"], "")]
        cells += [shown(growth(table, staleness, policy)) if staleness else "–"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| `max_staleness` | SP − IP, best − end | SP − IP, first fall | SP − IP, best − end, minus that of 0 |", "|---|---|---|---|"]  # fmt: skip
    changes = {staleness: (excess(table, staleness) - excess(table, 0)).dropna() for staleness in stalenesses}
    for staleness in stalenesses:
        cells = [staleness, shown(excess(table, staleness)), shown(excess(table, staleness, "first fall"))]
        lines.append("| " + " | ".join(map(str, [*cells, shown(changes[staleness]) if staleness else "–"])) + " |")
    primary = t_interval(changes[4])
    lines += ["", f"A shared adapter falls first as staleness grows: **{verdict(primary)}** (excess(4) − excess(0), in points: {shown(changes[4])})."]  # fmt: skip
    return "\n".join(lines), {"excess(4) - excess(0)": primary._asdict(), "verdict": verdict(primary)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness_falls"))
    parser.add_argument("--seconds", type=float, default=0.0, help="how long to begin missing runs; by default none is")
    parser.add_argument("--out", type=Path, help="the JSON file; the table goes to docs/staleness.md")
    options = parser.parse_args()
    if options.seconds:
        train(options.runs, options.seconds)
    table = measured(options.runs)
    if table.empty:
        print("No run is finished.")
        return
    text, decided = summary(table)
    print(text)
    result = {"parameters": PARAMETERS, "load": os.getloadavg(), "runs": table.to_dict("records"), "decision": decided}
    write("bench_staleness_falls", options.out, _finite(result), text, page="staleness")


def _finite(value: object) -> object:
    """Replace NaN by None and NumPy's numbers by Python's, for JSON."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()
