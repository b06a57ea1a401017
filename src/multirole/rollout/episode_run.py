"""Play the workflow of one episode: answer its calls, and make a turn of every reply."""

import asyncio
import copy
import math
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from multirole.chat.messages import normalised
from multirole.chat.replies import text_outside_thoughts
from multirole.chat.templates import control_tokens, takes_several_calls
from multirole.chat.tool_calls import parse_reply
from multirole.engines.endpoint import Endpoint
from multirole.engines.protocol import Completion, Request, RequestRefused, Sampling
from multirole.rollout.call_order import UnplacedTurn, current_branch
from multirole.rollout.errors import (
    PromptOverflow,
    RolloutStopped,
    WorkflowError,
    comes_from,
    is_interrupt,
    is_overflow,
)
from multirole.rollout.event_loop import last_line, user_lines, users_traceback
from multirole.rollout.replay import Replay
from multirole.rollout.replies import decode_reply, reply_text
from multirole.rollout.requests import EngineRequests
from multirole.rollout.seeds import prompt_seed, turn_seed
from multirole.rollout.tool_loop import MAX_ROUNDS, Toolbox, play_tool_loop
from multirole.types import OVERFLOW, Answer, Episode, Message, Problem, Reply, Turn

if TYPE_CHECKING:
    from multirole.rollout.rollout import Rollout


