"""What a study measures: what the number of updates, the schedule and the order of rows do to the comparison of policies, what
keeps a judging role's skill, and what the single agent reaches at the budgets of a workflow. None of them is in the paper.

A run of a study differs from a run of the grid in one thing and shares its seed and problems. Pairing by seed removes little of the
noise of an end, since two runs that differ in rounding alone part after some iterations: the A/A row of every table shows how much.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole_study.labels import TASK_NAMES, WORKFLOW_NAMES, cell_name
from multirole_study.paper import pack, skill_tables
from multirole_study.paper.claims import DECLARED, LEAST_CELLS
from multirole_study.paper.grid import LINES, POLICIES, WORKFLOWS, Study
from multirole_study.paper.output import Row, number
from multirole_study.paper.results import PLACES, Results, Run, accuracies
from multirole_study.paper.statistics import (
    ALL,
    ALPHA,
    RULES,
    Interval,
    corrected,
    difference,
    seeds_needed,
    t_interval,
    untested,
)

ARM = re.compile(r"(\d+) steps? of (\d+) rows")
"""The names of the factorial's variants."""
SINGLE = cell_name("single", "sp")


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

    def at(self, place: str) -> tuple[pd.Series, pd.Series]:
        """Accuracies of both at a named checkpoint."""
        return accuracies(self.usual, place), accuracies(self.changed, place)


def twins(results: Results, study: Study, *questions: str, control: str | None = None) -> Iterator[Twins]:
    """Yield every variant of the questions, or of all, on every cell with packed runs of both, in the study's order.

    The other run is the grid's, or that of the variant `control`.
    """
    found: dict[tuple[str, ...], list[tuple[Run, Run]]] = defaultdict(list)
    for question in questions or (None,):
        for name, where, cell in study.runs(question):
            other = study.cell(control, where, cell.seed) if control else study.grid.cell(*where.split(), cell.seed)
            usual, changed = results.find(other), results.find(cell)
            if usual and changed and usual is not changed:
                found[*where.split(), name].append((usual, changed))
    for coordinates, pairs in found.items():
        yield Twins(*coordinates, *(list(runs) for runs in zip(*pairs, strict=True)))


def beside(name: str, usual: pd.Series, changed: pd.Series, where: dict, unit: str = "accuracy") -> list[Row]:
    """A number of the twins and of the variant, and its change; one value per seed each."""
    change = f"change {'at' if unit == 'accuracy' else 'of'} the {name}"
    return [
        number(f"{name}, twin", t_interval(usual), unit, **where),
        number(name, t_interval(changed), unit, **where),
        number(change, difference(changed, usual), "difference", **where),
    ]


def with_means(rows: list[Row]) -> list[Row]:
    """Add the mean over workflows of every variant's differences, where enough cells have enough seeds."""
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["unit"] == "difference" and row["workflow"] != "single" and row["seeds"] >= RULES["least_seeds"]:
            means[row["variant"], row["number"]].append(row["value"])
    where = {"workflow": ALL, "policy": "", "task": ""}
    return rows + [
        number(name, t_interval(values), "difference", **where, variant=variant)
        for (variant, name), values in means.items()
        if len(values) >= LEAST_CELLS
    ]


def changes(results: Results, study: Study, of: str) -> list[Row]:
    """Falls, peak and end of each variant beside its twin in the grid, the mean over the cells of a variant, and the A/A pairs."""
    rows = []
    for twin in twins(results, study, of, "aa"):
        where = twin.where()
        rows.append(number("runs", len(twin.changed), "count", **where))
        for whose, runs in ((", twin", twin.usual), ("", twin.changed)):
            rows.append(number(f"falls{whose}", sum(run.falls for run in runs), "count", **where))
            rows.append(number(f"ending fallen{whose}", sum(run.ends_fallen for run in runs), "count", **where))
        for place in PLACES:
            rows += beside(place, *twin.at(place), where)
    return with_means(rows)


def matched_updates(results: Results, study: Study) -> list[Row]:
    """One step per iteration against one step per batch of rows, and against the single agent."""
    rows = []
    for twin in twins(results, study, "updates"):
        apart = difference(accuracies(twin.changed, "peak"), results.accuracy("single", "sp", twin.task, "peak"))
        rows.append(number("peak − SA-RL", apart, "difference", **twin.where()))
    return changes(results, study, "updates") + with_means(rows)


