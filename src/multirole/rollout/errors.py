"""Name what ends an episode or a rollout early, and tell such errors apart where they come in groups or as causes of others."""

from collections.abc import Collection


class WorkflowError(RuntimeError):
    """A workflow's own code failed; the message names it, the problem and the lines of that code, the cause is its error."""


class PromptOverflow(Exception):
    """A turn's prompt is longer than `max_prompt_tokens`, or than a partner's server takes: the episode ends without an answer."""


class RolloutStopped(Exception):
    """The rollout was stopped because its episodes are no longer needed."""


def is_overflow(error: BaseException) -> bool:
    """Return whether an error says that a prompt was too long, also in the group that an `asyncio.TaskGroup` raises."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_overflow, error.exceptions))
    return isinstance(error, PromptOverflow)


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