class EpisodeRun:
    """One episode that is being played.

    The workflow may make several calls at once, and a call with functions makes several turns, so replies come in any order.

    Args:
        rollout: says how its episodes are played.
        requests: takes the requests of this rollout.
        episode: gets the turns, in the order of their rounds, roles and slots, and the answer.
        replay: how an earlier episode is played again; None for a new one.
    """

    def __init__(
        self, rollout: "Rollout", requests: EngineRequests, episode: Episode, iteration: int, sampling: Sampling,
        replay: Replay | None,
    ) -> None:  # fmt: skip
        self.rollout, self.requests, self.episode = rollout, requests, episode
        self.iteration, self.sampling, self.replay = iteration, sampling, replay
        self.unplaced: defaultdict[str, list[UnplacedTurn]] = defaultdict(list)  # turns without a slot, by role
        self._made: list[str] = []  # the roles of all calls, awaited or not
        self._begun: list[str] = []  # of those that were awaited
        # role, slot and round of the turns that each call may make
        self._places: list[tuple[str, int | None, int]] = []
        # one for each call, done when its turns are recorded or it was cancelled
        self._ended: list[asyncio.Future[None]] = []
        self._raised: list[BaseException] = []  # by calls, which tools may make, too
        self._n_turns = 0
        self._n_equal: Counter[tuple[str, tuple[int, ...]]] = Counter()  # turns of a role with a prompt

    # ---- the episode

    async def play(self) -> None:
        """Run the workflow, and set the episode's turns and answer. Raises WorkflowError if the workflow fails."""
        workflow, problem = self.rollout.workflow, self.episode.problem
        answer = await self._run_workflow()
        if len(self._made) > len(self._begun):
            await asyncio.sleep(0)  # tasks that the workflow made just before it returned begin their calls
        if len(self._made) > len(self._begun) and answer.reason != OVERFLOW:
            raise WorkflowError(
                f"The workflow {workflow.name!r} did not await its calls of {sorted(Counter(self._made) - Counter(self._begun))} on problem "
                f"{problem.id!r}. Write `await call(...)`, or gather the calls."
            )
        if self.replay is not None and self.replay.has_missed_its_turn(answer):
            raise WorkflowError(
                f"The workflow {workflow.name!r} did not repeat the call that was to be forked on problem {problem.id!r}. "
                "Given the same replies, a workflow must make the same calls: it may not draw random numbers or read a clock."
            )
        await self.all_calls_ended()  # calls that the workflow does not wait for are also recorded and trained
        self.episode.answer = answer
        for turn in self.episode.turns:
            if turn.outcome is None:
                turn.outcome = "answered" if self.rollout.is_answer(turn.text) else "unparsed"

    async def all_calls_ended(self) -> None:
        """Wait until all calls are recorded or cancelled, including those made while waiting."""
        while running := [future for future in self._ended if not future.done()]:
            await asyncio.wait(running)

    async def _run_workflow(self) -> Answer:
        """Run the workflow; its answer is empty where a prompt was too long. WorkflowError if it fails or returns no answer."""
        workflow, problem, task = self.rollout.workflow, self.episode.problem, asyncio.current_task()
        assert task is not None
        try:
            answer = await workflow.run(private_copy(problem), self.call)
        except (RequestRefused, RolloutStopped):
            raise
        except BaseException as error:
            is_closed = isinstance(error, GeneratorExit) and asyncio.current_task() is not task
            if is_closed or isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # the rollout ends
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            if is_overflow(error):
                return Answer("", reason=OVERFLOW)
            where = user_lines(traceback.walk_tb(error.__traceback__)) or last_line(error)  # of a built-in workflow
            raise WorkflowError(
                f"The workflow {workflow.name!r} failed on problem {problem.id!r}: {type(error).__name__}"
                + f": {error}" * bool(str(error))
                + f"\n{where}" * bool(where)
            ) from error.with_traceback(users_traceback(error.__traceback__))
        if not isinstance(answer, Answer) or not isinstance(answer.text, str):
            kind, value = ("an Answer of a ", answer.text) if isinstance(answer, Answer) else ("a ", answer)
            raise WorkflowError(
                f"The workflow {workflow.name!r} returned {kind}{type(value).__name__} on problem {problem.id!r}, but only "
                "the text of an `Answer` can be scored. End `run` with `return Answer(text)`, where `text` is, for example, `turn.text`."
            )
        if not is_encodable(answer.text):
            raise WorkflowError(
                f"The workflow {workflow.name!r} returned an Answer that contains a lone surrogate (half of a character) on problem {problem.id!r}, "
                "which no tokenizer can encode. Remove it, for example by `text.encode(errors='replace').decode()`."
            )
        return answer

    # ---- a call

    def call(
        self, role: str, messages: list[Message], slot: int | None = 0, round: int = 0, max_tokens: int | None = None,
        tools: Sequence[Any] | None = None, max_rounds: int | None = None,
    ) -> Awaitable[Turn]:  # fmt: skip
        """Ask a role for a reply, as the workflow does: see `multirole.types.Call`."""
        self._made.append(role)
        return self._play_call(role, messages, slot, round, max_tokens, tools, max_rounds)

    async def _play_call(
        self, role: str, messages: list[Message], slot: int | None, round: int, max_tokens: int | None,
        tools: Sequence[Any] | None, max_rounds: int | None,
    ) -> Turn:  # fmt: skip
        """Return the turn of a call; of one with functions the last turn, after their results."""
        self._begun.append(role)
        self._stop_if_over()
        ended = asyncio.get_running_loop().create_future()
        self._ended.append(ended)
        try:
            try:
                messages = normalised(messages, any_role=True)
            except ValueError as error:
                raise ValueError(f"`call({role!r}, messages)`: {error}") from None
            box = toolbox_of(role, tools, max_rounds)
            most = (max_rounds or MAX_ROUNDS) if box.functions else 1
            self._check_place(role, slot, round, most)
            check_max_tokens(role, max_tokens)
            self._places.extend((role, slot, round + i) for i in range(most))

            def ask(conversation: list[Message], number: int) -> Awaitable[Turn]:
                nth = 0 if slot is None else number
                return self._play_turn(role, conversation, slot, round + nth, max_tokens, box.descriptions)

            if not box.functions:
                return await ask(messages, 0)
            prompts = self.rollout.prompts
            several = not prompts.reads_calls or takes_several_calls(prompts.tokenizer, prompts.render)
            return await play_tool_loop(
                ask, box, messages, most, several, lambda error: comes_from(error, self._raised)
            )
        except BaseException as error:
            self._raised.append(error)
            raise
        finally:
            ended.set_result(None)

    def _stop_if_over(self) -> None:
        """Cancel a sibling of the call that failed, or a call that comes after the answer."""
        if self.episode.failure is not None or self.episode.answer is not None:
            raise asyncio.CancelledError

    def _check_place(self, role: str, slot: int | None, round: int, n_rounds: int) -> None:
        """Raise ValueError for an unknown role or slot, and for a call whose rounds another one has."""
        slots = self.rollout.workflow.roles
        if role not in self.rollout.policy or slot is not None and slot not in range(slots[role]):
            unknown = "unknown role" if role not in self.rollout.policy else "no such slot"
            raise ValueError(
                f"`call({role!r}, slot={slot})`: {unknown}. The roles and their numbers of slots are {slots}."
            )
        if type(round) is not int:
            raise ValueError(
                f"`call({role!r}, round={round!r})`: rounds are counted, 0, 1, 2 and so on. Pass an integer."
            )
        if any(one == role and (other is None) != (slot is None) for one, other, _ in self._places):
            raise ValueError(
                f"`call({role!r}, slot={slot}, round={round})`: this episode has called the role with a slot and without one. Name the slot of all its "
                "calls, or of none."
            )
        if slot is not None and any((role, slot, round + i) in self._places for i in range(n_rounds)):
            raise ValueError(
                f"`call({role!r}, slot={slot}, round={round})` was made twice. Give each call of a role its own slot or round; one with functions as "
                "`tools` has the rounds from `round` to `round + max_rounds - 1`."
            )

    # ---- a turn

    async def _play_turn(
        self, role: str, messages: list[Message], slot: int | None, round: int, max_tokens: int | None,
        tools: list[dict[str, Any]],
    ) -> Turn:  # fmt: skip
        """Render the prompt, wait for its reply, and record both as a turn."""
        rollout = self.rollout
        self._stop_if_over()
        rollout.progress.made()
        began = time.monotonic_ns()
        rollout.warn_of_chat_roles(messages)
        self._n_turns += 1
        if self._n_turns > rollout.max_turns:
            raise ValueError(
                f"an episode may make at most `max_turns` ({rollout.max_turns}) calls. Raise it, or end the workflow's loop."
            )
        is_remote = isinstance(rollout.policy[role], Endpoint)
        if is_remote and tools:
            raise ValueError(
                f"`call({role!r}, tools=...)`: the role is behind an endpoint, whose tool calls are not read. Leave `tools` out."
            )
        prompt_ids = rollout.prompts.ids(messages, tools, is_remote)
        if len(prompt_ids) > rollout.max_prompt_tokens and not is_remote:
            raise self._overflow(role, len(prompt_ids))
        nth = self._n_equal[role, tuple(prompt_ids)]
        self._n_equal[role, tuple(prompt_ids)] += 1
        request = self._request(role, messages, prompt_ids, slot, round, nth, max_tokens)
        step: Request | Turn | str = request
        if self.replay is not None:
            step = self.replay.step(request, role, slot, round, nth, self.episode.turns)
        if isinstance(step, Request):
            done = await asyncio.shield(
                self.requests.send(step)
            )  # the engine goes on where the workflow cancels the call
            if done.finish_reason == OVERFLOW:
                rollout.warn_of_overflow(role, self.episode.problem, f"is refused by its server ({done.text})")
                raise PromptOverflow(done.text)
            rollout.sampled_tokens += len(done.token_ids)
            rollout.read_tokens += len(prompt_ids)
            version = rollout.versions.get(step.adapter, rollout.version)
            turn = Turn(
                role,
                slot or 0,
                round,
                prompt_ids,
                *self._reply_of(done, prompt_ids),
                version=version,
                billed=done.billed,
            )
        else:
            version = step.version if isinstance(step, Turn) else None
            turn = Turn(role, slot or 0, round, prompt_ids, *self._known_reply(step), version=version)
        if tools:
            prompts = rollout.prompts
            turn.reply = (
                parse_reply(prompts.tokenizer, turn, tools, prompts.form) if prompts.reads_calls else Reply(turn.text)
            )
        if slot is None:
            self.unplaced[role].append(UnplacedTurn(turn, nth, current_branch(), began, time.monotonic_ns()))
        self.episode.turns.append(turn)
        return turn

    def _overflow(self, role: str, n_tokens: int) -> PromptOverflow:
        """Return the error of a prompt that is too long, in the words of OpenAI's API, which agents know."""
        most = self.rollout.max_prompt_tokens
        what = f"has {n_tokens} tokens, more than `max_prompt_tokens` ({most})"
        self.rollout.warn_of_overflow(role, self.episode.problem, what)
        return PromptOverflow(
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {n_tokens} "
            f"tokens. Please reduce the length of the messages (role {role!r}, `max_prompt_tokens`)."
        )

    def _request(
        self, role: str, messages: list[Message], prompt_ids: list[int], slot: int | None, round: int, nth: int,
        max_tokens: int | None,
    ) -> Request:  # fmt: skip
        """Return the request of a turn: its prompt, what answers it, and its seed."""
        rollout, problem = self.rollout, self.episode.problem
        start = (rollout.seed, self.iteration, problem.id, self.episode.index, role)
        if slot is None or rollout.turn_seeds == "prompt":
            seed = prompt_seed(*start, prompt_ids, nth)
        else:
            seed = turn_seed(*start, slot, round)
        most = self.sampling.max_tokens if max_tokens is None else min(self.sampling.max_tokens, max_tokens)
        speaker = rollout.policy[role]
        if isinstance(speaker, Endpoint):
            request = Request(prompt_ids, None, seed, most, self.sampling.temperature, problem.id, endpoint=speaker)
            return replace(request, messages=messages)
        if isinstance(speaker, tuple):  # one for the episode
            speaker = speaker[turn_seed(*start, -1, -1) % len(speaker)]
        return Request(prompt_ids, speaker, seed, most, self.sampling.temperature, problem.id)

    def _reply_of(self, done: Completion, prompt_ids: list[int]) -> tuple[list[int], list[float], str, str]:
        """Return ids, log-probs, text and finish reason of an engine's reply. That of an endpoint has the tokens of its text, without log-probs."""
        prompts, strips = self.rollout.prompts, self.rollout.strip_thoughts
        if done.text is not None:
            text = text_outside_thoughts(done.text) if strips else done.text
            ids, *_ = self._known_reply(text)
            return ids, [math.nan] * len(ids), text, done.finish_reason
        if strips:
            text = reply_text(prompts.tokenizer, done.token_ids, prompt_ids, prompts.form)
        else:
            text = decode_reply(prompts.tokenizer, done.token_ids)
        return done.token_ids, done.logprobs, text, done.finish_reason

    def _known_reply(self, reply: Turn | str) -> tuple[list[int], list[float], str, str]:
        """Return ids, log-probs, text and finish reason of a reply that is not generated: a turn's, or a text with probability 1."""
        if isinstance(reply, Turn):
            return list(reply.completion_ids), list(reply.logprobs), reply.text, reply.finish_reason
        tokenizer = self.rollout.prompts.tokenizer
        ids = [*control_tokens(tokenizer).encode_text(reply), tokenizer.eos_token_id]
        return ids, [0.0] * len(ids), reply, "stop"


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


def toolbox_of(role: str, tools: Any, max_rounds: Any) -> Toolbox:
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


def check_max_tokens(role: str, max_tokens: Any) -> None:
    """Raise ValueError for another number of tokens than a positive integer."""
    if max_tokens is not None and not (type(max_tokens) is int and max_tokens >= 1):
        raise ValueError(
            f"`call({role!r}, max_tokens={max_tokens!r})`: a reply has at least one token. Pass an integer of 1 or more, or leave it out."
        )
