"""Train one cell at several values of `max_staleness`, and print wall time per iteration and accuracy at equal iterations.

    python benchmarks/bench_staleness.py                                    # Voting, shared policy, tiny-r, 30 iterations, seed 100
    python benchmarks/bench_staleness.py -p scale smollm2 -p dtype float32 -p engine vllm_server -p vllm_server_base_url http://127.0.0.1:8000

Each line of the table is one run of one seed. All runs correct for older rows by importance weights (`old_logprobs="recomputed"`). The
first iteration, which nothing overlaps, is not timed. The load of the machine is printed before and after a run: with engine and
trainer on the same busy cores, the times say nothing. Finished runs are not repeated, and their load is not known. With `--out
results/bench/staleness_server.json` (or `staleness_server_smollm2.json`) the table of that name in docs/staleness.md is written, too.
"""

import argparse
import os
import sys
from pathlib import Path

import pandas as pd
from measuring import write

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import folder_of, is_done
from multirole_study.experiment.settings import value

USUAL = {"workflow": "voting", "policy": "sp", "seed": 100, "max_steps": 30, "old_logprobs": "recomputed"}
LAST = 10
"""Iterations whose training accuracy is averaged."""


HEAD = [
    f"| `max_staleness` | iterations | training accuracy, last {LAST} | validation accuracy at the end | s per iteration (median) | of it waiting for episodes | CPU-s of the trainer | load |",
    "|---|---|---|---|---|---|---|---|",
]  # fmt: skip


def measured(folder: Path, staleness: int, loads: tuple[float, float] | None) -> dict:
    """Return the measures of one run."""
    metrics, evaluated = (pd.read_parquet(folder / f"{name}.parquet") for name in ("metrics", "eval"))
    timed, accuracy = metrics.iloc[1:], evaluated.groupby("step")["correct"].mean()
    return {
        "max_staleness": staleness, "iterations": len(metrics), "training_accuracy": metrics["accuracy"].tail(LAST).mean(),
        "validation_accuracy": accuracy.iloc[-1], "seconds": (timed["rollout_seconds"] + timed["update_seconds"]).median(),
        "waiting_seconds": timed["rollout_seconds"].median(), "cpu_seconds": timed["cpu_seconds"].median(), "loads": loads,
    }  # fmt: skip


def row(run: dict) -> str:
    """Return one line of the table."""
    cells = [
        run["max_staleness"], run["iterations"], *(f"{100 * run[f'{split}_accuracy']:.1f} %" for split in ("training", "validation")),
        *(f"{run[name]:.2f}" for name in ("seconds", "waiting_seconds", "cpu_seconds")),
        "–" if run["loads"] is None else f"{run['loads'][0]:.1f} to {run['loads'][1]:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results-dir", default="runs/staleness")
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a cell's parameter"
    )
    parser.add_argument("--out", type=Path, help="the JSON file; docs/staleness.md has a table for each of two names")
    options = parser.parse_args()
    parameters = USUAL | {"results_dir": options.results_dir} | {name: value(text) for name, text in options.p}
    sys.stdout.write("\n".join(HEAD) + "\n")
    runs = []
    for staleness in options.staleness:
        cell, launch = Cell.from_parameters(parameters | {"max_staleness": staleness})
        was_done, before = is_done(folder_of(cell, options.results_dir)), os.getloadavg()[0]
        folder = run_cell(cell, launch)
        runs.append(measured(folder, staleness, None if was_done else (before, os.getloadavg()[0])))
        sys.stdout.write(row(runs[-1]) + "\n")
        sys.stdout.flush()
    result = {"cell": cell.to_dict() | {"max_staleness": None}, "runs": runs}
    write(
        "bench_staleness",
        options.out,
        result,
        "\n".join([*HEAD, *map(row, runs)]),
        "staleness",
        of=options.out and options.out.name,
    )


if __name__ == "__main__":
    main()
