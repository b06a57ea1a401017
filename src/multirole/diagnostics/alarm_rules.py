"""When an alarm's condition holds: thresholds in one table, and one function of the history per alarm (paper sec 5, A.6.2).

What is compared with a threshold is the *level* of a metric, its median over the last `SMOOTH` iterations: in absolute
terms, or against the *baseline*, the median of the metric's first `BASELINE` values, when the policy has hardly moved.
chi2 has a heavy tail, one unlikely token can lift a healthy iteration a thousandfold, and it jumps where a fall begins: its
level is a mean in which no single iteration can pass the threshold alone (`History.rise`). Perplexity is not watched: in
healthy runs single iterations reach a thousand times its level, and collapses moved it by a tenth.

Not covered: trouble within the first `BASELINE` iterations, which becomes the baseline, and a role that is bad from the start.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

BASELINE, SMOOTH = 5, 3  # iterations
CAP = 2.4  # below SMOOTH


@dataclass(frozen=True)
class Threshold:
    """`value` in the unit of what is watched; `how` it was set. "Healthy" levels are over the runs of
    results/ at the default learning rate that do not fall: 20 runs, 1,200 iterations (`benchmarks/alarms.py --levels`)."""

    alarm: str
    watches: str
    value: float
    how: str


_GUESS = "a first guess, not measured yet"
THRESHOLDS = {
    "chi2": Threshold("gradient_amplification, sp_role_capture_frequency", "rise of chi2 of a role with several slots", 0.0025,
                      "2.5 times the highest healthy rise of such a role, 0.0010"),
    "chi2_after": Threshold("the same", "rise of chi2_after", 0.025, "four times the highest healthy rise, 0.0064"),
    "chi2_one": Threshold("policy_drift", "rise of chi2 of a role with one slot", 0.02, "the smallest of 0.0075, 0.01, 0.0125, "
                          "0.015, 0.02 and 0.03 at which no healthy run rings; roles that choose freely, such as the "
                          "orchestrator, have healthy spikes above it"),
    "chi2_after_one": Threshold("policy_drift", "rise of chi2_after of a role with one slot", 0.2, "ten times the limit of chi2, as "
                                "above; at half of it a healthy orchestrator rings"),
    "grad_norm": Threshold("the same two", "its gradient norm over the baseline's", 2.5, "the highest healthy level is 1.9, of "
                           "roles with one slot 8.9"),
    "coherence": Threshold("gradient_amplification", "cosine between its slots' gradients, mean of 5 iterations", 0.3,
                           "the highest healthy mean is 0.11, slots that write the same have 0.4; grows with the rows of a step, 43 "
                           "per slot here"),
    "tokens": Threshold("sp_role_capture_tokens", "token_mass of the dominant role", 0.5, "half of the tokens; healthy runs "
                        "have 0.88 and more, so that it counts only with a sign of damage"),
    "frequency": Threshold("sp_role_capture_frequency", "row_mass of a role with several slots", 0.5, "half of the rows, likewise"),
    "asymmetry": Threshold("sp_role_capture_tokens", "baseline length of the dominant role over the other's", 1.5, _GUESS),
    "approach": Threshold("sp_role_capture_tokens", "part of that gap in length that the other has closed", 0.5,
                          "the highest healthy level is 0.32"),
    "entropy_left": Threshold("entropy_collapse", "entropy over the baseline's", 0.3, "healthy entropy falls to 0.08 as the "
                              "reward rises, so that this counts only without the gain below"),
    "entropy_lost": Threshold("entropy_collapse", "entropy lost (nats)", 0.05, "spares a role that hardly chooses anyway"),
    "gain": Threshold("entropy_collapse", "reward gained over what the baseline lacks to 1", 0.2, "wherever healthy entropy"
                      " is that low, at least 0.75 is gained"),
    "length_ratio": Threshold("length_inflation", "length_mean over the baseline's", 2.5, "the highest healthy level is 1.8"),
    "length_rise": Threshold("length_inflation, sp_role_capture_tokens", "tokens above the baseline, or of the gap", 8.0, _GUESS),
    "truncated": Threshold("length_inflation", "rise of truncated_rate", 0.1, "healthy runs truncate nothing"),
    "unparsed": Threshold("verdict_or_box_loss", "rise of unparsed_rate", 0.1, "the highest healthy rise is 0.06"),
    "lost_format": Threshold("verdict_or_box_loss", "fall of boxed_rate or verdict_rate from at least 0.5", 0.2,
                             "healthy validation turns lose at most 0.03"),
    "drift": Threshold("format_drift, sp_role_capture_tokens", "rise of code_fence_rate (from at most 0.2) or hedging_rate, "
                       "fall of terse_rate (from at least 0.8) or bare_stamp_rate (from at least 0.5)", 0.25,
                       "healthy validation turns move by at most 0.10"),
}  # fmt: skip
DRIFTS = (("chi2",), ("chi2_after",), ("grad_norm",))
NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gradient_amplification": (*DRIFTS, ("coherence",)),
    "policy_drift": (("chi2",), ("chi2_after",)),
    "sp_role_capture_tokens": (("token_mass", "length_mean"), ("token_mass", "code_fence_rate")),
    "sp_role_capture_frequency": tuple(("token_mass", "row_mass", *names) for names in DRIFTS),
    "entropy_collapse": (("entropy", "reward"),),
    "length_inflation": (("length_mean",), ("truncated_rate",)),
    "verdict_or_box_loss": (("unparsed_rate",), ("boxed_rate",), ("verdict_rate",)),
    "format_drift": (("code_fence_rate",), ("hedging_rate",), ("terse_rate",), ("bare_stamp_rate",)),
}
"""Any one of an alarm's sets of metrics is enough for it to be evaluated. `token_mass` and `row_mass` are derived from `tokens`
and `rows` where a row lacks them. `grad_share` decides nothing, since a terse role often has the larger gradient and is
captured all the same; it is told with the alarm."""
WATCHED = tuple(sorted({m for sets in NEEDS.values() for names in sets for m in names} | {"coherence", "grad_share"}))
READ = {*WATCHED, "tokens", "rows"}


class Reading(NamedTuple):
    """An alarm's condition that holds now: for which role, on which adapter, and what to say."""

    role: str
    adapter: str
    value: float
    threshold: float
    message: str


