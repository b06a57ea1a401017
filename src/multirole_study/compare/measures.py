"""Measure a run: every number by which runs are compared, registered by its name. A new measure is one function with `@measure()`.

A measure takes a packed run and its declared options (`role`, `metric`, ...) and returns a number, or whether the run shows a pattern. One
that takes `other` compares a run with another run of the same seed.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pandas as pd

from multirole.policy import adapter_names, trained_part
from multirole_study.compare.rules import MARGIN, RULES, WINDOW
from multirole_study.falls import first_fall

if TYPE_CHECKING:
    from multirole_study.paper.results import Run

FLOOR = 1e-6
"""Smallest chi2 or norm whose logarithm or multiple is taken."""
FIRST_ITERATIONS = 5
ALARM_WINDOW = 3
"""Iterations whose mean an alarm reads."""
TOKEN_LEVEL = ("chi2", "perplexity", "grad_norm")
"""The paper's token-level training metrics by role (Table 2)."""
SKILL_MEASURES = {"eval_opt": ("judges", "repairs"), "voting": ("selects",), "orch_workers": ("merges", "plans")}
"""Workflow -> the measures of its roles in `multirole.roles.skill`, that of its judging role first."""
POOLED = "all roles (shared)"


@dataclass(frozen=True)
class Measure:
    """A registered measure. `unit` is the unit of a difference of it in tables (`labels.FORMS`).

    `has_margin`: it is in points of accuracy, so that a difference can be equivalent. `is_partial`: some runs have no such number
    (NaN); they count as runs when it is asked which seeds are there. `of_validation`: it reads validation alone, so that a run that
    diverged in its first iteration has it; every other measure of such a run is NaN.
    """

    name: str
    compute: Callable[..., float]
    unit: str
    has_margin: bool
    is_partial: bool
    of_validation: bool

    @property
    def options(self) -> list[str]:
        """List the names of its options."""
        return list(inspect.signature(self.compute).parameters)[1:]

    @property
    def required(self) -> list[str]:
        """List the names of the options that have no default."""
        parameters = inspect.signature(self.compute).parameters
        return [
            name for name in self.options if name != "other" and parameters[name].default is inspect.Parameter.empty
        ]

    @property
    def is_paired(self) -> bool:
        """Return whether it compares a run with another one."""
        return "other" in self.options

    @property
    def is_pattern(self) -> bool:
        """Return whether it says if a run shows a pattern, so that shares of runs can be estimated: its function returns a bool."""
        annotation = inspect.signature(self.compute).return_annotation
        return bool in (annotation, *get_args(annotation))

    def of(self, run: "Run", **options: object) -> float:
        """Return its number of a run, with those of the options that it has. A single agent has only one role."""
        if len(run.cell.policy) == 1 and "role" in options:
            options["role"] = next(iter(run.cell.policy))
        if not (self.of_validation or has_iterations(run)):
            return math.nan
        return float(self.compute(run, **{name: value for name, value in options.items() if name in self.options}))


MEASURES: dict[str, Measure] = {}
"""Name -> measure."""


def measure(
    unit: str = "difference", has_margin: bool = False, is_partial: bool = False, of_validation: bool = False
) -> Callable:
    """Register a function of a run as a measure under its name. Those with a margin are of validation."""

    def register(function: Callable[..., float]) -> Callable[..., float]:
        name = function.__name__
        MEASURES[name] = Measure(name, function, unit, has_margin, is_partial, of_validation or has_margin)
        return function

    return register


# ---- series of a run


def has_iterations(run: "Run") -> bool:
    """Return whether a run has recorded an iteration; one that diverged in the first has only the validation of the untrained model."""
    return not run.table("metrics").empty


def role_series(run: "Run") -> dict[str, pd.DataFrame]:
    """Map each role of a run to its rows by iteration, with chi2, perplexity, grad_norm, chi2_after and optimizer_steps.

    A shared adapter has a first entry for all of its roles together, then one for each role. Empty for a run without iterations.
    """
    if not has_iterations(run):
        return {}
    roles, ledger = run.table("roles"), run.table("ledger")
    roles = roles[roles["role"].isin(trained_part(run.cell.policy))]
    by_role = {role: rows.set_index("iteration") for role, rows in roles.groupby("role")}
    of_roles = {role: by_role[role] for role in run.cell.policy if role in by_role}
    if run.cell.policy_name == "ip" or len(of_roles) == 1:
        return of_roles
    steps = ledger.groupby("iteration")["grad_norm"]
    means = {"chi2": "tokens", "perplexity": "rows", "chi2_after": "tokens"}
    pooled = {name: weighted(roles, name, weight) for name, weight in means.items()}
    pooled |= {"grad_norm": steps.mean(), "optimizer_steps": steps.size()}
    return {POOLED: pd.DataFrame(pooled)} | {f"{role}'s part": rows for role, rows in of_roles.items()}


