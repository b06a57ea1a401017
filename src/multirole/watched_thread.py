"""Run work in a background thread and watch it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

T = TypeVar("T")
POLL = 0.5
"""Seconds between two checks of the thread."""


def in_thread(
    work: Callable[[], T],
    check: Callable[[int], object] = lambda thread: None,
    interrupt: Callable[[], object] | None = None,
) -> T:
    """Call `work` in a new thread, on the same GPU, because a notebook's thread has an event loop already.

    Meanwhile `check` is called with the thread every `POLL` seconds; if it raises, the thread is abandoned. On Ctrl-C the thread is
    abandoned, too, unless there is an `interrupt`, which makes `work` end: then the thread is joined, because a notebook's kernel lives on and so would
    the thread. A second Ctrl-C abandons it.
    """
    gpu, result = torch.cuda.current_device() if torch.cuda.is_available() else None, Future[T]()

    def call() -> None:
        try:
            if gpu is not None:  # a new thread starts on device 0, whatever its process trains on
                torch.cuda.set_device(gpu)
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again by `result`)
            result.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        while not wait([result], timeout=POLL).done:
            check(thread.ident or 0)
    except KeyboardInterrupt:
        if interrupt is not None:
            interrupt()
            thread.join()
        raise
    return result.result()
