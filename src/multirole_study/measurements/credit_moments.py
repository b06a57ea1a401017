"""Split the mean square of an estimator's advantage into effect, bias, baseline and noise, which `credit_accuracy` defines."""

import itertools
from typing import Any, NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Products of an estimator and the exact effect in one context, whose means over contexts are the parts of the mean square.

    Args:
        effect: variance of the exact effect over replies, from two halves of its draws.
        shared: covariance of the estimator with the exact effect.
        within: covariance of two independent draws of the estimator over replies, the variance of E[X | c, a].
        between: product of two independent draws at different replies, E[X | c]^2.
        square: mean square of the estimator.
    """

    effect: float
    shared: float
    within: float
    between: float
    square: float


PARTS = ("effect", "bias", "baseline", "noise")


def parts_of(moments: Moments) -> dict[str, Any]:
    """Return the share of each part in the mean square of an estimator, and its `scale` beta, from mean moments; NaN without an advantage.

    The moments may be arrays. Where no exact effect was found (its variance is not positive), the share of the effect is 0.
    """
    variance, shared, within, between, square = (np.asarray(value, dtype=float) for value in moments)
    square = np.where(square > 0, square, np.nan)
    scale = np.where(variance > 0, shared / np.where(variance > 0, variance, 1.0), 0.0)
    effect = scale * shared
    values = effect, within - effect, between, np.asarray(moments.square) - within - between
    return {name: (value / square)[()] for name, value in zip(PARTS, values, strict=True)} | {"scale": scale[()]}


def moments_of(draws: np.ndarray, exact: np.ndarray) -> Moments:
    """Return the moments of one context from `draws` (K, 2) of an estimator and two estimates (K, 2) of Q, of K replies."""

    def cov(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.cov(x, y)[0, 1])

    first, second = draws.T
    n = len(draws)
    different = (first.sum() * second.sum() - (first * second).sum()) / (n * (n - 1))
    shared = np.mean([cov(draws[:, i], exact[:, j]) for i, j in itertools.product(range(2), repeat=2)])
    return Moments(
        cov(*exact.T), float(shared), cov(first, second), float(different), float((draws**2).mean())
    )  # fmt: skip
