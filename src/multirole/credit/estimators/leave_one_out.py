"""Credit against the other replies to the same prompt, from forks (C3)."""

from collections.abc import Sequence

from multirole.credit.estimators.branches import BranchCredit


class LeaveOneOutCredit(BranchCredit):
    """A = R minus the mean of the other `n_branches` - 1 replies to the same prompt (C3, arXiv:2603.06859), all of which are trained.

    C3 replays under fixed continuations, as `branches` does; this is its estimate without a critic model. Needs replays and no grades,
    excludes older weights, and costs what `branches` costs.
    """

    @staticmethod
    def compare(rewards: Sequence[float]) -> list[float]:
        n, total = len(rewards), sum(rewards)
        return [reward - (total - reward) / (n - 1) if n > 1 else 0.0 for reward in rewards]
