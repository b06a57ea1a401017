"""Measures of one run for the rules of `claims.yaml`: numbers (`MEASURES`, and `ROLE_MEASURES` of one role) and patterns (`PATTERNS`)."""

import math
from collections.abc import Callable, Iterator
from itertools import combinations

import pandas as pd

from multirole_study.falls import first_fall
from multirole_study.paper.dynamics import FIRST_ITERATIONS, largest, weighted
from multirole_study.paper.results import Run
from multirole_study.paper.statistics import MARGIN, RULES

FLOOR = 1e-6
"""Smallest chi2 or norm whose logarithm or multiple is taken."""
ALARM_WINDOW = 3
"""Iterations whose mean an alarm reads."""
TOKEN_LEVEL = ("chi2", "perplexity", "grad_norm")
"""The paper's token-level training metrics by role (Table 2)."""


# ---- numbers of a run


def log_of(value: float) -> float:
    """Return the natural logarithm of a size; smaller sizes than `FLOOR` count as `FLOOR`."""
    return math.log(max(value, FLOOR))


def entropy(run: Run) -> pd.Series:
    """Return iteration -> entropy in nats per token, over the tokens of all roles."""
    return weighted(run.table("roles"), "entropy", "tokens")


def plateau(run: Run) -> float:
    """Return the first evaluated iteration within `MARGIN` of the peak."""
    trained = run.accuracy[run.accuracy.index > 0]
    return float(trained.index[(trained >= trained.max() - MARGIN - 1e-9).to_numpy().argmax()])


def wrong_agreement(answers: pd.DataFrame) -> float:
    """Return the share of pairs of wrong answers to one problem that are the same answer; NaN without such a pair.

    `answers` has a row per slot: problem, answer, and is_right. Slots without an answer are left out of it.
    """
    wrong = answers[~answers["is_right"]]
    pairs = [a == b for _, group in wrong.groupby("problem") for a, b in combinations(group["answer"], 2)]
    return sum(pairs) / len(pairs) if pairs else math.nan


def slot_answers(run: Run, role: str, step: int) -> pd.DataFrame:
    """Return the graded answers of a role's slots at a validation, as `wrong_agreement` takes them. Problems that the task no longer has are left out."""
    task = run.cell.make_task()
    turns = run.table("turns", "step", "problem", "role", "slot", "text")
    turns = turns[(turns["step"] == step) & (turns["role"] == role)]
    problems = {problem.id: problem for problem in task.problems("validation", run.cell.n_validation)}
    turns = turns[turns["problem"].isin(list(problems))]
    turns = turns.assign(answer=[task.extract(text) for text in turns["text"]]).dropna(subset="answer")
    scores = task.score([problems[name] for name in turns["problem"]], list(turns["text"])) if len(turns) else []
    is_right = pd.Series([score.is_correct for score in scores], turns.index, dtype=bool)
    return turns.assign(is_right=is_right)[["problem", "answer", "is_right"]]


def wrong_agreement_gain(run: Run, role: str) -> float:
    """Return `wrong_agreement` at the last validation minus that of the untrained workflow."""
    return wrong_agreement(slot_answers(run, role, run.steps["end"])) - wrong_agreement(slot_answers(run, role, 0))


MEASURES: dict[str, Callable[[Run], float]] = {
    "base": lambda run: run.accuracy[0],
    "first": lambda run: run.accuracy.iloc[1],
    "peak": lambda run: run.at("peak"),
    "end": lambda run: run.at("end"),
    "gain": lambda run: run.at("peak") - run.accuracy[0],
    "fall": lambda run: run.at("peak") - run.accuracy.iloc[-1],
    "falls": lambda run: float(run.ends_fallen),
    "plateau": plateau,
    "grad_norm": lambda run: log_of(run.table("ledger")["grad_norm"].max()),
    "chi2": lambda run: log_of(largest(run, "chi2")),
    "entropy": lambda run: entropy(run).iloc[0] - entropy(run).min(),
    "cpu": lambda run: log_of(run.series("cpu_seconds").sum()),
}
ROLE_MEASURES: dict[str, Callable[[Run, str], float]] = {
    "chi2_after": lambda run, role: log_of(run.series("chi2_after", role).max()),
    "coherence": lambda run, role: run.series("coherence", role).median(),
    "grad_share": lambda run, role: run.series("grad_share", role).median(),
    "optimizer_steps": lambda run, role: run.series("optimizer_steps", role).median(),
    "wrong_agreement_gain": wrong_agreement_gain,
    "falls_with_grown_judge": lambda run, role: float(run.ends_fallen and is_longer(run, role).any()),
}