def phenomena_elsewhere(results: Results, study: Study) -> Iterator[Row]:
    """The lines of `skill_tables.phenomena` in each variant that has both policies, and the grid's SP − IP of its seeds."""
    found = {(twin.variant, twin.task, twin.workflow, twin.policy): twin for twin in twins(results, study)}
    for variant, task, (name, about) in product(study.variants, results.grid.tasks, skill_tables.LINES.items()):
        cells = {policy: (variant, task, about["workflow"], policy) for policy in POLICIES}
        if set(cells.values()) <= set(found):
            changed = skill_tables.changes(about, {policy: found[cell].changed for policy, cell in cells.items()})
            usual = skill_tables.changes(about, {policy: found[cell].usual for policy, cell in cells.items()})
            where = {"variant": variant, "task": task, "workflow": about["workflow"], "phenomenon": name}
            yield from (rows := list(skill_tables.phenomenon(changed, about, where)))
            if rows:
                gap = (usual["change, sp"] - usual["change, ip"]).reindex(changed.index).dropna()
                yield number("SP − IP, twin", untested(t_interval(gap)), rows[-1]["unit"], **where)


def kept(found: Iterable[Twins]) -> pd.DataFrame:
    """The judging role's gain with each variant, and the end."""
    rows = []
    for twin in found:
        where = twin.where() | {"role": skill_tables.MEASURES[twin.workflow][0]}
        pairs = zip(twin.usual, twin.changed, strict=True)
        ends = [[skill_tables.gain_of(run, where["role"])[-2:].mean() for run in pair] for pair in pairs]
        gains = pd.DataFrame(ends, columns=["usual", "changed"]).dropna()
        rows.append(number("runs", len(twin.changed), "count", **where))
        rows += beside("gain", gains["usual"], gains["changed"], where, "gain")
        rows += beside("end", *twin.at("end"), where)
    return pd.DataFrame(rows)


def judges(results: Results, study: Study) -> pd.DataFrame:
    """Whether an arm keeps the judging role's skill, against the control, by the rule of `claims.yaml`."""
    found = list(twins(results, study, "judges", control=DECLARED["judges"]["control"]))
    if not found:
        return pd.DataFrame()
    table, keys, rows = kept([*found, *twins(results, study, "aa")]), [*Twins._fields[:4], "role"], []
    for where, mine in corrected(table).groupby(keys, sort=False):
        by = mine.set_index("number")
        gained, lost = by.loc["change of the gain"], by.loc["change at the end"]
        protects = gained["p_holm"] < ALPHA and gained["value"] > 0 and lost["value"] >= -DECLARED["judges"]["lost"]
        rows.append(number("protects", float(protects), "count", **dict(zip(keys, where, strict=True))))
    return pd.concat([table, pd.DataFrame(rows)], ignore_index=True)


def arms(results: Results, study: Study) -> dict[tuple[int, int, float], list[Run]]:
    """(steps per iteration, rows per step, multiple of the grid's rate) -> the single agent's runs; the grid's are one arm."""
    found: dict[tuple[int, int, float], list[Run]] = {}
    for twin in twins(results, study, "factorial"):
        if len(twin.changed) < len(study.variants[twin.variant].seeds or study.seeds):
            continue  # an arm is read when all its runs are there
        usual, own = twin.usual[0].cell, twin.changed[0].cell
        steps, rows = map(int, ARM.match(twin.variant).groups())
        found[steps, rows, own.learning_rate / usual.learning_rate] = twin.changed
        found[1, usual.n_problems * usual.n_episodes, 1.0] = twin.usual
    return dict(sorted(found.items()))


def is_unstable(runs: list[Run], counted: str = "falls") -> bool:
    """Whether an arm is unstable by the rule of `claims.yaml`; "ends_fallen" counts terminal falls alone."""
    return sum(getattr(run, counted) for run in runs) >= DECLARED["factorial"]["unstable"]


def factorial(results: Results, study: Study) -> Iterator[Row]:
    """What becomes of the single agent in every arm."""
    for (steps, rows, rate), runs in arms(results, study).items():
        where = {"steps": steps, "rows": rows, "rate": f"{rate:g}"}
        taken = np.mean([len(table := run.table("ledger")) / table["iteration"].nunique() for run in runs])
        chi2 = np.median([run.table("roles")["chi2"].max() for run in runs])
        yield number("runs", len(runs), "count", **where)
        yield number("falls", sum(run.falls for run in runs), "count", **where)
        yield number("ending fallen", sum(run.ends_fallen for run in runs), "count", **where)
        yield number("unstable", float(is_unstable(runs)), "count", **where)
        for place in PLACES:
            yield number(place, t_interval(accuracies(runs, place)), "accuracy", **where)
        yield number("steps per iteration", taken, "tokens", **where)
        yield number("largest chi2, median", chi2, "ratio", **where)


