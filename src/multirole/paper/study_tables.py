"""What a study measures: what the number of updates, the schedule and the order of rows do to the comparison of policies, what
keeps a judging role's skill, and what the single agent reaches at the budgets of a workflow. None of them is in the paper.

A run of a study differs from a run of the grid in one thing and shares its seed and problems. Pairing by seed removes little of the
noise of an end, since two runs that differ in rounding alone part after some iterations: the A/A row of every table shows how much.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.diagnostics.names import cell_name
from multirole.experiment.cell import Cell
from multirole.paper.claims import DECLARED, LEAST_CELLS
from multirole.paper.grid import LINES
from multirole.paper.results import Key, Results, Run, accuracies
from multirole.paper.skills import MEASURES, gain_of
from multirole.paper.statistics import ALL, ALPHA, RULES, corrected, difference, seeds_needed, t_interval
from multirole.paper.study import Study
from multirole.paper.write import number

SHOWN = {"best": "peak", "terminal": "end"}


class Twins(NamedTuple):
    """A cell of the grid and a variant of it: the runs of the seeds that have both."""

    workflow: str
    policy: str
    task: str
    variant: str
    usual: list[Run]
    changed: list[Run]

    def where(self) -> dict[str, str]:
        """The keys of its line in a table."""
        return dict(zip(self._fields[:4], self[:4], strict=True))

    def at(self, name: str) -> tuple[pd.Series, pd.Series]:
        """Accuracies of both at a named checkpoint."""
        return accuracies(self.usual, name), accuracies(self.changed, name)


def twins(results: Results, study: Study, *questions: str, control: str | None = None) -> Iterator[Twins]:
    """Yield every variant of the questions on every cell that has a packed run of both, in the study's order.

    The other run is the grid's, or that of the variant `control`.
    """
    found: dict[tuple[str, ...], list[tuple[Run, Run]]] = {}
    for question in questions:
        for name, where, cell in study.runs(question):
            other = study.cell(control, where, cell.seed) if control else study.grid.cell(*where.split(), cell.seed)
            usual, changed = results.find(other), results.find(cell)
            if usual and changed and usual is not changed:
                found.setdefault((*where.split(), name), []).append((usual, changed))
    for coordinates, pairs in found.items():
        yield Twins(*coordinates, *(list(runs) for runs in zip(*pairs, strict=True)))


def beside(name: str, usual: pd.Series, changed: pd.Series, where: dict, unit: str = "accuracy") -> list[dict]:
    """A number of the twins and of the variant, and its change; one value per seed each."""
    change = f"change {'at' if unit == 'accuracy' else 'of'} the {name}"
    return [
        number(f"{name}, twin", t_interval(usual), unit, **where),
        number(name, t_interval(changed), unit, **where),
        number(change, difference(changed, usual), "difference", **where),
    ]


def with_means(rows: list[dict]) -> list[dict]:
    """Add the mean over workflows of every variant's differences, where enough cells have enough seeds."""
    means: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["unit"] == "difference" and row["workflow"] != "single" and row["seeds"] >= RULES["least_seeds"]:
            means.setdefault((row["variant"], row["number"]), []).append(row["value"])
    where = {"workflow": ALL, "policy": "", "task": ""}
    return rows + [
        number(name, t_interval(values), "difference", **where, variant=variant)
        for (variant, name), values in means.items()
        if len(values) >= LEAST_CELLS
    ]


def changes(results: Results, study: Study, question: str) -> list[dict]:
    """Falls, peak and end of each variant beside its twin in the grid, the mean over the cells of a variant, and the A/A pairs."""
    rows = []
    for twin in twins(results, study, question, "aa"):
        where = twin.where()
        counts = {"runs": len(twin.changed)}
        for whose, runs in ((", twin", twin.usual), ("", twin.changed)):
            counts[f"falls{whose}"] = sum(run.falls for run in runs)
            counts[f"ending fallen{whose}"] = sum(run.ends_fallen for run in runs)
        rows += [number(name, count, "count", **where) for name, count in counts.items()]
        for x, place in SHOWN.items():
            rows += beside(place, *twin.at(x), where)
    return with_means(rows)


def matched_updates(results: Results, study: Study) -> pd.DataFrame:
    """One step per iteration against one step per batch of rows, and against the single agent."""
    rows = []
    for twin in twins(results, study, "updates"):
        apart = difference(accuracies(twin.changed, "best"), results.accuracy("single", "sp", twin.task, "best"))
        rows += [number("peak − SA-RL", apart, "difference", **twin.where())] if apart.seeds else []
    return pd.DataFrame(changes(results, study, "updates") + with_means(rows))


def setup(results: Results, study: Study) -> pd.DataFrame:
    """What the schedule, its clock, dual clip and the order of rows change."""
    return pd.DataFrame(changes(results, study, "setup"))


