"""Many gradings leak no process, descriptor, memory or file, and the death of the trainer ends everything."""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import multirole_sandbox as sandbox
from multirole_sandbox import Limits

LIMITS = Limits(test_seconds=2.0, workers=2)  # no program hangs, but the machine may be busy
PROGRAMS = (
    "print(input())",
    "import os\nos.write(1, os.read(0, 9))",
    "1 / 0",
    "import threading\nthreading.Thread(target=print, args=(input(),)).start()",
    "import os\nos.fork()",
    "def f(:",
    "print('x' * 10**6)",
    "open('/tmp/x', 'w')",
    "import os\nos._exit(3)",
    "x = [0] * 10**6\nprint(input())",
)
TESTS = [{"input": str(i), "output": str(i), "testtype": "stdin"} for i in range(2)]


def processes() -> list[int]:
    """All processes below this one, deepest last."""
    pids = [os.getpid()]
    for process in pids:
        for children in Path(f"/proc/{process}/task").glob("*/children"):  # of each of its threads
            with contextlib.suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids[1:]


def resident_kib(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def usage() -> tuple[list[int], int, list[int], set[str]]:
    """(process ids, our descriptors, descriptors of the zygotes, files in the folder for temporary ones)."""
    sandbox_processes = [worker.process.pid for worker in sandbox._running().idle]
    files = {path.name for path in Path(tempfile.gettempdir()).iterdir()}
    opened = [len(os.listdir(f"/proc/{process}/fd")) for process in sandbox_processes]
    return sorted(processes()), len(os.listdir("/proc/self/fd")), opened, files


def grade(rounds: int) -> None:
    for number in range(rounds):
        sources = [f"{program}\n# {number}" for program in PROGRAMS]
        rewards = [v.reward for v in sandbox.grade_batch(sources, [TESTS] * len(sources), limits=LIMITS)]
        assert rewards == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_gradings_in_a_row_leak_nothing(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a folder that no other process uses
    grade(20)  # warm-up, because the allocator of a process that has run other tests may still grow
    gc.collect()
    before = usage()
    ours, theirs = resident_kib(os.getpid()), [resident_kib(w.process.pid) for w in sandbox._running().idle]
    grade(rounds)
    assert usage() == before
    assert resident_kib(os.getpid()) - ours < 20_000
    assert all(
        resident_kib(w.process.pid) - kib < 2_000 for w, kib in zip(sandbox._running().idle, theirs, strict=True)
    )


def is_alive(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\\ntime.sleep(99)", "import os\\nos.read(0, 0)\\nwhile 1: 1"]
)
def test_nothing_outlives_a_killed_trainer_by_a_second(program: str) -> None:
    code = (
        "import sys\nimport multirole_sandbox as sandbox\n"
        f"tests = [{{'input': '', 'output': '', 'testtype': 'stdin'}}]\n"
        "sandbox.require()\nprint('up', flush=True)\n"
        f"sandbox.grade_batch(['{program}'] * 2, [tests] * 2, limits=sandbox.Limits(test_seconds=50, workers=2))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "up\n"
    deadline = time.monotonic() + 20
    below: set[int] = set()
    while len(below) < 6 and time.monotonic() < deadline:  # per worker: zygote, manager, program
        below = {p for p in processes() if is_below(p, trainer.pid)}
        time.sleep(0.02)
    assert len(below) == 6
    trainer.kill()
    trainer.communicate()
    time.sleep(1.0)
    assert not [process for process in below if is_alive(process)]


def is_below(process: int, ancestor: int) -> bool:
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
        if process == ancestor:
            return True
    return False


def test_a_forked_copy_of_the_trainer_starts_separate_workers() -> None:
    assert sandbox.grade("print(1)", [{"input": "", "output": "1"}], limits=LIMITS).reward == 1.0
    mine = {worker.process.pid for worker in sandbox._running().idle}
    child = os.fork()
    if child == 0:
        reward = sandbox.grade("print(1)", [{"input": "", "output": "1"}], limits=LIMITS).reward
        shared = mine & {worker.process.pid for worker in sandbox._running().idle}
        sandbox.close()
        os._exit(0 if reward == 1.0 and not shared else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sandbox.grade("print(1)", [{"input": "", "output": "1"}], limits=LIMITS).reward == 1.0
