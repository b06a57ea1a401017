"""Run a command in a process group of its own, and leave none of its processes behind.

    python -m multirole.engines.process_group vllm serve ...

vLLM's server has its engine and workers in child processes, which keep the GPU's memory if the server alone is killed. This process waits
for the server, passes signals on to it, and then ends what is left of its group. If this process is killed, Linux sends the server
SIGTERM, after which it ends its processes itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GRACE = 10.0
"""Seconds in which what is left of a group may end by itself."""
PR_SET_PDEATHSIG = 1
"""Linux's number for "send me this signal when my parent ends", `prctl(2)`."""


def run(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code, 128 + N if signal N killed it. OSError if there is no such command."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def follow_parent() -> None:  # in the child, before the command
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # it ended before the call
                os.kill(os.getpid(), signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to pass them on to
    process = subprocess.Popen(list(command), start_new_session=True, preexec_fn=follow_parent)  # noqa: PLW1509 (no threads)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    try:
        code = process.wait()
    finally:
        end_group(process.pid)
    return code if code >= 0 else 128 - code


def end_group(group: int) -> None:
    """Ask the processes of a group to end, and kill those that have not after `GRACE` seconds."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 0.0)):
        end = time.monotonic() + seconds
        try:
            os.killpg(group, number)
            while time.monotonic() < end:
                with suppress(ChildProcessError):  # as the first process of a container, this one gets the orphans
                    os.waitpid(-1, os.WNOHANG)
                os.killpg(group, 0)
                time.sleep(0.05)
        except ProcessLookupError:  # the group is empty
            return


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
