"""Kill small runs with SIGKILL, at every file operation and at random moments, and count those with the same result after a resume.

    OMP_NUM_THREADS=1 python benchmarks/kills.py [--scratch /dev/shm] --out results/bench/kills.json
    OMP_NUM_THREADS=1 python benchmarks/kills.py --processes 2 --points 12 --random 4 --out results/bench/kills_2_processes.json

`tests/support/kill_run.py` defines the runs and the comparison. The first takes about an hour on one core. With several processes,
one of them is killed, and what the launcher does then is part of the trial.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from kill_run import sweep

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.storage import write_text

SMALL = {
    "max_steps": 3, "n_problems": 2, "num_generations": 2, "n_validation": 4, "n_train": 8, "save_steps": 1, "eval_steps": 1,
    "max_completion_length": 24, "learning_rate": 5e-3,
}  # fmt: skip
CELLS = {"voting": "ip", "eval_opt": "sp", "orch_workers": "ip"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, help="file operations of the first workflow's run; all, unless given")
    parser.add_argument("--random", type=int, default=20, help="moments, per workflow")
    parser.add_argument("--processes", type=int, default=1, help="of a run, as a launcher starts them")
    parser.add_argument("--scratch", help="a folder; in memory (/dev/shm) it goes faster")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    runs, points = {}, arguments.points
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for workflow, policy in CELLS.items():
            folder = Path(scratch) / workflow
            folder.mkdir()
            n_operations, n_attempts, failed = sweep(
                Cell(workflow, policy, **SMALL), folder, points, arguments.random, arguments.processes
            )
            runs[workflow] = {
                "file_operations": n_operations,
                "points": n_attempts - arguments.random,
                "random": arguments.random,
                "failed": {at: problem.replace(scratch, "") for at, problem in failed.items()},
                "equal": n_attempts - len(failed),
            }
            sys.stderr.write(f"{workflow}: {runs[workflow]}\n")
            points = 0
    total = {name: sum(run[name] for run in runs.values()) for name in ("points", "random", "equal")}
    text = json.dumps({"cell": SMALL, "processes": arguments.processes, "runs": runs, "total": total}, indent=2)
    print(text)
    if arguments.out:
        write_text(arguments.out, text + "\n")


if __name__ == "__main__":
    main()