def predictors(results: Results, study: Study) -> Iterator[Row]:
    """The threshold of each declared quantity that misjudges the fewest arms, also with terminal falls alone."""
    lines = [(*arm, is_unstable(runs), is_unstable(runs, "ends_fallen")) for arm, runs in arms(results, study).items()]
    known = pd.DataFrame(lines, columns=["steps", "rows", "rate", "unstable", "fallen"])
    for name, formula in DECLARED["factorial"]["predictors"].items() if lines else ():
        quantity, where = known.eval(formula), {"quantity": name}
        limit, errors = _best_threshold(quantity, known["unstable"])
        yield number("threshold", limit if limit < np.inf else np.nan, "ratio", **where)
        yield number("arms misjudged", errors, "count", **where)
        yield number("unstable arms", known["unstable"].sum(), "count", **where)
        errors = _best_threshold(quantity, known["fallen"])[1]
        yield number("arms misjudged, terminal falls", errors, "count", **where)
        yield number("unstable arms, terminal falls", known["fallen"].sum(), "count", **where)
        yield number("arms", len(known), "count", **where)


def _best_threshold(quantity: pd.Series, unstable: pd.Series) -> tuple[float, int]:
    """From which value on arms are best called unstable (inf: none), and how many that misjudges."""
    limits = [*np.unique(quantity), np.inf]
    errors = [int(((quantity >= limit) != unstable).sum()) for limit in limits]
    return limits[int(np.argmin(errors))], min(errors)


def power(results: Results, study: Study) -> Iterator[Row]:
    """The spread of what is compared, and the seeds in which a paired t test finds the declared effects."""
    for place in PLACES:
        for (what, cell), found in compared(results, study, place).items():
            where = {"compared": what, "cell": cell, "at": place}
            yield number("runs", found.seeds, "count", **where)
            yield number("SD (points)", 100 * found.sd, "tokens", **where)
            for effect in RULES["effects"]:
                needed = seeds_needed(found.sd, effect) if found.seeds > 1 else None
                yield number(f"seeds for {100 * effect:.0f} points", needed or np.nan, "count", **where)


def compared(results: Results, study: Study, place: str) -> dict[tuple[str, str], Interval]:
    """(what is compared, cell) -> the difference: of policies, of two seeds of a cell, of a variant."""
    found, within = {}, []
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        ends = {policy: results.accuracy(workflow, policy, task, place) for policy in POLICIES}
        within += [of - of.mean() for of in ends.values() if len(of) > 1]
        if (gap := difference(ends["ip"], ends["sp"])).seeds:
            found["IP − SP", f"{WORKFLOW_NAMES[workflow]}, {TASK_NAMES.get(task, task)}"] = gap
    if within:  # two runs of one cell: sqrt 2 times the pooled deviation of a run from its cell
        apart = pd.concat(within)
        sd = float(np.sqrt(2 * (apart**2).sum() / (len(apart) - len(within))))
        found["noise floor: two seeds of one cell", ALL] = t_interval([0.0])._replace(sd=sd, seeds=len(apart))
    for twin in twins(results, study, "aa", "updates"):
        usual, changed = twin.at(place)
        found[f"{twin.variant} − grid", cell_name(*twin[:3])] = difference(changed, usual)
    return found


def controls(results: Results, study: Study) -> Iterator[Row]:
    """The single agent matched on iterations, updates and sampled tokens, beside the workflows of the same task.

    Every workflow's peak is also compared, paired by seed, with that of each variant of the single agent; one with other problems per
    iteration than the grid's, with the variants that have as many, as was declared.
    """
    usual = results.grid.cells()[0].n_problems
    for task in dict.fromkeys(where.split()[2] for _, where, _ in study.runs("controls")):
        runs = runs_by_variant(results, study, task)
        agents = {variant: of for (name, variant), of in runs.items() if name == SINGLE and variant in study.variants}
        # (a workflow's variant, the agent's) -> differences by seed, one for each workflow and policy
        gaps: dict[tuple[str, str], list[pd.Series]] = defaultdict(list)
        for (name, variant), found in runs.items():
            where = {"task": task, "run": f"{name}, {variant}".removesuffix(", ")}
            tokens = np.mean([run.table("roles")["tokens"].sum() for run in found])
            yield number("runs", len(found), "count", **where)
            yield number("tokens sampled (M)", tokens, "million", **where)
            yield number("optimizer steps", np.mean([len(run.table("ledger")) for run in found]), "count", **where)
            for place in PLACES:
                yield number(place, t_interval(accuracies(found, place)), "accuracy", **where)
            for agent, others in agents.items() if name != SINGLE else ():
                gap = (accuracies(found, "peak") - accuracies(others, "peak")).dropna()
                if len(gap) and found[0].cell.n_problems in (usual, others[0].cell.n_problems):
                    yield number(f"peak − {agent}", t_interval(gap), "difference", **where)
                    gaps[variant, agent].append(gap)
        for (variant, agent), cells in gaps.items():
            if len(cells) == len(LINES) - 1:  # every workflow and policy
                where = {"task": task, "run": f"{ALL}, {variant}".removesuffix(", ")}
                mean = pd.concat(cells, axis=1).dropna().mean(axis=1)
                yield number(f"peak − {agent}", t_interval(mean), "difference", **where)


