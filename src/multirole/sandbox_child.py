"""The sandbox's zygote: a small clean process that locks itself down and then forks one child per program.

Started by `multirole.sandbox` as a script (`python -s -S -P sandbox_child.py`), never imported by the trainer, and it
imports nothing but the standard library. It speaks over its own stdin and stdout: a fixed header and raw bytes in both
directions. It never looks into what a program wrote; it only passes at most a bounded number of those bytes on.
"""

import builtins
import ctypes
import gc
import json
import os
import platform
import random
import resource
import select
import signal
import struct
import sys
import time

# Loaded before the doors close, so that a program's import is a dictionary look-up.
PRELOAD = (
    "abc array ast bisect calendar cmath collections collections.abc contextlib copy dataclasses datetime decimal "
    "difflib enum fractions functools graphlib hashlib heapq io itertools math numbers operator pprint queue re "
    "secrets socket statistics string subprocess tempfile textwrap threading traceback types typing weakref zlib"
)
REQUEST = struct.Struct("!IddQI")  # payload bytes, CPU seconds, wall seconds, memory bytes, output bytes
RESPONSE = struct.Struct("!BiI")  # how it ended (below), exit code or signal number, bytes of output that follow
EXITED, SIGNALLED, TIMED_OUT, NOT_STARTED = 0, 1, 2, 3
RESULT_FD = 3  # the only writable descriptor a program has: a private memory file
SLACK = 4096  # a program may overshoot its output by this much before the write itself fails

# System call numbers: name -> (x86_64, aarch64); -1: the architecture has no such call.
KILL_ALWAYS = {
    "socket": (41, 198), "socketpair": (53, 199), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "fanotify_init": (300, 262), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount_setattr": (442, 442), "memfd_secret": (447, 447), "process_mrelease": (448, 448), "quotactl": (179, 60),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, -1),
    "ioperm": (173, -1), "syslog": (103, 116), "personality": (135, 92), "vhangup": (153, 58),
    "move_pages": (279, 239), "migrate_pages": (256, 238),
}  # fmt: skip
DENY_ALWAYS = {
    "creat": (85, -1), "truncate": (76, 45), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "link": (86, -1), "linkat": (265, 37),
    "unlink": (87, -1), "unlinkat": (263, 35), "symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1),
    "mknodat": (259, 33), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469), "openat2": (437, 437),
}  # fmt: skip
KILL_IN_PROGRAM = {
    "clone": (56, 220), "fork": (57, -1), "vfork": (58, -1), "clone3": (435, 435), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "memfd_create": (319, 279), "setuid": (105, 146),
    "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147),
    "setresgid": (119, 149), "setgroups": (116, 159), "setfsuid": (122, 151), "setfsgid": (123, 152),
    "capset": (126, 91), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "setpgid": (109, 154), "setsid": (112, 157),
}  # fmt: skip
DENY_IN_PROGRAM = {"setrlimit": (160, 164)}
OPEN, OPENAT, FCNTL, IOCTL, PRLIMIT, PRCTL = (2, -1), (257, 56), (72, 25), (16, 29), (302, 261), (157, 167)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, audit id
KILL, DENY, ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # kill the process; fail with EPERM; let through
NO_OPEN = 0x00050000 | 13  # fail with EACCES
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000  # the last: O_TMPFILE
SAFE_IOCTLS = (0x5401, 0x5450, 0x5451, 0x541B)  # isatty, close-on-exec off and on, bytes readable

Instruction = tuple[int, int, int, int]
LIBC = ctypes.CDLL(None, use_errno=True)


class SockFilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def prctl(option: int, value: int, pointer: object = None) -> bool:
    """Call prctl(2); True on success."""
    return LIBC.prctl(option, ctypes.c_ulong(value), pointer or ctypes.c_ulong(0), ctypes.c_ulong(0), 0) == 0


def load(offset: int) -> Instruction:
    """Load a 32-bit word of `struct seccomp_data`; argument i lies at 16 + 8 * i."""
    return 0x20, 0, 0, offset


def returning(action: int) -> Instruction:
    """End the filter with an action."""
    return 0x06, 0, 0, action


def on_equal(value: int, action: int) -> list[Instruction]:
    """End with an action where the loaded word equals value."""
    return [(0x15, 0, 1, value), returning(action)]


