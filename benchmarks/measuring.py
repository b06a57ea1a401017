"""What the benchmarks share: a measurement in a process of its own, the spread of ratios, the tables of pages in docs/."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def alone(script: str, *arguments: str, checkout: Path = ROOT, python: str = sys.executable) -> dict:
    """The JSON that a script prints last, run with one thread on a checkout's sources; RuntimeError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-W", "ignore", script, *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed in {checkout}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def shown(found: dict[str, float]) -> str:
    """A spread as a table's cell: median [minimum, maximum]."""
    return f"{found['median']:.2f} [{found['min']:.2f}, {found['max']:.2f}]"


def write(name: str, out: Path | None, result: dict, table: str) -> None:
    """Write a benchmark's result, if it goes to a file, and its table between its marks in docs/speed.md."""
    if out is None:
        return
    out.write_text(json.dumps(result, indent=1) + "\n")
    path = ROOT / "docs" / "speed.md"
    before, mark, rest = path.read_text().partition(f"<!-- table: benchmarks/{name}.py writes it -->\n")
    path.write_text(f"{before}{mark}{table}\n{rest[rest.index('<!-- end -->') :]}")
