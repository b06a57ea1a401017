"""The paper's Tables 1-7 and the compute of a grid, one call each, from a results folder and nothing else.

`tables(results)` is all of them, in order. What is not finished yet is a dash, counted in the caption.
"""

from itertools import product

import numpy as np
import pandas as pd

from multirole.experiment.presets import TASKS
from multirole.paper.dynamics_table import table_2
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.numbers import (
    MISSING,
    TASK_NAMES,
    WORKFLOW_NAMES,
    intervals,
    not_published,
    percent,
    points,
    policy_label,
    sample,
    unfinished,
)  # fmt: skip
from multirole.paper.results import Key, Results
from multirole.paper.setup_tables import table_7, table_compute
from multirole.paper.signature_tables import table_4, table_5, table_6
from multirole.paper.statistics import Interval, McNemar, bootstrap, difference, mcnemar, split_half_peak
from multirole.paper.write import Table

Outcomes = dict[int, np.ndarray]
"""seed -> (P,) outcomes on the same problems in the same order."""
PEAK = (
    "The peak is the best evaluated checkpoint of a run, chosen on the problems it is read on, as in the paper: it is "
    "optimistic."
)


def of_runs(results: Results, workflow: str, policy: str, task: str, at: str = "best") -> Outcomes:
    """Validation outcomes at a named checkpoint."""
    outcomes = results.outcomes(workflow, policy, task, at)
    return {} if outcomes is None else dict(zip(results.seeds(workflow, policy, task), outcomes, strict=True))


def of_base(results: Results, workflow: str, task: str) -> Outcomes:
    """The untrained workflow: step 0 of its runs, which both policies share."""
    return of_runs(results, workflow, "ip", task, "base") | of_runs(results, workflow, "sp", task, "base")


def of_evaluations(results: Results, adapters: str, workflow: str, task: str) -> Outcomes:
    """Outcomes of a transfer."""
    outcomes = results.evaluation_outcomes(adapters, workflow, task)
    cells = [key for kind, key in results.evaluations if kind == adapters]
    seeds = sorted(key.seed for key in cells if (key.workflow, key.task) == (workflow, task))
    return {} if outcomes is None else dict(zip(seeds, outcomes, strict=True))


def of_split_halves(results: Results, workflow: str, policy: str, task: str) -> Outcomes:
    """Outcomes at peaks that were chosen without them."""
    seeds = results.seeds(workflow, policy, task)
    return {seed: split_half_peak(results.correct(Key(workflow, policy, task, seed))) for seed in seeds}


def mean(outcomes: Outcomes) -> Interval | None:
    """The mean with its interval; None of nothing."""
    return bootstrap(np.stack(list(outcomes.values()))) if outcomes else None


def paired(first: Outcomes, second: Outcomes) -> tuple[np.ndarray, np.ndarray] | None:
    """Both outcomes (S, P) in the seeds that both have; None where there is none."""
    seeds = [seed for seed in first if seed in second]
    return (np.stack([first[s] for s in seeds]), np.stack([second[s] for s in seeds])) if seeds else None


def minus(after: Outcomes, before: Outcomes) -> Interval | None:
    """Mean difference, paired by seed and problem."""
    pair = paired(after, before)
    return difference(*pair) if pair else None


def shown(numbers: dict[str, Interval | None]) -> dict[str, str]:
    """Percent of the accuracies, and points of the differences, whose names hold a minus sign."""
    return {name: points(number) if "−" in name else percent(number) for name, number in numbers.items()}


def rows_of(numbers: dict[str, Interval | None], **where: str) -> list[dict]:
    """One row per number, fractions; a number that is not there has none."""
    return [where | {"number": name} | number._asdict() for name, number in numbers.items() if number]


def labels(task: str, workflow: str) -> dict[str, str]:
    """The first two columns."""
    return {"task": TASK_NAMES[task], "workflow": WORKFLOW_NAMES[workflow]}


