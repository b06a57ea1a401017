"""One process per results folder: a lock that the system lets go of when its holder dies, however it dies."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

LOCK = "LOCK"
PATIENCE = 5.0  # seconds: the former process may be saving its last checkpoint
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, `flock` on the file `LOCK`, which names the holder; ValueError where another process has it.

    Where the file system has no locks (some network mounts), it refuses a folder whose `LOCK` names a live process of this
    machine, and otherwise warns and goes on. `LOCK` goes at the end; one that stays is of a process that was killed.
    """
    path = folder / LOCK
    with _locked(path) as file:
        try:
            if former := file.read():
                logger.warning("%s is stale: %s does not run any more. It is taken over.", path, _named(former))
            file.seek(0)
            file.truncate()
            started = datetime.now(UTC).isoformat(timespec="seconds")
            json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
            file.flush()
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is held: nobody else's goes


def _locked(path: Path) -> TextIO:
    """The lock file, open and locked; waits `PATIENCE` for it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        file = path.open("a+", encoding="utf-8")
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            is_held = _runs_here(file.read())
            file.seek(0)
            logger.warning(
                "%s is on a file system without locks (%s). Nothing stops a process on another machine from writing to this "
                "folder as well: start no second one.", path, error.strerror,
            )  # fmt: skip
        else:
            is_held = False
        if not is_held and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file  # and not one that its holder has deleted meanwhile
        holder = file.read()
        file.close()
        if is_held and time.monotonic() > deadline:
            raise ValueError(
                f"{path.parent} is in use by {_named(holder)}, and two processes cannot write one run. Wait for that process "
                "or end it; or write another results_dir."
            )
        time.sleep(0.1)


def _named(text: str) -> str:
    try:
        holder = json.loads(text)
    except ValueError:  # killed while it wrote its name
        return "a process that has not said its name"
    return f"process {holder['pid']} on {holder['host']}, started {holder['started']},"


def _runs_here(text: str) -> bool:
    """Whether the process that a lock file names is a live one of this machine."""
    try:
        holder = json.loads(text)
        if holder["host"] != socket.gethostname() or holder["pid"] == os.getpid():
            return False
        os.kill(holder["pid"], 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True
