"""Lines that a program writes as it works, to standard output."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def announced(action: str, is_shown: bool) -> Iterator[None]:
    """Say that something begins which may take minutes, and how long it took."""
    started = time.monotonic()
    if is_shown:
        say(f"  {action} ...")
    yield
    if is_shown:
        say(f"  {action} took {time.monotonic() - started:.0f} s")
