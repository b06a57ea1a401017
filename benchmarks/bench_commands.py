"""Time every documented way to train a cell at scale tiny-r with and without `OMP_NUM_THREADS=1` in the environment.

    python benchmarks/bench_commands.py [--pairs 3] [--out results/bench/commands.json]

The commands are those of the README, the Makefile and docs, with 4 iterations; scripts of examples have their own number. A pair is one run of each, in alternating order; the ratio is
the wall time without the variable over that with it, so that above 1 the library's own choice of threads is slower. Wall time
depends on what else runs: the load of the machine at the start is recorded.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, markdown, shown, spread, write

BIN = Path(sys.executable).parent
SMALL = {"max_steps": 4, "eval_steps": 4, "n_validation": 32}
PARAMETERS = [word for name, value in SMALL.items() for word in ("-p", name, str(value))]


def commands(folder: str) -> dict[str, list[str]]:
    """Return name -> command; each trains into `folder`."""
    results = ["-p", "results_dir", folder]
    notebook = [str(ROOT / "notebooks" / "train_cell.ipynb"), f"{folder}/out.ipynb"]
    return {
        "papermill": [sys.executable, "-m", "papermill", "-k", "python3", *notebook, *PARAMETERS, *results],
        "multirole train": [str(BIN / "multirole"), "train", *PARAMETERS, *results],
        "make cell": ["make", "-s", "cell", f"RESULTS_DIR={folder}", f"ARGS={' '.join(PARAMETERS)}"],
        "examples/grpo_multirole.py": [sys.executable, str(ROOT / "examples/grpo_multirole.py")],
        "examples/partial_sharing.py": [sys.executable, str(ROOT / "examples/partial_sharing.py")],
        "examples/debate.py": [str(BIN / "multirole"), "train", "-p", "workflow", f"{ROOT}/examples/debate.py:Debate", *PARAMETERS, *results],
        "Jupyter (nbconvert)": [
            sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", f"{folder}/train_cell.ipynb", "--output", f"{folder}/run.ipynb",
        ],
    }  # fmt: skip


def notebook_for(folder: str) -> None:
    """Copy the training notebook with the small settings, as a reader would type them into its cell."""
    cells = json.loads((ROOT / "notebooks" / "train_cell.ipynb").read_text())
    for cell in cells["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            settings = SMALL | {"results_dir": folder}
            cell["source"] = [*cell["source"], "\n", *(f"{name} = {value!r}\n" for name, value in settings.items())]
    Path(folder, "train_cell.ipynb").write_text(json.dumps(cells))


def seconds(name: str, with_variable: bool) -> float:
    """Run one command in a new folder; return its wall seconds."""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    if with_variable:
        environment["OMP_NUM_THREADS"] = "1"
    folder = tempfile.mkdtemp()
    try:
        notebook_for(folder)
        place = ROOT if name == "make cell" else folder
        started = time.perf_counter()
        done = subprocess.run(
            commands(folder)[name], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
        return time.perf_counter() - started
    finally:
        shutil.rmtree(folder)


def table(result: dict[str, dict]) -> str:
    """Return the table in docs/speed.md."""
    rows = [[name, shown(ratio), ratio["pairs"], f"{ratio['load']:.1f}"] for name, ratio in result.items()]
    return markdown("command | without / with OMP_NUM_THREADS=1 | pairs | load", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, dict] = {}
    for name in commands(""):
        load, ratios = os.getloadavg()[0], []
        for i in range(options.pairs):
            order = (False, True) if i % 2 == 0 else (True, False)
            times = {with_variable: seconds(name, with_variable) for with_variable in order}
            ratios.append(times[False] / times[True])
        result[name] = spread(ratios) | {"pairs": len(ratios), "load": load}
        print(f"{name:<28} {shown(result[name])}  load {load:.1f}", flush=True)
    write("bench_commands", options.out, result, table(result))


if __name__ == "__main__":
    main()
