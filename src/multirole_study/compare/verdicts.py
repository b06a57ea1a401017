"""Decide on an interval or a test: the words of every verdict, and the rule that chooses between them.

A verdict answers a question that states a direction, such as "does A end above B?":

    yes          decided in the stated direction
    no           decided in the other one
    equivalent   of accuracies: two one-sided tests put the difference within the margin
    undecided    all else

Without a verdict a line says why: "not run", "unfinished" (not all declared seeds), "unequal tokens" (an arm spent more), "not measured",
"not tested" (its number is shown, and nothing is asked of it).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from multirole_study.compare.intervals import Interval
from multirole_study.compare.rules import ALPHA

YES, NO, EQUIVALENT, UNDECIDED = "yes", "no", "equivalent", "undecided"
NOT_RUN, UNFINISHED, UNEQUAL, NOT_MEASURED = "not run", "unfinished", "unequal tokens", "not measured"
NOT_TESTED = "not tested"
NO_NUMBERS = (NOT_RUN, NOT_MEASURED)
"""Words of a line without a number: it has no run, or the measure is NaN in all of its runs."""
WITHOUT_VERDICT = (*NO_NUMBERS, UNFINISHED, UNEQUAL, NOT_TESTED)
VERDICT_OF = {"holds": YES, "fails": NO, "better": YES, "worse": NO}
"""Word of a committed declaration or of an older table -> verdict."""


class Rule(NamedTuple):
    """How an interval is decided: yes above `at` (or above `enough`), no below `at`.

    `sign` is -1 where the question states that the number is smaller. `at_most` bounds a number from above as well; `within` asks
    instead for an interval inside ± that number. A difference can be equivalent if `has_margin`; at `alpha` both sides are tested.
    """

    at: float = 0.0
    enough: float | None = None
    at_most: float | None = None
    within: float | None = None
    sign: int = 1
    alpha: float = ALPHA
    has_margin: bool = False
    least_seeds: int = 0

    @property
    def is_test_against_zero(self) -> bool:
        """Return whether the p of a test of zero decides, if there is one."""
        return self.at == 0 and self.enough is None and self.at_most is None and self.within is None


def side(low: float, high: float, at: float = 0.0, enough: float | None = None) -> str:
    """Decide by the side of a bound on which an interval lies: yes above `enough` (by default `at`), no below `at`."""
    if low > (at if enough is None else enough):
        return YES
    return NO if high < at else UNDECIDED


def inside(low: float, high: float, limit: float) -> str:
    """Decide whether a number is within ± `limit`: yes for an interval inside of it, no for one entirely outside."""
    if -limit < low and high < limit:
        return YES
    return NO if low > limit or high < -limit else UNDECIDED


def both(first: str, second: str) -> str:
    """Return the verdict on two bounds together."""
    if NO in (first, second):
        return NO
    return YES if (first, second) == (YES, YES) else UNDECIDED


OPPOSITE = {YES: NO, NO: YES, UNDECIDED: UNDECIDED}


def decide(interval: Interval, rule: Rule) -> str:
    """Return the verdict on an interval, whose `p` and `p_match` are those after correction.

    The test of zero decides where the rule asks about zero and there is one, the interval otherwise: they agree unless p was corrected.
    """
    if interval.seeds < rule.least_seeds:
        return UNDECIDED
    low, high = sorted(rule.sign * limit for limit in (interval.low, interval.high))
    if rule.within is not None:
        verdict = inside(low, high, rule.within)
    elif rule.is_test_against_zero and not math.isnan(interval.p):
        verdict = UNDECIDED if interval.p >= rule.alpha else YES if rule.sign * interval.mean > 0 else NO
    else:
        verdict = side(low, high, rule.sign * rule.at, rule.enough)
    if rule.at_most is not None:
        verdict = both(verdict, OPPOSITE[side(low, high, rule.at_most)])
    is_equivalent = rule.has_margin and interval.p_match < rule.alpha
    return EQUIVALENT if verdict == UNDECIDED and is_equivalent else verdict


# ---- verdicts on several lines


def any_of(verdicts: Sequence[str]) -> str:
    """Return the verdict on whether any of several lines is a yes. "No" needs a verdict on every line."""
    known = [verdict for verdict in verdicts if verdict not in NO_NUMBERS]
    if not known:
        return NOT_RUN
    if YES in known:
        return YES
    if all(verdict == UNFINISHED for verdict in known):
        return UNFINISHED
    return NO if all(verdict in (NO, EQUIVALENT) for verdict in verdicts) else UNDECIDED


def any_in_all(verdicts: Iterable[Sequence[str]]) -> str:
    """Return the verdict on whether any arm is a yes in all places; `verdicts` has the verdicts of each arm in every place."""
    kinds = [set(of_arm) for of_arm in verdicts]
    if all({*NO_NUMBERS, UNFINISHED} & of_arm for of_arm in kinds):
        return UNFINISHED if any(UNFINISHED in of_arm for of_arm in kinds) else NOT_RUN
    if any(of_arm == {YES} for of_arm in kinds):
        return YES
    return NO if all({NO, EQUIVALENT} & of_arm for of_arm in kinds) else UNDECIDED
