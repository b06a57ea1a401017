"""Credit of critics against the generators that they read (MADA-RL)."""

import math
from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.advantages import compared_grades, mean
from multirole.credit.estimator import CreditEstimator
from multirole.types import JUDGING, Workflow, structure_of
from multirole.update.rows import Row


class CriticCredit(CreditEstimator):
    """A_C = R_C - acc_G: a critic's reward minus the accuracy of the generators on the same problem (MADA-RL, arXiv:2607.18006).

    Critics are the roles that judge, select or merge (`Structure.duties`), R_C is the outcome, and acc_G the share of right turns among
    those that the critic could read in its episode: of its `Duty.of`, up to its round. Generators, the roles that solve, are compared
    by their own correctness within the problem's turns of their role and round. The paper's rewards are twice as large and
    have a term for length, which is not implemented; its generators are trained first. Other roles, and turns that nobody has
    judged (`Turn.is_right`), keep their advantage.

    Needs grades and no replays, costs the grading of every turn, and allows older weights.
    """

    needs_grades = True

    @classmethod
    def check(cls, workflow: Workflow) -> None:
        kinds = {duty.kind for duty in structure_of(workflow).duties.values()}
        if not kinds & {"solves", *JUDGING}:
            raise ValueError(
                f"CriticCredit pays each role by its duty to solve, judge, select or merge, and no role of the workflow {workflow.name!r} has one, so that every turn would keep the advantage of "
                'its episode. Declare them, such as `structure = Structure({"solver": Duty("solves"), "judge": Duty("selects", "solver")})`, or write '
                'another `credit`, such as "outcome".'
            )

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        duties, advantages = structure_of(trainer.workflow).duties, [row.advantage for row in rows]
        solvers: list[int] = []
        for i, row in enumerate(rows):
            duty, turn = duties.get(row.turn.role), row.turn
            reward = row.episode.reward_of(turn)
            if duty is None or math.isnan(reward):
                continue
            if duty.kind == "solves" and turn.is_right is not None:
                solvers.append(i)
            elif duty.kind in JUDGING:
                read = [t.is_right for t in row.episode.turns if t.role == duty.of and t.round <= turn.round]
                if read and None not in read:
                    advantages[i] = reward - mean([float(bool(flag)) for flag in read])
        values = compared_grades(rows, solvers, trainer.args.num_generations)
        for i, value in zip(solvers, values, strict=True):
            advantages[i] = value
        return advantages
