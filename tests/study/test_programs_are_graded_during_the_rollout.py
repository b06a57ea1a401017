"""On a GPU, programs are graded while other episodes are played, each once, with the rewards that they would get anyway."""

import threading

import pytest

from multirole.types import Answer, Episode, Problem, Reward
from multirole_study.experiment import grades_ahead as module
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import TaskReward
from multirole_study.experiment.grades_ahead import GradesAhead, grades_ahead

PROBLEMS = [Problem(str(i), "code", f"q{i}", str(i)) for i in range(3)]


class Lengths:
    """A task whose reward is the length of the text over 10; text "bad" fails."""

    name = "code"

    def __init__(self) -> None:
        self.scored: list[tuple[str, str, str]] = []

    def score(self, problems, texts):
        for problem, text in zip(problems, texts, strict=True):
            self.scored.append((problem.reference, text, threading.current_thread().name))
            if text == "bad":
                raise RuntimeError("the sandbox is broken")
        return [Reward(len(text) / 10) for text in texts]


def episodes(*answers: tuple[int, str]) -> list[Episode]:
    """Return finished episodes whose problems have no reference, as in the trainer."""
    made = [Episode(Problem(str(i), "code", f"q{i}", None), n) for n, (i, _) in enumerate(answers)]
    for episode, (_, text) in zip(made, answers, strict=True):
        episode.answer = Answer(text)
    return made


def test_every_answer_is_graded_once_and_before_the_rewards_are_asked_for():
    task = Lengths()
    ahead = GradesAhead(task, PROBLEMS)
    reward = TaskReward(ahead, PROBLEMS)
    played = episodes((0, "a"), (0, "a"), (1, "a"), (2, "abc"))
    for episode in played[:3]:
        ahead.on_episode_end(None, episode)
    ahead.thread.submit(int).result()  # all before it is done
    assert [who[:2] for who in task.scored] == [("0", "a"), ("1", "a")]
    assert all(thread.startswith("grading") for _, _, thread in task.scored)
    assert reward([], [], played) == [0.1, 0.1, 0.1, 0.3] and len(task.scored) == 3  # the last one was missing
    ahead.on_rollout_end(None, played)
    assert reward([], [], played[:1]) == [0.1] and len(task.scored) == 4  # nothing is kept for another rollout


def test_an_error_of_the_grading_is_raised_where_the_rewards_are_asked_for():
    ahead = GradesAhead(Lengths(), PROBLEMS)
    played = episodes((0, "a"), (1, "bad"))
    for episode in played:
        ahead.on_episode_end(None, episode)
    with pytest.raises(RuntimeError, match="the sandbox is broken"):
        TaskReward(ahead, PROBLEMS)([], [], played)


def test_only_programs_at_a_paper_scale_on_a_gpu_are_graded_early(monkeypatch):
    for cuda in (True, False):
        monkeypatch.setattr(module, "has_cuda", lambda cuda=cuda: cuda)
        assert grades_ahead(Cell("voting", "sp", "code", "1.7b")) == cuda
        assert not grades_ahead(Cell("voting", "sp", "math", "1.7b")) and not grades_ahead(Cell("voting", "sp", "code"))
