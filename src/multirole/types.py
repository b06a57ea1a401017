"""Define the data types of the library: problem -> episode -> turn.

A *problem* is attempted `n` times; each attempt is an *episode* (the paper's "workflow rollout"); each model call in it is
a *turn*. A turn is also one training sequence (a *row*): its prompt is masked, and its completion is trained on.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static, iscoroutinefunction, signature, unwrap
from typing import Any, Literal, Protocol, get_args

Message = dict[str, Any]
"""One chat message, `{"role": "user" | "assistant" | "system", "content": text}` (the chat role, not the workflow role).

It may have `name`, `reasoning_content`, `tool_calls` and `tool_call_id`, as OpenAI's messages do (`chat.messages`).
"""


CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Chat roles allowed in a dataset's prompts; the chat template must know those that are used."""
OVERFLOW = "prompt_overflow"
"""`Answer.reason` of an episode ended by a prompt longer than `max_prompt_tokens`."""
FAILED = "workflow_failed"
"""`Answer.reason` of an episode whose workflow raised, if `max_failed_episodes` allows it."""


MAX_REWARD = 1e6
"""Largest accepted |reward|. TRL keeps rewards in float32: at this size they are exact to 0.06; a group's mean of 3e38 is infinite."""
TRL_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keywords that TRL passes to every reward function, besides the columns of its rows."""
REWARD_ARGUMENTS = (*TRL_REWARD_ARGUMENTS, "episodes")
"""Keywords that are passed to reward functions which accept `episodes`, or any keyword."""
RESERVED_COLUMNS = (*REWARD_ARGUMENTS, "environments")
"""Names that a dataset's columns may not have; TRL passes `environments` to the reward functions of environments."""


@dataclass(frozen=True)
class Problem:
    """One row of a dataset.

    `question` is the dataset's "prompt", or the text of the last user message if the prompt is a conversation; `history` then holds the
    messages before it: system messages and earlier turns. `reference` is the data that the reward function compares with
    (for a dataset, its other columns); no role may see it. `task` names the prompt templates of the built-in workflows
    (`workflows.prompts`). `prompt` is the dataset's, which reward functions get; None for a problem that no row was made into.
    """

    id: str
    task: str
    question: str
    reference: Any
    history: list[Message] = field(default_factory=list, hash=False)
    prompt: Any = field(default=None, repr=False, compare=False)

    @property
    def messages(self) -> list[Message]:
        """Return the whole prompt as a conversation that ends with the question."""
        return [*self.history, user(self.question)]


@dataclass(frozen=True)
class Reward:
    """Reward of one episode. Accuracy counts `is_correct`, which is None if the reward function does not set it.

    `turns` has the reward of each turn, in the order of the episode's, where a reward function rewards single roles or turns: NaN for a turn without
    one. The trainer sets it, and `value` is then the weighted sum of the functions' means.
    """

    value: float
    reason: str = "scored"
    is_correct: bool | None = None
    turns: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Convert NumPy's numbers, which `json` cannot write."""
        if not isinstance(self.value, str):  # which is refused later
            object.__setattr__(self, "value", float(self.value))
        if self.is_correct is not None:
            object.__setattr__(self, "is_correct", bool(self.is_correct))


@dataclass(frozen=True)
class Reply:
    """The parts of a reply to a call with `tools`: the text outside thoughts and tool calls, the thought, and the calls as (name, arguments).

    Where functions were passed and the calls were run, `results` has the text that each call gave, and `failures` says how many are errors.
    """

    text: str
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    failures: int = 0


@dataclass(frozen=True)
class Tool:
    """A function that a role may call, with its description in OpenAI's format: `{"type": "function", "function": {"name", "description", "parameters"}}`.

    A plain function needs none: its signature and docstring describe it.
    """

    function: Callable[..., Any]
    description: dict[str, Any]


class ToolUnavailable(RuntimeError):
    """Raised by a function among a call's `tools` that failed for a reason outside the model, such as a lost server.

    It fails the episode's workflow. Any other error of a function is text that the role reads, so that a lost server would become a low reward.
    """