def runs_by_variant(results: Results, study: Study, task: str) -> dict[tuple[str, str], list[Run]]:
    """(name of a cell, variant) -> packed runs: the single agent's, the workflows' and the variants' of both."""
    grid = sorted(results.grid.cells(), key=lambda cell: (cell.workflow != "single", cell.workflow))
    cells = [("as many iterations" if cell.workflow == "single" else "", cell) for cell in grid]
    cells += [(variant, cell) for question in ("controls", "updates") for variant, _, cell in study.runs(question)]
    found = defaultdict(list)
    for variant, cell in cells:
        if cell.task == task and (run := results.find(cell)):
            found[cell_name(cell.workflow, cell.policy_name), variant].append(run)
    return found


def vote(answers: pd.DataFrame, k: int) -> pd.Series:
    """Map each problem to whether the most frequent of the first k answers is right; of equals the first wins.

    `answers` has a row per rollout and problem; where `extracted` is None, the answer does not vote.
    """
    first = answers[(answers["rollout"] < k) & answers["extracted"].notna()].sort_values("rollout", kind="stable")
    found = first.groupby(["problem", "extracted"], sort=False)["correct"].agg(["size", "first"])
    chosen = found.sort_values("size", ascending=False, kind="stable").groupby("problem")["first"].first()
    return chosen.reindex(sorted(answers["problem"].unique()), fill_value=False).astype(float)


def tokens_per_problem(seeds: Iterable[pd.DataFrame]) -> dict[str, float]:
    """What is counted -> the tokens of all answers to a problem, mean over problems and seeds."""
    spent = [one.groupby("problem")[["completion_tokens", "prompt_tokens"]].sum().mean() for one in seeds]
    sampled, read = pd.concat(spent, axis=1).mean(axis=1)
    return {"vote": sampled, "vote, prompts counted": sampled + read}


def inference(results: Results, study: Study) -> Iterator[Row]:
    """Votes and best of k of the single agent at its peak, and the peak of each workflow, by tokens per problem.

    A workflow is compared, paired by seed, with the largest vote of no more tokens and the smallest of no fewer, once by sampled tokens
    and once by all tokens, prompts included.
    """
    drawn: dict[str, dict[int, pd.DataFrame]] = defaultdict(dict)
    for draw in study.draws():
        answers = pack.read(results.folder, "evaluations", [draw.id])
        if len(answers):
            extracted = answers["answer"].map(draw.cell.make_task().extract)
            drawn[draw.cell.task][draw.cell.seed] = answers.assign(extracted=extracted)
    for task, draws in drawn.items():
        found, votes = [], []
        for k in range(1, study.rollouts + 1):
            firsts = [answers[answers["rollout"] < k] for answers in draws.values()]
            spent = tokens_per_problem(firsts)
            votes.append((spent, pd.Series({seed: vote(answers, k).mean() for seed, answers in draws.items()})))
            found.append((f"Single agent, vote of {k}" if k > 1 else "Single agent, once", *votes[-1], {}))
            if k > 1:
                best = [one.groupby("problem")["correct"].any().mean() for one in firsts]
                found.append((f"Single agent, best of {k} (an oracle's choice)", spent, best, {}))
        for workflow, policy in product(WORKFLOWS, POLICIES):
            played = results.played(workflow, policy, task, "peak")
            if not len(played):  # not all may be evaluated yet
                continue
            peaks, apart = results.accuracy(workflow, policy, task, "peak"), {}
            spent = tokens_per_problem(one for _, one in played.groupby("seed"))
            for name, tokens in spent.items():
                for right in [right for cost, right in votes if cost[name] <= tokens][-1:]:
                    apart[f"minus the next smaller {name}"] = difference(peaks, right)
                for right in [right for cost, right in votes if cost[name] >= tokens][:1]:
                    apart[f"minus the next larger {name}"] = difference(peaks, right)
            found.append((f"{cell_name(workflow, policy)}, peak", spent, peaks, apart))
        for name, tokens, right, apart in sorted(found, key=lambda one: one[1]["vote"]):
            where = {"task": task, "run": name}
            yield number("sampled tokens per problem", tokens["vote"], "count", **where)
            yield number("with prompts", tokens["vote, prompts counted"], "count", **where)
            yield number("accuracy", t_interval(right), "accuracy", **where)
            for label, interval in apart.items():
                yield number(label, interval, "difference", **where)
