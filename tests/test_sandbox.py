"""Model-written programs: good ones pass, hostile ones end with a typed status and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from multirole import sandbox
from multirole.sandbox import Limits, Outcome, SandboxError, run_programs

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=3.0, memory_bytes=256 << 20, output_bytes=16 << 10)
HAS_WALLS = "seccomp+landlock" in sandbox.level()
needs_walls = pytest.mark.skipif(not HAS_WALLS, reason=f"this machine offers only {sandbox.level()}")


def run(source: str, *calls: list) -> list[Outcome]:
    """Run one program that defines f."""
    return run_programs([(source, "f", list(calls) or [[1]])], LIMITS)[0]


GOOD = {
    "loop": ("def f(n):\n    t = 0\n    for i in range(n):\n        t += i\n    return t", [5], 10),
    "recursion": ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)", [6], 720),
    "import": ("from collections import Counter\ndef f(s):\n    return dict(Counter(s))", ["aab"], {"a": 2, "b": 1}),
    "nested data": ("def f(x):\n    return [x, (1, 2.5), {'k': None}, True, 'ü']", [[3]], None),
    "big integer": ("def f(n):\n    return 2 ** n", [1000], 2**1000),
    "main guard": ("def f(n):\n    return n + 1\nif __name__ == '__main__':\n    print(f(1))", [1], 2),
    "global state": ("memo = {}\ndef f(n):\n    global memo\n    memo[n] = n\n    return len(memo)", [1], 1),
    "prints a lot": ("def f(n):\n    print('x' * 100000)\n    return n", [7], 7),
    "closes stdout": ("import sys\ndef f(n):\n    sys.stdout.close()\n    return n", [7], 7),
    "late import": ("def f(n):\n    import heapq\n    return heapq.nsmallest(1, [n, 2])", [7], [2]),
}
GOOD["nested data"] = (*GOOD["nested data"][:2], [[3], [1, 2.5], {"k": None}, True, "ü"])


@pytest.mark.parametrize("name", GOOD)
def test_good_program_passes(name: str) -> None:
    source, arguments, expected = GOOD[name]
    assert run(source, arguments) == [Outcome("ok", expected)]


def test_every_argument_list_gets_its_own_outcome() -> None:
    source = "def f(n):\n    while n == 2:\n        pass\n    return 10 // n"
    assert run(source, [1], [0], [5], [2], [1]) == [
        Outcome("ok", 10),
        Outcome("error"),
        Outcome("ok", 2),
        Outcome("timeout"),
        Outcome("timeout"),
    ]


def test_programs_do_not_see_each_other() -> None:
    leave = "import builtins, math\nbuiltins.left = math.pi = 5\ndef f(n):\n    return n"
    look = "import builtins, math\ndef f(n):\n    return [hasattr(builtins, 'left'), math.pi > 4]"
    outcomes = run_programs([(leave, "f", [[1]]), (look, "f", [[1]])], LIMITS)
    assert outcomes == [[Outcome("ok", 1)], [Outcome("ok", [False, False])]]


HOSTILE = {  # name: (body of the program, the statuses that are right)
    "infinite loop": ("def f(n):\n    while True: pass", {"timeout"}),
    "infinite loop at import": ("while True: pass", {"timeout"}),
    "swallows everything": (
        "def f(n):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
        {"timeout"},
    ),
    "sleeps": ("import time\ndef f(n):\n    time.sleep(60)", {"timeout"}),
    "stops itself": ("import os, signal\ndef f(n):\n    os.kill(os.getpid(), signal.SIGSTOP)", {"violation"}),
    "memory bomb": ("def f(n):\n    return len('x' * 10**10)", {"memory"}),
    "slow memory bomb": ("def f(n):\n    x = []\n    while True: x.append(bytearray(10**7))", {"memory", "timeout"}),
    "fork bomb": ("import os\ndef f(n):\n    while True: os.fork()", {"violation"}),
    "background process": ("import subprocess\ndef f(n):\n    subprocess.Popen(['sleep', '99'])", {"violation"}),
    "background thread": (
        "import threading\ndef f(n):\n    threading.Thread(target=lambda: 1, daemon=True).start()\n    return n",
        {"violation"},
    ),
    "os._exit(0)": ("import os\ndef f(n):\n    os._exit(0)", {"error"}),
    "SystemExit": ("import sys\ndef f(n):\n    sys.exit(0)", {"error"}),
    "abort": ("import os\ndef f(n):\n    os.abort()", {"violation"}),
    "fake result printed": ('def f(n):\n    print(\'{"status": "ok", "value": 42}\')\n    raise KeyError', {"error"}),
    "fake result before the true one": (
        'import os\ndef f(n):\n    os.write(3, b\'{"status": "ok", "value": 42}\\n\')\n    return n',
        {"violation"},
    ),
    "garbage on every descriptor": (
        "import contextlib, os\ndef f(n):\n    for d in range(64):\n        with contextlib.suppress(OSError): "
        + "os.write(d, b'\\x80\\x04garbage\\n')\n    os._exit(0)",
        {"violation"},
    ),
    "huge forged output": (
        "import os\ndef f(n):\n    try:\n        while True: os.write(3, b'[' * 4096)\n    finally: os._exit(0)",
        {"output_limit"},
    ),
    "forged nested JSON": (
        "import os\ndef f(n):\n    nested = b'[' * 7000 + b']' * 7000\n"
        + '    os.write(3, b\'{"status": "ok", "value": \' + nested + b\'}\\n\')\n    os._exit(0)',
        {"violation"},
    ),
    "forged infinity": (
        'import os\ndef f(n):\n    os.write(3, b\'{"status": "ok", "value": 1e999}\\n\')\n    os._exit(0)',
        {"violation"},
    ),
    "opens a socket": ("import socket\ndef f(n):\n    socket.socket()", {"violation"}),
    "opens a datagram socket": (
        "import socket\ndef f(n):\n    socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        {"violation"},
    ),
    "reads a file": ("def f(n):\n    return open('/etc/passwd').read()", {"violation"}),
    "reads the trainer": ("import os\ndef f(n):\n    return open('/proc/%d/maps' % n).read()", {"violation"}),
    "writes a file": ("def f(n):\n    open('/tmp/multirole-escaped', 'w')", {"violation"}),
    "writes where it stands": ("def f(n):\n    open('here', 'w')", {"violation"}),
    "removes a file": ("import os\ndef f(n):\n    os.unlink(str(n))", {"violation"}),
    "kills the trainer": ("import os\ndef f(n):\n    os.kill(n, 9)", {"violation"}),
    "kills the zygote": ("import os\ndef f(n):\n    os.kill(os.getppid(), 9)", {"violation"}),
    "kills everything": ("import os\ndef f(n):\n    os.kill(-1, 9)", {"violation"}),
    "traces the zygote": (
        "import ctypes, os\ndef f(n):\n    ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)",
        {"violation"},
    ),
    "outlives the zygote": ("import ctypes\ndef f(n):\n    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)", {"violation"}),
    "raises its limits": ("import resource\ndef f(n):\n    resource.setrlimit(7, (9, 9))", {"violation", "error"}),
    "always equal": ("class E:\n    def __eq__(self, o): return True\ndef f(n):\n    return E()", {"error"}),
    "always equal integer": (
        "class E(int):\n    def __eq__(self, o): return True\ndef f(n):\n    return E(3)",
        {"error"},
    ),
    "deep recursion": ("def f(n):\n    return f(n + 1)", {"error"}),
    "recursion without limit": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n):\n    return [f(n + 1)]",
        {"error", "memory", "timeout"},
    ),
    "giant result": ("def f(n):\n    return 'x' * 10**6", {"output_limit"}),
    "nested result": ("def f(n):\n    x = []\n    for _ in range(500): x = [x]\n    return x", {"output_limit"}),
    "cyclic result": ("def f(n):\n    x = []\n    x.append(x)\n    return x", {"output_limit"}),
    "not a number": ("def f(n):\n    return float('nan')", {"error"}),
    "no such function": ("def g(n):\n    return n", {"error"}),
    "not Python": ("def f(n:\n", {"error"}),
    "zero byte and surrogate": ("def f(n): return '\0\ud800'", {"error"}),
    "raises a hostile exception": (
        "class E(BaseException):\n    def __str__(self): return 1 / 0\ndef f(n):\n    raise E",
        {"error"},
    ),
}


@needs_walls
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_is_contained(name: str, tmp_path: Path) -> None:
    source, right = HOSTILE[name]
    victim = tmp_path / "victim"
    victim.write_text("still here")
    os.chmod(tmp_path, 0o777)
    argument = str(victim) if "removes" in name else os.getpid()
    start = time.monotonic()
    (outcome,) = run(source, [argument])
    assert outcome.status in right and outcome.value is None
    assert time.monotonic() - start < LIMITS.wall_seconds + 5
    assert victim.read_text() == "still here" and not Path("/tmp/multirole-escaped").exists()
    assert run(GOOD["loop"][0], [5]) == [Outcome("ok", 10)], "the next program must be unaffected"


def test_environment_and_memory_of_the_trainer_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    sandbox.close()
    source = "import os, sys\ndef f(n):\n    return [sorted(os.environ), 'torch' in sys.modules, sys.argv[1:]]"
    names, has_torch, argv = run(source)[0].value
    assert "SECRET_TOKEN" not in names and set(names) <= {"LC_ALL", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE"}
    assert not has_torch and argv == []


def test_nothing_survives_a_program() -> None:
    run("import os\ndef f(n):\n    os.setsid()\n    return n")
    run("import atexit\natexit.register(lambda: open('late', 'w'))\ndef f(n):\n    return n")
    zygote = sandbox._running().process.pid
    children = Path(f"/proc/{zygote}/task/{zygote}/children")
    assert not children.exists() or children.read_text().strip() == ""


def test_nothing_survives_a_killed_trainer() -> None:
    code = "from multirole import sandbox\nprint(sandbox._running().process.pid, flush=True)\n"
    code += "program = 'import time\\ndef f(n):\\n    print(time.sleep(50))'\n"
    code += "sandbox.run_programs([(program, 'f', [[1]])], sandbox.Limits(cpu_seconds=30, wall_seconds=60))"
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    zygote = int(trainer.stdout.readline())
    time.sleep(0.5)
    children = Path(f"/proc/{zygote}/task/{zygote}/children")
    processes = [zygote, *map(int, children.read_text().split() if children.exists() else ())]
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 10
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(process) for process in processes)


def is_alive(process: int) -> bool:
    """Whether a process exists and is no zombie."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_results_are_the_same_in_every_run() -> None:
    source = "import random\ndef f(n):\n    return [random.random(), hash('a'), list({'a', 'b', 'c', 'd'})]"
    first = run(source)
    sandbox.close()
    assert first == run(source) and first[0].status == "ok"


