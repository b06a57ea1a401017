"""Sandbox walls that any unprivileged Linux process can install: Landlock and seccomp.

Three seccomp filters are stacked; the strictest result for a system call wins:
  * `base`, for the zygote and all its forks, is an allow-list. A call that is not on the list fails with EPERM; dangerous
    calls kill the process, so that the attempt is reported as a violation. clone3 fails with ENOSYS, so that libc falls
    back to clone, whose flags a filter can check.
  * `no_files`, for a program's manager once its imports are done: no call that takes a path reaches the file system. The
    program sees an empty one (ENOENT) that is read-only (EACCES).
  * `leaf`, for the process that runs the program: threads but no processes, no signals, no questions about other processes,
    no new memory files, no changes of limits except that of the stack, which programs raise together with the recursion
    limit (it counts as address space).
"""

import ctypes
import os
import platform
import stat
import struct
from collections.abc import Iterable, Sequence

ALLOWED = {  # name -> (x86_64, aarch64); -1: the architecture has no such call
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, -1), "fstat": (5, 80), "lstat": (6, -1),
    "poll": (7, -1), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, -1), "pipe": (22, -1),
    "select": (23, -1), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227), "mincore": (27, 232),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, -1), "pause": (34, -1), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, -1), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71),
    "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209), "exit": (60, 93), "wait4": (61, 260), "kill": (62, 129),
    "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, -1),
    "getcwd": (79, 17), "chdir": (80, 49), "readlink": (89, -1), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, -1), "setsid": (112, 157), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "arch_prctl": (158, -1), "setrlimit": (160, 164), "gettid": (186, 178), "tkill": (200, 130), "time": (201, -1), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "epoll_create": (213, -1), "getdents64": (217, 61), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, -1), "epoll_ctl": (233, 21),
    "tgkill": (234, 131), "waitid": (247, 95), "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48),
    "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22), "eventfd": (284, -1), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "dup3": (292, 24), "pipe2": (293, 59), "getcpu": (309, 168), "getrandom": (318, 278), "memfd_create": (319, 279),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293),
    "close_range": (436, 436), "faccessat2": (439, 439), "epoll_pwait2": (441, 441), "futex_waitv": (449, 449),
}  # fmt: skip
KILLED = {  # nobody calls these by accident; a call that is on no list fails with EPERM
    "connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201), "sendmmsg": (307, 269),
    "accept4": (288, 242), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "reboot": (169, 142), "init_module": (175, 105), "kexec_load": (246, 104), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "shmget": (29, 194), "shmat": (30, 196), "fsopen": (430, 430),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setuid": (105, 146), "setgid": (106, 144), "setresuid": (117, 147),
    "setresgid": (119, 149), "setgroups": (116, 159), "capset": (126, 91), "setpgid": (109, 154),
    "pidfd_open": (434, 434),
}  # fmt: skip
PATH_LOOKUPS = (
    "stat",
    "lstat",
    "access",
    "readlink",
    "readlinkat",
    "faccessat",
    "faccessat2",
    "chdir",
    "newfstatat",
    "statx",
)
"""Calls of `ALLOWED` that take a path, besides open and openat; each of these is in the filter `no_files`."""
CLOCKS = ("clock_gettime", "clock_getres", "clock_nanosleep")
LEAF_KILLED, LEAF_DENIED = ("kill", "setsid", "memfd_create"), ("tkill", "tgkill", "sendfile", "setrlimit")
SOCKET, OPEN, OPENAT, FCNTL, IOCTL, PRCTL = (41, 198), (2, -1), (257, 56), (72, 25), (16, 29), (157, 167)
PRLIMIT, CLONE, CLONE3 = (302, 261), (56, 220), (435, 435)
SENDTO, SOCKETPAIR, FUTEX, GETAFFINITY = (44, 206), (53, 199), (202, 98), (204, 123)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, audit id

ALLOW, KILL = 0x7FFF0000, 0x80000000  # let through; kill the process
EPERM, ENOENT, ESRCH, EACCES, EINVAL, ENOSYS = (
    0x00050000 | number for number in (1, 2, 3, 13, 22, 38)
)  # fail with this error
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000  # the last: O_TMPFILE
SAFE_IOCTLS = (0x5401, 0x5421, 0x5450, 0x5451, 0x541B)  # isatty, non-blocking, close-on-exec off and on, bytes readable
SAFE_FCNTLS = (0, 1, 2, 3, 4, 1030, 1034)  # duplicate, descriptor and file flags, duplicate with close-on-exec, seals
SAFE_PRCTLS = (1, 15, 16, 22, 0x53564D41)  # die with parent, name set and get, seccomp, name of a memory area
PI_FUTEXES = (6, 7, 8, 11, 12, 13)  # futexes that hold the thread id of their owner
NEW_NAMESPACES, CLONE_THREAD, RLIMIT_STACK = 0x7E020000, 0x00010000, 3

