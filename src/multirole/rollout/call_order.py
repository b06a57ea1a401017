"""Put a role's turns that were called without a slot in an order that does not depend on the load of the machine.

Times alone cannot decide it: of two calls that a workflow gathers, one may be answered before the other is sent, or not. So a call follows
another one only if the code that made it had run after the other's reply: it is the same task, a task that was created since, or
the one that had created the other's task. Calls whose tasks are not known, such as those over sockets, are compared by their times.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from multirole.types import Turn


@dataclass(frozen=True, eq=False)
class Branch:
    """A task or a thread in the tree of those that created each other. `born` is at most the time of its creation (ns)."""

    parent: "Branch | None" = None
    born: int = field(default_factory=time.monotonic_ns)

    def lineage(self) -> list["Branch"]:
        """Return the branches from the root down to this one."""
        branches = [self]
        while (parent := branches[-1].parent) is not None:
            branches.append(parent)
        return branches[::-1]


class BranchTask(asyncio.Task):
    """A task that knows which task created it, and when. It is the task factory of every rollout's event loop."""

    def __init__(self, coroutine: Any, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self.branch = Branch(current_branch(loop))
        super().__init__(coroutine, loop=loop, **options)


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> BranchTask:
    """Create a task, as `loop.set_task_factory` needs it."""
    return BranchTask(coroutine, loop=loop, **options)


def current_branch(loop: asyncio.AbstractEventLoop | None = None) -> Branch | None:
    """Return the branch of the running task; None outside of one."""
    task = asyncio.current_task(loop)
    return task.branch if isinstance(task, BranchTask) else None


@dataclass(frozen=True)
class UnplacedTurn:
    """A turn that was called without a slot. `nth` counts the role's calls with this prompt; times are in ns."""

    turn: Turn
    nth: int
    branch: Branch | None
    began: int
    ended: int

    def follows(self, other: "UnplacedTurn") -> bool:
        """Return whether this call was made after the other's reply, however fast or slow the machine is."""
        if self.began < other.ended:
            return False
        if self.branch is None or other.branch is None:
            return True
        pairs = itertools.zip_longest(self.branch.lineage(), other.branch.lineage())
        mine = next((one for one, others in pairs if one is not others), None)  # where the two lineages part
        return mine is None or mine.born >= other.ended


def are_sequential(turns: Sequence[UnplacedTurn]) -> bool:
    """Return whether each of a role's calls in an episode followed the one before it."""
    by_time = sorted(turns, key=lambda turn: turn.began)
    return all(later.follows(earlier) for earlier, later in itertools.pairwise(by_time))


def place_turns(turns: Sequence[UnplacedTurn], n_slots: int, is_sequential: bool) -> None:
    """Set slot and round of one role's turns: each `n_slots` of them make a round.

    Sequential turns are ordered by time, others by prompt, the shortest first, and equal prompts by occurrence.
    """

    def place(unplaced: UnplacedTurn) -> tuple:
        return (
            (unplaced.began,)
            if is_sequential
            else (len(unplaced.turn.prompt_ids), unplaced.turn.prompt_ids, unplaced.nth)
        )

    for i, unplaced in enumerate(sorted(turns, key=place)):
        unplaced.turn.round, unplaced.turn.slot = divmod(i, n_slots)