class History:
    """role -> metric -> one value per iteration, None where it was missing or not a number."""

    def __init__(self, policy: dict[str, str], slots: dict[str, int]) -> None:
        self.policy, self.slots = policy, slots
        self.iterations: list[int] = []
        self.values: dict[str, dict[str, list[float | None]]] = {
            role: {metric: [] for metric in WATCHED} for role in policy
        }

    def add(self, iteration: int, roles: dict[str, dict[str, float]]) -> None:
        """Append one iteration; a role without turns in it has no values."""
        self.iterations.append(iteration)
        for role, series in self.values.items():
            row = self._masses(role, roles) | roles.get(role, {})
            for metric, values in series.items():
                value = row.get(metric)
                values.append(None if value is None or not math.isfinite(value) else float(value))

    def _masses(self, role: str, roles: dict[str, dict[str, float]]) -> dict[str, float]:
        """The role's shares of its adapter's tokens and rows, for runs that did not record them."""
        peers = [values for name, values in roles.items() if self.policy[name] == self.policy[role]]
        masses = {}
        for mass, count in (("token_mass", "tokens"), ("row_mass", "rows")):
            if role in roles and all(count in values for values in peers):
                masses[mass] = roles[role][count] / max(1, sum(values[count] for values in peers))
        return masses

    def level(self, role: str, metric: str) -> float | None:
        """Median of the last `SMOOTH` iterations; None if one of them lacks the metric."""
        last = [value for value in self.values[role][metric][-SMOOTH:] if value is not None]
        return None if len(last) < SMOOTH else statistics.median(last)

    def baseline(self, role: str, metric: str) -> float | None:
        """Median of the metric's first `BASELINE` values; None before there are more than that."""
        present = [value for value in self.values[role][metric] if value is not None]
        return statistics.median(present[:BASELINE]) if len(present) > BASELINE else None

    def pair(self, role: str, metric: str) -> tuple[float, float] | None:
        """(level, baseline), None unless there are both."""
        level, baseline = self.level(role, metric), self.baseline(role, metric)
        return None if level is None or baseline is None else (level, baseline)

    def mean(self, role: str, metric: str) -> float | None:
        """Mean of the last `BASELINE` iterations, for what is too noisy for `level`; None if one of them lacks the metric."""
        last = [value for value in self.values[role][metric][-BASELINE:] if value is not None]
        return None if len(last) < BASELINE else statistics.fmean(last)

    def rise(self, role: str, metric: str, at_least: float) -> tuple[float, float] | None:
        """(mean rise over the last iterations, threshold) of a metric with a heavy tail; None without its values.

        The threshold is `at_least`, or the baseline where the engine's own error makes that larger. One iteration counts for
        at most `CAP` thresholds, so that the mean of three passes on the word of two.
        """
        window, baseline = self.values[role][metric][-SMOOTH:], self.baseline(role, metric)
        last = [value for value in window if value is not None]
        if baseline is None or len(last) < len(window):
            return None
        threshold = max(at_least, baseline)
        return statistics.fmean(min(max(v - baseline, 0.0), CAP * threshold) for v in last), threshold

    def shared(self) -> Iterator[tuple[str, list[str]]]:
        """Adapters that serve several roles."""
        for adapter in dict.fromkeys(self.policy.values()):
            roles = [role for role, name in self.policy.items() if name == adapter]
            if len(roles) > 1:
                yield adapter, roles

    def has(self, metrics: tuple[str, ...]) -> bool:
        """Whether some role has all of these."""
        return any(all(set(series[m]) - {None} for m in metrics) for series in self.values.values())


