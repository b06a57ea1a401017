"""Connect a client in any thread or event loop to one episode of the rollout."""

import asyncio
import time

from multirole.core.rollout import PromptOverflow
from multirole.core.types import Call, Message, Turn


class Session:
    """An open episode. `call` belongs to the rollout's event loop, in which the session must be created."""

    def __init__(self, call: Call, roles: list[str]) -> None:
        self.roles = roles
        self.overflow: PromptOverflow | None = None
        self.pending = 0
        self.last_event = time.monotonic()
        self._call = call
        self._loop = asyncio.get_running_loop()

    async def play(self, role: str, messages: list[Message], max_tokens: int | None, tools: list[dict] | None) -> Turn:
        """Make one model call. May be awaited in any event loop. It goes on if the client disconnects: the turn is trained."""
        turn = self._play(role, messages, max_tokens, tools)
        if asyncio.get_running_loop() is self._loop:
            return await asyncio.shield(asyncio.ensure_future(turn))
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turn, self._loop)))

    async def _play(self, role: str, messages: list[Message], max_tokens: int | None, tools: list[dict] | None) -> Turn:
        self.pending += 1
        try:
            return await self._call(role, messages, slot=None, max_tokens=max_tokens, tools=tools)
        except PromptOverflow as overflow:
            self.overflow = overflow
            raise
        finally:
            self.pending -= 1
            self.last_event = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since the last call began or ended; 0 while a call is running."""
        return 0.0 if self.pending else time.monotonic() - self.last_event
