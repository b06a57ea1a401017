"""Verdicts, limits, scheduling and failures of the sandbox: what callers of `multirole_sandbox` rely on."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import multirole_sandbox as sandbox
from multirole_sandbox import Limits, SandboxError, selftest, worker

LIMITS = Limits(test_seconds=0.5, memory_bytes=1 << 30)
ECHO = "print(input())"
REPLACED = "A sandbox worker was replaced"


def echoes(*outputs: str) -> list[dict]:
    """Tests with the inputs 0, 1, 2, ... for a program that should print what it reads."""
    return [{"input": str(i), "output": output, "testtype": "stdin"} for i, output in enumerate(outputs)]


def test_the_fraction_and_every_reason() -> None:
    program = (
        "n = int(input())\nif n == 1: print('other')\nelif n == 2: 1 / 0\nelif n == 3:\n    while True: pass\n"
        "elif n == 4: x = 'x' * 10**11\nelif n == 5:\n    while True: print('x' * 10**6)\n"
        "elif n == 6: open('out', 'w')\nelse: print(n)"
    )
    verdict = sandbox.grade(program, echoes(*"01234567"), limits=LIMITS)
    reasons = ("passed", "wrong_answer", "error", "timeout", "memory", "output_limit", "violation", "passed")
    assert verdict.reasons == reasons
    assert (verdict.reward, verdict.reason) == (0.25, "wrong_answer")


def test_all_pass_is_all_or_nothing() -> None:
    good, bad = sandbox.grade_batch([ECHO, "print(0)"], [echoes(*"0123")] * 2, "all_pass", LIMITS)
    assert (good.reward, good.reason) == (1.0, "passed")
    assert (bad.reward, bad.reason) == (0.0, "wrong_answer")
    assert bad.reasons == ("passed", "wrong_answer", "wrong_answer", "wrong_answer")


def test_empty_programs_have_the_reason_no_code() -> None:
    programs = ["", " \n", ECHO, None]
    verdicts = sandbox.grade_batch(programs, [echoes("0"), echoes("0", "1"), echoes("0"), echoes("0")], limits=LIMITS)
    assert [v.reason for v in verdicts] == ["no_code", "no_code", "passed", "no_code"]
    assert [v.reward for v in verdicts] == [0.0, 0.0, 1.0, 0.0] and verdicts[1].reasons == ("no_code",) * 2


def cpu_seconds_of_programs() -> float:
    """CPU seconds of all processes that the sandbox's workers have waited for."""
    return sum(process.cpu_times().children_user for process in psutil.Process().children())


def test_a_program_whose_every_test_hangs_costs_one_budget() -> None:
    limits = Limits(test_seconds=0.4, full_timeouts=2, workers=1)
    program = "import os\nn = int(input())\nwhile n != 11: pass\nprint(n)"
    sandbox.level()
    before = cpu_seconds_of_programs()
    verdict = sandbox.grade(program, echoes(*map(str, range(12))), limits=limits)
    assert verdict.reasons == ("timeout",) * 11 + ("passed",), "a test that ends quickly passes even then"
    assert 2 * 0.4 < cpu_seconds_of_programs() - before < 4 * 0.4, "two tests cost 0.4 s and nine 0.02 s"


def test_a_busy_machine_takes_no_time_from_a_program() -> None:
    """Four other processes use the core of the program, which then computes for longer than it could sleep."""
    limits = Limits(test_seconds=10.0, idle_factor=0.03, workers=1)
    program = b"total = 0\nfor i in range(2_000_000): total += i\nprint(input())"
    core, started = min(os.sched_getaffinity(0)), worker.Worker()
    with contextlib.ExitStack() as stack:
        stack.callback(started.close)
        psutil.Process(started.process.pid).cpu_affinity([core])
        for _ in range(4):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
            psutil.Process(busy.pid).cpu_affinity([core])
        frames = list(started.run(program, [b"1", b"2"], [("", False)] * 2, limits))
    assert [frame.reason for frame in frames[:2]] == ["ended", "ended"]


def test_the_whole_budget_ends_a_program() -> None:
    limits = Limits(test_seconds=1.5, problem_seconds=1.5, workers=1)
    verdict = sandbox.grade("import os, time\ntime.sleep(0.3)\n" + ECHO, echoes(*map(str, range(12))), limits=limits)
    assert verdict.reasons[0] == "passed" and verdict.reasons[-1] == "timeout"