def table_1(results: Results) -> Table:
    """Validation accuracy: base, SA-RL, IP, SP and the residuals."""
    lines, values = [], []
    for task, workflow in product(TASKS, WORKFLOWS):
        single, ip, sp = (
            of_runs(results, w, p, task) for w, p in (("single", "sp"), (workflow, "ip"), (workflow, "sp"))
        )
        numbers = {
            "base": mean(of_base(results, workflow, task)),
            "SA-RL": mean(single),
            "IP": mean(ip),
            "SP": mean(sp),
            "IP − SA-RL": minus(ip, single),
            "SP − SA-RL": minus(sp, single),
        }
        lines.append(labels(task, workflow) | shown(numbers))
        values += rows_of(numbers, task=task, workflow=workflow)
    caption = (
        f"Validation accuracy in percent. {sample(results)} Base is the untrained workflow (step 0 of its runs). "
        f"SA-RL, IP and SP are peaks. {PEAK} The next table (table_1_checks) has the peak without that advantage. The "
        "last two columns are the paper's residuals in percentage points, paired by seed and problem; SA-RL knows no "
        f"workflow and is the same in all rows of a task. {intervals(results)} {not_published('Table 1')} "
        f"{unfinished(results)}"
    )
    title = "Table 1: validation accuracy of the base workflow, of SA-RL, IP and SP"
    return Table("table_1", title, caption, pd.DataFrame(lines), pd.DataFrame(values))


def table_1_checks(results: Results) -> Table:
    """Beyond the paper: the gain over base, the peak chosen on other problems, and what is left at the end."""
    lines, values = [], []
    cells = [*product(WORKFLOWS, POLICIES), ("single", "sp")]
    for task, (workflow, policy) in product(TASKS, cells):
        base, peak, final = (of_runs(results, workflow, policy, task, at) for at in ("base", "best", "terminal"))
        numbers = {
            "base": mean(base),
            "peak": mean(peak),
            "split-half peak": mean(of_split_halves(results, workflow, policy, task)),
            "final": mean(final),
            "peak − base": minus(peak, base),
            "final − peak": minus(final, peak),
        }
        lines.append(labels(task, workflow) | {"policy": policy_label(workflow, policy)} | shown(numbers))
        values += rows_of(numbers, task=task, workflow=workflow, policy=policy)
    caption = (
        f"Not in the paper. Validation accuracy in percent, differences in percentage points. {sample(results)} {PEAK} "
        "The split-half peak is not: its checkpoint is chosen on every second problem and read on the others, and the "
        "other way round. Final is the last checkpoint; final − peak is never positive, since no checkpoint is above "
        f"the peak. {intervals(results)} They do not count the choice of the checkpoint. {unfinished(results)}"
    )
    title = "Table 1, checked: split-half peaks and final accuracies"
    return Table("table_1_checks", title, caption, pd.DataFrame(lines), pd.DataFrame(values))


def table_1_mcnemar(results: Results) -> Table:
    """Beyond the paper: IP against SP at their peaks and at the end, with McNemar's test."""
    lines, values = [], []
    for (task, workflow), (at, name) in product(product(TASKS, WORKFLOWS), (("best", "peak"), ("terminal", "final"))):
        ip, sp = (of_runs(results, workflow, policy, task, at) for policy in POLICIES)
        pair, line = paired(ip, sp), labels(task, workflow) | {"at": name}
        if pair is None:
            lines.append(line | dict.fromkeys(("IP − SP", "only IP right", "only SP right", "p"), MISSING))
            continue
        gap, test = difference(*pair), mcnemar(*pair)
        lines.append(line | {"IP − SP": points(gap)} | tested(test))
        values.append({"task": task, "workflow": workflow, "at": name} | gap._asdict() | test._asdict())
    caption = (
        "Not in the paper. IP − SP in percentage points, paired by seed and problem, at each run's peak and at its "
        f"last checkpoint. {sample(results)} {intervals(results)} Only IP right and only SP right count the discordant "
        "pairs (problem, seed), pooled over seeds; p is the exact two-sided McNemar test of them. Pairs of one "
        "problem are not independent: p is of this set of runs, says nothing of new seeds, and is not corrected for "
        f"the {len(lines)} tests. {PEAK} {unfinished(results)}"
    )
    title = "Table 1, checked: IP against SP on the same problems"
    return Table("table_1_mcnemar", title, caption, pd.DataFrame(lines), pd.DataFrame(values))