@dataclass
class Turn:
    """One model call.

    `logprobs` are the engine's processed log-probabilities (after temperature) of `completion_ids`, same length; the
    final token is the end-of-turn token unless `finish_reason == "length"`. `outcome` says how the turn was parsed: a
    workflow sets it for turns that are verdicts, selections or plans; for every other turn the rollout records "called", where functions
    that it called were run, or else "answered" or "unparsed" from the task's answer extraction. `is_right` says whether the turn by itself was right, None if it
    has not been judged. `version` is the number of iterations for which the adapter had been trained when it sampled the turn; None outside a trainer.
    `reply` has the tool calls of a turn that was called with `tools`. A turn that an endpoint has played has this model's tokens of its text, NaN as
    log-probs, and in `billed` the tokens of prompt and reply that the server counted.
    """

    role: str
    slot: int
    round: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    outcome: str | None = None
    is_right: bool | None = None
    version: int | None = None
    reply: Reply | None = None
    billed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a workflow: the text that is scored. `reason`, if set, replaces the reward's reason, for example by "no answer"."""

    text: str
    reason: str | None = None


@dataclass(repr=False)
class Episode:
    """One attempt at one problem. `reward` is None until `answer` is scored, and stays None if no reward function scores it.

    `turn_advantages` has the advantage of each turn, in their order, where a reward function rewards single roles or turns. Without it, all turns
    have the episode's `advantage`. `failure` is the error if the workflow raised. Such an episode has no turns and no reward, and is left out of
    its group.
    """

    problem: Problem
    index: int
    turns: list[Turn] = field(default_factory=list)
    answer: Answer | None = None
    reward: Reward | None = None
    advantage: float = 0.0
    failure: str | None = None
    turn_advantages: list[float] = field(default_factory=list)

    def reward_of(self, turn: Turn) -> float:
        """Return the reward of one of the episode's turns, which is the episode's unless a function rewards turns; NaN without one."""
        if self.reward is None:
            return math.nan
        return self.reward.turns[self._place_of(turn)] if self.reward.turns else self.reward.value

    def advantage_of(self, turn: Turn) -> float:
        """Return the advantage of one of the episode's turns, which is the episode's unless a function rewards turns."""
        return self.turn_advantages[self._place_of(turn)] if self.turn_advantages else self.advantage

    def _place_of(self, turn: Turn) -> int:
        return next(i for i, other in enumerate(self.turns) if other is turn)

    def __repr__(self) -> str:
        """Return one line: TRL prints all arguments of a reward function, episodes among them, if all rewards are None."""
        reward = None if self.reward is None else self.reward.value
        return f"<Episode {self.index} of problem {self.problem.id!r}, {len(self.turns)} turns, reward {reward}>"

    def group(self, num_generations: int) -> tuple[str, int]:
        """Return the index of the group whose n attempts are compared. A problem drawn twice in an iteration makes two groups."""
        return self.problem.id, self.index // num_generations


class Call(Protocol):
    """`await call(role, messages, slot=0, round=0)`: one model call by `role`, with that role's adapter.

    Calls of the same stage run together under `asyncio.gather(call(...), call(...))`. `slot` must be less than the role's number of slots,
    and (role, slot, round) must be unique within an episode: it identifies the turn and seeds its sampling. With `slot=None`, role, prompt
    and occurrence seed the sampling, and slot and round are given when the rollout ends: by the order of the role's calls if each is awaited
    before the next one, otherwise by their prompts (`rollout.call_order`). `max_tokens` lowers the length cap of one reply.

    `tools` are for chat templates that support them. Descriptions in OpenAI's format only become part of the prompt: the workflow reads
    `turn.reply.calls`. Functions, and `Tool`s, are run: the role is asked again with their results until it calls none of them, and the last turn is
    returned. Such a call has `max_rounds` turns at most (8), whose rounds count from `round`, so the slot's next call begins at `round + max_rounds`.
    """

    def __call__(
        self, role: str, messages: list[Message], slot: int | None = 0, round: int = 0, max_tokens: int | None = None,
        tools: Sequence[Callable[..., Any] | Tool | dict[str, Any]] | None = None, max_rounds: int | None = None,
    ) -> Awaitable[Turn]: ...  # fmt: skip