def _limit(name: str) -> float:
    return THRESHOLDS[name].value


def _chi2_rise(history: History, role: str) -> tuple[float, float, str] | None:
    """(value, threshold, words) if the role's chi2 rises beyond what healthy training shows."""
    for metric in ("chi2", "chi2_after"):
        rise = history.rise(role, metric, _limit(metric if history.slots[role] > 1 else f"{metric}_one"))
        if rise and rise[0] >= rise[1]:
            return *rise, f"{metric} rose to {history.values[role][metric][-1]:.2g}"
    return None


def _drift(history: History, role: str) -> tuple[float, float, str] | None:
    """(value, threshold, words) if the role moves beyond what healthy training shows, by chi2 or by its gradient norm."""
    if found := _chi2_rise(history, role):
        return found
    norms = history.pair(role, "grad_norm")
    if norms and norms[1] > 0 and norms[0] >= _limit("grad_norm") * norms[1]:
        ratio = norms[0] / norms[1]
        return ratio, _limit("grad_norm"), f"its gradient norm is {ratio:.1f} times its first level"
    return None


def gradient_amplification(history: History) -> Iterator[Reading]:
    """A role's slots push its adapter in one direction, or drift from the sampling policy together (paper sec 5.1).

    Drift counts on an adapter of the role's own; on a shared one it is `sp_role_capture_frequency`.
    """
    for role, adapter in history.policy.items():
        n_slots, coherence = history.slots[role], history.mean(role, "coherence")
        if n_slots < 2:
            continue
        is_alone = list(history.policy.values()).count(adapter) == 1
        found = _drift(history, role) if is_alone else None
        if found is None and coherence is not None and coherence >= _limit("coherence"):
            words = f"their gradients agree (mean cosine {coherence:.2f}, so that {n_slots} count as {n_slots * coherence:.1f})"
            found = (coherence, _limit("coherence"), words)
        if found:
            yield Reading(role, adapter, *found[:2], (
                f"the {role}, with {n_slots} slots per episode, moves faster than its rollouts can follow: {found[2]}. Try a lower "
                "learning_rate, fewer slots, or an adapter that it shares with another role."
            ))  # fmt: skip


