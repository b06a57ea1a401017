"""The messages between the trainer and a zygote: one memory file per unit of work, one frame per test.

A unit is one program with some of its tests. Its memory file holds a JSON head (a `Head`), the program, and the inputs
one after another. The zygote never reads that file, and a program's manager reads only the head and the program, so the
process that runs one test never had the input of another test in its memory.
"""

import struct
from dataclasses import dataclass

MESSAGE = struct.Struct("!4sI")  # UNIT or STOP, bytes of the head
FRAME = struct.Struct("!4sIBidQ")  # TEST or END, test index, how it ended, its code, CPU seconds, bytes that follow
UNIT, STOP, TEST, END = b"unit", b"stop", b"test", b"done"
CHANNEL, ANSWERS, ERRORS, NULL = 60, 61, 62, 63  # descriptors of a zygote, out of the way of a program's 0 to 3

EXITED, SIGNALLED, TIMED_OUT, TOO_MUCH_OUTPUT = range(4)  # how a test ended
FINE, FAILED, NO_MEMORY, FORBIDDEN = 0, 1, 81, 82  # exit codes of a test's process


@dataclass(frozen=True)
class Head:
    """A unit's head. sizes: input bytes per test; functions: the function to call, or "" for a test on stdin."""

    source_bytes: int
    sizes: list[int]
    functions: list[str]
    test_seconds: float
    wall_seconds: float
    unit_seconds: float
    full_timeouts: int
    short_seconds: float
    memory_bytes: int
    output_bytes: int