def weighted(roles: pd.DataFrame, name: str, weight: str) -> pd.Series:
    """Return the weighted mean in each iteration, over the roles that have the metric: a role that was not trained has none."""
    known = roles.dropna(subset=name)
    products = known[name] * known[weight]
    means = products.groupby(known["iteration"]).sum() / known.groupby("iteration")[weight].sum()
    return means.reindex(roles["iteration"].drop_duplicates().sort_values())


def largest(run: "Run", name: str) -> float:
    """Return a metric's maximum over a run: over all tokens of a shared adapter, or of the role with the largest one."""
    roles = role_series(run)
    read = [roles[POOLED]] if POOLED in roles else roles.values()
    return pd.concat([series[name] for series in read]).max()


def log_of(value: float) -> float:
    """Return the natural logarithm of a size; smaller sizes than `FLOOR` count as `FLOOR`."""
    return math.log(max(value, FLOOR))


def entropy_series(run: "Run") -> pd.Series:
    """Return iteration -> entropy in nats per token, over the tokens of all roles."""
    return weighted(run.table("roles"), "entropy", "tokens")


def climb(series: pd.Series) -> float:
    """Return the largest 3-iteration mean divided by the first value, of absolute values, because chi2 estimates can be negative."""
    sizes = series.abs()
    return float(sizes.rolling(3).mean().max() / max(sizes.iloc[:FIRST_ITERATIONS].median(), FLOOR))


def is_longer(run: "Run", role: str) -> pd.Series:
    """Return iteration -> whether a role's texts have `longer` times their first length."""
    length = run.series("length_mean", role)
    return length.rolling(FIRST_ITERATIONS).mean() / length.iloc[:FIRST_ITERATIONS].mean() >= RULES["longer"]


def is_near(value: float, first: float) -> bool:
    """Return whether two sizes differ by less than a factor of `near`."""
    return first / RULES["near"] <= value <= first * RULES["near"]


def skill_of(run: "Run", skill: str) -> pd.DataFrame:
    """Return evaluated step -> "skill" of a role and "trivial", that of its trivial twin; empty if not measured."""
    rows = run.table("skills").reindex(columns=["measure", "step", "skill", "trivial"])
    return rows[rows["measure"] == skill].set_index("step")


def gain_of(run: "Run", skill: str) -> pd.Series:
    """Return evaluated step -> a role's skill minus that of its trivial twin; empty if not measured."""
    rows = skill_of(run, skill)
    return rows["skill"] - rows["trivial"]


def judge_skill(run: "Run") -> pd.Series:
    """Return evaluated step -> skill of the judging role, where it has a case; empty for a workflow without one."""
    skill, *_ = SKILL_MEASURES.get(run.cell.workflow, ("",))
    return skill_of(run, skill)["skill"].sort_index()


def split_half_outcomes(correct: pd.DataFrame) -> np.ndarray:
    """Return the outcomes (P,) of a run at a peak that was chosen on other problems.

    `correct` is problems x steps. The best trained step is chosen on every second problem and evaluated on the others, and vice
    versa, so that each problem counts once and none chooses the checkpoint at which it is scored. A problem without a grade there is NaN.
    """
    trained = correct.loc[:, correct.columns > 0]
    if trained.empty:  # the run diverged before
        return np.full(len(correct), math.nan)
    outcomes = np.empty(len(correct))
    for half in (0, 1):
        chosen = trained.iloc[1 - half :: 2].mean().idxmax()
        outcomes[half::2] = trained[chosen].iloc[half::2]
    return outcomes


# ---- accuracies


@measure(has_margin=True)
def base(run: "Run") -> float:
    """Return the accuracy of the untrained workflow."""
    return run.accuracy[0]


@measure(has_margin=True)
def first(run: "Run") -> float:
    """Return the accuracy at the first evaluation in training; NaN for a run that diverged before."""
    return run.accuracy.iloc[1] if len(run.accuracy) > 1 else math.nan


@measure(has_margin=True, is_partial=True)
def early(run: "Run", iteration: int = 10) -> float:
    """Return the accuracy at an iteration; NaN for a run that diverged before."""
    return run.accuracy.get(iteration, math.nan)


