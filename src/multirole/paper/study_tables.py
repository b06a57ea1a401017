"""What a study measures: what the number of updates, the schedule and the order of rows do to the comparison of policies, what
each remedy does, and what the single agent reaches at the budgets of a workflow. None of them is in the paper.

Every run of a study differs from a run of the grid in one thing and shares its seed and problems, so that all differences are
paired by both.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from multirole.diagnostics.names import cell_name
from multirole.experiment.cell import Cell
from multirole.paper.results import Key, Results
from multirole.paper.statistics import bootstrap, difference
from multirole.paper.study import Study
from multirole.paper.twins import SHOWN, Run, Twins, at, run_of, twins
from multirole.paper.write import number


def changes(found: Iterable[Twins], **counts: str) -> pd.DataFrame:
    """Peak and end of each variant beside its twin in the grid; `counts` are numbers and the properties of `Run` that they count."""
    rows = []
    for twin in found:
        where = dict(zip(("workflow", "policy", "task", "variant"), twin[:4], strict=True))
        for name, what in counts.items():
            before, after = (sum(getattr(run, what) for run in runs) for runs in (twin.usual, twin.changed))
            rows += [number(f"{name}, grid", before, "count", **where), number(name, after, "count", **where)]
        for x, place in SHOWN.items():
            usual, changed = at(twin.usual, x), at(twin.changed, x)
            rows += [
                number(f"{place}, grid", bootstrap(usual), "accuracy", **where),
                number(place, bootstrap(changed), "accuracy", **where),
                number(f"change at the {place}", difference(changed, usual), "difference", **where),
            ]
    return pd.DataFrame(rows)


def matched_updates(results: Results, study: Study) -> pd.DataFrame:
    """One step per iteration against one step per batch of rows, and against the single agent."""
    found, rows = list(twins(results, study, "updates")), []
    for twin in found:
        single = results.outcomes("single", "sp", twin.task, "best")
        where = dict(zip(("workflow", "policy", "task", "variant"), twin[:4], strict=True))
        if single is not None:
            rows.append(number("peak − SA-RL", difference(at(twin.changed, "best"), single), "difference", **where))
    return pd.concat([changes(found, falls="falls"), pd.DataFrame(rows)])


def setup(results: Results, study: Study) -> pd.DataFrame:
    """What the schedule, its clock and the order of rows change."""
    found = twins(results, study, "setup")
    return changes((twin for twin in found if twin.usual[0].cell.id != twin.changed[0].cell.id), falls="falls")


def remedies(results: Results, study: Study) -> pd.DataFrame:
    """What each remedy, and one step per iteration, changes in cells that fall."""
    tried = list(twins(results, study, "remedies"))
    cells = list(dict.fromkeys(twin[:3] for twin in tried))
    steps = [twin for twin in twins(results, study, "updates") if twin[:3] in cells]
    found = sorted([*tried, *steps], key=lambda twin: cells.index(twin[:3]))
    return changes(found, falls="falls", alarms="is_announced")


def policies(results: Results, study: Study) -> pd.DataFrame:
    """IP minus SP in the grid and under each variant."""
    found, rows = list(twins(results, study, "updates", "setup")), []
    by_cell = {(twin.workflow, twin.task, twin.variant, twin.policy): twin for twin in found}
    for ip in sorted(found, key=lambda twin: (twin.workflow, twin.task)):
        sp = by_cell.get((ip.workflow, ip.task, ip.variant, "sp"))
        if ip.policy == "ip" and sp is not None and len(sp.usual) == len(ip.usual):
            for x, place in SHOWN.items():
                where = {"workflow": ip.workflow, "task": ip.task, "at": place, "variant": ip.variant}
                usual, changed = (at(i, x) - at(s, x) for i, s in zip(ip[-2:], sp[-2:], strict=True))  # (S, P) each
                gaps = {"IP − SP, grid": usual, "IP − SP, variant": changed, "change": changed - usual}
                rows += [number(name, bootstrap(gap), "difference", **where) for name, gap in gaps.items()]
    return pd.DataFrame(rows)


def controls(results: Results, study: Study) -> pd.DataFrame:
    """The single agent matched on iterations, updates and sampled tokens, beside the workflows of the same task."""
    runs: dict[tuple[str, str], list[Run]] = {}

    def add(cell: Cell, variant: str) -> None:
        name = ", ".join(filter(None, [cell_name(cell.workflow, cell.policy_name), variant]))
        if run := run_of(cell, results.folder.parent):
            runs.setdefault((cell.task, name), []).append(run)

    for task in dict.fromkeys(where.split()[2] for _, where, _ in study.runs("controls")):
        usual = [cell for cell in results.grid.cells() if cell.task == task]
        for cell in sorted(usual, key=lambda cell: (cell.workflow != "single", cell.workflow)):
            add(cell, "as many iterations" if cell.workflow == "single" else "")
        for variant, _, cell in [*study.runs("controls"), *study.runs("updates")]:
            if cell.task == task:
                add(cell, variant)
    rows = []
    for (task, name), found in runs.items():
        where = {"task": task, "run": name}
        tokens = np.mean([run.table("roles")["tokens"].sum() for run in found])
        rows.append(number("tokens sampled (M)", tokens, "million", **where))
        rows.append(number("optimizer steps", np.mean([len(run.table("ledger")) for run in found]), "count", **where))
        rows += [number(place, bootstrap(at(found, x)), "accuracy", **where) for x, place in SHOWN.items()]
    return pd.DataFrame(rows)


def vote(answers: pd.DataFrame, k: int) -> pd.Series:
    """Map each problem to whether the most frequent of the first k answers is right; of equals the first wins.

    `answers` has a row per rollout and problem; where `extracted` is None, the answer does not vote.
    """
    first = answers[(answers["rollout"] < k) & answers["extracted"].notna()].sort_values("rollout", kind="stable")
    found = first.groupby(["problem", "extracted"], sort=False)["correct"].agg(["size", "first"])
    chosen = found.sort_values("size", ascending=False, kind="stable").groupby("problem")["first"].first()
    return chosen.reindex(sorted(answers["problem"].unique()), fill_value=False).astype(float)


def inference(results: Results, study: Study) -> pd.DataFrame:
    """Votes and best of k of the single agent at its peak, and the peak of each workflow, by completion tokens per problem."""
    rows, own, drawn = [], results.evaluated("own"), {}
    for draw in study.draws():
        if (table := results.drawn(draw)) is not None:
            table["extracted"] = table["answer"].map(draw.cell.make_task().extract)
            drawn.setdefault(draw.cell.task, []).append(table)
    for task, draws in drawn.items():
        found = []
        for k in range(1, study.rollouts + 1):
            firsts = [table[table["rollout"] < k] for table in draws]
            spent = np.mean([one.groupby("problem")["completion_tokens"].sum().mean() for one in firsts])
            votes = np.stack([vote(table, k) for table in draws])
            best = np.stack([one.groupby("problem")["correct"].any().astype(float) for one in firsts])
            found.append((f"Single agent, vote of {k}" if k > 1 else "Single agent, once", spent, votes))
            found += [(f"Single agent, best of {k} (an oracle's choice)", spent, best)] if k > 1 else []
        for workflow, policy in dict.fromkeys(k[:2] for k in results.runs if k.task == task and k.workflow != "single"):
            keys = [Key(workflow, policy, task, seed) for seed in results.seeds(workflow, policy, task)]
            at_peak = [own[(own[[*Key._fields, "step"]] == [*key, results.steps(key)["best"]]).all(axis=1)] for key in keys]
            spent = np.mean([one["completion_tokens"].mean() for one in at_peak])
            peaks = results.outcomes(workflow, policy, task, "best")
            found.append((f"{cell_name(workflow, policy)}, peak", spent, peaks))
        for name, tokens, right in sorted(found, key=lambda one: one[1]):
            where = {"task": task, "run": name}
            rows.append(number("completion tokens per problem", tokens, "count", **where))
            rows.append(number("accuracy", bootstrap(right), "accuracy", **where))
    return pd.DataFrame(rows)
