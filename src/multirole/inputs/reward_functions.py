"""Check reward functions, and what they return."""

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import nn
from trl.rewards import reasoning_accuracy_reward, think_format_reward
from trl.trainer.utils import get_callable_name, is_async_callable

from multirole.types import MAX_REWARD, REWARD_ARGUMENTS, TRL_REWARD_ARGUMENTS, Episode, Problem, accepts

logger = logging.getLogger(__name__)

THOUGHT_REWARDS = (think_format_reward, reasoning_accuracy_reward)
"""TRL's reward functions that look for `<think>` in a completion."""


def check_signature(function: Any, name: str, columns: list[str]) -> None:
    """Raise ValueError if a reward function cannot take the arguments that TRL passes for a dataset with these columns."""
    if isinstance(function, (str, nn.Module)):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    columns = [column for column in columns if column not in ("prompt", "completion", "completion_ids")]
    passed = REWARD_ARGUMENTS if accepts(function, "episodes") else TRL_REWARD_ARGUMENTS
    try:
        signature.bind(**dict.fromkeys([*passed, *columns]))
    except TypeError as error:
        raise ValueError(
            f"The reward function {get_callable_name(function)!r} does not fit `{name}`: {error}. It gets {', '.join(passed)} and the "
            f"columns {columns}, all by keyword. Name those that it reads, and end its parameters with `**kwargs`."
        ) from error


def check_reward(source: str, problem: Problem, reward: float) -> None:
    """Raise ValueError for a reward that is not a number, or larger than `MAX_REWARD`."""
    try:
        is_fine = bool(abs(reward) <= MAX_REWARD)
    except (TypeError, ValueError, RuntimeError):  # a text, a list, a tensor of several numbers
        is_fine = False
    if not is_fine:
        raise ValueError(
            f"{source} gave problem {problem.id!r} the reward {reward!r}. A reward must be a number between {-MAX_REWARD:g} and "
            f"{MAX_REWARD:g}."
        )


def checked_reward(
    function: Any, roles: Collection[str] = (), record: Callable[[list[list[float] | None]], object] = lambda of_turns: None
) -> Any:  # fmt: skip
    """Wrap a reward function so that an exception, or a reward that `check_reward` refuses, is reported under its name.

    None and NaN are allowed (TRL leaves that episode out); the first NaN gives a warning. `episodes` are passed to functions
    that accept them. Reward models and their names are returned unchanged.

    TRL gets one number per episode, also from a function that returns a dict from roles to numbers, or a list with a number per turn: the mean of
    these numbers.

    Args:
        roles: those that a dict may name.
        record: called with the rewards of each episode's turns; None for an episode that has one number.
    """
    if isinstance(function, (str, nn.Module)):
        return function
    name, takes_episodes = get_callable_name(function), accepts(function, "episodes")
    nan_problems: list[str] = []

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the user's own code
            raise RuntimeError(f"The reward function {name!r} failed: {type(error).__name__}: {error}") from error

    def check_number(reward: Any, episode: Episode) -> None:
        if is_nan(reward) and not nan_problems:
            nan_problems.append(episode.problem.id)
            logger.warning("The reward function %r gave problem %r the reward NaN. The episode is left out of its group, as "
                           "for None. Further NaN rewards are not reported.", name, episode.problem.id)  # fmt: skip
        elif reward is not None and not is_nan(reward):
            check_reward(f"The reward function {name!r}", episode.problem, reward)

    def check(rewards: list[Any], episodes: list[Episode]) -> list[float | None]:
        numbers: list[float | None] = []
        of_turns: list[list[float] | None] = []
        for reward, episode in zip(
            map(as_number, rewards), episodes, strict=False
        ):  # TRL refuses a wrong number of rewards
            parts, turns = spread_over_turns(reward, episode, f"The reward function {name!r}", roles)
            for part in parts:
                check_number(part, episode)
            numbers.append(mean_of_known(parts))
            of_turns.append(turns)
        record(of_turns)
        return numbers + [None] * (len(rewards) - len(numbers))

    def keywords(episodes: list[Episode]) -> dict[str, list[Episode]]:
        return {"episodes": episodes} if takes_episodes else {}

    @wraps(function)
    def call(*args: Any, episodes: list[Episode], **kwargs: Any) -> list[float | None]:
        with named():
            rewards = as_list(function(*args, **keywords(episodes), **kwargs))
        return check(rewards, episodes)

    @wraps(function)
    async def call_async(*args: Any, episodes: list[Episode], **kwargs: Any) -> list[float | None]:
        with named():
            rewards = as_list(await function(*args, **keywords(episodes), **kwargs))
        return check(rewards, episodes)

    wrapper: Callable[..., Any] = call_async if is_async_callable(function) else call
    wrapper.__name__ = name
    return wrapper