@measure(has_margin=True)
def peak(run: "Run", problems: list[str] | None = None) -> float:
    """Return the best accuracy in training, on all problems or on some, chosen on the problems that it is read on."""
    if problems is not None:
        accuracy = run.correct[run.correct.index.isin(problems)].mean()
        return accuracy[accuracy.index > 0].max()
    return run.at("peak")


@measure(has_margin=True)
def split_half_peak(run: "Run") -> float:
    """Return the accuracy at a peak that is chosen on one half of the problems and scored on the other."""
    return pd.Series(split_half_outcomes(run.correct)).mean()  # without problems that have no grade


@measure(has_margin=True)
def end(run: "Run", last: int = 1, problems: list[str] | None = None) -> float:
    """Return the mean accuracy over the last evaluations, or over some problems at the last one."""
    if problems is not None:
        last_evaluation = run.correct.iloc[:, -1]
        return last_evaluation[last_evaluation.index.isin(problems)].mean()
    return run.accuracy.iloc[-last:].mean()


@measure(has_margin=True)
def fall(run: "Run", last: int = 1) -> float:
    """Return the accuracy of the best evaluation, the untrained one included, minus `end`."""
    return run.accuracy.max() - end(run, last)


@measure(has_margin=True)
def peak_to_end(run: "Run") -> float:
    """Return the best accuracy in training minus the last one."""
    return run.at("peak") - run.accuracy.iloc[-1]


@measure(has_margin=True)
def gain(run: "Run") -> float:
    """Return the best accuracy in training minus that of the untrained workflow."""
    return run.at("peak") - run.accuracy[0]


@measure("tokens", of_validation=True)
def plateau(run: "Run") -> float:
    """Return the first evaluated iteration within `MARGIN` of the peak; NaN for a run that diverged before one."""
    trained = run.accuracy[run.accuracy.index > 0]
    if trained.empty:
        return math.nan
    return trained.index[(trained >= trained.max() - MARGIN - 1e-9).to_numpy().argmax()]


# ---- falls


@measure(of_validation=True)
def falls(run: "Run") -> bool:
    """Return whether a run ends fallen."""
    return run.ends_fallen


@measure(of_validation=True)
def stays(run: "Run") -> bool:
    """Return whether a run does not end fallen."""
    return not run.ends_fallen


@measure(is_partial=True, of_validation=True)
def late(run: "Run") -> bool | float:
    """Return whether the first fall of a run that ends fallen comes after the rate of a cosine with a clock per update call is first 0; NaN for another run."""
    fall = first_fall(run.accuracy)
    zero_iteration = run.cell.max_steps / len(adapter_names(run.cell.policy))
    return fall.at > zero_iteration if fall is not None and fall.is_terminal else math.nan


@measure(of_validation=True)
def only_ip_falls(run: "Run", other: "Run") -> bool:
    """Return whether a run ends fallen and the other one does not."""
    return run.ends_fallen and not other.ends_fallen


@measure(of_validation=True)
def slips_below_single(run: "Run", other: "Run") -> bool:
    """Return whether a run's peak lies `slip` or more below the other one's."""
    return run.at("peak") <= other.at("peak") - RULES["slip"] + 1e-9


@measure()
def falls_with_grown_judge(run: "Run", role: str) -> bool:
    """Return whether a run ends fallen with a role whose texts have grown."""
    return run.ends_fallen and is_longer(run, role).any()


@measure()
def climbs_and_falls(run: "Run", role: str, metric: str, flat: str | None = None) -> bool:
    """Return whether a role's metric climbs, more than another role's, and the run ends fallen."""
    climbs = {name: climb(run.series(metric, name)) for name in (role, flat) if name}
    is_apart = flat is None or climbs[role] >= 1.5 * climbs[flat]
    return climbs[role] >= RULES["climbs"] and is_apart and run.ends_fallen


@measure()
def soon_falls(run: "Run", role: str, metric: str) -> bool:
    """Return whether the first fall is at most `soon` iterations after the peak of a role's metric, and not before it."""
    fall = first_fall(run.accuracy)
    return fall is not None and 0 <= fall.at - run.series(metric, role).idxmax() <= RULES["soon"]


@measure()
def chi2_before(run: "Run") -> bool:
    """Return whether the generator's chi2 climbs alone and peaks shortly before the run falls terminally."""
    climbs = climbs_and_falls(run, "generator", "chi2_after", flat="aggregator")
    return climbs and soon_falls(run, "generator", "chi2_after")


