"""Say at which numbers of seeds a comparison is read, so that an interim look decides only what was declared."""

from dataclasses import dataclass

import pandas as pd

from multirole_study.compare.verdicts import NOT_RUN, UNFINISHED


@dataclass(frozen=True)
class Looks:
    """The numbers of pairs of seeds, in the study's order of seeds, at which a comparison is read; with none, all pairs that there are.

    Args:
        at: such as (5, 10). The verdict is that of the last look reached; seeds between two looks are not read.
        shows_unfinished: whether the pairs before the first look are shown, without a verdict.
        before_first: the word for a comparison that has pairs, but not enough for the first look.
        stages: the seeds of each look, as in a sequential test: a later stage is read only if the earlier ones are complete and undecided,
            and only as a whole.
        alphas: the level of both sides together at each look, such as (0.01, 0.045); with none, the rule's.
    """

    at: tuple[int, ...] = ()
    shows_unfinished: bool = True
    before_first: str = UNFINISHED
    stages: tuple[tuple[int, ...], ...] = ()
    alphas: tuple[float, ...] = ()

    def alpha(self, pairs: int, otherwise: float) -> float:
        """Return the level at the look of so many pairs."""
        return self.alphas[self.at.index(pairs)] if self.alphas and pairs in self.at else otherwise

    def missing(self, pairs: int) -> str:
        """Return why a comparison with so many pairs has no verdict yet; empty if it has one."""
        if not pairs:
            return NOT_RUN
        return self.before_first if self.at and pairs < self.at[0] else ""

    def read(self, pairs: int) -> int:
        """Return how many pairs are read: up to the last look that they reach."""
        if not self.at:
            return pairs
        return max((look for look in self.at if look <= pairs), default=pairs if self.shows_unfinished else 0)

    def of(self, numbers: pd.DataFrame) -> pd.DataFrame:
        """Return the numbers (a row per pair of runs of one cell) that are read."""
        return numbers.iloc[: self.read(len(numbers))]