# ---- patterns of a run


def climb(series: pd.Series) -> float:
    """Return the largest 3-iteration mean divided by the first value, of absolute values, because chi2 estimates can be negative."""
    sizes = series.abs()
    return float(sizes.rolling(3).mean().max() / max(sizes.iloc[:FIRST_ITERATIONS].median(), FLOOR))


def is_longer(run: Run, role: str) -> pd.Series:
    """Return iteration -> whether a role's texts have `longer` times their first length."""
    length = run.series("length_mean", role)
    return length.rolling(FIRST_ITERATIONS).mean() / length.iloc[:FIRST_ITERATIONS].mean() >= RULES["longer"]


def grows(run: Run, role: str, flat: str) -> bool:
    """Return whether a role's texts reach `longer` times their first length in an iteration where another role's have not."""
    return bool((is_longer(run, role) & ~is_longer(run, flat)).any())


def grows_alone(run: Run, role: str, flat: str) -> bool:
    """Return whether a role's texts reach `longer` times their first length, and another role's never do."""
    return bool(is_longer(run, role).any() and not is_longer(run, flat).any())


def is_near(value: float, first: float) -> bool:
    """Return whether two sizes differ by less than a factor of `near`."""
    return first / RULES["near"] <= value <= first * RULES["near"]


def grows_unseen(run: Run, role: str, flat: str) -> bool:
    """Return whether a role's texts reach `longer` times their first length while another role's Jaccard and entropy are near their start."""
    longer = is_longer(run, role)
    if not longer.any():
        return False
    series = [run.series(metric, flat) for metric in ("jaccard", "entropy")]
    return all(
        is_near(values.rolling(FIRST_ITERATIONS).mean()[longer.idxmax()], values.iloc[:FIRST_ITERATIONS].mean())
        for values in series
    )


def writes_code(run: Run, role: str) -> bool:
    """Return whether a role begins to write Python fences."""
    share = run.series("code_fence_rate", role)
    increase = share.rolling(FIRST_ITERATIONS).mean() - share.iloc[:FIRST_ITERATIONS].mean()
    return bool((increase >= RULES["more_code"]).any())


def drops(run: Run, role: str, metric: str) -> bool:
    """Return whether a share of a role's turns falls by `more_code`."""
    share = run.series(metric, role)
    decrease = share.iloc[:FIRST_ITERATIONS].mean() - share.rolling(FIRST_ITERATIONS).mean()
    return bool((decrease >= RULES["more_code"]).any())


def approaches(run: Run, role: str, flat: str) -> bool:
    """Return whether the distance of two roles' mean lengths, in logarithms, ends at no more than `closer` times its value in the first iterations."""
    lengths = [run.series("length_mean", name) for name in (role, flat)]
    first, last = (
        abs(math.log(a.mean() / b.mean()))
        for a, b in (
            [series.iloc[:FIRST_ITERATIONS] for series in lengths],
            [series.iloc[-FIRST_ITERATIONS:] for series in lengths],
        )
    )
    return last <= RULES["closer"] * first


def even_lengths(run: Run, role: str) -> bool:
    """Return whether a role's replies are about as long as every other role's, over the whole run."""
    lengths = {name: run.series("length_mean", name).mean() for name in run.cell.policy}
    return all(is_near(length, lengths[role]) for length in lengths.values())


def climbs_and_falls(run: Run, role: str, metric: str, flat: str | None = None) -> bool:
    """Return whether a role's metric climbs, more than another role's, and the run ends fallen."""
    climbs = {name: climb(run.series(metric, name)) for name in (role, flat) if name}
    is_apart = flat is None or climbs[role] >= 1.5 * climbs[flat]
    return climbs[role] >= RULES["climbs"] and is_apart and run.ends_fallen


