"""Alarms: what has happened to a role, said once, as soon as the training episodes show it.

Every rule compares a metric's *level*, the median of its last `SMOOTH` iterations, with where it stood before. `policy_drift` sees most
falls before the evaluation that shows them, `one_verdict` and `format_loss` the loss of a role's skill. None is a forecast: on seeds
that had set no threshold, the best announces falls hardly better than learning rate x optimizer steps does, which is known
before training (`benchmarks/alarms.py` measures it). Rules that were meant to announce them were removed, and so was one on the
reward, which few problems per iteration make too noisy to show a fall.

`alarm_callback` lets them ring in a training; readers of a run take them from its `roles` table. Not covered: trouble within the first
`BASELINE` iterations, which becomes the baseline, and a role that is bad from the start.
"""

import math
import statistics
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

BASELINE, SMOOTH = 5, 3  # iterations
REARM = 3  # iterations


class Rule(NamedTuple):
    """An alarm rings where `change(metric)` of a role is at least `threshold`; its baseline must lie in `within`."""

    alarm: str
    metric: str
    change: str
    threshold: float
    within: tuple[float, float] = (-math.inf, math.inf)


RULES = (
    Rule("policy_drift", "max_logprob_gap", "level", 3.1),
    Rule("one_verdict", "correct_verdict_rate", "share lost", 0.85, (0.1, 1.0)),
    Rule("format_loss", "unparsed_rate", "rise", 0.1),
)
"""`policy_drift` and `one_verdict` have the thresholds that separate best on seed 0 of an earlier embedded base, `format_loss` asks for a
tenth of the replies. Another scale may need others."""
READ = tuple(dict.fromkeys(rule.metric for rule in RULES))
"""The metrics that the rules read."""
SAID = {"level": "a level of {:.2g}", "share lost": "{:.0%} lost", "rise": "a rise of {:.2g}"}
ADVICE = {
    "policy_drift": "A token's log-probability moved that far within one batch of rollouts: lower learning_rate, or take fewer steps.",
    "one_verdict": "The evaluator no longer judges, and its loop runs to the last round: give it an outcome of its own (process_reward).",
    "format_loss": "Read the role's turns; what cannot be parsed is replaced by a default, so the accuracy need not show it.",
}


def change_of(change: str, values: list[float]) -> float | None:
    """How far the level of a series stands from where it stood before; None before there is a baseline and a level."""
    if len(values) <= BASELINE:
        return None
    if change == "level":  # a mean: single large values count
        return statistics.fmean(values[-SMOOTH:])
    level, baseline = statistics.median(values[-SMOOTH:]), statistics.median(values[:BASELINE])
    if change == "share lost":
        return 1.0 - level / baseline if baseline > 0 else 0.0
    return level - baseline  # "rise"


class Alarms:
    """Every alarm of a run. `new` holds those of the last update, `log` all of them, as rows.

    A row has iteration, alarm, role, adapter, value, threshold and message. `policy` maps roles to adapters. An alarm rings once
    per episode of trouble: again only after `REARM` iterations in a row without its condition.
    """

    def __init__(self, policy: dict[str, str], rules: Iterable[Rule] = RULES) -> None:
        self.policy, self.rules = policy, tuple(rules)
        self.last = 0
        self.values: dict[tuple[str, str], list[float]] = {}
        """(role, metric) -> its values so far, where it was measured."""
        self.new: list[dict] = []
        self.log: list[dict] = []
        self._quiet: dict[tuple[str, str], int] = {}
        """Ringing (alarm, role) -> iterations since its condition last held."""

    def update(self, iteration: int, roles: dict[str, dict[str, float]]) -> list[dict]:
        """Add one iteration (role -> metrics) and return what it announces. Iterations must ascend."""
        if iteration <= self.last:
            raise ValueError(
                f"Iterations must ascend, got {iteration} after {self.last}. After a resume, call `replay` with the record's rows first."
            )
        self.last = iteration
        measured = {
            (role, metric): float(row[metric])
            for role, row in roles.items()
            for metric in READ
            if row.get(metric) is not None and math.isfinite(row[metric])
        }
        for key, value in measured.items():
            self.values.setdefault(key, []).append(value)
        held = {(row["alarm"], row["role"]): row for row in self._holding(measured)}
        self.new = [{"iteration": iteration} | row for key, row in held.items() if key not in self._quiet]
        quiet = {key: 0 if key in held else n + 1 for key, n in self._quiet.items()}
        self._quiet = {key: n for key, n in quiet.items() if n < REARM} | dict.fromkeys(held, 0)
        self.log += self.new
        return self.new

    def _holding(self, measured: Iterable[tuple[str, str]]) -> Iterator[dict]:
        """The rules that hold now, of the metrics that this iteration measured."""
        for role, metric in measured:
            values = self.values[role, metric]
            for rule in self.rules:
                change = change_of(rule.change, values) if rule.metric == metric else None
                baseline = statistics.median(values[:BASELINE])
                if change is None or change < rule.threshold or not rule.within[0] <= baseline <= rule.within[1]:
                    continue
                level = statistics.median(values[-SMOOTH:])
                words = f"{metric} of the {role} went from {baseline:.3g} to {level:.3g}"
                yield {
                    "alarm": rule.alarm, "role": role, "adapter": self.policy[role], "value": change, "threshold": rule.threshold,
                    "message": f"{words} ({SAID[rule.change].format(change)}). {ADVICE[rule.alarm]}",
                }  # fmt: skip

    def replay(self, rows: Iterable[dict]) -> None:
        """Update with rows of `roles.parquet` in order of iteration: a resumed run's alarms from its own record."""
        for iteration, group in groupby(rows, key=lambda row: row["iteration"]):
            self.update(iteration, {row["role"]: row for row in group})
