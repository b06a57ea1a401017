"""Print progress lines to standard output."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print a line and flush it, so that a pipe shows it at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def announced(action: str, is_shown: bool) -> Iterator[None]:
    """Print when a slow action begins and how long it took."""
    started = time.monotonic()
    if is_shown:
        say(f"  {action} ...")
    yield
    if is_shown:
        say(f"  {action} took {time.monotonic() - started:.0f} s")
