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
def announced(what: str, is_said: bool) -> Iterator[None]:
    """Say that something begins which may take minutes, and how long it took."""
    started = time.monotonic()
    if is_said:
        say(f"  {what} ...")
    yield
    if is_said:
        say(f"  {what} took {time.monotonic() - started:.0f} s")
