"""Compare arms of a declared study: no verdict before the last declared seed, and Holm's correction over all declared arms."""

import math

import numpy as np

from multirole_study.paper.statistics import ALPHA, Interval, holm

NOT_RUN, UNFINISHED, UNDECIDED = "not run", "unfinished", "undecided"


def progress(n_runs: int, seeds: list[int]) -> str | None:
    """Return why a comparison with so many pairs of runs has no verdict yet; None if every declared seed has its pair."""
    if n_runs < len(seeds):
        return UNFINISHED if n_runs else NOT_RUN
    return None


def decided(gap: Interval, p_holm: float, p_match_holm: float) -> str:
    """Return the verdict on a difference of one arm minus another."""
    if p_holm < ALPHA:
        return "better" if gap.mean > 0 else "worse"
    return "equivalent" if p_match_holm < ALPHA else UNDECIDED


def corrected_over_arms(p_values: list[float]) -> list[float]:
    """Return p-values after Holm's correction; NaN, the p of an arm without all its runs, counts as 1."""
    return list(holm(np.nan_to_num(p_values, nan=1.0)))


def judged(gaps: list[Interval], missing: list[str | None], can_match: bool = True) -> list[tuple[float, str]]:
    """Return the corrected p and the verdict of every difference of a family; without p, where `missing` says why.

    `can_match` is False for differences that are not of accuracies, since the margin of equivalence is in points.
    """
    p_values, p_match_values = (
        corrected_over_arms([math.nan if why else getattr(gap, name) for why, gap in zip(missing, gaps, strict=True)])
        for name in ("p", "p_match")
    )
    lines = zip(gaps, missing, p_values, p_match_values, strict=True)
    return [
        (math.nan, why) if why else (p, decided(gap, p, p_match if can_match else 1.0))
        for gap, why, p, p_match in lines
    ]
