"""Compare a cell on one core and on two: wall seconds of an iteration with one thread, with two threads, and with two processes.

    python benchmarks/bench_processes.py [--scale smollm2] [--pairs 3] [--out results/bench/processes.json]

The three settings take turns. Repeats of a setting must end with the same adapters, bit for bit, or this program fails; `adapters` in
the JSON file is their hash, which differs between settings, since sums are added in another order. Wall time needs a quiet machine with
two free cores. With `--out`, other scales in the file are kept, and docs/speed.md gets the table.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import markdown, shown, spread, write

CELLS = ["voting sp", "eval_opt ip"]
SHORT = {
    "tiny-r": {"max_steps": 6, "n_train": 256, "n_validation": 8, "eval_steps": 6, "save_steps": 6},
    "smollm2": {
        "max_steps": 3,
        "n_problems": 2,
        "num_generations": 8,
        "n_validation": 2,
        "eval_steps": 3,
        "save_steps": 3,
    },
}
"""Scale -> the parameters of its cells."""
SETTINGS = {"one thread": (1, 1), "two threads": (1, 2), "two processes": (2, 1)}
"""Name -> (processes, threads of each)."""


def measure(scale: str, cell: str, n_processes: int, n_threads: int) -> dict:
    """Train a cell; return the wall seconds of rollout and update, averaged over the iterations after the first, and a hash of its adapters."""
    import pandas as pd

    workflow, policy = cell.split()
    parameters = SHORT[scale] | {"workflow": workflow, "policy": policy, "scale": scale, "n_processes": n_processes}
    with tempfile.TemporaryDirectory() as folder:
        options = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
        command = [sys.executable, "-m", "multirole_study", "train", *options, "-p", "results_dir", folder]
        environment = os.environ | {"OMP_NUM_THREADS": str(n_threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        metrics = pd.read_parquet(next(Path(folder).rglob("metrics.parquet"))).iloc[1:]
        last = max(Path(folder).rglob("adapter_model.safetensors"), key=lambda path: path.stat().st_mtime).parents[1]
        weights = b"".join(path.read_bytes() for path in sorted(last.rglob("adapter_model.safetensors")))
    phases = {name: float(metrics[f"{name}_seconds"].mean()) for name in ("rollout", "update")}
    return phases | {"iteration": sum(phases.values()), "adapters": hashlib.sha256(weights).hexdigest()[:16]}


def compare(scale: str, cell: str, n_pairs: int) -> dict[str, dict]:
    """Return setting -> hash of its adapters, and the spreads of seconds with one thread over those with the setting."""
    runs: dict[str, list[dict]] = {name: [] for name in SETTINGS}
    for _ in range(n_pairs):
        for name, numbers in SETTINGS.items():
            runs[name].append(measure(scale, cell, *numbers))
    for name, repeats in runs.items():
        if len(hashes := {run["adapters"] for run in repeats}) > 1:
            raise RuntimeError(f"Repeats of {cell} with {name} end with different adapters: {sorted(hashes)}.")
    result = {}
    for name, repeats in runs.items():
        pairs = list(zip(runs["one thread"], repeats, strict=True))
        ratios = {phase: spread([one[phase] / run[phase] for one, run in pairs]) for phase in ("rollout", "update", "iteration")}  # fmt: skip
        result[name] = ratios | {"adapters": repeats[0]["adapters"], "runs": repeats, "pairs": n_pairs}
    return result


def table(result: dict[str, dict]) -> str:
    """Return the table in docs/speed.md."""
    rows = []
    for scale, cells in result.items():
        for cell, settings in cells.items():
            for name, ratios in settings.items():
                if name != "one thread":
                    spans = [shown(ratios[phase]) for phase in ("rollout", "update", "iteration")]
                    rows.append([scale, cell, name, *spans, ratios["pairs"]])
    return markdown("scale | cell | setting | rollout | update | iteration | pairs", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SHORT, default="tiny-r")
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="'WORKFLOW POLICY'")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for cell in args.cells:
        result.setdefault(args.scale, {})[cell] = compare(args.scale, cell, args.pairs)
        print(args.scale, cell, json.dumps(result[args.scale][cell]), flush=True)
        write("bench_processes", args.out, result, table(result))


if __name__ == "__main__":
    main()
