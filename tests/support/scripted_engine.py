"""An engine without a model, whose answers come from a function, for tests of code that uses the engine protocol."""

from collections.abc import Callable

from multirole.engines.protocol import Completion, Request


class ScriptedEngine:
    """Answers from `reply(key, request) -> (token_ids, n_steps)`: a completion that takes `n_steps` engine steps."""

    def __init__(self, reply: Callable[[int, Request], tuple[list[int], int]], eos_id: int) -> None:
        self.reply, self.eos_id = reply, eos_id
        self.running: dict[int, tuple[list[int], int]] = {}
        self.requests: list[Request] = []
        self.versions: list[int | None] = []
        self.steps = 0

    def add(self, key: int, request: Request) -> None:
        self.requests.append(request)
        self.running[key] = self.reply(key, request)

    def step(self) -> list[tuple[int, Completion]]:
        self.steps += 1
        self.running = {key: (ids, left - 1) for key, (ids, left) in self.running.items()}
        done = [(key, ids) for key, (ids, left) in self.running.items() if left <= 0]
        for key, _ in done:
            del self.running[key]
        return [(k, Completion(i, [0.0] * len(i), "stop" if i[-1] == self.eos_id else "length")) for k, i in done]

    def publish(self, model, version: int) -> None:
        self.versions.append(version)

    def sleep(self) -> None:
        self.versions.append(None)

    def close(self) -> None:
        self.running.clear()