def test_many_tests_of_one_program_keep_their_order() -> None:
    outputs = [str(i) if i % 3 else "x" for i in range(150)]
    verdict = sandbox.grade(ECHO, echoes(*outputs), limits=dataclasses.replace(LIMITS, workers=2))
    assert [reason == "passed" for reason in verdict.reasons] == [bool(i % 3) for i in range(150)]


def test_results_are_the_same_in_every_process() -> None:
    program = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c', 'd'}))"
    results: set[bytes] = set()
    for _ in range(2):
        for _ in range(3):
            job = sandbox.Job(program, [b""], [""], lambda _, output: results.add(output) or "passed")
            sandbox._running().run([job], LIMITS)
        sandbox.close()
    assert len(results) == 1


def test_any_thread_may_grade() -> None:
    verdicts: list[float] = []
    threads = [threading.Thread(target=lambda: verdicts.append(sandbox.grade(ECHO, echoes("0"), limits=LIMITS).reward)) for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [1.0] * 4


def test_workers_outlive_the_thread_that_started_them(caplog) -> None:
    sandbox.close()
    thread = threading.Thread(target=lambda: sandbox.grade(ECHO, echoes("0"), limits=LIMITS))
    thread.start()
    thread.join()
    assert sandbox.grade(ECHO, echoes("0"), limits=LIMITS).reward == 1.0 and REPLACED not in caplog.text


def test_dead_workers_are_replaced_and_the_program_is_still_graded(caplog) -> None:
    sandbox.grade_batch([ECHO] * 8, [echoes(*map(str, range(16)))] * 8, limits=dataclasses.replace(LIMITS, workers=3))
    assert len(sandbox._running().idle) >= 3
    for idle in list(sandbox._running().idle):
        os.kill(idle.process.pid, signal.SIGKILL)
        idle.process.wait()
    assert sandbox.grade(ECHO, echoes("0"), limits=LIMITS).reward == 1.0
    assert REPLACED in caplog.text


def test_a_failure_of_the_sandbox_is_never_a_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for text in (
        "raise SystemExit('no memory left')",
        "def main():\n    print('garbage' * 99, flush=True)\n    input()",
    ):
        (tmp_path / "inside" / "zygote.py").write_text(text)
        sandbox.close()
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_START_SECONDS", 5.0)
            patch.setattr(worker, "_HOME", tmp_path)
            with pytest.raises(SandboxError):
                sandbox.grade(ECHO, echoes("0"))
    assert sandbox.grade(ECHO, echoes("0"), limits=LIMITS).reward == 1.0


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that makes workers' managers run a statement before they compile a program (`source`)."""

    def apply(statement: str) -> None:
        shutil.copytree(Path(worker.__file__).parent / "inside", tmp_path / "inside", dirs_exist_ok=True)
        with open(tmp_path / "inside" / "manager.py", "a") as file:
            file.write(
                f"honest = compile_program\ndef compile_program(source):\n    {statement}\n    return honest(source)\n"
            )
        monkeypatch.setattr(worker, "_HOME", tmp_path)
        sandbox.close()

    yield apply
    monkeypatch.undo()
    sandbox.close()


KILL_ZYGOTE = "os.kill(os.getppid(), 9), time.sleep(9)"  # the manager dies with it, but not at once


@pytest.mark.parametrize("death", [KILL_ZYGOTE, "raise MemoryError", "os.kill(os.getpid(), 31)"])
@pytest.mark.parametrize("rule", ["fraction", pytest.param("all_pass", marks=pytest.mark.slow)])
def test_a_program_that_makes_workers_fail_is_an_error_and_is_logged(sabotage, caplog, death: str, rule: str) -> None:
    sabotage(f"if 'POISON' in source: {death}")
    sources = [ECHO, "# POISON\n" + ECHO, ECHO + "\n"]
    good, bad, other = sandbox.grade_batch(sources, [echoes(*map(str, range(20)))] * 3, rule, LIMITS)
    assert good.reward == other.reward == 1.0
    assert bad.reward == 0.0 and set(bad.reasons) == {"error"}
    assert REPLACED in caplog.text and "crashed two workers" in caplog.text


def test_a_manager_that_dies_amid_a_frame_spoils_no_verdict(sabotage, caplog) -> None:
    sabotage(
        "global copy; whole = copy\n"
        "    def copy(source, target, offset, count):\n"  # of the second of four tests: a second attempt has three
        "        frame = sys._getframe(1).f_locals\n"
        "        if target == wire.ANSWERS and frame['index'] == 1 and len(frame['self'].sizes) == 4:\n"
        "            os.kill(os.getpid(), 9)\n"
        "        whole(source, target, offset, count)\n"
        "    import sys"
    )
    assert sandbox.grade(ECHO, echoes("0", "1", "2", "3"), limits=LIMITS).reasons == ("passed",) * 4
    assert caplog.text.count(REPLACED) == 1


def test_workers_that_fail_at_every_program_raise(sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "check", lambda pool: None)
    sabotage(KILL_ZYGOTE)
    with pytest.raises(SandboxError, match="stopped working"):
        sandbox.grade(ECHO, echoes("0"), limits=LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        "# reconstruct the answer from trace",
        "text = 'import trace'",
        "import sysconfig",
        "from zoneinfo import ZoneInfo",
        "x = 0x" + "f" * 4000,
        "x = [" + "('a' * 4096,) * 256, " * 99 + "]",
        pytest.param("x = [" + "('a' * 4096,) * 256, " * 1000 + "]", marks=pytest.mark.slow),
        "x = [" + "2 ** 5000, " * 5000 + "]",
        "x = " + "'/dev/stdin' " * 4000,
        "import os\nos.path.expanduser('~')\nos.path.expanduser('~root')",
        "'import antigravity, this'",
        "def f():\n    import antigravity, tkinter, test.support",
        "try: import trace.nonsense\nexcept ImportError: pass",
        "from __future__ import annotations",
        "x: 'import trace' = 1",
    ],
)
def test_no_correct_program_makes_grading_fail(text: str, caplog) -> None:
    verdict = sandbox.grade(f"{text}\n{ECHO}", echoes("0", "1"), limits=dataclasses.replace(LIMITS, test_seconds=5.0))
    assert verdict.reasons == ("passed", "passed")
    assert REPLACED not in caplog.text


