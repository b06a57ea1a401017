"""Hostile programs pass nothing, end with a typed reason, and leave nothing behind: no file, process or connection."""

import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile_programs import BOMBS, CARRIERS, ESCAPES, FINDERS, FORGED_TIME, FUNCTION_HACKS, HACKS

import multirole_sandbox as sandbox
from multirole_sandbox import Limits

LIMITS = Limits(test_seconds=0.6, memory_bytes=1 << 30, output_bytes=1 << 20, workers=1)
SECRET = "7319 0451"


def stdin_test(stdin: str, expected: str) -> dict:
    return {"input": stdin, "output": expected, "testtype": "stdin"}


QUICK = {  # one of each class; the others are marked slow
    "reads a file", "reads its parent's descriptors", "asks whether a file exists", "maps a file", "imports from the disk",
    "writes a file", "removes a file", "connects by TCP", "opens a Unix socket", "a stream pair sends elsewhere", "forks",
    "forks by raw call", "executes a program", "kills the trainer", "stops its group", "becomes another user",
    "traces its parent", "outlives its parent", "mounts", "uses 32-bit call numbers", "makes shared memory",
    "raises its limits", "turns the walls off", "infinite loop", "disarms its alarm", "folds constants",
    "nested beyond the parser", "memory at once", "memory with an unlimited stack", "threads without end", "descriptors without end", "output without end",
    "a hole as output", "recursion past the stack", "breaks the interpreter", "ends in an exit hook", "exits well",
    "closes what it has", "writes everywhere", "searches the heap", "leaves a hook", "a surrogate", "always equal",
    "not a number", "a deep forged result", "a second forged result", "a giant result", "exits in the function",
    "a name in builtins", "a class that is changed by type", "a replaced stdin", "the flags of the error output", "a thread", "a mapping of its input",
    "readers behind stdin", "descriptors", "the memory",
}  # fmt: skip


def quick_first(programs: dict) -> list:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in programs]


class World:
    """The files, processes and sockets that a program might attack, with checks that none was touched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder, folder / "canary"
        folder.chmod(0o777)
        self.canary.write_text(SECRET)
        self.canary.chmod(0o666)
        (folder / "planted.py").write_text(f"print({SECRET!r})")
        self.stream = socket.create_server(("127.0.0.1", 0))
        self.datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagram.bind(("127.0.0.1", 0))
        self.local = socket.socket(socket.AF_UNIX)
        self.local.bind(str(folder / "socket"))
        self.local.listen()
        self.sockets = self.stream, self.datagram, self.local
        for socket_ in self.sockets:
            socket_.setblocking(False)
        self.files = self.listing()

    def listing(self) -> dict[str, tuple]:
        return {p.name: (p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_size) for p in self.folder.iterdir()}

    def aim(self, program: str) -> str:
        """Return the program with its targets filled in."""
        targets = {
            "DATAGRAM_PORT": self.datagram.getsockname()[1],
            "PORT": self.stream.getsockname()[1],
            "CANARY": self.canary,
            "FOLDER": self.folder,
            "TRAINER": os.getpid(),
            "SOCKET": self.folder / "socket",
            "SECRET": SECRET,
        }
        for name, target in targets.items():
            program = program.replace(name, str(target))
        return program

    def check_untouched(self) -> None:
        assert self.listing() == self.files and self.canary.read_text() == SECRET
        for arrive in (self.stream.accept, self.local.accept, lambda: self.datagram.recv(99)):
            with pytest.raises(BlockingIOError):
                arrive()
        assert not Path("/dev/shm/multirole-escaped").exists()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for socket_ in world.sockets:
        socket_.close()


def descendants() -> list[str]:
    """Return the command lines of this process's descendants, except idle zygotes."""
    idle = {worker.process.pid for worker in sandbox._running().idle}
    names = []
    for child in psutil.Process().children(recursive=True):
        if child.pid in idle:
            continue
        try:
            names.append(" ".join(child.cmdline()))
        except psutil.ZombieProcess:
            names.append("a zombie")
        except psutil.NoSuchProcess:
            pass  # it has ended since it was listed
    return sorted(names)


