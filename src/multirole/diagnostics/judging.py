"""The outcome reward of episodes, and whether a turn was right by itself.

An answer is graded by the task, a verdict is held against the draft that it judges, a selection against its candidate.
"""

import logging
from collections.abc import Container
from dataclasses import replace

from multirole import sandbox
from multirole.core.types import Episode
from multirole.experiment.cell import Cell
from multirole.tasks import TASKS

logger = logging.getLogger(__name__)

UNGRADED = ("orchestrator", "evaluator", "aggregator")
"""Roles whose replies are no answers to the problem: plans, verdicts, selections."""


def verdict_is_right(verdict: str, is_correct: bool) -> bool:
    """An unparsed verdict is wrong on every draft."""
    return verdict == ("correct" if is_correct else "incorrect")


def score_episodes(episodes: list[Episode], cell: Cell, with_turns: bool = False) -> sandbox.Stats:
    """Set the outcome reward of each episode (paper A.7), and on demand `is_right` of its turns; returns what grading took."""
    rewards = TASKS[cell.task_name].score_batch(
        [e.problem for e in episodes], [e.answer.text for e in episodes], **cell.reward_options
    )
    for episode, reward in zip(episodes, rewards, strict=True):
        episode.reward = reward if episode.answer.reason is None else replace(reward, reason=episode.answer.reason)
    if with_turns:
        judge(episodes, cell)
    grading = sandbox.take_stats()
    if grading.programs:
        logger.info("graded %s", grading.line())
    return grading


def grade(episodes: list[Episode], roles: Container[str], cell: Cell) -> None:
    """Set `is_right` of these roles' turns by the task's own scoring, all of them at once."""
    turns = [(e.problem, turn) for e in episodes for turn in e.turns if turn.role in roles]
    rewards = TASKS[cell.task_name].score_batch(
        [problem for problem, _ in turns], [turn.text for _, turn in turns], **cell.reward_options
    )
    for (_, turn), reward in zip(turns, rewards, strict=True):
        turn.is_right = reward.is_correct


def judge(episodes: list[Episode], cell: Cell) -> None:
    """Set `is_right` of every turn of scored episodes. A plan has no right or wrong of its own: it stays None.

    An evaluator judges the draft of its round. An aggregator's selection is what the episode was scored by.
    """
    grade(episodes, [role for role in cell.policy if role not in UNGRADED], cell)
    for episode in episodes:
        drafts = {turn.round: turn for turn in episode.turns if turn.role == "generator"}
        for turn in episode.turns:
            if turn.role == "evaluator" and turn.round in drafts:
                turn.is_right = verdict_is_right(turn.outcome, drafts[turn.round].is_right)
            elif turn.role == "aggregator":
                turn.is_right = episode.reward.is_correct
