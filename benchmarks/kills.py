"""Kills small runs by SIGKILL, at every file operation and at random moments, and counts those that end as if nothing was.

    python benchmarks/kills.py --out results/bench/kills.json

`tests/kill_run.py` says what is killed and what is compared. It takes about half an hour on two quiet cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from multirole.experiment.storage import write_text

SCRIPT = Path(__file__).parents[1] / "tests" / "kill_run.py"
SMALL = {
    "iterations": 3, "n_problems": 2, "n_episodes": 2, "n_validation": 4, "n_train": 8, "save_every": 1, "eval_every": 1,
    "max_response_tokens": 24, "learning_rate": 5e-3,
}  # fmt: skip
CELLS = {"voting": "ip", "eval_opt": "sp", "orch_workers": "ip"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default="all", help="file operations of the first workflow's run, or all")
    parser.add_argument("--random", type=int, default=20, help="moments, per workflow")
    parser.add_argument("--scratch", help="a folder; in memory (/dev/shm) it goes faster")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for workflow, policy in CELLS.items():
            fields = Path(scratch) / f"{workflow}.json"
            fields.write_text(json.dumps({"workflow": workflow, "policy": policy} | SMALL))
            points = "0" if results else arguments.points
            command = [SCRIPT, fields, Path(scratch) / workflow, "--points", points, "--random", str(arguments.random)]
            done = subprocess.run(
                [sys.executable, *command], check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            results[workflow] = json.loads(done.stdout)
            failed = {at: problem.replace(scratch, "") for at, problem in results[workflow]["failed"].items()}
            results[workflow]["failed"] = failed
            sys.stderr.write(f"{workflow}: {results[workflow]}\n")
    total = {name: sum(one[name] for one in results.values()) for name in ("points", "random", "equal")}
    text = json.dumps({"cell": SMALL, "runs": results, "total": total}, indent=2)
    print(text)
    if arguments.out:
        write_text(arguments.out, text + "\n")


if __name__ == "__main__":
    main()
