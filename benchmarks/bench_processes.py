"""Compare a cell on one core and on two: wall seconds of an iteration, in interleaved pairs.

    python benchmarks/bench_processes.py [--pairs 3] [--out results/bench/processes.json]

Wall time needs a quiet machine with two free cores. With `--out`, docs/speed.md gets the table.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import shown, spread, write

CELLS = ["voting sp", "eval_opt ip"]
SHORT = {"iterations": 6, "n_train": 256, "n_validation": 8, "eval_every": 6}


def seconds(workflow: str, policy: str, n_processes: int) -> dict[str, float]:
    """Return the wall seconds of rollout and update, averaged over a run's iterations after the first."""
    import pandas as pd

    options = SHORT | {"workflow": workflow, "policy": policy, "n_processes": n_processes}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            word for name, value in (options | {"results_dir": folder}).items() for word in ("-p", name, str(value))
        ]
        command = [sys.executable, "-m", "multirole_study", "train", *words]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        metrics = pd.read_parquet(next(Path(folder).rglob("metrics.parquet"))).iloc[1:]
    return {phase: float(metrics[f"{phase}_seconds"].mean()) for phase in ("rollout", "update")}


def table(result: dict[str, dict]) -> str:
    """Return the rows of the table in docs/speed.md."""
    lines = ["| cell | rollout | update | pairs |", "| --- | --- | --- | --- |"]
    for cell, ratios in result.items():
        lines.append(f"| {cell} math | {shown(ratios['rollout'])} | {shown(ratios['update'])} | {ratios['pairs']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {}
    for cell in CELLS:
        pairs = [(seconds(*cell.split(), 1), seconds(*cell.split(), 2)) for _ in range(args.pairs)]
        result[cell] = {phase: spread([single[phase] / two[phase] for single, two in pairs]) for phase in pairs[0][0]}
        result[cell]["pairs"] = args.pairs
        print(cell, result[cell], flush=True)
        write("bench_processes", args.out, result, table(result))


if __name__ == "__main__":
    main()
