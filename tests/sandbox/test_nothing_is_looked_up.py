"""A program cannot tell a path that exists from one that does not, nor a process, by any system call."""

import platform

import pytest

from multirole_sandbox import grade

ASK = r"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
buffer, times = ctypes.create_string_buffer(4096), (ctypes.c_long * 4)(0, 1000)
def answers(number, places, *arguments):
    found = set()
    for place in places:
        arguments_here = [place if argument is ... else argument for argument in arguments]
        ctypes.set_errno(0)
        found.add((libc.syscall(number, *arguments_here), ctypes.get_errno()))
    return found
"""
PATHS = {
    "open": (2, ..., 0), "stat": (4, ..., "b"), "lstat": (6, ..., "b"), "access": (21, ..., 0), "truncate": (76, ..., 0), "chdir": (80, ...),
    "mkdir": (83, ..., 0), "rmdir": (84, ...), "unlink": (87, ...), "symlink": (88, ..., ...), "readlink": (89, ..., "b", 99),
    "chmod": (90, ..., 0), "chown": (92, ..., -1, -1), "utime": (132, ..., 0), "mknod": (133, ..., 0, 0), "uselib": (134, ...),
    "statfs": (137, ..., "b"), "acct": (163, ...), "swapon": (167, ..., 0), "quotactl": (179, 0, ..., 0, 0), "getxattr": (191, ..., b"user.x", "b", 99),
    "inotify_add_watch": (254, 0, ..., 1), "openat": (257, -100, ..., 0), "newfstatat": (262, -100, ..., "b", 0),
    "newfstatat with an empty path": (262, -100, ..., "b", 0x1000), "readlinkat": (267, -100, ..., "b", 99), "faccessat": (269, -100, ..., 0),
    "utimensat": (280, -100, ..., 0, 0), "fanotify_mark": (301, 0, 1, 1, -100, ...), "statx": (332, -100, ..., 0, 0x7FF, "b"),
    "statx with an empty path": (332, -100, ..., 0x1000, 0x7FF, "b"), "open_tree": (428, -100, ..., 0), "fspick": (433, -100, ..., 0),
    "openat2": (437, -100, ..., "b", 24), "faccessat2": (439, -100, ..., 0, 0), "mount_setattr": (442, -100, ..., 0, "b", 32),
    "quotactl_fd": (443, 0, 0, 0, 0), "fchmodat2": (452, -100, ..., 0, 0), "setxattrat": (463, -100, ..., 0, b"user.x", "b", 16),
}  # fmt: skip
PROCESSES = {
    "getpgid": (121, ...), "getsid": (124, ...), "sched_getaffinity": (204, ..., 128, "b"), "sched_getscheduler": (145, ...),
    "sched_getparam": (143, ..., "b"), "sched_getattr": (315, ..., "b", 48, 0), "getpriority": (140, 0, ...), "ioprio_get": (252, 1, ...),
    "get_robust_list": (274, ..., "b", "b"), "prlimit": (302, ..., 0, 0, "b"), "tkill": (200, ..., 0), "tgkill": (234, ..., ..., 0),
    "wait4": (61, ..., 0, 1, 0), "move_pages": (279, ..., 0, 0, 0, 0, 0), "get_mempolicy": (239, 0, 0, 0, 0, 0),
}  # fmt: skip
CLOCKS = {"clock_gettime": (228, ..., "b"), "clock_getres": (229, ..., "b"), "clock_nanosleep": (230, ..., 0, "t", 0)}
X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are those of x86_64")


def asking(calls: dict, places: str) -> str:
    """Return a program that prints the names of the calls whose answers differ between places."""
    names = {"b": "buffer", "t": "times"}
    lines = [
        f"if len(answers({number}, PLACES, {', '.join('...' if a is ... else names.get(a, repr(a)) for a in arguments)})) > 1: print({name!r})"
        for name, (number, *arguments) in calls.items()
    ]
    return "\n".join([ASK, f"PLACES = {places}", *lines])


@X86_64
@pytest.mark.parametrize(
    ("calls", "places"),
    [
        (PATHS, "(b'/usr/lib', b'/no-such-folder', b'/proc/1', b'/proc/%d/exe' % os.getppid(), b'/etc/passwd', b'')"),
        (PROCESSES, "(1, os.getppid(), 4194303)"),
        (CLOCKS, "[(~pid << 3) | 2 for pid in (1, os.getppid(), 4194303)]"),
    ],
    ids=["paths", "processes", "clocks"],
)
def test_a_call_answers_the_same_for_what_exists_and_for_what_does_not(calls: dict, places: str) -> None:
    verdict = grade(asking(calls, places) + "\nprint('end')", [{"input": "", "output": "end"}])
    assert verdict.reasons == ("passed",)


@X86_64
def test_a_lock_does_not_tell_whether_its_owner_exists() -> None:
    program = ASK + (
        "def lock(pid, operation):\n    word = ctypes.c_uint32(pid)\n"
        "    return answers(202, [ctypes.byref(word)], ..., operation, 0, times, 0, 0)\n"
        "print(*[len(set.union(*[lock(pid, operation) for pid in (1, os.getppid(), 4194303)])) for operation in (6, 7, 8, 13)])"
    )
    assert grade(program, [{"input": "", "output": "1 1 1 1"}]).reasons == ("passed",)


def test_a_program_knows_itself_and_its_input() -> None:
    program = (
        "import mmap, os, stat, sys, time\n"
        "size = os.fstat(0).st_size\nwhole = mmap.mmap(0, 0, access=mmap.ACCESS_READ)\n"
        "print(size, stat.S_ISREG(os.fstat(0).st_mode), len(whole[:]), len(os.read(0, size)), sys.stdin.read() == '')\n"
        "print(os.getpgid(0) > 0, len(os.sched_getaffinity(0)) > 0, time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) > 0)\n"
        "try: os.fstat(77)\nexcept OSError as error: print(error.errno)"
    )
    assert grade(program, [{"input": "1 2\n3\n", "output": "6 True 6 6 True\nTrue True True\n9"}]).reasons == (
        "passed",
    )