STAT = (
    "QQQIII4xQqqqqqqqqq",
    "QQIIIIQ8xqi4xqqqqqqq",
)  # `struct stat`: device, inode, ... seconds and nanoseconds of three times

Instruction = tuple[int, int, int, int]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
FORK = ctypes.PyDLL(None).fork
"""libc's fork, for a process with one thread; -1 on failure. `os.fork` also re-creates the interpreter's locks and runs
modules' fork hooks, which touches a hundred more pages of memory: a quarter of the cost of a short test."""


class Filter(ctypes.Structure):
    """`struct sock_fprog`: a seccomp filter ready to install."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def prctl(option: int, value: int, pointer: object = None) -> bool:
    """Call prctl(2); True on success."""
    return LIBC.prctl(option, ctypes.c_ulong(value), pointer or ctypes.c_ulong(0), ctypes.c_ulong(0), 0) == 0


def load(offset: int) -> Instruction:
    """Load a 32-bit word of `struct seccomp_data`; argument i is at offset 16 + 8 * i, low half first."""
    return 0x20, 0, 0, offset


def returning(action: int) -> Instruction:
    """End the filter with an action."""
    return 0x06, 0, 0, action


def on_equal(value: int, action: int) -> list[Instruction]:
    """End with an action where the loaded word equals value."""
    return [(0x15, 0, 1, value), returning(action)]


def on_bits(mask: int, action: int) -> list[Instruction]:
    """End with an action where the loaded word has any of the bits."""
    return [(0x45, 0, 1, mask), returning(action)]


def block(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run body for one system call only; body must end in a return."""
    return [(0x15, 0, len(body), number), *body] if number >= 0 else []


def assemble(rules: Sequence[Instruction], otherwise: int, audit_id: int) -> Filter:
    """Build a filter: the architecture check, the rules, then the default action."""
    program = [load(4), (0x15, 1, 0, audit_id), returning(KILL), load(0)]
    if audit_id == ARCHITECTURES["x86_64"][1]:
        program += [(0x35, 0, 1, 0x40000000), returning(KILL)]  # the x32 call numbers
    program += [*rules, returning(otherwise)]
    return Filter(len(program), b"".join(struct.pack("=HBBI", *instruction) for instruction in program))


def build_filters() -> tuple[Filter, Filter, Filter] | None:
    """Build the filters base, no_files and leaf (see the module); None for an unknown processor."""
    if platform.machine() not in ARCHITECTURES:
        return None
    column, audit_id = ARCHITECTURES[platform.machine()]

    def rules(calls: Iterable[str], action: int) -> list[Instruction]:
        numbers = [(ALLOWED | KILLED)[name][column] for name in calls]
        return [step for number in numbers for step in block(number, [returning(action)])]

    def only(call: tuple[int, int], offset: int, values: Sequence[int]) -> list[Instruction]:
        allowed = [step for value in values for step in on_equal(value, ALLOW)]
        return block(call[column], [load(offset), *allowed, returning(EPERM)])

    base = rules(KILLED, KILL) + block(CLONE3[column], [returning(ENOSYS)])
    base += only(IOCTL, 24, SAFE_IOCTLS) + only(FCNTL, 24, SAFE_FCNTLS) + only(PRCTL, 16, SAFE_PRCTLS)
    base += block(CLONE[column], [load(16), *on_bits(NEW_NAMESPACES, KILL), returning(ALLOW)])
    base += block(PRLIMIT[column], [load(16), *on_equal(0, ALLOW), returning(EPERM)])  # of this process only
    # libc asks for a Unix socket to look up this machine's users (`os.path.expanduser`) and goes on without one.
    base += block(SOCKET[column], [load(16), *on_equal(1, EACCES), returning(KILL)])
    # A pair of stream sockets can reach nobody else and an event loop needs one; addresses and datagrams are refused.
    is_stream = [load(24), (0x54, 0, 0, 0xF), *on_equal(1, ALLOW), returning(KILL)]
    base += block(SOCKETPAIR[column], [load(16), (0x15, 1, 0, 1), returning(KILL), *is_stream])
    base += block(SENDTO[column], [load(48), (0x15, 1, 0, 0), returning(KILL), load(52), *on_equal(0, ALLOW), returning(KILL)])  # fmt: skip
    for call, flags_at in ((OPEN, 24), (OPENAT, 32)):
        base += block(call[column], [load(flags_at), *on_bits(WRITE_FLAGS, EACCES), returning(ALLOW)])
    base += rules(ALLOWED, ALLOW)

    no_files = rules(PATH_LOOKUPS, ENOENT)
    for call, flags_at in ((OPEN, 24), (OPENAT, 32)):
        no_files += block(call[column], [load(flags_at), *on_bits(WRITE_FLAGS, EACCES), returning(ENOENT)])

    leaf = block(CLONE[column], [load(16), *on_bits(CLONE_THREAD, ALLOW), returning(KILL)])
    leaf += rules(LEAF_KILLED, KILL) + rules(LEAF_DENIED, EPERM)
    leaf += block(PRCTL[column], [load(16), *on_equal(1, KILL), returning(ALLOW)])  # to outlive its parent
    # Whether another process exists, and what it has computed, is nobody's business.
    for name in ("getpgid", "getsid"):
        leaf += block(ALLOWED[name][column], [load(16), *on_equal(0, ALLOW), returning(ESRCH)])
    leaf += block(GETAFFINITY[column], [load(16), *on_equal(0, ALLOW), returning(ENOSYS)])
    for name in CLOCKS:  # a negative number is the clock of a process, a thread or a device
        leaf += block(ALLOWED[name][column], [load(16), *on_bits(1 << 31, EINVAL), returning(ALLOW)])
    refused = [step for operation in PI_FUTEXES for step in on_equal(operation, ENOSYS)]  # the owner is looked up
    leaf += block(FUTEX[column], [load(24), (0x54, 0, 0, 0x7F), *refused, returning(ALLOW)])
    no_new_limit = [load(24), *on_equal(RLIMIT_STACK, ALLOW)]
    no_new_limit += [load(32), (0x15, 0, 2, 0), load(36), (0x15, 1, 0, 0), returning(EPERM), returning(ALLOW)]
    leaf += block(PRLIMIT[column], no_new_limit)
    return assemble(base, EPERM, audit_id), assemble(no_files, ALLOW, audit_id), assemble(leaf, ALLOW, audit_id)


