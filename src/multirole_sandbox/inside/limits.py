"""Resource limits of a program, with defaults for this machine."""

import math
import os
from dataclasses import dataclass, field

BUSY_FACTOR = 4.0
"""Wall-clock time of all tests of a program, as a multiple of `problem_seconds`, after which it is ended on a machine that is too busy."""
MAX_OUTPUT_BYTES = 256 << 20
"""The longest output that the trainer can be asked to hold in its memory."""


def processes_here() -> int:
    """Return the number of training processes on this machine, as the launcher has set it. All of them grade at once."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def container_limits(folder: str = "/sys/fs/cgroup") -> tuple[float, float]:
    """Return the cores and the bytes of memory that a container may use, by the files of cgroup v2 or v1; infinity where there is no limit."""

    def numbers(*names: str) -> list[float]:
        found: list[float] = []
        try:
            for name in names:
                with open(f"{folder}/{name}", encoding="ascii") as file:
                    found += [math.inf if word == "max" else float(word) for word in file.read().split()]
        except (OSError, ValueError):
            return []
        return found

    quota = numbers("cpu.max") or numbers("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    memory = numbers("memory.max") or numbers("memory/memory.limit_in_bytes")
    has_quota = len(quota) == 2 and min(quota) > 0  # v1 has -1 for none
    cores = quota[0] / quota[1] if has_quota else math.inf
    return cores, memory[0] if memory else math.inf


def default_workers() -> int:
    """Return the number of workers: one per usable core, at most 64. Several training processes share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(64, int(min(cores, container_limits()[0])) // processes_here()))


def default_memory_bytes() -> int:
    """Return a program's memory limit: 2 GiB (the authors allow 4), or less if all workers together would not fit; at least 512 MiB.

    This limits address space. It fits the usual 512 MiB thread stack for deep recursion and a large heap.
    """
    physical = int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), container_limits()[1]))
    return max(512 << 20, min(2 << 30, physical // (processes_here() * (default_workers() + 1))))


@dataclass(frozen=True)
class Limits:
    """Limits of one program; `test_seconds` are CPU seconds, and it may be idle for `idle_factor` times as long, as when it sleeps.

    A program whose tests hang has a bounded cost: `full_timeouts` tests may use all of `test_seconds`; every further test
    has a twentieth of it (fast tests still pass), and all tests, which run sequentially, have `problem_seconds` of
    CPU and idle time together. With the defaults 20 hanging tests cost 12 s instead of 60 s. Time in which a program waits for a busy
    machine does not count, up to `BUSY_FACTOR` times `problem_seconds`.
    """

    test_seconds: float = 3.0
    idle_factor: float = 2.0
    problem_seconds: float = 120.0
    full_timeouts: int = 3
    memory_bytes: int = field(default_factory=default_memory_bytes)
    output_bytes: int = 16 << 20
    workers: int = field(default_factory=default_workers)

    @property
    def wall_seconds(self) -> float:
        """Wall-clock time that all tests of a program may take."""
        return BUSY_FACTOR * self.problem_seconds

    def __post_init__(self) -> None:
        has_time = 0 < self.test_seconds <= self.problem_seconds <= 86_400 and self.full_timeouts >= 1
        has_room = self.memory_bytes >= 64 << 20 and 256 <= self.output_bytes <= MAX_OUTPUT_BYTES and self.workers >= 1
        if not (has_time and has_room):
            raise ValueError(
                f"No program can be run within {self}. Write 0 < test_seconds <= problem_seconds <= 86400, a "
                "memory_bytes of at least 64 MiB (Python itself needs about 32), an output_bytes of 256 to 256 << 20 "
                "(held in the trainer's memory), and at least 1 for full_timeouts and workers."
            )