def test_works_from_other_threads_and_restarts_a_dead_zygote() -> None:
    outcomes: list[list[Outcome]] = []
    workers = [threading.Thread(target=lambda: outcomes.append(run(GOOD["loop"][0], [5]))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert outcomes == [[Outcome("ok", 10)]] * 4
    first = sandbox._running().process.pid
    os.kill(first, signal.SIGKILL)
    assert run(GOOD["loop"][0], [5]) == [Outcome("ok", 10)]
    assert sandbox._running().process.pid != first


def test_infrastructure_failure_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    for text in ("import sys; sys.exit('no memory left')", "print('garbage' * 9, flush=True); input()"):
        broken.write_text(text)
        sandbox.close()
        with monkeypatch.context() as patch:
            patch.setattr(sandbox, "_CHILD", broken)
            patch.setattr(sandbox, "_START_SECONDS", 1.0)
            with pytest.raises(SandboxError):
                run(GOOD["loop"][0])
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_KNOWN_GOOD", "def f(n):\n    return 1")
        with pytest.raises(SandboxError, match="a correct program"):
            run(GOOD["loop"][0])
    assert run(GOOD["loop"][0], [5]) == [Outcome("ok", 10)]


def test_trainers_own_mistakes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        run_programs([("", "f", [[object()]])])
    with pytest.raises(ValueError, match="cpu_seconds"):
        Limits(cpu_seconds=2.0, wall_seconds=1.0)
    with pytest.raises(ValueError, match="output_bytes"):
        Limits(output_bytes=0)
