"""The zygote: a small process that sandboxes itself and then forks one manager per unit of work.

`multirole_sandbox.worker` starts it; the trainer never imports it. It receives units on a socket, passes each to a forked
manager (`inside.manager`), and reports the end of the unit on a pipe. It never reads a program or a program's output.
"""

import builtins
import contextlib
import gc
import math
import os
import posix
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings

from . import manager, prelude, runner, walls, wire

STACK_BYTES = 256 << 20
THREAD_STACK_BYTES = 8 << 20  # default size; without it each thread would get as much as the main thread
MAX_TASKS = 512  # processes and threads, if the user id belongs to this zygote alone
SPARE_TASKS = 4096  # added to the existing tasks, if the user id is shared
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1  # how often to check that the trainer lives


def grow_stack() -> None:
    """Re-exec with a bigger stack for deep recursion in C code; the limit applies from exec on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack_limit = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft == resource.RLIM_INFINITY or soft < stack_limit:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_limit, hard))
        os.execv(sys.executable, sys.orig_argv)


def move_descriptors() -> None:
    """Move socket, answers and errors to fixed high descriptors and close all others."""
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((wire.CHANNEL, 0), (wire.ANSWERS, 1), (wire.ERRORS, 2), (wire.NULL, null)):
        os.dup2(source, target, inheritable=False)
    os.closerange(3, wire.CHANNEL)
    os.closerange(wire.NULL + 1, 1 << 16)


def preload(module: str, folders: list[str]) -> None:
    """Import the modules that programs use, and make the interpreter state the same in every process."""
    prelude.load()
    if module:
        sys.path[:] = dict.fromkeys([*folders, *sys.path])  # as where it is called, so that it imports the same copies
        __import__(module)
        sys.modules[module].preload()
    sys.modules["random"].seed(0)
    sys.set_int_max_str_digits(0)  # programs may print any integer; their time is limited anyway
    builtins.exit = builtins.quit = sys.exit  # `-S` leaves them out
    warnings.simplefilter("ignore")
    time.tzset()
    threading.stack_size(THREAD_STACK_BYTES)
    sys.argv[:] = [""]
    # Another user may not traverse the library's parent folders, so later imports use paths relative to the library.
    sys.path[:] = [".", "./lib-dynload"]
    for loaded in sys.modules.values():
        folders = vars(loaded).get("__path__", [])
        folders[:] = [folder.replace(os.getcwd(), ".") for folder in folders]
    posix.getcwd = lambda: "."
    posix.fstat = os.fstat = walls.fstat  # libc's may need a call that takes a path
    sys.path_importer_cache.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == __package__]:
        del sys.modules[name]


def library_folders() -> list[str]:
    """Return the folders of loaded shared libraries, from which later imports may load more."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    folders = {*map(os.path.dirname, paths), "/etc/ld.so.cache"}
    return sorted(filter(os.path.exists, folders))


def count_tasks() -> int:
    """Count the processes and threads of this process's user, as RLIMIT_NPROC does."""
    count = 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{process}/task"))
    return count


def end_all(pid: int) -> int:
    """Kill all processes of a unit, orphans included; return the manager's wait status."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while True:  # orphans came to us and are being killed with their group
            os.waitpid(-1, 0)
    return status


def wait_for(descriptor: int, trainer: int, seconds: float) -> bool:
    """Wait until a descriptor is readable; False after a timeout or when the trainer has exited."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and os.getppid() == trainer:
        if poller.poll(1000 * min(left, POLL_SECONDS)):
            return True
    return False


def main(module: str, folders: list[str]) -> None:
    """Preload modules (also `module`, for which `folders` are added to the path), enter the sandbox, report the level, then serve until the trainer hangs up."""
    grow_stack()
    trainer = os.getppid()
    move_descriptors()
    os.chdir(os.path.dirname(os.__file__))
    preload(module, folders)
    runner.open_streams()
    sys.excepthook = lambda *error: os.write(wire.ERRORS, "".join(traceback.format_exception(*error)).encode())
    walls.prctl(36, 1)  # orphans come to us, so that they can be killed
    max_tasks = count_tasks() + SPARE_TASKS
    level, filters = walls.lock_down([".", *library_folders()])
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    max_tasks = MAX_TASKS if "setuid" in level else max_tasks
    max_tasks = max_tasks if hard == resource.RLIM_INFINITY else min(max_tasks, hard)
    signal.pthread_sigmask(signal.SIG_BLOCK, manager.AWAITED)
    channel = socket.socket(fileno=wire.CHANNEL)
    hello = f"{level}+rlimits".lstrip("+").encode()
    os.write(wire.ANSWERS, wire.FRAME.pack(wire.MARK, -1, 0, len(hello)) + hello)
    gc.collect()
    gc.freeze()
    while wait_for(wire.CHANNEL, trainer, math.inf):
        packet, files, _, _ = socket.recv_fds(channel, wire.PACKET.size, 1)
        if not files:  # the trainer hung up
            break
        head_bytes, seconds = wire.PACKET.unpack(packet)
        end, alive = os.pipe()  # its second half is the manager's and is closed with it
        pid = walls.FORK()
        if pid == 0:
            manager.main(files[0], head_bytes, max_tasks, filters)
        if pid < 0:
            raise OSError("a manager could not be forked")
        os.close(files[0])
        os.close(alive)
        is_in_time = wait_for(end, trainer, seconds + GRACE_SECONDS)
        os.close(end)
        code = os.waitstatus_to_exitcode(end_all(pid))
        if is_in_time and code not in wire.REASON_OF_MANAGER:
            # it may have died within a frame, and a new frame would be read as the rest of it
            raise OSError(f"a manager ended with {code}")
        reason = wire.REASON_OF_MANAGER[code] if is_in_time else "timeout"
        os.write(wire.ANSWERS, wire.FRAME.pack(wire.MARK, -1, wire.REASONS.index(reason), 0))
    os._exit(0)
