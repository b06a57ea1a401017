"""Train one cell at several values of `max_staleness`, and print wall time per iteration and accuracy at equal iterations.

    python benchmarks/bench_staleness.py                                    # Voting, shared policy, tiny-r, 30 iterations, seed 100
    python benchmarks/bench_staleness.py -p scale smollm2 -p dtype float32 -p engine vllm_server -p vllm_server_base_url http://127.0.0.1:8000

Each line of the table is one run of one seed. All runs correct for older rows by importance weights (`old_logprobs="recomputed"`). The
first iteration, which nothing overlaps, is not timed. The load of the machine is printed before and after a run: with engine and
trainer on the same busy cores, the times say nothing. Finished runs are not repeated.
"""

import argparse
import os
from pathlib import Path

import pandas as pd

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.settings import value

USUAL = {"workflow": "voting", "policy": "sp", "seed": 100, "iterations": 30, "old_logprobs": "recomputed"}
LAST = 10
"""Iterations whose training accuracy is averaged."""


def row(folder: Path, staleness: int, loads: tuple[float, float]) -> str:
    """Return one line of the table."""
    metrics, evaluated = (pd.read_parquet(folder / f"{name}.parquet") for name in ("metrics", "eval"))
    timed, accuracy = metrics.iloc[1:], evaluated.groupby("step")["correct"].mean()
    seconds = timed["rollout_seconds"] + timed["update_seconds"]
    cells = [
        staleness, len(metrics), f"{100 * metrics['accuracy'].tail(LAST).mean():.1f} %", f"{100 * accuracy.iloc[-1]:.1f} %",
        f"{seconds.median():.2f}", f"{timed['rollout_seconds'].median():.2f}", f"{timed['cpu_seconds'].median():.2f}",
        f"{loads[0]:.1f} to {loads[1]:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results-dir", default="runs/staleness")
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a cell's parameter"
    )
    options = parser.parse_args()
    parameters = USUAL | {"results_dir": options.results_dir} | {name: value(text) for name, text in options.p}
    print(f"| `max_staleness` | iterations | training accuracy, last {LAST} | validation accuracy at the end | s per iteration (median) | of it waiting for episodes | CPU-s | load |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for staleness in options.staleness:
        cell, launch = Cell.from_parameters(parameters | {"max_staleness": staleness})
        before = os.getloadavg()[0]
        folder = run_cell(cell, launch)
        print(row(folder, staleness, (before, os.getloadavg()[0])), flush=True)


if __name__ == "__main__":
    main()
