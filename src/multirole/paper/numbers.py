"""How the tables write names and numbers, and the sentences that their captions share."""

from collections.abc import Callable, Sequence

import numpy as np

from multirole.paper.results import Results
from multirole.paper.statistics import OUTER, Interval, method

MISSING = "–"
WORKFLOW_NAMES = {
    "eval_opt": "Eval-Opt",
    "voting": "Voting",
    "orch_workers": "Orch-Workers",
    "single": "single agent",
}
POLICY_NAMES = {"ip": "IP", "sp": "SP"}
TASK_NAMES = {"math": "Math", "code": "Code"}
Form = Callable[[float], str]


def policy_label(workflow: str, policy: str) -> str:
    """ "IP", "SP", or "SA-RL" for the single agent, to whom the two are the same."""
    return "SA-RL" if workflow == "single" else POLICY_NAMES[policy]


def fixed(decimals: int, scale: float = 1.0, sign: str = "") -> Form:
    """A format of so many decimals, after a multiplication; `sign="+"` writes it always."""
    return lambda value: f"{scale * value:{sign},.{decimals}f}".replace("-", "−")


def significant(value: float) -> str:
    """Three significant digits; two, and a power of ten, where the number is very small or very large."""
    size = abs(value)
    if size and not 1e-3 <= size < 1e5:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    elif size >= 100:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{2 - int(np.floor(np.log10(size)))}f}" if size else "0"
    return text.replace("-", "−")


def bracketed(interval: Interval | None, form: Form) -> str:
    """A mean with its interval."""
    if interval is None:
        return MISSING
    return f"{form(interval.mean)} [{form(interval.low)}, {form(interval.high)}]"


def percent(interval: Interval | None) -> str:
    """A fraction in percent, with its interval."""
    return bracketed(interval, fixed(1, 100))


def points(interval: Interval | None) -> str:
    """A difference of fractions in percentage points, with its interval."""
    return bracketed(interval, fixed(1, 100, "+"))


def spread(values: Sequence[float], middle: Callable[[Sequence[float]], float], form: Form) -> str:
    """The middle (mean or median) of one value per seed, and the range over seeds unless they agree."""
    if not len(values):
        return MISSING
    low, high = form(min(values)), form(max(values))
    return form(float(middle(values))) + (f" [{low}, {high}]" if low != high else "")


def listed(items: Sequence[object]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def sample(results: Results) -> str:
    """n, the task, the scale and the seeds."""
    cell, seeds = results.grid.cells()[0], results.grid.seeds
    tasks = ", ".join(dict.fromkeys(c.task_name for c in results.grid.cells()))
    n = "all" if cell.n_validation is None else f"n = {cell.n_validation}"
    over = f"mean over seeds {listed(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]} alone"
    return f"Scale {cell.scale}; {n} validation problems per task ({tasks}), one episode each; {over}."


def intervals(results: Results) -> str:
    """What the brackets are."""
    n = len(results.grid.seeds)
    text = f"Brackets: {method(n)}"
    if n < OUTER:
        return text + ": they know nothing of other seeds."
    fewer = " (problems only where fewer than three seeds are finished)" * (
        len(results.runs) < len(results.grid.cells())
    )
    return f"{text}{fewer}; so few seeds make them too narrow rather than too wide."


def unfinished(results: Results, kinds: Sequence[str] = ()) -> str:
    """How many of the grid's runs, and of its evaluations of these kinds, are not there."""
    asked = [e.adapters for e in results.grid.evaluations() if e.adapters in kinds]
    done = [kind for kind, _ in results.evaluations if kind in kinds]
    counts = [("runs", len(results.grid.cells()), len(results.runs))]
    counts += [(f"evaluations ({listed(kinds)})", len(asked), len(done))] if kinds else []
    missing = [f"{n - there} of {n} {what}" for what, n, there in counts if there < n]
    if not missing:
        return f"All {listed([f'{n} {what}' for what, n, _ in counts])} are finished."
    return (
        f"Not finished, or altered since: {listed(missing)}. {MISSING} stands where there is none, and every number is "
        "of the finished seeds only."
    )


def not_published(table: str) -> str:
    """Why there is no column of the paper's numbers."""
    return f"The numbers of the paper's {table} are not published in its text, so none stand beside these."