def policy_drift(history: History) -> Iterator[Reading]:
    """A role with one slot outruns its rollouts, by no mechanism that the paper names: too large or too many steps.

    The roles with several slots are those of the two alarms above and below.
    """
    for role, adapter in history.policy.items():
        found = _chi2_rise(history, role) if history.slots[role] == 1 else None
        if found:
            yield Reading(role, adapter, *found[:2], (
                f"the {role} moves faster than its rollouts can follow: {found[2]}. Try a lower learning_rate, or updates='one', "
                "which takes one step per iteration."
            ))  # fmt: skip


def _owns(history: History, role: str, mass: str) -> str:
    """What the role owns of its adapter, in words."""
    share = history.level(role, "grad_share")
    gradient = "" if share is None else f" and {share:.0%} of the gradient"
    return f"{history.level(role, mass):.0%} of the {mass.removesuffix('_mass')}s{gradient} of adapter {history.policy[role]!r}"


def _taken_on(history: History, role: str, dominant: str) -> tuple[float, float, str] | None:
    """(value, threshold, words) if the role's turns come to resemble the dominant role's, in length or as programs."""
    own, theirs = history.pair(role, "length_mean"), history.baseline(dominant, "length_mean")
    if own and theirs and theirs - own[1] >= _limit("length_rise") and theirs >= _limit("asymmetry") * own[1]:
        closed = (own[0] - own[1]) / (theirs - own[1])
        if closed >= _limit("approach"):
            words = f"its length went from {own[1]:.0f} to {own[0]:.0f} tokens, towards {theirs:.0f}"
            return closed, _limit("approach"), words
    codes, their_code = history.pair(role, "code_fence_rate"), history.level(dominant, "code_fence_rate")
    if codes and their_code is not None and codes[1] <= 0.2 and their_code >= 0.5:
        rise = codes[0] - codes[1]
        if rise >= _limit("drift"):
            return rise, _limit("drift"), f"{codes[0]:.0%} of its turns are programs, where {codes[1]:.0%} were"
    return None


def sp_role_capture_tokens(history: History) -> Iterator[Reading]:
    """On a shared adapter, a role takes on the form of the one that owns most tokens (paper sec 5.2)."""
    for adapter, roles in history.shared():
        levels = {role: history.level(role, "token_mass") for role in roles}
        masses = {role: level for role, level in levels.items() if level is not None}
        if len(masses) < len(roles) or max(masses.values()) < _limit("tokens"):
            continue
        dominant = max(masses, key=masses.__getitem__)
        for role in roles:
            found = _taken_on(history, role, dominant) if role != dominant else None
            if found:
                yield Reading(role, adapter, *found[:2], (
                    f"the {role} takes on the form of the {dominant}, which owns {_owns(history, dominant, 'token_mass')}: "
                    f"{found[2]}. Read its turns; try an adapter for each of the two, or a smaller max_response_tokens."
                ))  # fmt: skip


def sp_role_capture_frequency(history: History) -> Iterator[Reading]:
    """A role owns a shared adapter by its number of slots, and the adapter escalates (paper sec 5.2)."""
    for adapter, roles in history.shared():
        for role in roles:
            rows = history.level(role, "row_mass")
            if history.slots[role] < 2 or rows is None or rows < _limit("frequency"):
                continue
            if found := _drift(history, role):
                yield Reading(role, adapter, *found[:2], (
                    f"the {role} owns {_owns(history, role, 'row_mass')}, which now escalates: {found[2]}. Read the other roles' "
                    "turns; try fewer slots, a lower learning_rate, or an adapter for each role."
                ))  # fmt: skip


def entropy_collapse(history: History) -> Iterator[Reading]:
    """A role becomes certain without having become right."""
    for role in history.policy:
        entropy, reward = history.pair(role, "entropy"), history.pair(role, "reward")
        if not entropy or not reward or entropy[1] - entropy[0] < _limit("entropy_lost"):
            continue
        left = entropy[0] / entropy[1]
        if left <= _limit("entropy_left") and reward[0] - reward[1] < _limit("gain") * (1 - reward[1]):
            yield Reading(role, history.policy[role], left, _limit("entropy_left"), (
                f"the {role} chooses less and less (entropy {entropy[0]:.3f} nats, {left:.0%} of its first level) while the reward "
                f"went from {reward[1]:.2f} to {reward[0]:.2f}. Try a larger clip_high, a lower learning_rate or a higher temperature."
            ))  # fmt: skip


