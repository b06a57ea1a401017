"""Processes for tests, forked from a server that has imported everything, so that a start takes milliseconds instead of 7 CPU-seconds.

pytest-xdist's workers use one server, which its controller starts (`serve_workers`).

They run a function that can be pickled, that is one of a module; their output goes to a log.
"""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

PATIENCE = 900.0
"""Seconds after which a process is taken for one that hangs."""
SERVER = multiprocessing.get_context("forkserver")
IMPORTED = [
    "multirole.trainer", "trainers", "multirole_cpu.passes", "multirole_study.doctor", "multirole_study.experiment.run", "multirole_study.plan",
]  # fmt: skip
"""Modules that the server imports. Those that are not installed are left out."""
SERVER.set_forkserver_preload(IMPORTED)
ADDRESS = "MULTIROLE_TESTS_SERVER"
"""The environment variable with the address of the server that all workers use."""


def serve_workers() -> None:
    """Start the server of all workers, whose environment has its address; it ends with this process."""
    SERVER.set_forkserver_preload([*IMPORTED, "snakemake.cli"])
    forkserver.ensure_running()
    os.environ[ADDRESS] = forkserver._forkserver._forkserver_address


def _use_server(address: str) -> None:
    server = forkserver._forkserver
    server.ensure_running = lambda: None
    server._forkserver_address, server._forkserver_alive_fd = address, os.pipe()[1]


if ADDRESS in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    _use_server(os.environ[ADDRESS])


def start(log: Path, work: Callable, *args: object, **environment: str) -> BaseProcess:
    """Call `work(*args)` in a new process. Its exit code is that of a Python script: 1 for an exception, -9 if killed."""
    process = SERVER.Process(target=_work, args=(log, environment, work, args))
    process.start()
    return process


def run(log: Path, work: Callable, *args: object, **environment: str) -> int:
    """Call `work(*args)` in a new process, wait for it, and return its exit code."""
    process = start(log, work, *args, **environment)
    process.join(PATIENCE)
    assert process.exitcode is not None, f"a process hangs; its output is in {log}"
    return process.exitcode


def run_together(
    n: int, log: Path, work: Callable, *args: object, kill: tuple[int, float] | None = None
) -> list[int]:  # fmt: skip
    """Run `n` processes as torchrun would, with rank, address and port; if one fails, all are ended.

    `kill` is a rank and the seconds after which it gets SIGKILL.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    started = [
        start(Path(f"{log}.{rank}"), work, *args, RANK=str(rank), LOCAL_RANK=str(rank), **sizes, **address)
        for rank in range(n)
    ]
    began = time.monotonic()
    deadline = began + PATIENCE
    while any(process.is_alive() for process in started):
        if kill is not None and time.monotonic() - began >= kill[1]:
            started[kill[0]].kill()
        if any(process.exitcode for process in started) or time.monotonic() > deadline:
            for process in started:
                process.kill()
        time.sleep(0.05)
    return [process.exitcode for process in started]


def _work(log: Path, environment: dict[str, str], work: Callable, args: tuple) -> None:
    os.environ.update(environment)
    os.fsync = lambda descriptor: None  # as in conftest.py
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    work(*args)
