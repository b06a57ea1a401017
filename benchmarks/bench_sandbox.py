"""Measure how fast the sandbox grades, compared with a peer on the same cores in the same run; print ratios (above 1: ours is faster).

    python benchmarks/bench_sandbox.py [--repeats 3] [--against FOLDER] [--write]

The peer, `fresh`, starts `python -I` per test, with rlimits and without isolation. Ours runs with full isolation and a
process per test. Wall-clock seconds, medians over repeats, of which every second one begins with the peer; the two workloads of 16 x 20 run
once. --write stores them in results/bench/sandbox.json.
The program with 30 lines is a shortest-path search with imports.

--against compares the CPU-seconds of programs with 10 tests with those of another checkout, in alternating pairs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import ROOT, seconds_of, spread

import multirole_sandbox as sandbox

PROGRAM = '''import sys
from collections import defaultdict
import heapq


def shortest(graph, start, n):
    """Dijkstra's algorithm."""
    far = float("inf")
    distance = [far] * (n + 1)
    distance[start] = 0
    queue = [(0, start)]
    while queue:
        d, u = heapq.heappop(queue)
        if d > distance[u]:
            continue
        for v, w in graph[u]:
            if d + w < distance[v]:
                distance[v] = d + w
                heapq.heappush(queue, (d + w, v))
    return [-1 if d == far else d for d in distance[1:]]


def main():
    n, m, *rest = map(int, sys.stdin.read().split())
    graph = defaultdict(list)
    for i in range(m):
        a, b, w = rest[3 * i : 3 * i + 3]
        graph[a].append((b, w))
        graph[b].append((a, w))
    print(*shortest(graph, 1, n))