def length_inflation(history: History) -> Iterator[Reading]:
    """A role writes much longer, or runs into its response cap."""
    for role, adapter in history.policy.items():
        advice = " Read its turns; if the length earns nothing, try a lower learning_rate or max_response_tokens."
        length, cut = history.pair(role, "length_mean"), history.pair(role, "truncated_rate")
        if length and length[0] >= max(length[1] + _limit("length_rise"), _limit("length_ratio") * length[1]):
            words = f"the {role} writes {length[0]:.0f} tokens where it wrote {length[1]:.0f}."
            yield Reading(role, adapter, length[0] / length[1], _limit("length_ratio"), words + advice)
        elif cut and cut[0] - cut[1] >= _limit("truncated"):
            words = f"{cut[0]:.0%} of the {role}'s turns hit the response cap, up from {cut[1]:.0%}."
            yield Reading(role, adapter, cut[0] - cut[1], _limit("truncated"), words + advice)


def _shifts(history: History, role: str, watched: Iterable[tuple[str, int, float, float]]) -> Iterator[tuple]:
    """(metric, change, level, baseline) of rates that moved up (sign 1) or down (-1) from a baseline within [low, high]."""
    for metric, sign, low, high in watched:
        rates = history.pair(role, metric)
        if rates and low <= rates[1] <= high:
            yield metric, sign * (rates[0] - rates[1]), *rates


def verdict_or_box_loss(history: History) -> Iterator[Reading]:
    """A role's turns can no longer be read as what they should be."""
    lost = (("boxed_rate", -1, 0.5, 1.0), ("verdict_rate", -1, 0.5, 1.0))
    for role, adapter in history.policy.items():
        checks = [("unparsed", shift) for shift in _shifts(history, role, [("unparsed_rate", 1, 0.0, 1.0)])]
        checks += [("lost_format", shift) for shift in _shifts(history, role, lost)]
        for name, (metric, change, level, baseline) in checks:
            if change >= _limit(name):
                yield Reading(role, adapter, change, _limit(name), (
                    f"the {role} is losing its format: {metric} went from {baseline:.2f} to {level:.2f}. Read its "
                    "turns; go back to an earlier checkpoint with a lower learning_rate, or set malformed_reward."
                ))  # fmt: skip
                break


def format_drift(history: History) -> Iterator[Reading]:
    """A role writes another role's kind of text: programs, hedged derivations, prose around a stamp (paper A.6.2).

    How alike slots are and how turns open is left out: healthy learning moves both by half.
    """
    watched = (
        ("code_fence_rate", 1, 0.0, 0.2), ("hedging_rate", 1, 0.0, 1.0), ("terse_rate", -1, 0.8, 1.0),
        ("bare_stamp_rate", -1, 0.5, 1.0),
    )  # fmt: skip
    for role, adapter in history.policy.items():
        for metric, change, level, baseline in _shifts(history, role, watched):
            if change >= _limit("drift"):
                yield Reading(role, adapter, change, _limit("drift"), (
                    f"the {role} writes differently: {metric} went from {baseline:.2f} to {level:.2f}. Compare its turns with the "
                    "other roles'; if it does their work, give it an adapter of its own."
                ))  # fmt: skip
                break


TESTS: dict[str, Callable[[History], Iterator[Reading]]] = {
    "gradient_amplification": gradient_amplification,
    "policy_drift": policy_drift,
    "sp_role_capture_tokens": sp_role_capture_tokens,
    "sp_role_capture_frequency": sp_role_capture_frequency,
    "entropy_collapse": entropy_collapse,
    "length_inflation": length_inflation,
    "verdict_or_box_loss": verdict_or_box_loss,
    "format_drift": format_drift,
}
