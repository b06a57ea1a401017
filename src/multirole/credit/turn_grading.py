"""Grade single turns: set `is_right` of each.

An answer is graded by scoring it as the answer of an episode. A verdict is compared with the grade of the draft that it judges,
and a selection has the grade of its episode.
"""

from collections.abc import Callable, Container

from multirole.types import Answer, Episode, Structure

Score = Callable[[list[Episode]], object]
"""Sets `reward` of episodes by their answers, as `MultiRoleGRPOTrainer.score` does."""
UNGRADED = ("plans", "judges", "selects")
"""Duties of roles whose replies are not answers to the problem."""


def grade_answers(episodes: list[Episode], roles: Container[str], score: Score) -> None:
    """Set `is_right` of these roles' turns, in one batch: each is scored as the answer of an episode that has this turn alone.

    It stays None where the reward has no `is_correct`.
    """
    graded = [
        Episode(episode.problem, episode.index, [turn], Answer(turn.text))
        for episode in episodes
        for turn in episode.turns
        if turn.role in roles
    ]
    if graded:
        score(graded)
    for episode in graded:
        episode.turns[0].is_right = None if episode.reward is None else episode.reward.is_correct


def grade_by_duty(episodes: list[Episode], score: Score, structure: Structure) -> None:
    """Set `is_right` of every turn of scored episodes, by the duties of the workflow's roles.

    A plan is neither right nor wrong by itself and stays at None. A role that judges is right or wrong about the reply of its slot and round; an
    unparsed verdict is always wrong; about a reply without a grade it stays at None. A selection has the grade of its episode. All other
    replies are graded as answers.
    """
    duties = structure.duties
    roles = {turn.role for episode in episodes for turn in episode.turns}
    grade_answers(episodes, {role for role in roles if role not in duties or duties[role].kind not in UNGRADED}, score)
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