def kept(found: Iterable[Twins]) -> pd.DataFrame:
    """The judging role's gain with each variant, and the end."""
    rows = []
    for twin in found:
        where = twin.where() | {"role": MEASURES[twin.workflow][0]}
        pairs = zip(twin.usual, twin.changed, strict=True)
        ends = [[gain_of(run, where["role"])[-2:].mean() for run in pair] for pair in pairs]
        gains = pd.DataFrame(ends, columns=["usual", "changed"]).dropna()
        rows.append(number("runs", len(twin.changed), "count", **where))
        if len(gains):
            rows += beside("gain", gains["usual"], gains["changed"], where, "gain")
        rows += beside("end", *twin.at("terminal"), where)
    return pd.DataFrame(rows)


def judges(results: Results, study: Study) -> pd.DataFrame:
    """Whether an arm keeps the judging role's skill, against the control, by the rule of `claims.yaml`."""
    found = list(twins(results, study, "judges", control=DECLARED["judges"]["control"]))
    if not found:
        return pd.DataFrame()
    table = corrected(kept([*found, *twins(results, study, "aa")]))
    keys, rows = list(Twins._fields[:4]), []
    for where, mine in table.groupby(keys, sort=False):
        by = mine.set_index("number")
        if {"change of the gain", "change at the end"} <= set(by.index):
            gained, lost = by.loc["change of the gain"], by.loc["change at the end"]
            protects = gained["p_holm"] < ALPHA and gained["value"] > 0 and lost["value"] >= -DECLARED["judges"]["lost"]
            about = dict(zip(keys, where, strict=True)) | {"role": mine["role"].iloc[0]}
            rows.append(number("protects", float(protects), "count", **about))
    return pd.concat([table.drop(columns=["p_holm", "p_match_holm"]), pd.DataFrame(rows)], ignore_index=True)


def power(results: Results, study: Study) -> pd.DataFrame:
    """The spread of what is compared, and the seeds that a paired t test needs to find effects of the declared sizes."""
    compared = {}
    for x, place in SHOWN.items():
        within = []
        for workflow, policy, task in dict.fromkeys(key[:3] for key in results.runs if key.workflow != "single"):
            ends = results.accuracy(workflow, policy, task, x)
            within += [ends - ends.mean()] if len(ends) > 1 else []
            gap = difference(ends, results.accuracy(workflow, "sp", task, x))
            if policy == "ip" and gap.seeds:
                compared["IP − SP", cell_name(workflow, "ip", task).replace("-IP", ""), place] = gap
        if within:  # two runs of one cell: sqrt 2 times the pooled deviation of a run from its cell
            apart = pd.concat(within)
            sd = float(np.sqrt(2 * (apart**2).sum() / (len(apart) - len(within))))
            of_pairs = t_interval([0.0])._replace(sd=sd, seeds=len(apart))
            compared["noise floor: two seeds of one cell", ALL, place] = of_pairs
        for twin in twins(results, study, "aa", "updates"):
            usual, changed = twin.at(x)
            compared[f"{twin.variant} − grid", cell_name(*twin[:3]), place] = difference(changed, usual)
    rows = []
    for (what, cell, place), found in compared.items():
        where = {"compared": what, "cell": cell, "at": place}
        rows.append(number("runs", found.seeds, "count", **where))
        rows.append(number("SD (points)", 100 * found.sd, "tokens", **where))
        for effect in RULES["effects"]:
            needed = seeds_needed(found.sd, effect) if found.seeds > 1 else None
            rows.append(number(f"seeds for {100 * effect:.0f} points", needed or np.nan, "count", **where))
    return pd.DataFrame(rows)


def controls(results: Results, study: Study) -> pd.DataFrame:
    """The single agent matched on iterations, updates and sampled tokens, beside the workflows of the same task.

    Every workflow's peak is also compared, paired by seed, with that of each variant of the single agent; one with other problems per
    iteration than the grid's, with the variants that have as many, as was declared.
    """
    usual = results.grid.cells()[0]
    runs: dict[tuple[str, str], list[Run]] = {}
    agents: dict[tuple[str, str], list[Run]] = {}  # (task, variant)

    def add(cell: Cell, variant: str) -> None:
        name = ", ".join(filter(None, [cell_name(cell.workflow, cell.policy_name), variant]))
        if run := results.find(cell):
            runs.setdefault((cell.task, name), []).append(run)

    for task in dict.fromkeys(where.split()[2] for _, where, _ in study.runs("controls")):
        in_grid = [cell for cell in results.grid.cells() if cell.task == task]
        for cell in sorted(in_grid, key=lambda cell: (cell.workflow != "single", cell.workflow)):
            add(cell, "as many iterations" if cell.workflow == "single" else "")
        for variant, _, cell in [*study.runs("controls"), *study.runs("updates")]:
            if cell.task != task:
                continue
            add(cell, variant)
            if cell.workflow == "single" and (run := results.find(cell)):
                agents.setdefault((task, variant), []).append(run)
    rows: list[dict] = []
    gaps: dict[tuple[str, str, str], list[pd.Series]] = {}  # (task, variant, the agent's) -> by seed, for each workflow
    for (task, name), found in runs.items():
        where = {"task": task, "run": name}
        rows.append(number("runs", len(found), "count", **where))
        tokens = np.mean([run.table("roles")["tokens"].sum() for run in found])
        rows.append(number("tokens sampled (M)", tokens, "million", **where))
        rows.append(number("optimizer steps", np.mean([len(run.table("ledger")) for run in found]), "count", **where))
        rows += [number(place, t_interval(accuracies(found, x)), "accuracy", **where) for x, place in SHOWN.items()]
        cell = found[0].cell
        for (of, variant), singles in agents.items() if cell.workflow != "single" else ():
            if of != task or cell.n_problems not in (usual.n_problems, singles[0].cell.n_problems):
                continue
            gap = (accuracies(found, "best") - accuracies(singles, "best")).dropna()
            if len(gap):
                rows.append(number(f"peak − {variant}", t_interval(gap), "difference", **where))
                gaps.setdefault((task, name.partition(", ")[2], variant), []).append(gap)
    for (task, changed, variant), cells in gaps.items():
        if len(cells) == len(LINES) - 1:  # every workflow and policy
            where = {"task": task, "run": ", ".join(filter(None, [ALL, changed]))}
            mean = pd.concat(cells, axis=1).dropna().mean(axis=1)
            rows.append(number(f"peak − {variant}", t_interval(mean), "difference", **where))
    return pd.DataFrame(rows)