def test_missing_containment_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(selftest.ATTACKS, "prints", "print('escaped')")
        with pytest.raises(SandboxError, match="allow_unsafe_code=True"):
            sandbox.require()
        with pytest.raises(SandboxError, match="a program that prints was not stopped"):
            sandbox.grade(ECHO, echoes("0"))
        assert sandbox.require(allow_unsafe=True) == sandbox.level()
        assert sandbox.grade(ECHO, echoes("0"), limits=LIMITS).reward == 1.0
    assert "seccomp" in sandbox.require()


def test_a_trusted_function_imports_what_this_process_would(tmp_path, monkeypatch) -> None:
    """Such as wheels that were unpacked into a folder of PYTHONPATH, where nothing can be installed; of two copies, the first on the path."""
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    beside.mkdir()
    elsewhere.mkdir()
    (elsewhere / "doubling.py").write_text("def double(number): return 2 * number")
    (elsewhere / "yaml.py").write_text("ONE = 1")  # it is installed, too
    (beside / "trusted.py").write_text(
        "from doubling import double\nfrom yaml import ONE\ndef preload(): pass\ndef judge(number): return double(number) + ONE"
    )
    monkeypatch.syspath_prepend(elsewhere)
    assert sandbox.call(beside, "trusted", "judge", [[4]], LIMITS) == [("passed", b"9")]


def test_invalid_arguments_are_value_errors() -> None:
    for tests in ([], [{"input": "1"}], None):
        with pytest.raises(ValueError, match="non-empty list"):
            sandbox.grade(ECHO, tests)
    with pytest.raises(ValueError, match="must be 'fraction' or 'all_pass'"):
        sandbox.grade(ECHO, echoes("0"), rule="half")
    with pytest.raises(ValueError, match="needs a list of tests"):
        sandbox.grade_batch([ECHO], [])
    with pytest.raises(ValueError, match="test_seconds"):
        Limits(test_seconds=0)
    with pytest.raises(ValueError, match="memory_bytes"):
        Limits(memory_bytes=1)
