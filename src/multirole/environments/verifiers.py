"""Turn an environment of verifiers into a workflow (`from_verifiers`): a role for each of its agents, and its rewards for the roles.

verifiers asks for other versions of `openai` and `mcp` than the locks have, so it needs an environment of its own (docs/environments.md).
"""

import asyncio
import itertools
import json
import os
from collections.abc import Collection
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

from datasets import Dataset
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.env import Env
from verifiers.v1.task import Task

from multirole.openai_api.workflow import OpenAIWorkflow
from multirole.types import Answer, Call, Episode, Problem, Structure

COLUMN = "idx"
"""Column of the rows: the position of the task among the environment's."""


class VerifiersWorkflow(OpenAIWorkflow):
    """A workflow whose episodes are those of an environment; created by [`from_verifiers`]. `rewards` is its reward function, and `rows` makes its datasets."""

    def __init__(self, env: Any, name: str, ignore: Collection[str], patience: float) -> None:
        specs = {role: spec for role, spec in agent_config_fields(env.config).items() if spec.client is None}
        if not specs:
            raise ValueError(
                f"Every agent of {type(env).__name__} has a `client` of its own, so there is none to train. Leave the `client` of an agent out."
            )
        named = {role: spec.model_copy(update={"model": role}) for role, spec in specs.items()}
        self.env = type(env)(env.config.model_copy(update=named))
        self._problem: ContextVar[Problem] = ContextVar("problem")
        self._tasks: dict[int, Any] = {}
        self._serving: dict[asyncio.AbstractEventLoop, asyncio.Future[AsyncExitStack]] = {}
        self._numbers = itertools.count()
        super().__init__(self._play, dict.fromkeys(specs, 1), name, Structure(), ignore, True, patience)

    async def run(self, problem: Problem, call: Call) -> Answer:
        """Run one episode of the problem's task. The answer is JSON: the rewards of the roles."""
        self._problem.set(problem)
        return await super().run(problem, call)

    async def _play(self, question: Any, client: Any) -> str:
        loop = asyncio.get_running_loop()
        start = self._serving.get(loop)
        has_failed = start is not None and start.done() and (start.cancelled() or start.exception() is not None)
        if start is None or has_failed:
            start = self._serving[loop] = asyncio.ensure_future(self._start_serving())
        await asyncio.shield(start)  # an episode that is cancelled leaves it to the others
        key_variable = f"MULTIROLE_EPISODE_{next(self._numbers)}"  # verifiers reads keys from the environment
        os.environ[key_variable] = client.api_key
        try:
            endpoint = EvalClientConfig(base_url=str(client.base_url), api_key_var=key_variable)
            context = ModelContext(model=next(iter(self.roles)), client=endpoint)
            episode = await self.env.run_episode(self._task(self._problem.get()), context)
        finally:
            del os.environ[key_variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(
                "the episode failed in verifiers: " + "; ".join(f"{e.type}: {e.message}" for e in errors)
            )
        return json.dumps({"rewards": self._rewards_of(episode.traces)})

    async def _start_serving(self) -> AsyncExitStack:
        """Start the environment's servers, which last as long as the event loop of the rollouts."""
        stack = AsyncExitStack()
        await stack.enter_async_context(self.env.serving())
        return stack

    def _rewards_of(self, traces: Collection[Any]) -> dict[str, float]:
        """Return role -> mean reward of its runs. The only agent of a plain task set has no name in its traces."""
        rewards: dict[str, list[float]] = {}
        for trace in traces:
            name = next(iter(self.roles)) if len(self.roles) == 1 else trace.agent.name
            rewards.setdefault(name, []).append(trace.reward)
        return {role: sum(values) / len(values) for role, values in rewards.items() if role in self.roles}

    def _task(self, problem: Problem) -> Any:
        number = int(problem.reference[COLUMN])
        if number not in self._tasks:
            self._tasks[number] = next(itertools.islice(iter(self.env.taskset), number, None))
        return self._tasks[number]

    def rewards(self, episodes: list[Episode], **columns: Any) -> list[dict[str, float] | None]:
        """Return, for each episode, role -> the environment's reward; None, which leaves an episode out, where a prompt was too long."""
        return [
            json.loads(episode.answer.text)["rewards"] if episode.answer is not None and episode.answer.text else None
            for episode in episodes
        ]

    def rows(self, n: int, start: int = 0) -> Dataset:
        """Return a dataset of `n` tasks of the environment, from the one at `start` on."""
        tasks = list(itertools.islice(iter(self.env.taskset), start, start + n))
        self._tasks |= {start + i: task for i, task in enumerate(tasks)}
        return Dataset.from_list([{"prompt": _text(task), COLUMN: start + i} for i, task in enumerate(tasks)])


def _text(task: Task) -> str:
    """Return a task's prompt as text, which names the row; the environment itself sends the prompt."""
    prompt = task.data.prompt
    if isinstance(prompt, str):
        return prompt
    return "" if prompt is None else "\n".join(str(message.content) for message in prompt)


def from_verifiers(
    env: Any, *, name: str | None = None, ignore: Collection[str] = (), patience: float = 120.0
) -> VerifiersWorkflow:
    """Turn an environment of verifiers 0.4 into a workflow. Its method `rewards` is the reward function, and `rows(n)` makes a dataset.

    Every agent of the environment without a `client` of its own is a role. Its requests go to this process, where the role's adapter answers them;
    how they are made is the agent's harness. An episode that fails in verifiers fails here, so that it has no reward.

    Args:
        env: an environment, `verifiers.v1.env.Env`, such as `load_environment(config)` returns.
        name: the workflow's name; by default made from the name of its class.
        ignore: request fields that are dropped instead of refused, as in `from_openai`.
        patience: the most seconds that an episode may go without a request.

    Raises:
        TypeError: for anything else than an environment.
        ValueError: if every agent has a `client` of its own.
    """
    if not isinstance(env, Env):
        raise TypeError(
            f"`env` must be an environment of verifiers (`verifiers.v1.env.Env`), got {env!r:.200}. Load it: `load_environment(config)`."
        )
    return VerifiersWorkflow(env, name or type(env).__name__, ignore, patience)