@measure()
def unseen_falls(run: "Run") -> bool:
    """Return whether a run ends fallen, and no token-level metric of any role has climbed before its first fall."""
    fall = first_fall(run.accuracy)
    if fall is None or not fall.is_terminal:
        return False
    before_fall = [
        run.series(metric, role).loc[: fall.at - 1] for role in trained_part(run.cell.policy) for metric in TOKEN_LEVEL
    ]
    return all(climb(series) < RULES["climbs"] for series in before_fall)


@measure()
def alarm(run: "Run", metric: str, role: str | None = None) -> bool:
    """Return whether a metric of a role (by default of any) is alarming before the first fall of a run that ends fallen, or at any time in another run."""
    fall = first_fall(run.accuracy)
    end = fall.at if fall is not None and fall.is_terminal else math.inf
    roles = [role] if role else list(trained_part(run.cell.policy))
    return any(at < end for role in roles for at in alarms(run.series(metric, role), metric))


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


# ---- updates and costs


@measure("ratio")
def grad_norm(run: "Run") -> float:
    """Return the logarithm of the largest gradient norm."""
    return log_of(run.table("ledger")["grad_norm"].max())


@measure("ratio")
def chi2(run: "Run") -> float:
    """Return the logarithm of the largest chi2, of the role with the largest one or of all tokens of a shared adapter."""
    return log_of(largest(run, "chi2"))


@measure("ratio")
def chi2_after(run: "Run", role: str) -> float:
    """Return the logarithm of a role's largest chi2 after the update."""
    return log_of(run.series("chi2_after", role).max())


@measure("ratio")
def coherence(run: "Run", role: str) -> float:
    """Return the median cosine between the gradients of a role's slots."""
    return run.series("coherence", role).median()


@measure("rate")
def grad_share(run: "Run", role: str) -> float:
    """Return a role's median share of its adapter's gradient."""
    return run.series("grad_share", role).median()


@measure("rate")
def share_above_half(run: "Run", role: str) -> float:
    """Return a role's median share of its adapter's gradient, minus one half."""
    return grad_share(run, role) - 0.5


@measure("tokens")
def optimizer_steps(run: "Run", role: str) -> float:
    """Return a role's median number of optimizer steps per iteration."""
    return run.series("optimizer_steps", role).median()


@measure()
def entropy(run: "Run") -> float:
    """Return the first entropy minus the least one."""
    series = entropy_series(run)
    return series.iloc[0] - series.min()


@measure()
def keeps_entropy(run: "Run") -> bool:
    """Return whether the smallest entropy is at least `keeps` times the first."""
    series = entropy_series(run)
    return series.min() >= RULES["keeps"] * series.iloc[0]


@measure()
def rises_beyond_norm(run: "Run", role: str) -> bool:
    """Return whether a role's chi2 and perplexity both climb farther over their first values than its gradient norm."""
    chi2, perplexity, norm = (climb(run.series(metric, role)) for metric in ("chi2_after", "perplexity", "grad_norm"))
    return min(chi2, perplexity) > norm


@measure("ratio")
def cpu(run: "Run") -> float:
    """Return the logarithm of all CPU seconds of training."""
    return log_of(run.series("cpu_seconds").sum())


@measure("tokens")
def sampled_tokens(run: "Run") -> float:
    """Return the completion tokens that an iteration samples, on average, replays included."""
    return tokens_of_requests(run, "sampled").mean()


def tokens_of_requests(run: "Run", kind: Literal["sampled", "read"]) -> pd.Series:
    """Return the tokens of all requests by iteration, replays included; of a run that did not count them, those of its episodes."""
    metrics = run.table("metrics")
    of_episodes = metrics["completion_tokens" if kind == "sampled" else "prompt_tokens"]
    return metrics.get(f"{kind}_tokens", pd.Series(math.nan, metrics.index)).fillna(of_episodes)


# ---- what roles write and how well


@measure("change")
def change(run: "Run", role: str | None = None, metric: str = "", gain: str = "") -> float:
    """Return the change of a role's metric, or of a judging role's gain over its trivial twin, from start to end; NaN if not measured."""
    return start_and_change(run, role, metric, gain)[1]


@measure("change")
def growth(run: "Run", role: str) -> float:
    """Return the growth of a role's replies from start to end, as a part of their length at the start."""
    return change(run, role, "length_mean")


