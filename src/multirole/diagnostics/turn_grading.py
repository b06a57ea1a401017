"""Whether a turn was right by itself.

An answer is graded by the task, a verdict is held against the draft that it judges, a selection against its candidate.
"""

from collections.abc import Container
from typing import Protocol

from multirole.core.types import Episode, Problem, Reward

UNGRADED = ("orchestrator", "evaluator", "aggregator")
"""Roles whose replies are not answers to the problem: plans, verdicts, selections."""


class Scorer(Protocol):
    """What grading needs of a task."""

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """One reward per text."""
        ...


def grade(episodes: list[Episode], roles: Container[str], task: Scorer) -> None:
    """Set `is_right` of these roles' turns by the task's own scoring, all of them at once."""
    turns = [(e.problem, turn) for e in episodes for turn in e.turns if turn.role in roles]
    rewards = task.score([problem for problem, _ in turns], [turn.text for _, turn in turns]) if turns else []
    for (_, turn), reward in zip(turns, rewards, strict=True):
        turn.is_right = reward.is_correct


def judge(episodes: list[Episode], task: Scorer) -> None:
    """Set `is_right` of every turn of scored episodes. A plan is neither right nor wrong by itself and stays at None.

    An evaluator judges the draft of its round; an unparsed verdict is wrong on every draft. An aggregator's selection is what the
    episode was scored by.
    """
    roles = {turn.role for episode in episodes for turn in episode.turns}
    grade(episodes, roles - set(UNGRADED), task)
    for episode in episodes:
        drafts = {turn.round: turn for turn in episode.turns if turn.role == "generator"}
        for turn in episode.turns:
            if turn.role == "evaluator" and turn.round in drafts:
                turn.is_right = turn.outcome == ("correct" if drafts[turn.round].is_right else "incorrect")
            elif turn.role == "aggregator" and episode.reward is not None:
                turn.is_right = episode.reward.is_correct