class Workflow(Protocol):
    """Interface of a workflow: a name, its roles, and one coroutine per episode.

    `roles` maps each role to its multiplicity, the number of slots it fills in one stage (paper sec 3). Optional attributes: `structure`
    (a `Structure`), `waits_outside`, which is True if all episodes may at once wait for tools or other threads for more than a minute, and
    `on_rollout_begin(tokenizer, sampling)`, which is called before the episodes of a rollout, with `render=` if it takes that.
    """

    name: str
    roles: dict[str, int]

    def run(self, problem: Problem, call: Call) -> Awaitable[Answer]: ...


DutyKind = Literal["solves", "judges", "selects", "merges", "plans"]
JUDGING = ("judges", "selects", "merges")
"""Duties of roles that read the replies of another one."""


@dataclass(frozen=True)
class Duty:
    """The function of a role in its workflow, which decides how its skill is measured (`roles.skill`).

    Args:
        kind: "solves" (its replies answer the problem), "judges" (its `outcome` is "correct" or "incorrect", about the reply of
            role `of` in the same slot and round), "selects" (picks one of the replies of `of`), "merges" (answers from the replies of `of`)
            or "plans" (the replies of `of` follow its plan).
        of: the role whose replies it works on or, for "plans", the role that follows its plan; None for "solves".
        twin: returns what a trivial role in its place would reply, given the turns of the episode that have been answered (`rollout.replay`).
            Without it, the twin of a role that merges repeats the reply of slot 0, and other roles have none.
    """

    kind: DutyKind
    of: str | None = None
    twin: Callable[[Sequence[Turn]], str] | None = None


@dataclass(frozen=True)
class Edge:
    """An arrow of a workflow's diagram: `target` reads what `source` wrote.

    `source` and `target` are roles, "question" or "answer". An edge that goes back to an earlier role is a loop.
    """

    source: str
    target: str
    label: str = ""
    is_loop: bool = False


@dataclass(frozen=True)
class Structure:
    """Description of a workflow, in its attribute `structure`, for diagnostics, tables, diagrams, and credit that is given by duty. Every field is optional.

    Args:
        duties: role -> its duty. For a role without a duty, format and length are measured but no skill.
        trivial_workflows: name of a trivial workflow -> a function that takes, for each slot, whether the solver's first turn is right, and
            returns whether the trivial workflow's answer is right.
        edges: the arrows of the diagram; without them only the order of the roles is drawn.
        chats: for each kind of call, the chat roles of its messages after the problem's history. They are rendered with the tokenizer's chat
            template before the first rollout.
    """

    duties: Mapping[str, Duty] = field(default_factory=dict)
    trivial_workflows: Mapping[str, Callable[[Sequence[bool]], bool]] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    chats: tuple[tuple[str, ...], ...] = ()

    @property
    def solver(self) -> str | None:
        """Return the first role whose replies answer the problem."""
        return next((role for role, duty in self.duties.items() if duty.kind == "solves"), None)

    @property
    def judge(self) -> str | None:
        """Return the first role that judges, selects or merges the solver's replies."""
        return next((role for role, duty in self.duties.items() if duty.kind in JUDGING), None)


def structure_of(workflow: Any) -> Structure:
    """Return the workflow's optional attribute `structure`."""
    return getattr(workflow, "structure", Structure())


def waits_outside(workflow: Any) -> bool:
    """Return the workflow's optional attribute `waits_outside`: whether it may wait for other threads or sockets without a limit."""
    return getattr(workflow, "waits_outside", False)


