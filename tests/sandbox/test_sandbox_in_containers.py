"""The walls by themselves, and the whole sandbox inside what a default container allows: no namespaces, no clone3."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from multirole_sandbox.inside import limits, walls

CONTAINER = """
import ctypes, json, os, struct, sys
from multirole_sandbox.inside import walls

column, audit_id = walls.ARCHITECTURES[os.uname().machine]
denied = ["unshare", "mount", "umount2", "setns", "pivot_root", "chroot", "bpf", "ptrace", "perf_event_open", "keyctl",
          "add_key", "request_key", "kexec_load", "init_module", "open_by_handle_at", "userfaultfd", "reboot"]
rules = [step for name in denied for step in walls.block(walls.KILLED[name][column], [walls.returning(walls.EPERM)])]
rules += walls.block(walls.CLONE3[column], [walls.returning(walls.ENOSYS)])
rules += walls.block(walls.CLONE[column], [walls.load(16), *walls.on_bits(walls.NEW_NAMESPACES, walls.EPERM), walls.returning(walls.ALLOW)])
if os.geteuid() == 0 and {as_user}:
    os.setgroups([])
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)
assert walls.prctl(38, 1) and walls.install(walls.assemble(rules, walls.ALLOW, audit_id))
try:
    os.unshare(0x10000000) if sys.version_info >= (3, 12) else ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and (_ for _ in ()).throw(PermissionError())
    raise SystemExit("this profile lets new namespaces through")
except PermissionError:
    pass
import multirole_sandbox as sandbox
level = sandbox.require()
sys.path.insert(0, {tests!r})
from hostile_programs import ESCAPES
from honest_programs import STDIN
names = list(ESCAPES)
attacks = [ESCAPES[name][1].replace("CANARY", "/etc/passwd").replace("TRAINER", str(os.getpid())).replace("PORT", "9") for name in names]
secret = [{{"input": "", "output": "SECRET", "testtype": "stdin"}}]
through = [n for n, v in zip(names, sandbox.grade_batch(attacks, [secret] * len(attacks), limits=sandbox.Limits(test_seconds=1.0))) if v.reward]
lost = []
for name in ("input and print", "open(0)", "a thread that nobody joins", "an event loop", "thread with a big stack"):
    program, cases = STDIN[name]
    tests = [{{"input": i, "output": o, "testtype": "stdin"}} for i, o, _ in cases]
    if [r == "passed" for r in sandbox.grade(program, tests).reasons] != [due for *_, due in cases]:
        lost.append(name)
print(json.dumps({{"level": level, "through": through, "lost": lost}}))
"""


@pytest.mark.parametrize("as_user", [False, True])
def test_the_sandbox_works_in_a_default_container(as_user: bool) -> None:
    if as_user and os.geteuid() == 0:
        blocked = [p for p in (sys.base_prefix, sys.prefix, __file__) if not others_may_reach(p)]
        if blocked:
            pytest.skip(f"another user may not read {blocked}")
    code = CONTAINER.format(as_user=as_user, tests=str(Path(__file__).parents[1] / "support"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["through"] == [] and report["lost"] == []
    assert "seccomp+landlock" in report["level"] and ("setuid" in report["level"]) == (
        os.geteuid() == 0 and not as_user
    )


def others_may_reach(path: str) -> bool:
    parts = os.path.realpath(path).split("/")
    return all(os.stat("/".join(parts[:n]) or "/").st_mode & 0o001 for n in range(1, len(parts)))


def test_both_processors_have_a_number_for_every_call() -> None:
    for table in (walls.ALLOWED, walls.KILLED):
        assert all(len(numbers) == 2 and numbers[0] >= 0 for numbers in table.values())
    assert {*walls.PATH_LOOKUPS, *walls.LEAF_KILLED, *walls.LEAF_DENIED} <= set(walls.ALLOWED)
    for column in (0, 1):
        allowed = {numbers[column] for numbers in walls.ALLOWED.values()} - {-1}
        killed = {numbers[column] for numbers in walls.KILLED.values()} - {-1}
        assert not allowed & killed and len(killed) >= len(walls.KILLED) - 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "400000 100000\n", "memory.max": "17179869184\n"}, (4, 2**34)),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, (math.inf, math.inf)),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n", "memory/memory.limit_in_bytes": "4096\n"}, (1.5, 4096)),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, (math.inf, math.inf)),
        ({}, (math.inf, math.inf)),
    ],
)  # fmt: skip
def test_a_containers_limits_are_read(tmp_path, monkeypatch, files, expected) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert limits.container_limits(str(tmp_path)) == expected
    monkeypatch.setattr(limits, "container_limits", lambda: expected)
    assert limits.default_workers() <= max(1, expected[0])
    assert limits.default_memory_bytes() <= max(512 << 20, expected[1])