def thought_reward(reward_funcs: Iterable[Any]) -> str | None:
    """Return the name of the first function that reads the thoughts of a completion, or None."""
    for function in reward_funcs:
        if (function.func if isinstance(function, partial) else function) in THOUGHT_REWARDS:
            return get_callable_name(function)
    return None


def as_list(rewards: Any) -> list[float | None]:
    """Return a reward function's result as a list; TypeError if it is a single value, or has no order."""
    if isinstance(rewards, (str, bytes, dict, set)) or not isinstance(rewards, Iterable):
        raise TypeError(f"it must return a list with one number per completion, got {rewards!r}.")
    return list(rewards)


def spread_over_turns(
    reward: Any, episode: Episode, source: str, roles: Collection[str]
) -> tuple[list[Any], list[float] | None]:
    """Return the numbers that a reward consists of, and those of the episode's turns, NaN without one; None for a single number.

    Raises ValueError for a dict with another key than a role, and for a list of another length than the turns'.
    """
    advice = "Return a number for each episode, a dict from roles to numbers, or a list with a number for each of `episode.turns`."
    if isinstance(reward, Mapping):
        if unknown := [role for role in reward if role not in roles]:
            raise ValueError(
                f"{source} gave problem {episode.problem.id!r} a reward of {unknown}, but the roles are {list(roles)}. {advice}"
            )
        of_roles = {role: as_number(part) for role, part in reward.items()}
        return list(of_roles.values()), [or_nan(of_roles.get(turn.role)) for turn in episode.turns]
    if isinstance(reward, Iterable) and not isinstance(reward, (str, bytes, AbstractSet)):
        parts = [as_number(part) for part in reward]
        if len(parts) != len(episode.turns):
            raise ValueError(
                f"{source} gave problem {episode.problem.id!r} {len(parts)} rewards, but the episode has {len(episode.turns)} turns. {advice}"
            )
        return parts, list(map(or_nan, parts))
    return [reward], None


def or_nan(reward: Any) -> Any:
    """Return a reward, NaN for None."""
    return math.nan if reward is None else reward


def mean_of_known(parts: list[Any]) -> Any:
    """Return the mean of rewards that are neither None nor NaN, exactly if all are equal, and None without any. A single one stays as it is."""
    if len(parts) == 1:
        return parts[0]
    known = [part for part in parts if part is not None and not is_nan(part)]
    if not known:
        return None
    return known[0] if min(known) == max(known) else math.fsum(known) / len(known)


def as_number(reward: Any) -> Any:
    """Return a reward as a float: of NumPy, a tensor with one element, a fraction. What is no number stays as it is, and so does None."""
    if reward is None or isinstance(reward, (str, bytes)):
        return reward
    try:
        return float(reward)
    except (TypeError, ValueError, RuntimeError):
        return reward


def is_nan(reward: Any) -> bool:
    """Return whether a reward is the number NaN."""
    return isinstance(reward, (float, int)) and math.isnan(reward)
