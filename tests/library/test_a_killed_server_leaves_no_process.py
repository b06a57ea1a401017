"""`multirole.engines.process_group`: whichever process of a server is killed, its others end too, and give their memory back."""

import os
import signal
import subprocess
import sys
import time

import pytest

SERVER = "trap 'kill $!; exit 3' TERM; sleep 1000 & echo $$ $!; wait"
"""A stand-in for vLLM's server: it has a child, which it ends on SIGTERM alone."""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Return whether a process ends within half a minute."""
    for _ in range(600):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to follow a parent that is killed")
@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [("server", signal.SIGKILL, 137), ("runner", signal.SIGTERM, 3), ("runner", signal.SIGKILL, -9), ("child", signal.SIGKILL, 0)],
)  # fmt: skip
def test_none_is_left(victim, number, code):
    command = [sys.executable, "-m", "multirole.engines.process_group", "bash", "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as runner:
        server, child = map(int, runner.stdout.readline().split())
        assert os.getpgid(child) == server != os.getpgid(runner.pid)
        os.kill({"server": server, "runner": runner.pid, "child": child}[victim], number)
        assert runner.wait(60) == code
        assert ends(server) and ends(child)


def test_what_ignores_the_request_to_end_is_killed():
    code = "import sys; from multirole.engines import process_group as p; p.GRACE = 0.2; sys.exit(p.run(sys.argv[1:]))"
    stubborn = 'trap "" TERM; sleep 1000 & echo $!; exit 5'
    command = [sys.executable, "-c", code, "bash", "-c", stubborn]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 5 and ends(int(done.stdout))
