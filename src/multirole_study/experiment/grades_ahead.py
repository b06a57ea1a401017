"""Grade programs during the rollout, on cores that are idle while a GPU samples, so that the GPU does not wait for grading afterwards."""

from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.types import Episode, Problem, Reward
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import has_cuda
from multirole_study.experiment.presets import is_small


def grades_ahead(cell: Cell) -> bool:
    """Return whether programs are graded during the rollout: at a paper scale on a GPU. On a CPU the engine needs the cores.

    With `max_staleness` the GPU does not wait for the grading, and other episodes are played meanwhile.
    """
    return cell.task == "code" and not is_small(cell.scale) and has_cuda() and not cell.max_staleness


class GradesAhead(MultiRoleCallback):
    """Wrapper of a code task that grades answers as their episodes end; `score` returns these rewards.

    A thread grades all waiting answers as one batch. `score` waits for it, raises its errors, and grades the remaining answers.
    Rewards are the same, except for programs close to their time limit.
    """

    def __init__(self, task: Any, problems: list[Problem]) -> None:
        self.task, self.name = task, task.name
        self.problems = {problem.id: problem for problem in problems}
        self.rewards: dict[tuple[str, str], Reward] = {}
        """(problem's id, text) -> reward in this rollout."""
        self.waiting = SimpleQueue[tuple[str, str]]()
        self.thread = ThreadPoolExecutor(1, "grading")
        self.batches: list[Future[None]] = []

    def on_episode_end(self, trainer: Trainer, episode: Episode) -> None:
        if episode.answer is not None:
            self.waiting.put((episode.problem.id, episode.answer.text))
            self.batches.append(self.thread.submit(self._grade_waiting))

    def _grade_waiting(self) -> None:
        """Grade all waiting answers, if any; each pair of problem and text once."""
        pairs = dict.fromkeys(self.waiting.get() for _ in range(self.waiting.qsize()))
        self._grade([pair for pair in pairs if pair not in self.rewards])

    def _grade(self, pairs: list[tuple[str, str]]) -> None:
        if pairs:
            rewards = self.task.score([self.problems[name] for name, _ in pairs], [text for _, text in pairs])
            self.rewards.update(zip(pairs, rewards, strict=True))

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Wait for running batches, then return the task's rewards of the texts."""
        batches, self.batches = self.batches, []
        for batch in batches:
            batch.result()
        pairs = [(problem.id, text) for problem, text in zip(problems, texts, strict=True)]
        self._grade(list(dict.fromkeys(pair for pair in pairs if pair not in self.rewards)))
        return [self.rewards[pair] for pair in pairs]

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        self.rewards.clear()

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:
        self.rewards.clear()