def tested(test: McNemar) -> dict[str, str]:
    """Discordant counts and p."""
    p = f"{test.p:.3f}" if test.p >= 0.001 else "< 0.001"
    return {"only IP right": f"{test.only_first:,}", "only SP right": f"{test.only_second:,}", "p": p}


def transfers(results: Results, task: str, workflow: str) -> dict[str, Outcomes]:
    """The accuracies of Table 3, by column."""
    return {
        "SA-RL": of_runs(results, "single", "sp", task),
        "base": of_base(results, workflow, task),
        "transfer": of_evaluations(results, "transfer", workflow, task),
        "transfer to all": of_evaluations(results, "transfer_all", workflow, task),
        "IP": of_runs(results, workflow, "ip", task),
        "SP": of_runs(results, workflow, "sp", task),
    }


TRANSFER = (
    "Transfer gives the single agent's adapter at its peak to the solver role alone (the generator; in Orch-Workers "
    "the worker) and none to the others; transfer to all gives it to every role."
)


def table_3(results: Results) -> Table:
    """The single agent's adapter inside each workflow, beside joint training."""
    lines, values = [], []
    for task, workflow in product(TASKS, WORKFLOWS):
        numbers = {name: mean(outcomes) for name, outcomes in transfers(results, task, workflow).items()}
        lines.append(labels(task, workflow) | shown(numbers))
        values += rows_of(numbers, task=task, workflow=workflow)
    caption = (
        f"Validation accuracy in percent. {sample(results)} {TRANSFER} The paper's table has SA-RL and transfer; base, "
        "transfer to all and the jointly trained IP and SP stand beside them for reference, base, SA-RL, IP and SP as "
        f"in Table 1. {PEAK} {intervals(results)} {not_published('Table 3')} "
        f"{unfinished(results, ('transfer', 'transfer_all'))}"
    )
    title = "Table 3: the single-agent adapter in the workflows"
    return Table("table_3", title, caption, pd.DataFrame(lines), pd.DataFrame(values))


def table_3_differences(results: Results) -> Table:
    """Beyond the paper: what the workflow adds to the single agent's adapter, and joint training to that."""
    lines, values = [], []
    for task, workflow in product(TASKS, WORKFLOWS):
        of = transfers(results, task, workflow)
        numbers = {
            "transfer − base": minus(of["transfer"], of["base"]),
            "transfer − SA-RL": minus(of["transfer"], of["SA-RL"]),
            "transfer to all − transfer": minus(of["transfer to all"], of["transfer"]),
            "IP − transfer": minus(of["IP"], of["transfer"]),
            "SP − transfer": minus(of["SP"], of["transfer"]),
        }
        lines.append(labels(task, workflow) | shown(numbers))
        values += rows_of(numbers, task=task, workflow=workflow)
    caption = (
        "Not in the paper. Differences between the columns of Table 3 in percentage points, paired by seed and "
        f"problem. {sample(results)} {TRANSFER} Transfer − SA-RL is what the workflow adds to an adapter that was "
        "trained without it; IP − transfer and SP − transfer are what joint training adds to that. IP and SP are "
        "peaks of their own runs; the transferred adapter was chosen at the single agent's peak, and so has the "
        f"smaller advantage. {intervals(results)} {unfinished(results, ('transfer', 'transfer_all'))}"
    )
    title = "Table 3, taken apart: workflow and joint training"
    return Table("table_3_differences", title, caption, pd.DataFrame(lines), pd.DataFrame(values))


def tables(results: Results) -> list[Table]:
    """Every table, in the paper's order."""
    makers = (
        table_1, table_1_checks, table_1_mcnemar, table_2, table_3, table_3_differences, table_4, table_5, table_6,
        table_7, table_compute,
    )  # fmt: skip
    return [make(results) for make in makers]
