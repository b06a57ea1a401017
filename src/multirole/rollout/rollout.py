"""Play many episodes at once on one engine. An episode continues as soon as its calls are answered.

Workflows are plain coroutines; `asyncio` runs them and the engine's steps are what the event loop "waits for": each
time every coroutine is waiting, the loop's selector advances the engine by one step. So there is no barrier between
stages, no polling, and the order of events depends on nothing but the engine.

`Rollout.run` plays the episodes of an iteration. `episode_run` plays one of them: it makes a turn of every call. `prompts` renders what a call sends, and
`requests` holds what the engine has not answered yet.
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from multirole import watched_thread
from multirole.chat.templates import Renderer, chat_template
from multirole.engines.context import Context
from multirole.engines.endpoint import Endpoint
from multirole.engines.protocol import Engine, Sampling
from multirole.rollout.call_order import are_sequential, place_turns
from multirole.rollout.episode_run import EpisodeRun
from multirole.rollout.errors import WorkflowError
from multirole.rollout.event_loop import EngineSelector, cancel_tasks, new_loop, position, run_to_end
from multirole.rollout.prompts import Prompts
from multirole.rollout.replay import Replay
from multirole.rollout.requests import EngineRequests, Progress
from multirole.types import (
    CHAT_ROLES,
    FAILED,
    OVERFLOW,
    Answer,
    Episode,
    Message,
    Problem,
    Workflow,
    begin_rollout,
    waits_outside,
)
from multirole.watched_thread import in_thread

logger = logging.getLogger(__name__)

Attempt = tuple[Problem, int]
"""A problem and the index of the episode that attempts it."""
Speaker = str | None | tuple[str, ...] | Endpoint
"""What answers the calls of a role: an adapter, the base (None), one of several adapters that the episode draws, or a server."""
PATIENCE = 600.0
"""Seconds without progress (a call, an answer, an episode's end) before a rollout is declared hung; the engine's time is excluded."""


def numbered_attempts(problems: Iterable[Problem]) -> list[Attempt]:
    """Return one attempt per problem, numbered among the attempts at the same problem."""
    n_attempts: dict[str, int] = defaultdict(int)
    attempts = []
    for problem in problems:
        attempts.append((problem, n_attempts[problem.id]))
        n_attempts[problem.id] += 1
    return attempts


def warn_of_silent_roles(workflow: Workflow, called: Collection[str], when: str, n_overflows: int = 0) -> None:
    """Warn of roles without a turn, which may be right: a workflow may call a role for certain replies only.

    `n_overflows` is the number of episodes that ended at a prompt longer than `max_prompt_tokens`.
    """
    silent = ", ".join(role for role in workflow.roles if role not in called)
    if silent and n_overflows:
        logger.warning("The workflow %r got no reply from %s %s: prompts longer than `max_prompt_tokens` ended %d episodes.",
                       workflow.name, silent, when, n_overflows)  # fmt: skip
    elif silent:
        logger.warning("The workflow %r did not call %s %s. A role that is never called is not trained.",
                       workflow.name, silent, when)  # fmt: skip


def check_failures(episodes: Sequence[Episode], most: int) -> None:
    """Raise WorkflowError if more than `most` episodes of all processes failed; each process has checked its share before."""
    failures = [episode.failure for episode in episodes if episode.failure is not None]
    if len(failures) > most:
        raise WorkflowError(
            f"{len(failures)} episodes of one rollout failed, and `max_failed_episodes` is {most}. The last: {failures[-1]}"
        )


@dataclass
class Rollout:
    """Plays a workflow over an engine.

    Attributes:
        sampled_tokens: completion tokens that the engine has sampled so far, in replays, too.
        read_tokens: prompt tokens of the same requests.
        patience: seconds without progress after which `run` raises WorkflowError.
    """

    workflow: Workflow
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    policy: Mapping[str, Speaker]
    is_answer: Callable[[str], bool]  # for the outcome of turns that the workflow does not judge itself
    seed: int
    max_prompt_tokens: int  # a longer prompt ends its episode without an answer
    render: Renderer = chat_template  # how messages become a prompt
    max_turns: int = 256  # more calls in one episode raise `WorkflowError`
    turn_seeds: str = "position"  # of a turn: (role, slot, round), or (role, "prompt", occurrence)
    max_failed_episodes: int = 0  # more failing episodes of one `run` raise `WorkflowError`
    # called in the rollout's thread, with its answer
    on_episode_end: Callable[[Episode], object] = lambda episode: None
    strip_thoughts: bool = True  # cut thoughts out of the turns' texts
    n_embeddings: int | None = None  # of the model; a prompt with another token is refused
    context: Context | None = None  # of the base
    version: int | None = None  # of the adapters that the engine has, for the turns
    versions: Mapping[str | None, int | None] = field(default_factory=dict)  # of adapters that have another one
    reads_calls: bool = True  # of tools, in replies; a trial without a tokenizer reads none
    is_stopped: Callable[[], bool] = lambda: False  # asked before each step; if so, `RolloutStopped` is raised

    prompts: Prompts = field(init=False)  # of the last `run`
    _lasting: ClassVar[tuple[EngineSelector, asyncio.AbstractEventLoop] | None] = None
    """The event loop of all rollouts that wait outside: frameworks keep clients, and clients belong to a loop."""

    def __post_init__(self) -> None:
        self.patience = PATIENCE
        self.progress = Progress()
        self.sampled_tokens = 0
        self.read_tokens = 0
        self._keys = itertools.count()  # of requests
        self._requests: EngineRequests | None = None  # of the last `run`
        self._playing: list[tuple[Episode, Any]] = []  # with the coroutine that plays it
        self._unplaced: list[EpisodeRun] = []  # with turns that were called without a slot
        self._n_failed = 0
        self._warned_of: set[Hashable] = set()

    # ---- all episodes

    def run(
        self, attempts: Sequence[Attempt], iteration: int, sampling: Sampling, replays: Sequence[Replay] | None = None
    ) -> list[Episode]:
        """Play one episode per (problem, episode index), all started together; return them in this order.

        `replays`, one per attempt, replay episodes that were played before (`forks`). Raises WorkflowError where more than
        `max_failed_episodes` of them fail.
        """
        episodes = [Episode(problem, index) for problem, index in attempts]
        self.prompts = Prompts(self.tokenizer, self.render, self.n_embeddings, self.reads_calls)
        self._n_failed = 0
        self._unplaced.clear()
        begin_rollout(self.workflow, self.tokenizer, sampling, self.render)
        self.progress.made()
        requests = EngineRequests(self.engine, self._keys, self.context, self.progress, self.is_stopped)
        self._requests = requests
        chosen: Sequence[Replay | None] = replays or [None] * len(episodes)
        runs = [
            EpisodeRun(self, requests, episode, iteration, sampling, replay)
            for episode, replay in zip(episodes, chosen, strict=True)
        ]
        try:
            in_thread(lambda: self._play(runs, requests), self._check_progress, requests.is_interrupted.set)
        except KeyboardInterrupt:
            Rollout._lasting = None  # its loop may have been left behind
            raise
        self._playing.clear()
        self._place_turns()
        self._warn_of_missing_turns(episodes)
        return episodes

    def _play(self, runs: Sequence[EpisodeRun], requests: EngineRequests) -> None:
        """Play all episodes in an event loop whose waiting steps the engine. It ends when the engine is idle."""
        self._playing = [(run.episode, self._try_episode(run)) for run in runs]

        async def all_episodes() -> None:
            await asyncio.gather(*(coroutine for _, coroutine in self._playing))

        try:
            with self._event_loop(requests.advance) as loop:
                run_to_end(loop, all_episodes())
        finally:
            requests.finish()

    async def _try_episode(self, run: EpisodeRun) -> None:
        """Play one episode. Its failure is recorded on it, or raised where `max_failed_episodes` have failed already."""
        episode = run.episode
        try:
            await run.play()
        except WorkflowError as error:
            self._n_failed += 1
            if self._n_failed > self.max_failed_episodes:
                raise self._last_failure(error) from error.__cause__
            episode.failure, episode.answer = str(error), Answer("", reason=FAILED)
            logger.warning("Left out episode %d of problem %r. %s", episode.index, episode.problem.id, error)
            await run.all_calls_ended()
            episode.turns.clear()
        else:
            if run.unplaced:
                self._unplaced.append(run)
            self._sort_turns(episode)
            self.on_episode_end(episode)
        self.progress.made()

    def _last_failure(self, error: WorkflowError) -> WorkflowError:
        """Return the error that ends the run, with advice on `max_failed_episodes`."""
        if not self.max_failed_episodes:
            return WorkflowError(
                f"{error}\nTo leave such episodes out instead, set `max_failed_episodes` to the number that a rollout may have."
            )
        return WorkflowError(f"{self._n_failed} episodes of one rollout failed, and `max_failed_episodes` is {self.max_failed_episodes}. "
                             f"The last: {error}")  # fmt: skip

    @contextmanager
    def _event_loop(self, advance: Callable[[], bool]) -> Iterator[asyncio.AbstractEventLoop]:
        """Return an event loop that the engine drives. It outlives the rollout where clients of the workflow keep connections.

        Threads in which tools hang are left behind.
        """
        lasts, is_whole = waits_outside(self.workflow), False
        selector, loop = Rollout._lasting if lasts and Rollout._lasting else new_loop(may_wait=lasts)
        if lasts:
            Rollout._lasting = selector, loop
        selector.advance = advance
        try:
            yield loop
            is_whole = True
        finally:
            selector.advance, selector.may_wait = (lambda: False), True
            if not lasts or not is_whole:  # or its episodes would go on in the next rollout
                cancel_tasks(loop)
            if not lasts:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

    def _check_progress(self, thread: int) -> None:
        """Raise `WorkflowError` where for `patience` no episode has called or ended and no call has been answered."""
        if self.progress.after(watched_thread.POLL) < self.patience:
            return
        if waits_outside(self.workflow):
            Rollout._lasting = None  # its thread is left behind
        episode, coroutine = max(self._playing, key=lambda one: (one[1].cr_frame is not None, one[1].cr_running))
        error = WorkflowError(
            f"The workflow {self.workflow.name!r} hangs on problem {episode.problem.id!r}: for {self.patience:g} s no episode has made a "
            f"call, got an answer or ended. It is here:\n{position(coroutine, thread)}"
        )
        assert self._requests is not None
        self._requests.give_up()
        raise error

    # ---- the order of turns

    def _place_turns(self) -> None:
        """Set slot and round of the turns that were called without a slot.

        Whether a role's calls are sequential is decided for all episodes together: over sockets, concurrent calls may look sequential in a few.
        """
        roles = self.workflow.roles
        for role in dict.fromkeys(role for run in self._unplaced for role in run.unplaced):
            of_episodes = [run.unplaced[role] for run in self._unplaced if role in run.unplaced]
            is_sequential = all(map(are_sequential, of_episodes))
            for turns in of_episodes:
                place_turns(turns, roles[role], is_sequential)
            n_turns = max(map(len, of_episodes))
            if not is_sequential and n_turns > roles[role]:
                self._warn_once(
                    ("order", role),
                    "The workflow %r makes up to %d calls of the role %r in an episode, which has %d slots, some of them at the same time. "
                    "Their order would depend on the load of the machine, so the role's turns are put in slots and rounds by prompt, the shortest "
                    "first. Await each call before the next one, or give the role a slot for each call.",
                    self.workflow.name, n_turns, role, roles[role],
                )  # fmt: skip
        for run in self._unplaced:
            self._sort_turns(run.episode)
        self._unplaced.clear()

    def _sort_turns(self, episode: Episode) -> None:
        episode.turns.sort(key=lambda turn: (turn.round, list(self.policy).index(turn.role), turn.slot))

    # ---- warnings

    def _warn_once(self, of: Hashable, message: str, *values: object) -> None:
        """Warn in this rollout's first case only."""
        if of not in self._warned_of:
            self._warned_of.add(of)
            logger.warning(message, *values)

    def _warn_of_missing_turns(self, episodes: Sequence[Episode]) -> None:
        """Warn if episodes that ended well have no turn although others have some."""
        ended = [e for e in episodes if e.failure is None and e.answer is not None and e.answer.reason != OVERFLOW]
        counts = [len(episode.turns) for episode in ended]
        if 0 in counts and any(counts):
            self._warn_once(
                "missing turns",
                "%d of %d episodes of the workflow %r have no turn, so they are not trained on; others have up to %d."
                + (" If the agent's client is kept for later episodes or reads its key from the environment, the calls of one episode count for another: "
                   "make each client in the agent, from the `base_url` and `api_key` of the client that it receives." * waits_outside(self.workflow)),
                counts.count(0), len(counts), self.workflow.name, max(counts),
            )  # fmt: skip

    def warn_of_overflow(self, role: str, problem: Problem, what: str) -> None:
        """Warn of the first prompt that is longer than `max_prompt_tokens`, or than a server takes."""
        self._warn_once(
            "overflow",
            "A prompt of the role %r on problem %r %s. Unless the workflow "
            "handles this, the episode ends and is scored on an empty answer. Further ones are not reported; the log has their `prompt_overflow_rate`.",
            role, problem.id, what,
        )  # fmt: skip

    def warn_of_chat_roles(self, messages: Sequence[Message]) -> None:
        """Warn of chat roles that most templates do not know."""
        for message in messages:
            if message["role"] not in CHAT_ROLES:
                self._warn_once(
                    ("chat role", message["role"]),
                    "The workflow %r sends a message of the chat role %r. Most chat templates know %s only: check its spelling.",
                    self.workflow.name, message["role"], ", ".join(CHAT_ROLES),
                )  # fmt: skip