def start_and_change(run: "Run", role: str | None = None, metric: str = "", gain: str = "") -> tuple[float, float]:
    """Return a number at the start of a run, and its change until the end, of a length as a part of the start.

    A metric is its mean over `WINDOW` iterations. A gain over the trivial twin ends with its last two evaluations.
    """
    if gain:
        series = gain_of(run, gain)
        return (series.iloc[0], series.iloc[-2:].mean() - series.iloc[0]) if len(series) else (np.nan, np.nan)
    series = run.series(metric, role)
    start, end = series.iloc[:WINDOW].mean(), series.iloc[-WINDOW:].mean()
    return start, end / start - 1 if metric == "length_mean" else end - start


@measure(has_margin=True)
def skill(run: "Run") -> float:
    """Return the skill of the judging role at the last evaluation; NaN where it has no case."""
    return judge_skill(run).get(run.steps["end"], math.nan)


@measure(has_margin=True)
def skill_peak(run: "Run") -> float:
    """Return the largest skill of the judging role at a trained checkpoint."""
    series = judge_skill(run)
    return series[series.index > 0].max()


@measure()
def grows(run: "Run", role: str, flat: str) -> bool:
    """Return whether a role's texts reach `longer` times their first length in an iteration where another role's have not."""
    return (is_longer(run, role) & ~is_longer(run, flat)).any()


@measure()
def grows_alone(run: "Run", role: str, flat: str) -> bool:
    """Return whether a role's texts reach `longer` times their first length, and another role's never do."""
    return is_longer(run, role).any() and not is_longer(run, flat).any()


@measure()
def grows_and_falls(run: "Run", role: str, flat: str) -> bool:
    """Return whether a role grows as in `grows` and the run ends fallen."""
    return grows(run, role, flat) and run.ends_fallen


@measure()
def grows_unseen(run: "Run", role: str, flat: str) -> bool:
    """Return whether a role's texts reach `longer` times their first length while another role's Jaccard and entropy are near their start."""
    longer = is_longer(run, role)
    if not longer.any():
        return False
    series = [run.series(metric, flat) for metric in ("jaccard", "entropy")]
    return all(
        is_near(values.rolling(FIRST_ITERATIONS).mean()[longer.idxmax()], values.iloc[:FIRST_ITERATIONS].mean())
        for values in series
    )


@measure()
def writes_code(run: "Run", role: str) -> bool:
    """Return whether a role begins to write Python fences."""
    share = run.series("code_fence_rate", role)
    increase = share.rolling(FIRST_ITERATIONS).mean() - share.iloc[:FIRST_ITERATIONS].mean()
    return (increase >= RULES["more_code"]).any()


@measure()
def drops(run: "Run", role: str, metric: str) -> bool:
    """Return whether a share of a role's turns falls by `more_code`."""
    share = run.series(metric, role)
    decrease = share.iloc[:FIRST_ITERATIONS].mean() - share.rolling(FIRST_ITERATIONS).mean()
    return (decrease >= RULES["more_code"]).any()


@measure()
def approaches(run: "Run", role: str, flat: str) -> bool:
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


@measure()
def even_lengths(run: "Run", role: str) -> bool:
    """Return whether a role's replies are about as long as every other role's, over the whole run."""
    lengths = {name: run.series("length_mean", name).mean() for name in run.cell.policy}
    return all(is_near(length, lengths[role]) for length in lengths.values())


@measure()
def unseen_drift(run: "Run") -> bool:
    """Return whether accuracy and entropy look healthy while a role's chi2 or length rises."""
    drifts = [
        climb(run.series("chi2", role)) >= RULES["climbs"] or is_longer(run, role).any()
        for role in trained_part(run.cell.policy)
    ]
    return not run.ends_fallen and keeps_entropy(run) and any(drifts)


def wrong_agreement(answers: pd.DataFrame) -> float:
    """Return the share of pairs of wrong answers to one problem that are the same answer; NaN without such a pair.

    `answers` has a row per slot: problem, answer, and is_right. Slots without an answer are left out of it.
    """
    wrong = answers[~answers["is_right"]]
    pairs = [a == b for _, group in wrong.groupby("problem") for a, b in combinations(group["answer"], 2)]
    return sum(pairs) / len(pairs) if pairs else math.nan


def slot_answers(run: "Run", role: str, step: int) -> pd.DataFrame:
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


@measure()
def wrong_agreement_gain(run: "Run", role: str) -> float:
    """Return `wrong_agreement` at the last validation minus that of the untrained workflow."""
    return wrong_agreement(slot_answers(run, role, run.steps["end"])) - wrong_agreement(slot_answers(run, role, 0))
