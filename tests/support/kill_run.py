"""Run one small cell repeatedly, each time killed by SIGKILL at another file operation or moment, and resumed.

The file operations of a run below its folder are numbered: every open for writing, mkdir, rename and removal that Python makes
(audit events; each comes before the operation) and every fsync. A run of several processes, as a launcher starts them, loses one
of them; the launcher then ends the others. A resumed run is compared with one that was not killed: the names
of all files, the bytes of every adapter, and every table except its columns of seconds.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import processes
from cells import compare_runs

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
    try:
        compare_runs(one, other, "**/*.parquet")
    except AssertionError as error:
        return str(error)
    return ""


def is_first() -> bool:
    """Return whether this process is the only one, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def unbroken(cell: Cell, results_dir: Path, count: Path) -> None:
    """Run the cell and write the first process's number of file operations to `count`."""
    points = Points(folder_of(cell, results_dir).resolve(), None)
    points.install()
    run_cell(cell, results_dir)
    if is_first():
        count.write_text(str(points.count))


def interrupted(cell: Cell, results_dir: Path, kill_at: int | None) -> None:
    if kill_at and is_first():
        Points(folder_of(cell, results_dir).resolve(), kill_at).install()
    run_cell(cell, results_dir)


def run_all(
    log: Path, n_processes: int, work: Callable, *args: object, kill: tuple[int, float] | None = None
) -> list[int]:
    """Run one process, or several as a launcher does, and return their exit codes; `kill` is a rank and the seconds until its SIGKILL."""
    if n_processes > 1:
        return processes.run_together(n_processes, log, work, *args, kill=kill)
    if kill is None:
        return [processes.run(log, work, *args)]
    process = processes.start(log, work, *args)
    time.sleep(kill[1])
    process.kill()
    process.join()
    return [process.exitcode]


def killed(
    scratch: Path, cell: Cell, whole: Path, kill_at: int | None, moment: tuple[int, float] | None, n_processes: int
) -> str:
    """Kill a new run at one operation of its first process, or one rank at a moment, and resume it; return the first difference from the uninterrupted run."""
    results, log = scratch / "killed", scratch / "log"
    while True:
        shutil.rmtree(results, ignore_errors=True)
        codes = run_all(log, n_processes, interrupted, cell, results, kill_at, kill=moment)
        if moment is None or any(codes):
            break
        moment = (moment[0], moment[1] / 2)  # it had ended before that moment
    if codes[moment[0] if moment else 0] != -signal.SIGKILL:
        return f"was not killed but ended with {codes}: {tail(scratch)}"
    if any(codes := run_all(log, n_processes, run_cell, cell, results)):
        return f"did not resume, exit codes {codes}: {tail(scratch)}"
    return same(whole, folder_of(cell, results))


def tail(scratch: Path) -> str:
    """Return the end of the last run's output."""
    return " ".join(path.read_text()[-500:] for path in sorted(scratch.glob("log*")))


def sweep(
    cell: Cell, scratch: Path, n_points: int | None, n_moments: int, n_processes: int = 1
) -> tuple[int, int, dict[str, str]]:
    """Kill the cell at `n_points` file operations (None: all) and `n_moments` moments; return the numbers of operations and attempts, and the failures.

    The operations are those of the first process, which writes the run; at moments, the ranks take turns.
    """
    whole, began = folder_of(cell, scratch / "whole"), time.monotonic()
    codes = run_all(scratch / "log", n_processes, unbroken, cell, scratch / "whole", scratch / "count")
    assert not any(codes), tail(scratch)
    lasted, n = time.monotonic() - began, int((scratch / "count").read_text())
    assert {path.stem for path in whole.glob("*.parquet")} <= set(TABLES)
    n_points = n if n_points is None else n_points
    points = [1 + (2 * i + 1) * n // (2 * n_points) for i in range(n_points)]
    moments = [(i % n_processes, random.Random(i).uniform(0, lasted)) for i in range(n_moments)]
    results = {f"point {point}": killed(scratch, cell, whole, point, None, n_processes) for point in points}
    for rank, seconds in moments:
        name = f"rank {rank} after {seconds:.2f} s" if n_processes > 1 else f"after {seconds:.2f} s"
        results[name] = killed(scratch, cell, whole, None, (rank, seconds), n_processes)
    return n, len(results), {name: problem for name, problem in results.items() if problem}
