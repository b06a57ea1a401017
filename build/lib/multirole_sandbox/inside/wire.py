"""Message formats between trainer and zygote: one packet per unit of work, one frame per test.

A unit is one program with its (remaining) tests. Its packet carries a memory file with a head, the program,
and the inputs one after another. The head is JSON: [bytes of the program, bytes of each input, per test [the function
to call or "" for a test on stdin, whether its arguments' dicts get integer keys], the fields of `Limits`]. The zygote never reads that file. A manager reads
only the head and the program, so that a test's process never has another test's input in memory.
"""

import signal
import struct

PACKET = struct.Struct("!Qd")  # bytes of the head, and the seconds that the whole unit has
FRAME = struct.Struct("!4sibQ")  # MARK, test index (-1: end of the unit), position in REASONS, bytes that follow
MARK = b"test"
CHANNEL, ANSWERS, ERRORS, NULL = 60, 61, 62, 63  # descriptors of a zygote, out of the way of a program's 0 to 3

REASONS = ("ended", "error", "timeout", "memory", "output_limit", "violation")
"""How a test or a unit ended. An internal failure sends no frame: the zygote exits."""
FINE, FAILED, NO_MEMORY, FORBIDDEN = 0, 1, 81, 82  # exit codes of a test's process
REASON_OF_EXIT = {  # and of negative signal numbers; anything else is an "error"
    FINE: "ended", NO_MEMORY: "memory", FORBIDDEN: "violation", -signal.SIGSYS: "violation", -signal.SIGXCPU: "timeout",
    -signal.SIGKILL: "memory", -signal.SIGXFSZ: "output_limit",
}  # fmt: skip
REASON_OF_MANAGER = {  # compiling a program can time out or crash; anything else ends the zygote
    FINE: "ended", -signal.SIGXCPU: "timeout", -signal.SIGSEGV: "error", -signal.SIGABRT: "error", -signal.SIGBUS: "error",
}  # fmt: skip
