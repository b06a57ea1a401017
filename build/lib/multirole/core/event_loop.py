"""How a rollout runs: in a thread of its own, by an event loop that the engine drives; and where a coroutine hangs in it."""

import inspect
import selectors
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
POLL = 0.5
"""Seconds between two looks at the thread."""


class EngineSelector(selectors.DefaultSelector):
    """An I/O selector that advances the engine instead of sleeping.

    `may_wait` allows coroutines to wait for threads and sockets when the engine has nothing to do.
    """

    def __init__(self, advance: Callable[[], bool], may_wait: bool = False) -> None:
        super().__init__()
        self.advance, self.may_wait = advance, may_wait

    def select(self, timeout: float | None = None) -> list:
        if timeout == 0 or self.advance():  # 0: some coroutine can run now
            return super().select(0)
        if timeout is None and not self.may_wait and len(self.get_map()) <= 1:  # the one is the loop's own self-pipe
            raise RuntimeError(
                "Every episode waits for something that is not a model call, so the rollout would hang. "
                "A workflow may only await `call(...)`, gathers of calls, and asyncio timers."
            )
        return super().select(timeout)


def in_thread(work: Callable[[], T], check: Callable[[int], object] = lambda thread: None) -> T:
    """Call `work` in a thread of its own, on the same GPU: a notebook's thread has an event loop already.

    `check` is called with the thread every `POLL` seconds meanwhile; where it raises, the thread is left to itself.
    """
    gpu, done = torch.cuda.current_device() if torch.cuda.is_available() else None, Future[T]()

    def call() -> None:
        try:
            if gpu is not None:  # a new thread starts on device 0, whatever its process trains on
                torch.cuda.set_device(gpu)
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again by `result`)
            done.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not wait([done], timeout=POLL).done:
        check(thread.ident or 0)
    return done.result()


def position(coroutine: Any, thread: int) -> str:
    """Where a workflow's coroutine is in a thread, running or waiting."""
    if coroutine.cr_running:
        return user_lines([*traceback.walk_stack(sys._current_frames()[thread])][::-1])
    frames = []
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame:
        frames.append((coroutine.cr_frame, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return user_lines(frames)


def user_lines(frames: Iterable[tuple[FrameType, int]]) -> str:
    """A traceback's lines without those of asyncio, of threads and of this package."""
    ours = ("asyncio", "concurrent", "threading", "multirole")
    kept = [frame for frame in frames if frame[0].f_globals["__name__"].partition(".")[0] not in ours]
    return "".join(traceback.StackSummary.extract(kept).format()).rstrip()