def check(world: World, program: str, test: dict, reasons: str, n_tests: int = 1) -> None:
    before = descendants()
    verdict = sandbox.grade(world.aim(program), [test] * n_tests, limits=LIMITS)
    assert verdict.reward == 0.0
    assert set(verdict.reasons) <= set(reasons.split())
    world.check_untouched()
    assert descendants() == before
    assert sandbox.grade("print(input())", [stdin_test("next", "next")], limits=LIMITS).reward == 1.0


@pytest.mark.parametrize("name", quick_first(ESCAPES))
def test_nothing_outside_is_reached(world: World, name: str) -> None:
    reasons, program = ESCAPES[name]
    check(world, program, stdin_test("", SECRET), reasons)


@pytest.mark.parametrize("name", quick_first(BOMBS))
def test_a_bomb_ends_within_its_limits(world: World, name: str) -> None:
    reasons, program = BOMBS[name]
    check(world, program, stdin_test("", SECRET), reasons)


@pytest.mark.parametrize("name", quick_first(HACKS))
def test_no_trick_earns_a_reward(world: World, name: str) -> None:
    reasons, program = HACKS[name]
    check(world, program, stdin_test("", SECRET), reasons, n_tests=3)


@pytest.mark.parametrize("name", quick_first(FUNCTION_HACKS))
def test_no_function_earns_a_reward(world: World, name: str) -> None:
    reasons, program = FUNCTION_HACKS[name]
    test = {"input": "1", "output": "7319", "testtype": "functional", "metadata": {"func_name": "f"}}
    check(world, program, test, reasons, n_tests=3)


NUMBERS = [stdin_test(str(n), str(n + 1)) for n in (73191111, 73192222, 73193333, 73194444)]


@pytest.mark.parametrize("name", quick_first(CARRIERS | FINDERS))
def test_a_test_knows_nothing_of_the_others(name: str) -> None:
    """A program that kept or found anything of another test would print it and fail."""
    verdict = sandbox.grade((CARRIERS | FINDERS)[name], NUMBERS, limits=LIMITS)
    assert verdict.reasons == ("passed",) * 4


def test_time_cannot_be_forged() -> None:
    limits = dataclasses.replace(LIMITS, full_timeouts=4)
    assert sandbox.grade(FORGED_TIME, NUMBERS, limits=limits).reasons == ("timeout",) * 4


def test_threads_are_limited() -> None:
    program = (
        "import _thread, os, threading\nthreading.stack_size(1 << 15)\nlock, n = threading.Lock(), 0\nlock.acquire()\ntry:\n"
        "    while n < 13_000:\n        _thread.start_new_thread(lock.acquire, ())\n        n += 1\nexcept RuntimeError: pass\n"
        "os.write(1, b'few' if 50 < n < 5000 else b'%d' % n)\nos._exit(0)"
    )
    assert sandbox.grade(program, [stdin_test("", "few")] * 2, limits=Limits(test_seconds=3.0)).reward == 1.0


def test_a_flood_of_output_costs_the_trainer_little() -> None:
    program = "import os\ndef f(n):\n    os.write(3, b'[' + b'[],' * 5_000_000 + b'[]]')\n    os._exit(0)"
    test = {"input": "1", "output": "[1]", "testtype": "functional", "metadata": {"func_name": "f"}}
    before = time.process_time()
    assert sandbox.grade(program, [test] * 4, limits=Limits(workers=1)).reasons == ("wrong_answer",) * 4
    assert time.process_time() - before < 1.0


def test_the_environment_of_the_trainer_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    sandbox.close()
    program = "import os, sys\nprint('SECRET_TOKEN' in os.environ, 'torch' in sys.modules, sys.argv[1:])"
    assert sandbox.grade(program, [stdin_test("", "False False []")]).reward == 1.0


def test_a_process_holds_no_input_but_its_own() -> None:
    program = (
        "import gc, ctypes\nmine = input()\nprint(mine)\n"
        "other = 'other-input-' + ('2' if mine[-1] == '1' else '1')\n"
        "for o in gc.get_objects():\n"
        "    if isinstance(o, (dict, list, tuple)) and other in repr(o) and 'gc' not in repr(o): print('seen')\n"
        "import os\n"
        "for d in range(3, 256):\n"
        "    try: print(os.pread(d, 99, 0))\n"
        "    except OSError: pass\n"
    )
    tests = [stdin_test(f"other-input-{n}", f"other-input-{n}") for n in (1, 2)]
    assert sandbox.grade(program, tests).reward == 1.0