def fstat(descriptor: int) -> os.stat_result:
    """Return what `os.fstat` does, by a system call that takes no path; many versions of libc make one that takes an empty path."""
    column, _ = ARCHITECTURES[platform.machine()]
    buffer = ctypes.create_string_buffer(144)
    if LIBC.syscall(ALLOWED["fstat"][column], ctypes.c_int(descriptor), buffer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    fields = struct.unpack_from(STAT[column], buffer)
    device, inode, mode, links = (*fields[:2], *(fields[3:1:-1] if column == 0 else fields[2:4]))
    user, group, special, size, block_size, blocks, *times = fields[4:]
    nanoseconds = [10**9 * whole + part for whole, part in zip(times[::2], times[1::2], strict=True)]
    whole = (mode, inode, device, links, user, group, size, *times[::2])
    return os.stat_result((*whole, *(t / 1e9 for t in nanoseconds), *nanoseconds, block_size, blocks, special))


def install(program: Filter) -> bool:
    """Install a seccomp filter in this thread and its future children. Returns whether that succeeded."""
    return prctl(22, 2, ctypes.byref(program))


def restrict_files(handles: Sequence[int]) -> bool:
    """Apply Landlock: allow reading below these O_PATH descriptors only, no TCP, no signals or abstract sockets outside.

    Returns whether that succeeded.
    """
    abi = LIBC.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    words = (handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attribute = struct.pack("=QQQ", *words)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = LIBC.syscall(444, attribute, ctypes.c_size_t(len(attribute)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    for handle in handles:
        rights = 0b1100 if stat.S_ISDIR(os.fstat(handle).st_mode) else 0b0100  # read files, and list folders
        LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", rights, handle), 0)
    is_restricted = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return is_restricted


def drop_root(spare: int) -> bool:
    """Switch from root to the user id `spare`, which owns nothing; False if impossible or not root."""
    if os.geteuid() != 0:
        return False
    try:
        os.setgroups([])
        os.setresgid(spare, spare, spare)
        os.setresuid(spare, spare, spare)
    except OSError:  # no CAP_SETUID, or the id is not mapped in this user namespace
        return False
    return True


def lock_down(readable: Sequence[str]) -> tuple[str, tuple[Filter, Filter] | None]:
    """Sandbox this process irreversibly; return its level, such as "setuid+seccomp+landlock", and the other two filters.

    Forbids network, exec, file writes, signals to other processes, and reads outside `readable` (only with Landlock). Open
    descriptors stay usable. Call it before the first thread starts, because existing threads are not sandboxed.
    """
    handles = [os.open(path, os.O_PATH) for path in readable]  # while paths can still be opened
    level = ["setuid"] if drop_root(50_000 + os.getpid() % 10_000) else []
    prctl(4, 0)  # not dumpable: no other process of this user may attach
    has_rights_frozen = prctl(38, 1)  # no new privileges: a precondition of both walls
    has_landlock = has_rights_frozen and restrict_files(handles)
    for handle in handles:
        os.close(handle)
    filters = build_filters() if has_rights_frozen else None
    has_seccomp = filters is not None and install(filters[0])
    level += ["seccomp"] * has_seccomp + ["landlock"] * has_landlock
    return "+".join(level), filters[1:] if filters and has_seccomp else None
