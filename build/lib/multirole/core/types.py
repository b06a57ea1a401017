"""The types that everything else passes around: problem -> episode -> turn.

A *problem* is attempted `n` times; each attempt is an *episode* (the paper's "workflow rollout"); each model call in it is
a *turn*. A turn is also one training sequence (a *row*): its prompt is masked, its completion is trained.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static, iscoroutinefunction
from typing import Any, Literal, Protocol

Message = dict[str, str]
"""One chat message, `{"role": "user" | "assistant" | "system", "content": text}` (the chat role, not the workflow role)."""


CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message of a dataset's prompt may have; the chat template must know them."""
OVERFLOW = "prompt_overflow"
"""`Answer.reason` of an episode that a prompt of more than `max_prompt_tokens` ended."""
FAILED = "workflow_failed"
"""`Answer.reason` of an episode whose workflow raised, where `max_failed_episodes` allows it."""


LARGEST_REWARD = 1e6
"""In size. TRL compares rewards in float32: this large they are exact to 0.06, and the mean of a group of 3e38 is infinite."""
TRL_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keywords that TRL passes to every reward function, besides the columns of its rows."""
REWARD_ARGUMENTS = (*TRL_REWARD_ARGUMENTS, "episodes")
"""Keywords that are passed to every reward function that takes `episodes`, or any keyword."""
RESERVED_COLUMNS = (*REWARD_ARGUMENTS, "environments")
"""Names that no column may have; TRL passes `environments` to functions of environments."""


@dataclass(frozen=True)
class Problem:
    """One row of a dataset.

    `question` is the dataset's "prompt", or the text of the last user message where the prompt is a conversation; `history` then holds
    the messages in front of it: system messages and earlier turns. `reference` is what the reward compares with (for a dataset, its
    other columns); no role may see it. `task` names the prompt templates that the built-in workflows use (`workflows.prompts`).
    """

    id: str
    task: str
    question: str
    reference: Any
    history: list[Message] = field(default_factory=list, hash=False)

    @property
    def messages(self) -> list[Message]:
        """The whole prompt as a conversation that ends with the question."""
        return [*self.history, user(self.question)]


@dataclass(frozen=True)
class Reward:
    """Outcome reward of one episode. `is_correct` is what accuracy counts; None where the reward function does not say."""

    value: float
    reason: str = "scored"
    is_correct: bool | None = None


@dataclass
class Turn:
    """One model call.

    `logprobs` are the engine's processed log-probabilities (after temperature) of `completion_ids`, same length; the
    final token is the end-of-turn token unless `finish_reason == "length"`. `outcome` says how the turn was parsed: a
    workflow sets it for turns that are verdicts, selections or plans; for every other turn the rollout records
    "answered" or "unparsed" from the task's own answer extraction. `is_right` says whether the turn was right by itself,
    None where nobody has judged it.
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


@dataclass(frozen=True)
class Answer:
    """What a workflow returns: the text that is scored. `reason`, if set, replaces the reward's, as for "no answer"."""

    text: str
    reason: str | None = None


@dataclass(repr=False)
class Episode:
    """One attempt at one problem. `reward` is None until `answer` has been scored, and if the reward functions leave it out.

    `failure` is the error of an episode whose workflow raised. It has no turns and no reward, so its group is compared without it.
    """

    problem: Problem
    index: int
    turns: list[Turn] = field(default_factory=list)
    answer: Answer | None = None
    reward: Reward | None = None
    advantage: float = 0.0
    failure: str | None = None

    def __repr__(self) -> str:
        """One line: TRL prints every argument of a reward function, episodes among them, where all rewards are None."""
        reward = None if self.reward is None else self.reward.value
        return f"<Episode {self.index} of problem {self.problem.id!r}, {len(self.turns)} turns, reward {reward}>"

    def group(self, num_generations: int) -> tuple[str, int]:
        """The n attempts that are compared. A problem drawn twice in an iteration makes two groups."""
        return self.problem.id, self.index // num_generations


class Call(Protocol):
    """`await call(role, messages, slot=0, round=0)`: one model call by `role`, with that role's adapter.

    Same-stage calls run together under `asyncio.gather(call(...), call(...))`. `slot` is below the
    role's number of slots, and (role, slot, round) unique within an episode: it identifies the turn and seeds its sampling.
    With `slot=None` the sampling is seeded by role, prompt and occurrence, and slot and round follow from the prompts when the
    episode ends, so that the order of the calls does not matter. `max_tokens` lowers the cap of one reply. `tools` are OpenAI's
    descriptions of functions, for chat templates that know them.
    """

    def __call__(
        self, role: str, messages: list[Message], slot: int | None = 0, round: int = 0, max_tokens: int | None = None,
        tools: list[dict] | None = None,
    ) -> Awaitable[Turn]: ...  # fmt: skip


class Workflow(Protocol):
    """What the trainer needs of a workflow: a name, its roles, and one coroutine per episode.

    `roles` maps each role to its multiplicity, the number of slots it fills in one stage (paper sec 3).
    """

    name: str
    roles: dict[str, int]

    def run(self, problem: Problem, call: Call) -> Awaitable[Answer]: ...


