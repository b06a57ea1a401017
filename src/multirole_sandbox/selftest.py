"""Self-test before grading: correct programs must pass and attacks must fail.

A successful attack prints "escaped". This tests the walls themselves and does not rely on what the kernel claims to support.
"""

import os
import tempfile

from multirole_sandbox.inside.limits import Limits
from multirole_sandbox.pool import Job, Pool
from multirole_sandbox.verdict import SandboxError

GOOD = {
    "reads, computes, prints": "import math\nprint(math.factorial(int(input())))",
    "thread with a large stack": (
        "import sys, threading\nthreading.stack_size(1 << 26)\nsys.setrecursionlimit(10**6)\n"
        "def f(n):\n    return n if n == 0 else 1 + f(n - 1)\n"
        "def main():\n    print(120 * (f(3000) == 3000))\n"
        "thread = threading.Thread(target=main)\nthread.start()\nthread.join()"
    ),
}
ATTACKS = {
    "reads a file": "open({canary!r}).read()\nprint('escaped')",
    "writes a file": "open({canary!r}, 'w').write('x')\nprint('escaped')",
    "lists a folder": "import os\nos.listdir('/')\nprint('escaped')",
    "opens a socket": "import socket\nsocket.socket()\nprint('escaped')",
    "opens a datagram socket": "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\nprint('escaped')",
    "forks": "import os\npid = os.fork()\nif pid:\n    print('escaped')",
    "starts a program": "import subprocess\nsubprocess.run(['true'])\nprint('escaped')",
    "signals the trainer": "import os\nos.kill({trainer}, 0)\nprint('escaped')",
    "reads the trainer": "open('/proc/{trainer}/environ').read()\nprint('escaped')",
}


def check(pool: Pool) -> None:
    """Run correct programs and attacks on the pool. Raises SandboxError for the first wrong result."""
    for name, program in GOOD.items():
        reason = _reason_of(pool, program, b"120")
        if reason != "passed":
            raise SandboxError(f"a correct program ({name}) ended with {reason!r} at level {pool.level!r}.")
    with tempfile.NamedTemporaryFile("w+", prefix="multirole-canary-") as canary:
        canary.write("canary")
        canary.flush()
        os.chmod(canary.name, 0o666)
        for name, program in ATTACKS.items():
            reason = _reason_of(pool, program.format(canary=canary.name, trainer=os.getpid()), b"escaped")
            if reason == "passed":
                raise SandboxError(f"a program that {name} was not stopped at level {pool.level!r}.")
        canary.seek(0)
        if canary.read() != "canary":
            raise SandboxError(f"a program wrote a file at level {pool.level!r}.")


def _reason_of(pool: Pool, program: str, expected: bytes) -> str:
    job = Job(program, [b"5"], [""], lambda _, output: "passed" if output.strip() == expected else "wrong_answer")
    pool.run([job], Limits(test_seconds=10.0))
    return job.reasons[0]
