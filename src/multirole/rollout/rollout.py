"""Play many episodes at once on one engine. An episode continues as soon as its calls are answered.

Workflows are plain coroutines; `asyncio` runs them and the engine's steps are what the event loop "waits for": each
time every coroutine is waiting, the loop's selector advances the engine by one step. So there is no barrier between
stages, no polling, and the order of events depends on nothing but the engine.
"""

import asyncio
import copy
import hashlib
import itertools
import json
import logging
import math
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Event
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from multirole import watched_thread
from multirole.chat.messages import normalised
from multirole.chat.replies import THOUGHT_TAGS, opens_thought, text_outside_thoughts
from multirole.chat.templates import (
    Renderer,
    chat_template,
    check_tools,
    control_tokens,
    reply_form,
    takes_several_calls,
)
from multirole.chat.tool_calls import ToolForm, parse_reply
from multirole.engines.context import Context
from multirole.engines.endpoint import Endpoint
from multirole.engines.protocol import Completion, Engine, Request, RequestRefused, Sampling
from multirole.rollout.call_order import UnplacedTurn, are_sequential, current_branch, place_turns
from multirole.rollout.event_loop import (
    EngineSelector,
    WorkflowError,
    cancel_tasks,
    last_line,
    new_loop,
    position,
    run_to_end,
    user_lines,
    users_traceback,
)
from multirole.rollout.replay import Replay
from multirole.rollout.tool_loop import MAX_ROUNDS, Toolbox, play_tool_loop
from multirole.types import (
    CHAT_ROLES,
    FAILED,
    OVERFLOW,
    Answer,
    Episode,
    Message,
    Problem,
    Reply,
    Turn,
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
Send = Callable[[Request], asyncio.Future[Completion]]
"""Queues a request at the engine."""
PATIENCE = 600.0
"""Seconds without progress (a call, an answer, an episode's end) before a rollout is declared hung; the engine's time is excluded."""
PROMPT_TAIL = 16
"""Last tokens of a prompt that are searched for the tag that opens a thought."""


class PromptOverflow(Exception):
    """A turn's prompt is longer than `max_prompt_tokens`, or than a partner's server takes: the episode ends without an answer."""


class RolloutStopped(Exception):
    """The rollout was stopped because its episodes are no longer needed."""


def private_copy(problem: Problem) -> Problem:
    """Return a copy of the problem whose parts can be changed without affecting other episodes."""
    reference = problem.reference  # any object: those that are not JSON's may not be copyable
    if isinstance(reference, (list, dict)):
        reference = copy.deepcopy(reference)
    history, prompt = copy.deepcopy((problem.history, problem.prompt))
    return replace(problem, history=history, reference=reference, prompt=prompt)


def is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogate, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C, also in a group."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_interrupt, error.exceptions))
    return isinstance(error, KeyboardInterrupt)


def comes_from(error: BaseException | None, raised: Collection[BaseException]) -> bool:
    """Return whether an error is among those that were raised, or has one of them as its cause or context."""
    while error is not None:
        if any(error is other for other in raised):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_overflow(error: BaseException) -> bool:
    """Return whether an error says that a prompt was too long, also in the group that an `asyncio.TaskGroup` raises."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_overflow, error.exceptions))
    return isinstance(error, PromptOverflow)


def numbered_attempts(problems: Iterable[Problem]) -> list[Attempt]:
    """Return one attempt per problem, numbered among the attempts at the same problem."""
    n_attempts: dict[str, int] = defaultdict(int)
    attempts = []
    for problem in problems:
        attempts.append((problem, n_attempts[problem.id]))
        n_attempts[problem.id] += 1
    return attempts


def last_turns(episodes: list[Episode], eos: int) -> dict[str, list]:
    """Return one row per episode for TRL's `rollout_func`: its last turn, and the episode for the reward functions."""
    nothing = Turn("", 0, 0, [eos], [eos], [0.0], "", "stop")  # an episode whose first prompt was too long
    turns = [episode.turns[-1] if episode.turns else nothing for episode in episodes]
    return {
        "prompt_ids": [turn.prompt_ids for turn in turns],
        "completion_ids": [turn.completion_ids for turn in turns],
        "logprobs": [turn.logprobs for turn in turns],
        "episodes": episodes,
    }


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


def turn_seed(seed: int, iteration: int, problem: str, episode: int, role: str, slot: int, round: int) -> int:
    """Return the 63-bit sampling seed of one turn. No part of it depends on scheduling."""
    key = repr((seed, iteration, problem, episode, role, slot, round)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def prompt_seed(seed: int, iteration: int, problem: str, episode: int, role: str, prompt: list[int], nth: int) -> int:
    """Return the 63-bit sampling seed of the `nth` turn of a role with this prompt in an episode, in whatever order the calls arrive."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
    key = repr((seed, iteration, problem, episode, role, digest, nth)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def reply_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], prompt_ids: Sequence[int] | None = None,
    form: ToolForm | None = None,
) -> str:  # fmt: skip
    """Return the text of a reply outside thoughts; "" for a thought that the token limit cut off.

    Some templates open the thought in the prompt, so `prompt_ids` tells whether the reply starts inside one. `form` says how the model replies, by
    default as the tokenizer's chat template writes it.
    """
    in_channels = (form or reply_form(tokenizer)).text_in_channels(tokenizer, token_ids)
    if in_channels is not None:
        return in_channels
    text = decode_reply(tokenizer, token_ids)
    if prompt_ids is None:
        return text_outside_thoughts(text)
    prompt_end = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False)
    return text_outside_thoughts(text, is_thinking=opens_thought(prompt_end))


def decode_reply(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode a whole reply without special tokens, except those that open or close a thought (Magistral's are special)."""
    special, tags = _special_ids(tokenizer, len(tokenizer))
    if not tags:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    return tokenizer.decode([i for i in token_ids if i in tags or i not in special], skip_special_tokens=False)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase, n_tokens: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of all special tokens, and of those that are tags of thoughts; of a tokenizer that is not a transformers one, none."""
    if not isinstance(tokenizer.added_tokens_decoder, dict):  # mistral-common's
        return frozenset(), frozenset()
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tags = frozenset(i for text, i in ids.items() if any(tag.startswith(text) for pair in THOUGHT_TAGS for tag in pair))
    return frozenset({*ids.values(), *tokenizer.all_special_ids}), tags


def answer_ids(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[int]:
    """Return the tokens of an episode's answer: those of the last turn with this text, or else of its text."""
    text = episode.answer.text if episode.answer else ""
    ids = next((turn.completion_ids for turn in reversed(episode.turns) if turn.text == text), None)
    return control_tokens(tokenizer).encode_text(text) if ids is None else ids


def transcript(episode: Episode) -> str:
    """Return all turns of an episode as text for a person."""
    return "\n".join(f"[{turn.role} {turn.slot}.{turn.round}] {turn.text}" for turn in episode.turns)


def check_failures(episodes: Sequence[Episode], most: int) -> None:
    """Raise WorkflowError if more than `most` episodes of all processes failed; each process has checked its share before."""
    failures = [episode.failure for episode in episodes if episode.failure is not None]
    if len(failures) > most:
        raise WorkflowError(
            f"{len(failures)} episodes of one rollout failed, and `max_failed_episodes` is {most}. The last: {failures[-1]}"
        )


async def _all_done(asked: list[asyncio.Future[None]]) -> None:
    """Wait until all calls of an episode are recorded or cancelled, including those made while waiting."""
    while running := [future for future in asked if not future.done()]:
        await asyncio.wait(running)


@dataclass
class Rollout:
    """Plays a workflow over an engine."""

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

    _lasting: ClassVar[tuple[EngineSelector, asyncio.AbstractEventLoop] | None] = None
    """The event loop of all rollouts that wait outside: frameworks keep clients, and clients belong to a loop."""

    def __post_init__(self) -> None:
        self.patience = PATIENCE
        self._keys = itertools.count()  # of requests; an engine that failed may still hold some
        self._encoded: dict[str, list[int]] = {}
        self._playing: list[tuple[Episode, Any]] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}  # the requests that the engine has
        self._is_interrupted = Event()
        self._n_failed = 0
        self._unusual: list[str] = []  # chat roles that were warned of
        self._has_overflowed = False  # a prompt was longer than `max_prompt_tokens`
        self._unplaced: list[tuple[Episode, dict[str, list[UnplacedTurn]]]] = []  # turns without a slot, by role
        self._warned_of: set[str] = set()  # roles with concurrent calls, and "" for episodes without a turn
        self.sampled_tokens = 0  # completion tokens that the engine has sampled so far, in replays, too
        self.read_tokens = 0  # prompt tokens of the same requests
        self._clock = 0.0  # seconds in which this process was not suspended
        self._progress = 0.0  # `_clock` at the last progress

    def run(
        self, attempts: Sequence[Attempt], iteration: int, sampling: Sampling, replays: Sequence[Replay] | None = None
    ) -> list[Episode]:
        """Play one episode per (problem, episode index), all started together; return them in this order.

        `replays`, one per attempt, replay episodes that were played before (`forks`). Raises WorkflowError where more than
        `max_failed_episodes` of them fail.
        """
        episodes = [Episode(problem, index) for problem, index in attempts]
        self._encoded.clear()
        self._n_failed = 0
        self._unplaced.clear()
        begin_rollout(self.workflow, self.tokenizer, sampling, self.render)
        self._progress = self._clock
        # a thread that was left behind has its own
        self._waiting, self._is_interrupted = {}, Event()
        waiting, is_interrupted = self._waiting, self._is_interrupted
        try:
            in_thread(
                lambda: self._play(episodes, iteration, sampling, replays, waiting, is_interrupted),
                self._check_progress,
                is_interrupted.set,
            )
        except KeyboardInterrupt:
            Rollout._lasting = None  # its loop may have been left behind
            raise
        self._playing.clear()
        self._place_turns()
        self._warn_of_missing_turns(episodes)
        return episodes

    def _place_turns(self) -> None:
        """Set slot and round of the turns that were called without a slot.

        Whether a role's calls are sequential is decided for all episodes together: over sockets, concurrent calls may look sequential in a few.
        """
        roles = self.workflow.roles
        for role in dict.fromkeys(role for _, unplaced in self._unplaced for role in unplaced):
            of_episodes = [unplaced[role] for _, unplaced in self._unplaced if role in unplaced]
            is_sequential = all(map(are_sequential, of_episodes))
            for turns in of_episodes:
                place_turns(turns, roles[role], is_sequential)
            n_turns = max(map(len, of_episodes))
            if not is_sequential and n_turns > roles[role] and role not in self._warned_of:
                self._warned_of.add(role)
                logger.warning("The workflow %r makes up to %d calls of the role %r in an episode, which has %d slots, some of them at the same time. "
                               "Their order would depend on the load of the machine, so the role's turns are put in slots and rounds by prompt, the shortest "
                               "first. Await each call before the next one, or give the role a slot for each call.",
                               self.workflow.name, n_turns, role, roles[role])  # fmt: skip
        for episode, _ in self._unplaced:
            self._sort_turns(episode)
        self._unplaced.clear()

    def _sort_turns(self, episode: Episode) -> None:
        episode.turns.sort(key=lambda turn: (turn.round, list(self.policy).index(turn.role), turn.slot))

    def _warn_of_missing_turns(self, episodes: Sequence[Episode]) -> None:
        """Warn once if episodes that ended well have no turn although others have some."""
        ended = [e for e in episodes if e.failure is None and e.answer is not None and e.answer.reason != OVERFLOW]
        counts = [len(episode.turns) for episode in ended]
        if 0 in counts and any(counts) and "" not in self._warned_of:
            self._warned_of.add("")
            logger.warning(
                "%d of %d episodes of the workflow %r have no turn, so they are not trained on; others have up to %d."
                + (" If the agent's client is kept for later episodes or reads its key from the environment, the calls of one episode count for another: "
                   "make each client in the agent, from the `base_url` and `api_key` of the client that it receives." * waits_outside(self.workflow)),
                counts.count(0), len(counts), self.workflow.name, max(counts))  # fmt: skip

    def _check_progress(self, thread: int) -> None:
        """Raise `WorkflowError` where for `patience` no episode has called or ended and no call has been answered."""
        self._clock += watched_thread.POLL
        if self._clock - self._progress < self.patience:
            return
        if waits_outside(self.workflow):
            Rollout._lasting = None  # its thread is left behind
        episode, coroutine = max(self._playing, key=lambda one: (one[1].cr_frame is not None, one[1].cr_running))
        error = WorkflowError(
            f"The workflow {self.workflow.name!r} hangs on problem {episode.problem.id!r}: for {self.patience:g} s no episode has made a "
            f"call, got an answer or ended. It is here:\n{position(coroutine, thread)}"
        )
        self._give_up()
        raise error

    def _give_up(self) -> None:
        """Take the requests of a rollout whose thread is left behind out of the engine; should the thread go on, it makes no others."""
        self._is_interrupted.set()
        unfinished = set(self._waiting)
        self._waiting.clear()
        while unfinished:
            unfinished -= {key for key, _ in self.engine.step()}

    @property
    def _form(self) -> ToolForm:
        """How the model replies to the prompts."""
        return reply_form(self.tokenizer, self.render)

    def _encode(self, messages: list[Message], tools: list[dict[str, Any]], is_remote: bool = False) -> list[int]:
        """Return the prompt's ids. Equal prompts are encoded once per rollout: same-role slots and the n episodes share them.

        The ids of a prompt for an endpoint only seed and count: what the base's template refuses is encoded as JSON.
        """
        key = repr((messages, tools, is_remote))
        if key not in self._encoded:
            if tools and self.reads_calls:
                check_tools(self.tokenizer, self.render)
            options = {"tools": tools} if tools else {}
            try:
                ids = self.render(self.tokenizer, messages, **options)
            except ValueError:
                if not is_remote:
                    raise
                ids = control_tokens(self.tokenizer).encode_text(json.dumps(messages))
            if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
                raise TypeError(
                    f"`render` must return the prompt's token ids as a list of integers, got {type(ids).__name__}. With "
                    "`apply_chat_template`, pass `add_generation_prompt=True, return_dict=False`."
                )
            if self.n_embeddings is not None and ids and max(ids) >= self.n_embeddings:
                raise ValueError(
                    f"the prompt has the token {self.tokenizer.decode([max(ids)])!r} with id {max(ids)}, but the model has embeddings for only "
                    f"{self.n_embeddings} tokens. Call `model.resize_token_embeddings(len(tokenizer))` before training."
                )
            self._encoded[key] = ids
        return self._encoded[key]

    def _play(
        self, episodes: list[Episode], iteration: int, sampling: Sampling, replays: Sequence[Replay] | None,
        waiting: dict[int, asyncio.Future[Completion]], is_interrupted: Event,
    ) -> None:  # fmt: skip
        """Play all episodes in an event loop whose waiting steps the engine. Once `is_interrupted`, it ends when the engine is idle.

        `waiting` gets the requests that the engine has.
        """

        def step() -> list[tuple[int, Completion]]:
            try:
                return self.engine.step()
            except BaseException:
                waiting.clear()  # a broken engine finishes nothing
                raise

        def advance() -> bool:
            if self.is_stopped() or is_interrupted.is_set():
                raise RolloutStopped
            if not waiting:
                return False
            self._progress = math.inf  # the engine takes what it needs
            for key, completion in step():
                if key in waiting:  # or it is of a rollout that was given up
                    waiting.pop(key).set_result(completion)
            self._progress = self._clock
            return True

        def request_of(
            prompt_ids: list[int],
            episode: Episode,
            role: str,
            place: tuple[int, int] | None,
            nth: int,
            max_tokens: int | None,
        ) -> Request:
            start = (self.seed, iteration, episode.problem.id, episode.index, role)
            seed = turn_seed(*start, *place) if place else prompt_seed(*start, prompt_ids, nth)
            most = sampling.max_tokens if max_tokens is None else min(sampling.max_tokens, max_tokens)
            player = self.policy[role]
            endpoint = player if isinstance(player, Endpoint) else None
            if isinstance(player, tuple):  # one for the episode
                player = player[turn_seed(*start, -1, -1) % len(player)]
            adapter = None if isinstance(player, Endpoint) else player
            return Request(prompt_ids, adapter, seed, most, sampling.temperature, episode.problem.id, endpoint=endpoint)

        def send(request: Request) -> asyncio.Future[Completion]:
            if is_interrupted.is_set():
                raise RolloutStopped
            if self.context is not None and request.endpoint is None:
                self.context.check(request)
            key = next(self._keys)
            try:
                self.engine.add(key, request)
            except ValueError as error:  # no fault of the workflow
                raise RequestRefused(str(error)) from error
            waiting[key] = asyncio.get_running_loop().create_future()
            return waiting[key]

        chosen: Sequence[Replay | None] = replays or [None] * len(episodes)
        self._playing = [
            (episode, self._try_episode(episode, request_of, send, replay))
            for episode, replay in zip(episodes, chosen, strict=True)
        ]

        async def all_episodes() -> None:
            await asyncio.gather(*(coroutine for _, coroutine in self._playing))

        try:
            with self._event_loop(advance) as loop:
                run_to_end(loop, all_episodes())
        finally:
            self._progress = math.inf  # the engine takes what it needs
            while waiting:  # calls that were cancelled: the engine must have no request left when the rollout ends
                for key, _ in step():
                    waiting.pop(key, None)

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

    async def _try_episode(
        self, episode: Episode, request_of: Callable[..., Request], send: Send, replay: Replay | None
    ) -> None:
        """Play one episode. Its failure is recorded on it, or raised where `max_failed_episodes` have failed already."""
        asked: list[asyncio.Future[None]] = []  # one for each call, done when its turn is recorded or it was cancelled
        try:
            await self._play_episode(episode, request_of, send, asked, replay)
        except WorkflowError as error:
            self._n_failed += 1
            if self._n_failed > self.max_failed_episodes:
                raise self._last_failure(error) from error.__cause__
            episode.failure, episode.answer = str(error), Answer("", reason=FAILED)
            logger.warning("Left out episode %d of problem %r. %s", episode.index, episode.problem.id, error)
            await _all_done(asked)
            episode.turns.clear()
        else:
            self.on_episode_end(episode)
        self._progress = self._clock

    def _last_failure(self, error: WorkflowError) -> WorkflowError:
        """Return the error that ends the run, with advice on `max_failed_episodes`."""
        if not self.max_failed_episodes:
            return WorkflowError(
                f"{error}\nTo leave such episodes out instead, set `max_failed_episodes` to the number that a rollout may have."
            )
        return WorkflowError(f"{self._n_failed} episodes of one rollout failed, and `max_failed_episodes` is {self.max_failed_episodes}. "
                             f"The last: {error}")  # fmt: skip

    async def _play_episode(
        self, episode: Episode, request_of: Callable[..., Request], send: Send, asked: list[asyncio.Future[None]],
        replay: Replay | None,
    ) -> None:  # fmt: skip
        """Run the workflow of one episode and set its turns and its answer; WorkflowError if the workflow fails."""
        called: list[tuple[str, int | None, int]] = []
        occurrences: Counter[tuple[str, tuple[int, ...]]] = Counter()
        unplaced: defaultdict[str, list[UnplacedTurn]] = defaultdict(list)
        made: list[str] = []  # the roles of all calls, awaited or not
        begun: list[str] = []  # of those that were awaited
        raised: list[BaseException] = []  # by calls, which tools may make, too
        numbers = itertools.count(1)  # of the turns

        def stop_if_over() -> None:
            """Cancel a sibling of the call that failed, or a call that comes after the answer."""
            if episode.failure is not None or episode.answer is not None:
                raise asyncio.CancelledError

        def call(
            role: str, messages: list[Message], slot: int | None = 0, round: int = 0, max_tokens: int | None = None,
            tools: Sequence[Any] | None = None, max_rounds: int | None = None,
        ) -> Awaitable[Turn]:  # fmt: skip
            made.append(role)
            return play_call(role, messages, slot, round, max_tokens, tools, max_rounds)

        async def play_call(
            role: str, messages: list[Message], slot: int | None, round: int, max_tokens: int | None,
            tools: Sequence[Any] | None, max_rounds: int | None,
        ) -> Turn:  # fmt: skip
            begun.append(role)
            stop_if_over()
            asked.append(asyncio.get_running_loop().create_future())
            recorded = asked[-1]
            try:
                try:
                    messages = normalised(messages, any_role=True)
                except ValueError as error:
                    raise ValueError(f"`call({role!r}, messages)`: {error}") from None
                box = self._toolbox(role, tools, max_rounds)
                most = (max_rounds or MAX_ROUNDS) if box.functions else 1
                self._check_call(role, slot, round, most, max_tokens, called)
                called.extend((role, slot, round + i) for i in range(most))

                def ask(conversation: list[Message], number: int) -> Awaitable[Turn]:
                    nth = 0 if slot is None else number
                    return play_turn(role, conversation, slot, round + nth, max_tokens, box.descriptions)

                if not box.functions:
                    return await ask(messages, 0)
                several = not self.reads_calls or takes_several_calls(self.tokenizer, self.render)
                return await play_tool_loop(ask, box, messages, most, several, lambda error: comes_from(error, raised))
            except BaseException as error:
                raised.append(error)
                raise
            finally:
                recorded.set_result(None)

        async def play_turn(
            role: str, messages: list[Message], slot: int | None, round: int, max_tokens: int | None,
            tools: list[dict[str, Any]],
        ) -> Turn:  # fmt: skip
            stop_if_over()
            self._progress, began = self._clock, time.monotonic_ns()
            self._check_turn(messages, next(numbers))
            is_remote = isinstance(self.policy[role], Endpoint)
            if is_remote and tools:
                raise ValueError(
                    f"`call({role!r}, tools=...)`: the role is behind an endpoint, whose tool calls are not read. Leave `tools` out."
                )
            prompt_ids = self._encode(messages, tools, is_remote)
            if len(prompt_ids) > self.max_prompt_tokens and not is_remote:
                n_tokens = len(prompt_ids)
                self._warn_of_overflow(
                    role,
                    episode.problem,
                    f"has {n_tokens} tokens, more than `max_prompt_tokens` ({self.max_prompt_tokens})",
                )
                raise PromptOverflow(
                    f"This model's maximum context length is {self.max_prompt_tokens} tokens. However, your messages resulted in {n_tokens} "
                    f"tokens. Please reduce the length of the messages (role {role!r}, `max_prompt_tokens`)."
                )
            nth = occurrences[role, tuple(prompt_ids)]
            occurrences[role, tuple(prompt_ids)] += 1
            place = None if slot is None or self.turn_seeds == "prompt" else (slot, round)
            request = request_of(prompt_ids, episode, role, place, nth, max_tokens)
            if request.endpoint is not None:
                request = replace(request, messages=messages)
            step: Request | Turn | str = request
            if replay is not None:
                step = replay.step(request, role, slot, round, nth, episode.turns)
            if isinstance(step, Request):
                done = await asyncio.shield(send(step))  # the engine goes on where the workflow cancels the call
                if done.finish_reason == OVERFLOW:
                    self._warn_of_overflow(role, episode.problem, f"is refused by its server ({done.text})")
                    raise PromptOverflow(done.text)
                self.sampled_tokens += len(done.token_ids)
                self.read_tokens += len(prompt_ids)
                version = self.versions.get(step.adapter, self.version)
                reply = self._reply_of(done, prompt_ids)
                turn = Turn(role, slot or 0, round, prompt_ids, *reply, version=version, billed=done.billed)
            else:
                version = step.version if isinstance(step, Turn) else None
                turn = Turn(role, slot or 0, round, prompt_ids, *self._known_reply(step), version=version)
            if tools:
                turn.reply = (
                    parse_reply(self.tokenizer, turn, tools, self._form) if self.reads_calls else Reply(turn.text)
                )
            if slot is None:
                unplaced[role].append(UnplacedTurn(turn, nth, current_branch(), began, time.monotonic_ns()))
            episode.turns.append(turn)
            return turn

        answer = await self._answer_of(episode.problem, call)
        if len(made) > len(begun):
            await asyncio.sleep(0)  # tasks that the workflow made just before it returned begin their calls
        if len(made) > len(begun) and answer.reason != OVERFLOW:
            raise WorkflowError(
                f"The workflow {self.workflow.name!r} did not await its calls of {sorted(Counter(made) - Counter(begun))} on problem "
                f"{episode.problem.id!r}. Write `await call(...)`, or gather the calls."
            )
        if replay is not None and replay.has_missed_its_turn(answer):
            raise WorkflowError(
                f"The workflow {self.workflow.name!r} did not repeat the call that was to be forked on problem {episode.problem.id!r}. "
                "Given the same replies, a workflow must make the same calls: it may not draw random numbers or read a clock."
            )
        await _all_done(asked)  # calls that the workflow does not wait for are also recorded and trained
        episode.answer = answer
        if unplaced:
            self._unplaced.append((episode, unplaced))
        self._sort_turns(episode)
        for turn in episode.turns:
            if turn.outcome is None:
                turn.outcome = "answered" if self.is_answer(turn.text) else "unparsed"

    async def _answer_of(self, problem: Problem, call: Callable[..., Awaitable[Turn]]) -> Answer:
        """Run the workflow; its answer is empty where a prompt was too long. WorkflowError if it fails or returns no answer."""
        task = asyncio.current_task()
        assert task is not None
        try:
            answer = await self.workflow.run(private_copy(problem), call)
        except (RequestRefused, RolloutStopped):
            raise
        except BaseException as error:
            now = asyncio.current_task()
            if (
                isinstance(error, GeneratorExit)
                and now is not task
                or isinstance(error, asyncio.CancelledError)
                and task.cancelling()
            ):
                raise  # the rollout ends
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            if is_overflow(error):
                return Answer("", reason=OVERFLOW)
            where = user_lines(traceback.walk_tb(error.__traceback__)) or last_line(error)  # of a built-in workflow
            raise WorkflowError(
                f"The workflow {self.workflow.name!r} failed on problem {problem.id!r}: {type(error).__name__}"
                + f": {error}" * bool(str(error))
                + f"\n{where}" * bool(where)
            ) from error.with_traceback(users_traceback(error.__traceback__))
        if not isinstance(answer, Answer) or not isinstance(answer.text, str):
            kind, value = ("an Answer of a ", answer.text) if isinstance(answer, Answer) else ("a ", answer)
            raise WorkflowError(
                f"The workflow {self.workflow.name!r} returned {kind}{type(value).__name__} on problem {problem.id!r}, but only "
                "the text of an `Answer` can be scored. End `run` with `return Answer(text)`, where `text` is, for example, `turn.text`."
            )
        if not is_encodable(answer.text):
            raise WorkflowError(
                f"The workflow {self.workflow.name!r} returned an Answer that contains a lone surrogate (half of a character) on problem {problem.id!r}, "
                "which no tokenizer can encode. Remove it, for example by `text.encode(errors='replace').decode()`."
            )
        return answer

    def _warn_of_overflow(self, role: str, problem: Problem, what: str) -> None:
        """Warn of the first prompt that is longer than `max_prompt_tokens`, or than a server takes."""
        if not self._has_overflowed:
            logger.warning("A prompt of the role %r on problem %r %s. Unless the workflow "
                           "handles this, the episode ends and is scored on an empty answer. Further ones are not reported; the log has their `prompt_overflow_rate`.",
                           role, problem.id, what)  # fmt: skip
        self._has_overflowed = True

    def _reply_of(self, done: Completion, prompt_ids: list[int]) -> tuple[list[int], list[float], str, str]:
        """Return ids, log-probs, text and finish reason of an engine's reply. That of an endpoint has the tokens of its text, without log-probs."""
        if done.text is not None:
            text = text_outside_thoughts(done.text) if self.strip_thoughts else done.text
            ids, *_ = self._known_reply(text)
            return ids, [math.nan] * len(ids), text, done.finish_reason
        if self.strip_thoughts:
            text = reply_text(self.tokenizer, done.token_ids, prompt_ids, self._form)
        else:
            text = decode_reply(self.tokenizer, done.token_ids)
        return done.token_ids, done.logprobs, text, done.finish_reason

    def _known_reply(self, reply: Turn | str) -> tuple[list[int], list[float], str, str]:
        """Return ids, log-probs, text and finish reason of a reply that is not generated: a turn's, or a text with probability 1."""
        if isinstance(reply, Turn):
            return list(reply.completion_ids), list(reply.logprobs), reply.text, reply.finish_reason
        ids = [*control_tokens(self.tokenizer).encode_text(reply), self.tokenizer.eos_token_id]
        return ids, [0.0] * len(ids), reply, "stop"

    def _toolbox(self, role: str, tools: Any, max_rounds: Any) -> Toolbox:
        """Return the tools of a call; ValueError for those that cannot be used, or for another `max_rounds` than a positive integer."""
        try:
            box = Toolbox.of(tools)
        except ValueError as error:
            raise ValueError(f"`call({role!r}, tools=...)`: {error}") from error
        if max_rounds is not None and not (box.functions and type(max_rounds) is int and max_rounds >= 1):
            raise ValueError(
                f"`call({role!r}, max_rounds={max_rounds!r})`: it is the most turns of a call whose `tools` have functions. Pass an integer of 1 or "
                "more and a function, or leave it out."
            )
        return box

    def _check_call(
        self, role: str, slot: int | None, round: int, n_rounds: int, max_tokens: int | None,
        called: Sequence[tuple[str, int | None, int]],
    ) -> None:  # fmt: skip
        """Raise ValueError for an unknown role or slot, and for a call whose rounds another one has."""
        slots = self.workflow.roles
        if role not in self.policy or slot is not None and slot not in range(slots[role]):
            unknown = "unknown role" if role not in self.policy else "no such slot"
            raise ValueError(
                f"`call({role!r}, slot={slot})`: {unknown}. The roles and their numbers of slots are {slots}."
            )
        if type(round) is not int:
            raise ValueError(
                f"`call({role!r}, round={round!r})`: rounds are counted, 0, 1, 2 and so on. Pass an integer."
            )
        if max_tokens is not None and not (type(max_tokens) is int and max_tokens >= 1):
            raise ValueError(
                f"`call({role!r}, max_tokens={max_tokens!r})`: a reply has at least one token. Pass an integer of 1 or more, or leave it out."
            )
        if any(one == role and (other is None) != (slot is None) for one, other, _ in called):
            raise ValueError(
                f"`call({role!r}, slot={slot}, round={round})`: this episode has called the role with a slot and without one. Name the slot of all its "
                "calls, or of none."
            )
        if slot is not None and any((role, slot, round + i) in called for i in range(n_rounds)):
            raise ValueError(
                f"`call({role!r}, slot={slot}, round={round})` was made twice. Give each call of a role its own slot or round; one with functions as "
                "`tools` has the rounds from `round` to `round + max_rounds - 1`."
            )

    def _check_turn(self, messages: list[Message], n_turns: int) -> None:
        """Raise ValueError where this turn, the `n_turns`th of its episode, is beyond `max_turns`. Warn of a chat role that templates do not know."""
        for message in messages:
            if message["role"] not in CHAT_ROLES and message["role"] not in self._unusual:
                self._unusual.append(message["role"])
                logger.warning("The workflow %r sends a message of the chat role %r. Most chat templates know %s only: check its spelling.",
                               self.workflow.name, message["role"], ", ".join(CHAT_ROLES))  # fmt: skip
        if n_turns > self.max_turns:
            raise ValueError(
                f"an episode may make at most `max_turns` ({self.max_turns}) calls. Raise it, or end the workflow's loop."
            )