def vote(answers: pd.DataFrame, k: int) -> pd.Series:
    """Map each problem to whether the most frequent of the first k answers is right; of equals the first wins.

    `answers` has a row per rollout and problem; where `extracted` is None, the answer does not vote.
    """
    first = answers[(answers["rollout"] < k) & answers["extracted"].notna()].sort_values("rollout", kind="stable")
    found = first.groupby(["problem", "extracted"], sort=False)["correct"].agg(["size", "first"])
    chosen = found.sort_values("size", ascending=False, kind="stable").groupby("problem")["first"].first()
    return chosen.reindex(sorted(answers["problem"].unique()), fill_value=False).astype(float)


def tokens_per_problem(seeds: list[pd.DataFrame]) -> dict[str, float]:
    """What is counted -> the tokens of all answers to a problem, mean over problems and seeds."""
    spent = [one.groupby("problem")[["completion_tokens", "prompt_tokens"]].sum().mean() for one in seeds]
    sampled, read = pd.concat(spent, axis=1).mean(axis=1)
    return {"vote": sampled, "vote, prompts counted": sampled + read}


def inference(results: Results, study: Study) -> pd.DataFrame:
    """Votes and best of k of the single agent at its peak, and the peak of each workflow, by tokens per problem.

    A workflow is compared, paired by seed, with the largest vote of no more tokens and the smallest of no fewer, once by sampled tokens
    and once by all tokens, prompts included.
    """
    rows, own, drawn = [], results.evaluated("own"), {}
    for draw in study.draws():
        if (table := results.drawn(draw)) is not None:
            table["extracted"] = table["answer"].map(draw.cell.make_task().extract)
            drawn.setdefault(draw.cell.task, {})[draw.cell.seed] = table
    for task, draws in drawn.items():
        found, votes = [], []
        for k in range(1, study.rollouts + 1):
            firsts = [table[table["rollout"] < k] for table in draws.values()]
            spent = tokens_per_problem(firsts)
            of_seeds = pd.Series({seed: vote(table, k).mean() for seed, table in draws.items()})
            votes.append((spent, of_seeds))
            best = [one.groupby("problem")["correct"].any().mean() for one in firsts]
            name = f"Single agent, vote of {k}" if k > 1 else "Single agent, once"
            found.append((name, spent, of_seeds, {}))
            found += [(f"Single agent, best of {k} (an oracle's choice)", spent, best, {})] if k > 1 else []
        for workflow, policy in dict.fromkeys(k[:2] for k in results.runs if k.task == task and k.workflow != "single"):
            runs, peaks = results.runs_of(workflow, policy, task), results.accuracy(workflow, policy, task, "best")
            at_peak = [[workflow, policy, task, seed, run.steps["best"]] for seed, run in runs.items()]
            played = [own[(own[[*Key._fields, "step"]] == one).all(axis=1)] for one in at_peak]
            if not any(map(len, played)):  # not all may be evaluated yet
                continue
            spent, apart = tokens_per_problem([one for one in played if len(one)]), {}
            for name, tokens in spent.items():
                no_more = [right for cost, right in votes if cost[name] <= tokens]
                no_fewer = [right for cost, right in votes if cost[name] >= tokens]
                for which, right in [("smaller", one) for one in no_more[-1:]] + [
                    ("larger", one) for one in no_fewer[:1]
                ]:
                    apart[f"minus the next {which} {name}"] = difference(peaks, right)
            found.append((f"{cell_name(workflow, policy)}, peak", spent, peaks, apart))
        for name, tokens, right, apart in sorted(found, key=lambda one: one[1]["vote"]):
            where = {"task": task, "run": name}
            rows.append(number("sampled tokens per problem", tokens["vote"], "count", **where))
            rows.append(number("with prompts", tokens["vote, prompts counted"], "count", **where))
            rows.append(number("accuracy", t_interval(right), "accuracy", **where))
            rows += [number(label, interval, "difference", **where) for label, interval in apart.items()]
    return pd.DataFrame(rows)
