"""Run one small cell repeatedly, each time killed by SIGKILL at another file operation or moment, and resumed.

The file operations of a run below its folder are numbered: every open for writing, mkdir, rename and removal that Python makes
(audit events; each comes before the operation) and every fsync. A resumed run is compared with one that was not killed: the names
of all files, the bytes of every adapter, and every table except its columns of seconds.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import processes

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.record import TABLES
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import folder_of, is_done

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Points:
    """Counts this process's file operations below a folder, and kills the process right before operation `kill_at` (from 1)."""

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.folder, self.kill_at, self.count = str(folder), kill_at, 0

    def install(self) -> None:
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            self.record(f"/proc/self/fd/{descriptor}")
            sync(descriptor)

        os.fsync = fsync
        sys.addaudithook(self.on_audit_event)

    def on_audit_event(self, event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str) and isinstance(args[2], int) and args[2] & WRITES:
            self.record(args[0])
        elif event in CHANGES:
            at = args[-1] if isinstance(args[-1], int) and args[-1] >= 0 else None  # a folder's descriptor
            path = os.fsdecode(args[0])
            self.record(f"/proc/self/fd/{at}/{path}" if at is not None and event in ("os.remove", "os.rmdir") else path)

    def record(self, path: str) -> None:
        if os.path.realpath(path).startswith(self.folder):
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def same(one: Path, other: Path) -> str:
    """Return the first difference between two finished runs, or an empty string."""
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


def unbroken(cell: Cell, results_dir: Path, count: Path) -> None:
    """Run the cell and write its number of file operations to `count`."""
    points = Points(folder_of(cell, results_dir).resolve(), None)
    points.install()
    run_cell(cell, results_dir)
    count.write_text(str(points.count))


def interrupted(cell: Cell, results_dir: Path, kill_at: int | None) -> None:
    if kill_at:
        Points(folder_of(cell, results_dir).resolve(), kill_at).install()
    run_cell(cell, results_dir)


def killed(scratch: Path, cell: Cell, whole: Path, kill_at: int | None, seconds: float | None) -> str:
    """Kill a new run at one operation or moment and resume it; return the first difference from the uninterrupted run."""
    results, log = scratch / "killed", scratch / "log"
    while True:
        shutil.rmtree(results, ignore_errors=True)
        process = processes.start(log, interrupted, cell, results, kill_at)
        if seconds is not None:
            time.sleep(seconds)
            process.kill()
        process.join()
        if seconds is None or process.exitcode:
            break
        seconds /= 2  # it had ended before that moment
    if (code := process.exitcode) != -signal.SIGKILL:
        return f"was not killed but ended with {code}: {log.read_text()[-500:]}"
    if code := processes.run(log, run_cell, cell, results):
        return f"did not resume, exit code {code}: {log.read_text()[-500:]}"
    return same(whole, folder_of(cell, results))


def sweep(cell: Cell, scratch: Path, n_points: int | None, n_moments: int) -> tuple[int, int, dict[str, str]]:
    """Kill the cell at `n_points` file operations (None: all) and `n_moments` moments; return the numbers of operations and attempts, and the failures."""
    whole, began = folder_of(cell, scratch / "whole"), time.monotonic()
    code = processes.run(scratch / "log", unbroken, cell, scratch / "whole", scratch / "count")
    assert code == 0, (scratch / "log").read_text()[-2000:]
    lasted, n = time.monotonic() - began, int((scratch / "count").read_text())
    assert {path.stem for path in whole.glob("*.parquet")} <= set(TABLES)
    n_points = n if n_points is None else n_points
    points = [1 + (2 * i + 1) * n // (2 * n_points) for i in range(n_points)]
    moments = [random.Random(i).uniform(0, lasted) for i in range(n_moments)]
    results = {f"point {point}": killed(scratch, cell, whole, point, None) for point in points}
    results |= {f"after {seconds:.2f} s": killed(scratch, cell, whole, None, seconds) for seconds in moments}
    return n, len(points) + len(moments), {name: problem for name, problem in results.items() if problem}