main()
'''
SLOW = "n = int(input())\nt = 0\nfor i in range(300_000):\n    t += i * n\nprint(n * n)\n"
SQUARE = "import sys\nn = int(sys.stdin.readline())\nprint(n * n{})\n"
CPU_SECONDS = """
import inspect, json, sys
import psutil
import multirole_sandbox as sandbox
programs, tests = zip(*json.load(sys.stdin))
# an older version could run the tests of one program in one process
alone = {"may_share": False} if "may_share" in inspect.signature(sandbox.grade_batch).parameters else {}
def spent():
    here = psutil.Process()
    return sum(here.cpu_times()[:2]) + sum(sum(child.cpu_times()[:4]) for child in here.children())
sandbox.grade_batch(programs[:4], tests[:4], **alone)
before = spent()
found = sandbox.grade_batch(programs, tests, **alone)
print(json.dumps([spent() - before, sum(verdict.reward for verdict in found)]))
"""

Batch = list[tuple[str, list[dict]]]


def limit() -> None:
    """Set the peer's limits: 2 GiB and 4 CPU seconds."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (4, 4))


def start(code: str, stdin: str) -> str:
    """Run code in a new Python process."""
    completed = subprocess.run(
        [sys.executable, "-I", "-c", code], input=stdin, capture_output=True, text=True, check=False, preexec_fn=limit
    )
    return completed.stdout


def run_fresh(batch: Batch) -> None:
    """Grade with a new process per test."""

    def grade(program: str, tests: list[dict]) -> list[bool]:
        return [start(program, test["input"]).strip() == test["output"].strip() for test in tests]

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda pair: grade(*pair), batch))


def run_ours(batch: Batch) -> None:
    """Grade with the sandbox."""
    sandbox.grade_batch([program for program, _ in batch], [tests for _, tests in batch])


def make_graphs(outcome: str, n_programs: int, n_tests: int) -> Batch:
    """Return programs of 30 lines that pass, fail, or pass every second test."""
    stdin = "4 4\n1 2 3\n2 3 4\n1 3 9\n3 4 1\n"
    outputs = ["x" if outcome == "failing" or (outcome == "mixed" and i % 2) else "0 3 7 8" for i in range(n_tests)]
    tests = [{"input": stdin, "output": output, "testtype": "stdin"} for output in outputs]
    return [(f"{PROGRAM}# {i}\n", tests) for i in range(n_programs)]


def make_squares(share_wrong: float, is_slow: bool = False) -> Batch:
    """Return 16 problems with 20 tests; each wrong program begins to fail at another test."""
    batch, n_problems, n_tests = [], 16, 20
    for problem in range(n_problems):
        tests = [{"input": f"{n}\n", "output": str(n * n), "testtype": "stdin"} for n in range(n_tests)]
        is_wrong = problem < share_wrong * n_problems
        body = SLOW if is_slow else SQUARE.format(f" + (n >= {problem % n_tests})" if is_wrong else "")
        batch.append((f"{body}# {problem}\n", tests))
    return batch


def compare(batch: Batch, repeats: int) -> dict[str, float]:
    """Return our median milliseconds per program, and the peer's ratio to it."""
    run_ours(batch[:4])  # workers started
    ours, ratios = [], []
    for repeat in range(repeats):
        works = {"ours": lambda: run_ours(batch), "fresh": lambda: run_fresh(batch)}
        wall = {name: seconds_of(works[name], time.perf_counter) for name in sorted(works, reverse=repeat % 2 == 0)}
        ours.append(wall["ours"])
        ratios.append(wall["fresh"] / wall["ours"])
    milliseconds = 1000 * statistics.median(ours) / len(batch)
    return {
        "ours_ms_per_program": round(milliseconds, 2), "fresh/ours": round(statistics.median(ratios), 2), "repeats": repeats,
    }  # fmt: skip


def cpu_pairs(other: Path, pairs: int) -> dict[str, object]:
    """Return the CPU milliseconds per program of 10 tests, of this and another checkout, child processes included."""
    batch = [program for outcome in ("passing", "failing", "mixed") for program in make_graphs(outcome, 48, 10)]
    folders = {"ours": ROOT, "other": other}
    spent: dict[str, list[float]] = {name: [] for name in folders}
    for pair in range(pairs):
        rewards = []
        for name in sorted(folders, reverse=bool(pair % 2)):
            completed = subprocess.run(
                [sys.executable, "-c", CPU_SECONDS], input=json.dumps(batch), capture_output=True, text=True, check=True,
                env=os.environ | {"PYTHONPATH": str(folders[name] / "src")},
            )  # fmt: skip
            cpu_seconds, reward = json.loads(completed.stdout)
            spent[name].append(1000 * cpu_seconds / len(batch))
            rewards.append(reward)
        assert rewards[0] == rewards[1], "other verdicts"
    ratios = [ours / other for ours, other in zip(spent["ours"], spent["other"], strict=True)]
    named = spent | {"ours/other": ratios}
    return {"pairs": pairs} | {
        name: {kind: round(value, 3) for kind, value in spread(values).items()} for name, values in named.items()
    }


class Shown(dict[str, dict]):
    """Results by workload, printed as they come."""

    def __setitem__(self, name: str, values: dict) -> None:
        super().__setitem__(name, values)
        print(f"{name}: {values}", flush=True)


def main() -> None:
    """Run all workloads and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--write", action="store_true", help="write results/bench/sandbox.json")
    options = parser.parse_args()
    results: dict[str, dict] = Shown()
    level = sandbox.require()
    if options.against:
        results["30 lines, 10 tests, CPU milliseconds per program"] = cpu_pairs(options.against, 7)
    for outcome in ("passing", "failing", "mixed"):
        results[f"30 lines, 10 tests, {outcome}"] = compare(make_graphs(outcome, 16, 10), options.repeats)
    results["30 lines, 1 test"] = compare(make_graphs("passing", 60, 1), options.repeats)
    results["16 x 20, 80 % wrong"] = compare(make_squares(0.8), 1)
    results["16 x 20, slow but right"] = compare(make_squares(0.0, is_slow=True), 1)
    record = {
        "level": level,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "workloads": results,
    }
    if options.write:
        target = ROOT / "results" / "bench" / "sandbox.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
