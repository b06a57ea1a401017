"""One process per results folder: a lock that the system releases when its holder dies, however it dies."""

import errno
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

logger = logging.getLogger(__name__)

LOCK = "LOCK"
PATIENCE = 5.0  # seconds: the former process may be saving its last checkpoint
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, `flock` on the file `LOCK`, which names the holder; ValueError if another process holds it.

    `LOCK` is deleted at the end; one that stays is of a process that was killed, and is taken over. On a file system without
    `flock` (some network mounts) the existence of another file, `LOCK.soft`, is the lock.
    """
    path = folder / LOCK
    try:
        lock = _acquired(path)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by {_holder(path)}, and two processes cannot write one run. Wait for that process or end it; "
            "or write another results_dir."
        ) from None
    try:
        if path.read_text():
            logger.warning("%s is stale: %s does not run any more. It is taken over.", path, _holder(path))
        started = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started}))
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held, so that nobody else's goes
        lock.release()


def _acquired(path: Path) -> BaseFileLock:
    try:
        lock: BaseFileLock = FileLock(path, timeout=PATIENCE, fallback_to_soft=False)
        lock.acquire(poll_interval=0.1)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s is on a file system without locks (%s); a file is used instead.", path, error.strerror)
        lock = SoftFileLock(f"{path}.soft", timeout=PATIENCE)
        lock.acquire(poll_interval=0.1)
    return lock


def _holder(path: Path) -> str:
    """Who has written the lock file."""
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']},"
    except (OSError, ValueError, TypeError, KeyError):  # killed while it wrote its name
        return "another process"