@dataclass(frozen=True)
class Duty:
    """What a role does in its workflow, which says how its skill is measured (`diagnostics.role_skill`).

    Args:
        kind: "solves" (its replies answer the problem), "judges" (its `outcome` is "correct" or "incorrect", about the reply of
            role `of` in the same slot and round), "selects" (picks one of the replies of `of`), "merges" (answers from the replies of `of`)
            or "plans" (the replies of `of` follow its plan).
        of: the role whose replies it works on, or that works on its own; None for "solves".
    """

    kind: Literal["solves", "judges", "selects", "merges", "plans"]
    of: str | None = None


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
    """What a workflow says of itself, in its attribute `structure`, for diagnostics, tables and diagrams. All of it is optional.

    Args:
        duties: role -> what it does. A role without a duty has its format and length measured, and no skill.
        twins: name of a trivial workflow -> whether it is right, given whether each slot of the solver's first turn is.
        edges: the arrows of the diagram; without them only the order of the roles is drawn.
        chats: the chat roles of the messages of its calls, behind the problem's own history. They are tried on the tokenizer's chat
            template before anything is played.
    """

    duties: Mapping[str, Duty] = field(default_factory=dict)
    twins: Mapping[str, Callable[[Sequence[bool]], bool]] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    chats: tuple[tuple[str, ...], ...] = ()

    @property
    def solver(self) -> str | None:
        """The first role whose replies answer the problem."""
        return next((role for role, duty in self.duties.items() if duty.kind == "solves"), None)

    @property
    def judge(self) -> str | None:
        """The first role that judges, selects or merges the solver's replies."""
        return next((role for role, duty in self.duties.items() if duty.kind in ("judges", "selects", "merges")), None)


def structure_of(workflow: Any) -> Structure:
    """The attribute `structure` of a workflow, which is optional."""
    return getattr(workflow, "structure", Structure())


def waits_outside(workflow: Any) -> bool:
    """The attribute `waits_outside` of a workflow, which is optional: whether it waits for threads or sockets of its own."""
    return getattr(workflow, "waits_outside", False)


def check_structure(workflow: Any) -> None:
    """Refuse a structure that names what the workflow does not have (ValueError or TypeError)."""
    structure, roles = structure_of(workflow), workflow.roles
    if not isinstance(structure, Structure):
        raise TypeError(f"`workflow.structure` must be a `multirole.Structure`, got {structure!r}.")
    named = {role for role, duty in structure.duties.items()} | {
        duty.of for duty in structure.duties.values() if duty.of
    }
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
    """Refuse an object that cannot be played as a workflow (ValueError or TypeError)."""
    advice = "A workflow has `name`, `roles` such as {'judge': 1} and `async def run(self, problem, call)`."
    if isinstance(workflow, type):
        raise TypeError(
            f"`workflow` must be an instance, got the class {workflow.__name__}. Call it: {workflow.__name__}()."
        )
    if not iscoroutinefunction(getattr_static(workflow, "run", None)):
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
        is_word = isinstance(role, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", role)
        if not is_word or type(slots) is not int or slots < 1:
            raise ValueError(
                f"`workflow.roles` must map words to positive numbers of slots, got {role!r}: {slots!r}. {advice}"
            )
    check_structure(workflow)


def check_columns(source: str, columns: Iterable[str]) -> None:
    """Refuse rows with a column whose name a reward function gets something else under (ValueError)."""
    for column in columns:
        if column in RESERVED_COLUMNS:
            raise ValueError(
                f"{source} has the column {column!r}, but reward functions get something else under this name. Rename the column. "
                f"Reserved are {', '.join(RESERVED_COLUMNS)}."
            )


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An assistant message (another role's text quoted as conversation history)."""
    return {"role": "assistant", "content": text}


def conversation_of(prompt: Any) -> list[Message]:
    """A row's prompt as messages, of which the last is the question: a user message. ValueError where it is none."""
    if isinstance(prompt, str):
        return [user(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f'a "prompt" must be text or a list of messages, got {prompt!r}.')
    messages = [_message_of(message) for message in prompt]
    if messages[-1]["role"] != "user":
        raise ValueError(
            f"a conversation must end with a user message, which the roles answer, and this one ends with {prompt[-1]!r}. Move a reply "
            "that is to be learnt into another column."
        )
    return messages


def _message_of(message: Any) -> Message:
    """One message of a dataset with its text, and without the empty fields that Arrow adds."""
    if not isinstance(message, dict) or message.get("role") not in CHAT_ROLES:
        raise ValueError(
            f'a message must be a dictionary with "content" and a "role" among {", ".join(CHAT_ROLES)}, got {message!r}.'
        )
    present = {key: value for key, value in message.items() if value is not None}
    content = present.get("content", "" if "tool_calls" in present else None)
    parts: list[Any] = content if isinstance(content, list) and content else [{"type": "text", "text": content}]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts) or not all(
        isinstance(part.get("text"), str) for part in parts
    ):
        raise ValueError(f"the content of a message must be text, got {message!r}. Roles are sent no images or audio.")
    return present | {"content": "".join(part["text"] for part in parts)}