def block(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run body for one system call only; body must end in a return."""
    return [(0x15, 0, len(body), number), *body] if number >= 0 else []


def assemble(rules: list[Instruction], audit_id: int) -> SockFilterProgram:
    """Put the architecture check in front of the rules and let everything else through."""
    program = [load(4), (0x15, 1, 0, audit_id), returning(KILL), load(0)]
    if audit_id == ARCHITECTURES["x86_64"][1]:
        program += [(0x35, 0, 1, 0x40000000), returning(KILL)]  # the x32 call numbers
    program += [*rules, returning(ALLOW)]
    return SockFilterProgram(len(program), b"".join(struct.pack("=HBBI", *instruction) for instruction in program))


def build_filters(has_landlock: bool) -> tuple[SockFilterProgram, SockFilterProgram] | None:
    """The filter of the zygote (and so of every program) and the extra one of each program; None: unknown machine."""
    if platform.machine() not in ARCHITECTURES:
        return None
    column, audit_id = ARCHITECTURES[platform.machine()]

    def rules(calls: dict[str, tuple[int, int]], action: int) -> list[Instruction]:
        return [step for number in calls.values() for step in block(number[column], [returning(action)])]

    base = rules(KILL_ALWAYS, KILL) + rules(DENY_ALWAYS, DENY)
    for numbers, flags_at in ((OPEN, 24), (OPENAT, 32)):  # without Landlock nothing at all can be opened
        check = [load(flags_at), (0x45, 0, 1, WRITE_FLAGS), returning(NO_OPEN), returning(ALLOW)]
        base += block(numbers[column], check if has_landlock else [returning(NO_OPEN)])
    own = rules(KILL_IN_PROGRAM, KILL) + rules(DENY_IN_PROGRAM, DENY)
    owner = [step for command in (8, 15) for step in on_equal(command, KILL)]  # F_SETOWN(_EX): signals to others
    own += block(FCNTL[column], [load(24), *owner, returning(ALLOW)])
    own += block(PRCTL[column], [load(16), *on_equal(1, KILL), returning(ALLOW)])  # to outlive the zygote
    safe = [step for request in SAFE_IOCTLS for step in on_equal(request, ALLOW)]
    own += block(IOCTL[column], [load(24), *safe, returning(DENY)])
    new_limit = [load(32), (0x15, 0, 2, 0), load(36), (0x15, 1, 0, 0), returning(DENY), returning(ALLOW)]
    own += block(PRLIMIT[column], new_limit)
    return assemble(base, audit_id), assemble(own, audit_id)


def install(program: SockFilterProgram) -> bool:
    """Install a seccomp filter in this process and all its future children."""
    return prctl(22, 2, ctypes.byref(program))


def restrict_files(library: int) -> bool:
    """Landlock: read Python's own library and nothing else; no TCP; no signals or abstract sockets to the outside."""
    abi = LIBC.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    words = (handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attribute = struct.pack("=QQQ", *words)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = LIBC.syscall(444, attribute, ctypes.c_size_t(len(attribute)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", 0b1100, library), 0)
    done = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def drop_root() -> bool:
    """As root, become a user id that owns nothing; False where that is impossible or not needed."""
    if os.geteuid() != 0:
        return False
    spare = 50_000 + os.getppid() % 10_000
    try:
        os.setgroups([])
        os.setresgid(spare, spare, spare)
        os.setresuid(spare, spare, spare)
    except OSError:  # no CAP_SETUID, or the id is not mapped in this user namespace
        return False
    return True


def lock_down() -> tuple[str, SockFilterProgram | None]:
    """Give up every right that can be given up here; returns the level and the filter each program still adds."""
    library = os.open(os.path.dirname(os.__file__), os.O_PATH)
    level = ["setuid"] if drop_root() else []
    prctl(4, 0)  # not dumpable: no other process of this user may attach
    prctl(36, 1)  # orphans come to us, so that they can be killed
    has_rights_frozen = prctl(38, 1)  # no new privileges: a precondition of both walls
    has_landlock = has_rights_frozen and restrict_files(library)
    filters = build_filters(has_landlock) if has_rights_frozen else None
    if filters is not None and not install(filters[0]):
        filters = None
    level += ["seccomp"] * (filters is not None) + ["landlock"] * has_landlock + ["rlimits"]
    return "+".join(level), None if filters is None else filters[1]


class TooBig(Exception):
    """A returned value exceeds the bounds of `plain`."""


def plain(value: object, budget: list[int], depth: int = 0) -> object:
    """A copy made of JSON types only, exact types checked; TypeError for anything else, TooBig if too big."""
    budget[0] -= 1
    if budget[0] < 0 or depth > 32:
        raise TooBig("more than 10,000 values, or nested deeper than 32")
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        if value.bit_length() > 4096:
            raise TooBig("integer of more than 4096 bits")
        return value
    if type(value) in (list, tuple):
        return [plain(item, budget, depth + 1) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain(item, budget, depth + 1) for key, item in value.items()}
    raise TypeError("not plain data")


def status_of(error: BaseException) -> str:
    """The recorded status of an exception that a program let escape."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, PermissionError):
        return "violation"
    return "output_limit" if isinstance(error, TooBig) else "error"


def run_program(payload: bytes, output_bytes: int) -> None:
    """Define the program once and call its function on every argument list; one JSON line per call, at once."""
    job = json.loads(payload)
    room, results = output_bytes, []
    namespace = {"__name__": "__main__", "__builtins__": builtins}
    try:
        exec(compile(job["source"], "<program>", "exec", dont_inherit=True), namespace)  # noqa: S102 (what we are here for)
        function = namespace[job["function"]]
    except BaseException as error:  # noqa: BLE001 (the boundary to untrusted code: SystemExit too ends here)
        results, function = [status_of(error)] * len(job["calls"]), None
    for arguments in job["calls"] if function is not None else ():
        try:
            value = plain(function(*arguments), [10_000])
            line = json.dumps({"status": "ok", "value": value}, allow_nan=False).encode() + b"\n"
        except BaseException as error:  # noqa: BLE001 (the same boundary)
            line = json.dumps({"status": status_of(error)}).encode() + b"\n"
        room -= len(line)
        if room < 0:
            line = b'{"status": "output_limit"}\n'
        os.write(RESULT_FD, line)
    for status in results:
        os.write(RESULT_FD, json.dumps({"status": status}).encode() + b"\n")


def enter_child(payload: bytes, request: tuple, descriptors: tuple[int, int, int], extra: SockFilterProgram | None):
    """The child's whole life: new session, descriptors, limits, last filter, the program, exit. Never returns."""
    null, result, ready = descriptors
    _, cpu_seconds, _, memory_bytes, output_bytes = request
    os.setsid()
    prctl(1, signal.SIGKILL)  # die with the zygote
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.dup2(ready, 63)
    os.dup2(result, RESULT_FD)
    os.closerange(RESULT_FD + 1, 63)
    for kind, limit in (
        (resource.RLIMIT_CPU, int(cpu_seconds) + 2),  # the zygote enforces the exact limit; this is the kernel's own
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, output_bytes + SLACK),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    random.seed(0)
    if extra is None or install(extra):
        os.write(63, b"1")
        os.close(63)
        run_program(payload, output_bytes)
    os._exit(0)


def cpu_seconds_of(pid: int) -> float:
    """CPU time of a process so far, from its kernel clock; 0 where this kernel does not show it."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def watch(pid: int, cpu_seconds: float, wall_seconds: float) -> bool:
    """Wait for a child within its limits; False if it had to be stopped. Ends everything when the trainer is gone."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        handle = None
    poller = select.poll()
    poller.register(0, 0)  # hang-up of the trainer's end
    if handle is not None:
        poller.register(handle, select.POLLIN)
    deadline, has_ended, step = time.monotonic() + wall_seconds, False, 0.05
    try:
        while True:
            left = min(cpu_seconds - cpu_seconds_of(pid), deadline - time.monotonic())
            if left <= 0:
                return False
            events = dict(poller.poll(max(1, 1000 * min(left, 0.5)) if handle is not None else 1000 * step))
            if 0 in events:
                os.kill(pid, signal.SIGKILL)
                os._exit(0)
            step = 0.005
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            has_ended = state is not None
            if has_ended:
                return True
    finally:
        if handle is not None:
            os.close(handle)


def reap(pid: int, children: int) -> int:
    """Kill what is left of a program, orphans included, and return the wait status of its first process."""
    for send, target in ((os.killpg, pid), (os.kill, pid)):
        try:
            send(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _, status = os.waitpid(pid, 0)
    for _ in range(1000):  # normally ends at once: programs cannot fork where seccomp works
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        for child in os.pread(children, 65536, 0).split():
            os.kill(int(child), signal.SIGKILL)
        time.sleep(0.001)
    raise OSError("processes of a program survive SIGKILL")


def serve_one(request: tuple, payload: bytes, opened: tuple[int, int], extra: SockFilterProgram | None) -> bytes:
    """Fork, watch and reap one program; the answer's bytes."""
    null, children = opened
    result = os.memfd_create("result")
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter_child(payload, request, (null, result, ready_write), extra)
        finally:
            os._exit(1)
    os.close(ready_write)
    is_in_time = watch(pid, request[1], request[2])
    status = reap(pid, children)
    has_started = os.read(ready_read, 1) == b"1"
    os.close(ready_read)
    output = os.pread(result, request[4] + SLACK, 0)
    os.close(result)
    if not has_started:
        return RESPONSE.pack(NOT_STARTED, status, 0)
    kind, code = (SIGNALLED, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (EXITED, os.WEXITSTATUS(status))
    return RESPONSE.pack(kind if is_in_time else TIMED_OUT, code, len(output)) + output


def main() -> None:
    """Preload, lock down, say the level, then serve until the trainer hangs up."""
    for module in PRELOAD.split():
        __import__(module)
    builtins.exit = builtins.quit = sys.exit  # `-S` leaves them out
    # Both are opened now because nothing can be opened later; the second lists our children.
    opened = os.open(os.devnull, os.O_RDWR), os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    requests, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(1, "wb", closefd=False)
    level, extra = lock_down()
    answers.write(struct.pack("!I", len(level)) + level.encode())
    answers.flush()
    gc.collect()
    gc.freeze()
    while len(header := requests.read(REQUEST.size)) == REQUEST.size:
        request = REQUEST.unpack(header)
        answers.write(serve_one(request, requests.read(request[0]), opened, extra))
        answers.flush()


if __name__ == "__main__":
    main()