def rises_beyond_norm(run: Run, role: str) -> bool:
    """Return whether a role's chi2 and perplexity both climb farther over their first values than its gradient norm."""
    chi2, perplexity, norm = (climb(run.series(metric, role)) for metric in ("chi2_after", "perplexity", "grad_norm"))
    return min(chi2, perplexity) > norm


def soon_falls(run: Run, role: str, metric: str) -> bool:
    """Return whether the first fall is at most `soon` iterations after the peak of a role's metric, and not before it."""
    fall = first_fall(run.accuracy)
    return fall is not None and 0 <= fall.at - run.series(metric, role).idxmax() <= RULES["soon"]


def unseen_falls(run: Run) -> bool:
    """Return whether a run ends fallen, and no token-level metric of any role has climbed before its first fall."""
    fall = first_fall(run.accuracy)
    if fall is None or not fall.is_terminal:
        return False
    before_fall = [run.series(metric, role).loc[: fall.at - 1] for role in run.cell.policy for metric in TOKEN_LEVEL]
    return all(climb(series) < RULES["climbs"] for series in before_fall)


def keeps_entropy(run: Run) -> bool:
    """Return whether the smallest entropy is at least `keeps` times the first."""
    series = entropy(run)
    return bool(series.min() >= RULES["keeps"] * series.iloc[0])


def unseen_drift(run: Run) -> bool:
    """Return whether accuracy and entropy look healthy while a role's chi2 or length rises."""
    drifts = [
        climb(run.series("chi2", role)) >= RULES["climbs"] or is_longer(run, role).any() for role in run.cell.policy
    ]
    return not run.ends_fallen and keeps_entropy(run) and any(drifts)


PATTERNS: dict[str, Callable[..., bool]] = {
    "falls": lambda run: run.ends_fallen,
    "stays": lambda run: not run.ends_fallen,
    "grows": grows,
    "grows_alone": grows_alone,
    "grows_unseen": grows_unseen,
    "grows_and_falls": lambda run, role, flat: grows(run, role, flat) and run.ends_fallen,
    "writes_code": writes_code,
    "drops": drops,
    "approaches": approaches,
    "even_lengths": even_lengths,
    "climbs_and_falls": climbs_and_falls,
    "rises_beyond_norm": rises_beyond_norm,
    "soon_falls": soon_falls,
    "unseen_falls": unseen_falls,
    "unseen_drift": unseen_drift,
    "keeps_entropy": keeps_entropy,
}
PAIRED_PATTERNS: dict[str, Callable[[Run, Run], bool]] = {
    "only_ip_falls": lambda run, other: run.ends_fallen and not other.ends_fallen,
    "slips_below_single": lambda run, other: run.at("peak") <= other.at("peak") - RULES["slip"] + 1e-9,
}
"""Patterns that compare a run with another run of the same seed."""


# ---- alarms


def alarms(series: pd.Series, metric: str) -> Iterator[int]:
    """Yield the iterations at which a metric of a role is alarming.

    The mean of `ALARM_WINDOW` iterations is compared with the median of the first ones. A share is alarming once it has fallen by
    `more_code`, a length at `longer` times its first value, and any other metric at `climbs` times.
    """
    recent, first = series.abs().rolling(ALARM_WINDOW).mean(), series.abs().iloc[:FIRST_ITERATIONS].median()
    if metric.endswith("_rate"):
        is_alarming = first - recent >= RULES["more_code"]
    else:
        times = RULES["longer"] if metric == "length_mean" else RULES["climbs"]
        is_alarming = recent >= times * max(first, FLOOR)
    yield from series.index[is_alarming]


def warns(run: Run, metric: str, roles: list[str]) -> bool:
    """Return whether a role's metric is alarming before the first fall of a run that ends fallen, or at any time in another run."""
    fall = first_fall(run.accuracy)
    end = fall.at if fall is not None and fall.is_terminal else math.inf
    return any(at < end for role in roles for at in alarms(run.series(metric, role), metric))
