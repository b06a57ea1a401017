"""Keep the requests of one rollout at the engine, and wake the calls that wait for their replies."""

import asyncio
import math
from collections.abc import Callable, Iterator
from threading import Event

from multirole.engines.context import Context
from multirole.engines.protocol import Completion, Engine, Request, RequestRefused
from multirole.rollout.errors import RolloutStopped


class Progress:
    """Tells for how many seconds a rollout has made no progress: a call, a reply, or an episode's end.

    Its clock counts the seconds in which this process was not suspended, and those in which the engine works are not counted.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.last = 0.0

    def made(self) -> None:
        """Note that the rollout has just made progress."""
        self.last = self.clock

    def wait_for_engine(self) -> None:
        """Count nothing until the next progress: the engine takes the time that it needs."""
        self.last = math.inf

    def after(self, seconds: float) -> float:
        """Advance the clock, and return the seconds without progress."""
        self.clock += seconds
        return self.clock - self.last


class EngineRequests:
    """The requests of one rollout that its engine has. A rollout whose thread is left behind keeps its own.

    Args:
        keys: the keys of requests; an engine that failed may still hold earlier ones, so they do not start again.
        context: of the base, which refuses requests that it has no positions for; None if it takes any.
        is_stopped: asked before each step of the engine.
    """

    def __init__(
        self, engine: Engine, keys: Iterator[int], context: Context | None, progress: Progress,
        is_stopped: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.engine, self.keys, self.context = engine, keys, context
        self.progress, self.is_stopped = progress, is_stopped
        self.is_interrupted = Event()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}

    def send(self, request: Request) -> asyncio.Future[Completion]:
        """Queue a request at the engine. Raises RequestRefused for one that cannot be sampled."""
        if self.is_interrupted.is_set():
            raise RolloutStopped
        if self.context is not None and request.endpoint is None:
            self.context.check(request)
        key = next(self.keys)
        try:
            self.engine.add(key, request)
        except ValueError as error:  # no fault of the workflow
            raise RequestRefused(str(error)) from error
        self._waiting[key] = asyncio.get_running_loop().create_future()
        return self._waiting[key]

    def advance(self) -> bool:
        """Advance the engine by one step, and answer the calls whose replies are finished. Returns whether it had any request; RolloutStopped ends the rollout."""
        if self.is_stopped() or self.is_interrupted.is_set():
            raise RolloutStopped
        if not self._waiting:
            return False
        self.progress.wait_for_engine()
        for key, completion in self._step():
            if key in self._waiting:  # or it is of a rollout that was given up
                self._waiting.pop(key).set_result(completion)
        self.progress.made()
        return True

    def finish(self) -> None:
        """Step the engine until it has none of the requests, such as those of calls that were cancelled: it must have none when the rollout ends."""
        self.progress.wait_for_engine()
        while self._waiting:
            for key, _ in self._step():
                self._waiting.pop(key, None)

    def give_up(self) -> None:
        """Take the requests of a rollout whose thread is left behind out of the engine; should the thread go on, it sends no others."""
        self.is_interrupted.set()
        unfinished = set(self._waiting)
        self._waiting.clear()
        while unfinished:
            unfinished -= {key for key, _ in self.engine.step()}

    def _step(self) -> list[tuple[int, Completion]]:
        try:
            return self.engine.step()
        except BaseException:
            self._waiting.clear()  # a broken engine finishes nothing
            raise
