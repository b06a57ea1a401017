"""Grade single turns: set `is_right` of each.

The task grades an answer. A verdict is compared with the grade of the draft that it judges, and a selection with its candidate.
"""

from collections.abc import Container
from typing import Protocol

from multirole.types import Episode, Problem, Reward, Structure

UNGRADED = ("plans", "judges", "selects")
"""Duties of roles whose replies are not answers to the problem."""


class Scorer(Protocol):
    """Interface of a task for grading."""

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Return one reward per text."""
        ...


def grade(episodes: list[Episode], roles: Container[str], task: Scorer) -> None:
    """Set `is_right` of these roles' turns by the task's scoring, in one batch."""
    turns = [(e.problem, turn) for e in episodes for turn in e.turns if turn.role in roles]
    rewards = task.score([problem for problem, _ in turns], [turn.text for _, turn in turns]) if turns else []
    for (_, turn), reward in zip(turns, rewards, strict=True):
        turn.is_right = reward.is_correct


def judge(episodes: list[Episode], task: Scorer, structure: Structure) -> None:
    """Set `is_right` of every turn of scored episodes. A plan is neither right nor wrong by itself and stays at None.

    A role that judges is right or wrong about the reply of its slot and round; an unparsed verdict is always wrong; about a reply
    without a grade it stays at None. A selection
    has the grade of its episode. All other replies are graded as answers.
    """
    duties = structure.duties
    roles = {turn.role for episode in episodes for turn in episode.turns}
    grade(episodes, {role for role in roles if role not in duties or duties[role].kind not in UNGRADED}, task)
    for episode in episodes:
        replies = {(turn.role, turn.slot, turn.round): turn for turn in episode.turns}
        for turn in episode.turns:
            duty = duties.get(turn.role)
            if duty is None:
                continue
            if duty.kind == "judges" and (judged := replies.get((str(duty.of), turn.slot, turn.round))):
                is_known = judged.is_right is not None
                turn.is_right = turn.outcome == ("correct" if judged.is_right else "incorrect") if is_known else None
            elif duty.kind == "selects" and episode.reward is not None:
                turn.is_right = episode.reward.is_correct
