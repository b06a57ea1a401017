"""Run coroutines in an event loop that steps the engine while they wait, in the rollout's thread, and find where one hangs."""

import asyncio
import inspect
import selectors
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from multirole.rollout.call_order import make_task
from multirole.rollout.errors import WorkflowError

T = TypeVar("T")
ALONE = 60.0
"""Seconds for which every episode may wait for something other than a model call, such as a tool in a thread, without `waits_outside`."""


class EngineSelector(selectors.DefaultSelector):
    """An I/O selector that steps the engine instead of sleeping.

    When the engine has nothing to do, coroutines may wait for threads for `ALONE` seconds, and without a limit if `may_wait`.
    """

    def __init__(self, advance: Callable[[], bool], may_wait: bool = False) -> None:
        super().__init__()
        self.advance, self.may_wait = advance, may_wait

    def select(self, timeout: float | None = None) -> list:
        if timeout == 0 or self.advance():  # 0: some coroutine can run now
            return super().select(0)
        is_idle = timeout is None and len(self.get_map()) <= 1  # the one is the loop's own self-pipe
        if not is_idle or self.may_wait:
            return super().select(timeout)
        if events := super().select(ALONE):
            return events
        raise WorkflowError(
            f"For {ALONE:g} s every episode has waited for something other than a model call, so the rollout may hang. If the workflow waits "
            "for slow tools or other threads, set `waits_outside = True` on it; otherwise await only `call(...)`, tools and asyncio timers."
        )


def new_loop(may_wait: bool) -> tuple[EngineSelector, asyncio.AbstractEventLoop]:
    """Return a new event loop and its selector, which drives no engine yet."""
    selector = EngineSelector(lambda: False, may_wait)
    loop = asyncio.SelectorEventLoop(selector)
    loop.set_task_factory(make_task)  # type: ignore[arg-type]
    return selector, loop


def run_to_end(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop. The `SystemExit` of a task, which leaves the loop, is left to the code that awaits the task."""
    main = loop.create_task(coroutine)
    while True:
        try:
            return loop.run_until_complete(main)
        except SystemExit:
            if main.done():
                raise


def cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks of an event loop that is not running, and wait until they have ended."""
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))


def position(coroutine: Any, thread: int) -> str:
    """Describe at which line a workflow's coroutine runs or waits in a thread."""
    if coroutine.cr_running:
        return user_lines([*traceback.walk_stack(sys._current_frames()[thread])][::-1])
    frames = []
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame:
        frames.append((coroutine.cr_frame, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    return user_lines(frames)


def is_users(frame: FrameType) -> bool:
    """Return whether a frame is neither of asyncio or threading nor of this project's packages."""
    ours = ("asyncio", "concurrent", "threading", "multirole", "multirole_study")
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ours


def users_traceback(where: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the user's code, so that a debugger starts there; all of it if there is none."""
    part = where
    while part is not None and not is_users(part.tb_frame):
        part = part.tb_next
    return part or where


def last_line(error: BaseException) -> str:
    """Return the line at which an error was raised."""
    return "".join(traceback.format_tb(error.__traceback__)[-1:]).rstrip()


def user_lines(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return a traceback's lines without those of asyncio, threading and this package."""
    user_frames = [frame for frame in frames if is_users(frame[0])]
    return "".join(traceback.StackSummary.extract(user_frames).format()).rstrip()