def begin_rollout(workflow: Any, tokenizer: Any, sampling: Any, render: Any) -> None:
    """Call the workflow's optional method `on_rollout_begin(tokenizer, sampling)`, before its episodes are played."""
    if (method := getattr(workflow, "on_rollout_begin", None)) is not None:
        method(tokenizer, sampling, **({"render": render} if accepts(method, "render") else {}))


def check_structure(workflow: Any) -> None:
    """Raise ValueError or TypeError for a structure that names roles which the workflow does not have."""
    structure, roles = structure_of(workflow), workflow.roles
    if not isinstance(structure, Structure):
        raise TypeError(f"`workflow.structure` must be a `multirole.Structure`, got {structure!r}.")
    for part, kind in [
        *((duty, Duty) for duty in structure.duties.values()),
        *((edge, Edge) for edge in structure.edges),
    ]:
        if not isinstance(part, kind):
            raise TypeError(f"`workflow.structure` must be made of `multirole.{kind.__name__}`, got {part!r}.")
    for role, duty in structure.duties.items():
        if duty.kind not in get_args(DutyKind):
            raise ValueError(f"The duty of {role!r} must be one of {list(get_args(DutyKind))}, got {duty.kind!r}.")
    named = set(structure.duties) | {duty.of for duty in structure.duties.values() if duty.of}
    named |= {end for edge in structure.edges for end in (edge.source, edge.target)} - {"question", "answer"}
    if unknown := sorted(named - set(roles)):
        raise ValueError(f"`workflow.structure` names the roles {unknown}, but the workflow's roles are {list(roles)}.")
    for role, duty in structure.duties.items():
        if (duty.of is None) != (duty.kind == "solves"):
            raise ValueError(
                f"`workflow.structure` gives {role!r} the duty {duty!r}. 'solves' takes no other role, and all other duties name in `of` "
                "the role whose replies they are about."
            )


def check_workflow(workflow: Any) -> None:
    """Raise ValueError or TypeError for an object that is not a valid workflow."""
    advice = "A workflow has `name`, `roles` such as {'judge': 1} and `async def run(self, problem, call)`."
    if isinstance(workflow, type):
        raise TypeError(
            f"`workflow` must be an instance, got the class {workflow.__name__}. Call it: {workflow.__name__}()."
        )
    run = getattr_static(workflow, "run", None)
    if not iscoroutinefunction(unwrap(run.__func__ if isinstance(run, (staticmethod, classmethod)) else run)):
        raise ValueError(
            f"The workflow {workflow!r} must have a coroutine method `async def run(self, problem, call)`."
        )
    name, roles = (getattr(workflow, member, None) for member in ("name", "roles"))
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise ValueError(
            f"`workflow.name` must be a plain identifier of letters, digits, '_' and '-', got {name!r}. {advice}"
        )
    if not isinstance(roles, dict) or not roles:
        raise ValueError(f"`workflow.roles` must map each role to its number of slots, got {roles!r}. {advice}")
    for role, slots in roles.items():
        if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", role):
            raise ValueError(
                f"`workflow.roles` has the role {role!r}. A role's name must begin with a letter and have letters, digits and '_' only. {advice}"
            )
        if type(slots) is not int or slots < 1:
            raise ValueError(
                f"`workflow.roles` gives the role {role!r} the number of slots {slots!r}, which must be 1 or more. {advice}"
            )
    check_structure(workflow)


def check_columns(source: str, columns: Iterable[str]) -> None:
    """Raise ValueError for a column whose name is a reserved keyword of reward functions."""
    for column in columns:
        if column in RESERVED_COLUMNS:
            raise ValueError(
                f"{source} has the column {column!r}, but the trainer passes another argument to reward functions under this name. Rename the column. "
                f"Reserved names are {', '.join(RESERVED_COLUMNS)}."
            )


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes the keyword argument `name`; True if its signature is not known."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return True
    return any(
        p.kind is p.VAR_KEYWORD or p.name == name and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """Return an assistant message (another role's text quoted as conversation history)."""
    return {"role": "assistant", "content": text}
