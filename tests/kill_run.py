"""Trains one small cell again and again, killed by SIGKILL each time at another file operation or moment, and resumed.

    python tests/kill_run.py FIELDS.json SCRATCH --points 12 --random 5 > result.json

The file operations of a run below its folder are numbered: every open for writing, mkdir, rename and removal that Python makes
(audit events; each comes before the operation) and every fsync. A process that has imported everything forks a child per
attempt, so that one costs seconds. What is compared with the run that nobody killed: the names of all files, the bytes of
every adapter, and every table but its columns of seconds.
"""

import argparse
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from multirole.experiment.cell import Cell
from multirole.experiment.folders import folder_of, is_done
from multirole.experiment.record import TABLES
from multirole.experiment.run import run_cell

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Points:
    """Counts this process's file operations below a folder, and kills it right before number `kill_at` (from 1)."""

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.folder, self.kill_at, self.count = str(folder), kill_at, 0

    def install(self) -> None:
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            self.one(f"/proc/self/fd/{descriptor}")
            sync(descriptor)

        os.fsync = fsync
        sys.addaudithook(self.heard)

    def heard(self, event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str) and isinstance(args[2], int) and args[2] & WRITES:
            self.one(args[0])
        elif event in CHANGES:
            at = args[-1] if isinstance(args[-1], int) and args[-1] >= 0 else None  # a folder's descriptor
            path = os.fsdecode(args[0])
            self.one(f"/proc/self/fd/{at}/{path}" if at is not None and event in ("os.remove", "os.rmdir") else path)

    def one(self, path: str) -> None:
        if os.path.realpath(path).startswith(self.folder):
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def child(work: Callable[[], None], log: Path) -> int:
    """Do the work in a fork whose output goes to a file; returns its process."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def ended(process: int) -> int:
    """Its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def same(one: Path, other: Path) -> str:
    """The first difference between two finished runs; empty where there is none."""
    if not is_done(other):
        return "not done"
    files = [sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()) for run in (one, other)]
    if files[0] != files[1]:
        return f"files {sorted(set(files[0]) ^ set(files[1]))}"
    for name in files[0]:
        if name.startswith("adapters/") and (one / name).read_bytes() != (other / name).read_bytes():
            return f"{name}: other bytes"
    for name in [name for name in files[0] if name.endswith(".parquet")]:
        a, b = (pd.read_parquet(run / name) for run in (one, other))
        clocks = [column for column in a if column.endswith("seconds")]
        try:
            pd.testing.assert_frame_equal(a.drop(columns=clocks), b.drop(columns=clocks), check_exact=True)
        except AssertionError as error:
            return f"{name}: {error}"
    return ""


def killed(scratch: Path, cell: Cell, whole: Path, kill_at: int | None, seconds: float | None) -> str:
    """Kill a fresh run at one point or moment, then let it go on: what differs from the whole run."""
    results = scratch / "killed"
    shutil.rmtree(results, ignore_errors=True)
    folder, log = folder_of(cell, results), scratch / "log"

    def first() -> None:
        if kill_at:
            Points(folder.resolve(), kill_at).install()
        run_cell(cell, results)

    process = child(first, log)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    if (code := ended(process)) not in (-signal.SIGKILL, 0) or (code == 0 and kill_at):
        return f"was not killed but ended with {code}: {log.read_text()[-500:]}"
    if code := ended(child(lambda: run_cell(cell, results), log)):
        return f"did not resume, exit code {code}: {log.read_text()[-500:]}"
    return same(whole, folder)


def spread(n: int, count: int | None) -> list[int]:
    """`count` of the numbers 1 to n, evenly; None takes all."""
    if count is None or count >= n:
        return list(range(1, n + 1))
    return sorted({round(1 + i * (n - 1) / (count - 1)) for i in range(count)}) if count > 1 else [n][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fields", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--points", default="all", help="how many file operations, or all")
    parser.add_argument("--random", type=int, default=0, help="how many moments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("multirole").setLevel(logging.WARNING)
    scratch, cell = arguments.scratch, Cell(**json.loads(arguments.fields.read_text()))
    whole, seen = folder_of(cell, scratch / "whole"), scratch / "points"

    def unbroken() -> None:
        points = Points(whole.resolve(), None)
        points.install()
        run_cell(cell, scratch / "whole")
        seen.write_text(str(points.count))

    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    gc.freeze()  # what is imported stays: a child would copy it at its first collection
    began = time.monotonic()
    if code := ended(child(unbroken, scratch / "log")):
        sys.exit(f"the unbroken run ended with {code}: {(scratch / 'log').read_text()[-2000:]}")
    lasted, n = time.monotonic() - began, int(seen.read_text())
    assert {path.stem for path in whole.glob("*.parquet")} <= set(TABLES)
    failed: dict[str, str] = {}
    points = spread(n, None if arguments.points == "all" else int(arguments.points))
    for done, point in enumerate(points, start=1):
        if problem := killed(scratch, cell, whole, point, None):
            failed[f"point {point}"] = problem
        if done % 10 == 0:
            print(f"{done} of {len(points)} points, {len(failed)} failed", file=sys.stderr, flush=True)
    rng = random.Random(0)
    for _ in range(arguments.random):
        seconds = rng.uniform(0, lasted)
        if problem := killed(scratch, cell, whole, None, seconds):
            failed[f"after {seconds:.2f} s"] = problem
    result = {"file_operations": n, "points": len(points), "random": arguments.random, "failed": failed}
    print(json.dumps(result | {"equal": len(points) + arguments.random - len(failed)}))


if __name__ == "__main__":
    main()
