"""Build the study's tables, none of which is in the paper: how the number of updates, the schedule and the row order change the
comparison of policies, what preserves a judging role's skill, and what the single agent reaches with a workflow's budget.

A run of a study differs from a run of the grid in one setting and shares its seed and problems. Pairing by seed removes little
noise, because two runs that differ only by rounding diverge after some iterations: the A/A row of every table shows how much.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole_study.compare.corrections import ALL_CELLS, corrected
from multirole_study.compare.estimates import MIN_CELLS
from multirole_study.compare.intervals import Interval, difference, seeds_needed, t_interval, untested
from multirole_study.compare.measures import SKILL_MEASURES, gain_of
from multirole_study.compare.rules import ALPHA, RULES
from multirole_study.labels import WORKFLOW_NAMES, cell_name, task_name
from multirole_study.paper import pack, skill_tables
from multirole_study.paper.claims import DECLARED
from multirole_study.paper.grid import POLICIES, WORKFLOW_POLICIES, WORKFLOWS, Study
from multirole_study.paper.output import Row, number
from multirole_study.paper.results import REPORTED_STEPS, Results, Run, accuracies

ARM = re.compile(r"(\d+) steps? of (\d+) rows")
"""Matches the names of the factorial's variants."""
SINGLE = cell_name("single", "sp")


class Twins(NamedTuple):
    """A cell of the grid and a variant of it, with the runs of the seeds that have both."""

    workflow: str
    policy: str
    task: str
    variant: str
    usual: list[Run]
    changed: list[Run]

    def keys(self) -> dict[str, str]:
        """Return the keys of its line in a table."""
        return dict(zip(self._fields[:4], self[:4], strict=True))

    def at(self, place: str) -> tuple[pd.Series, pd.Series]:
        """Return the accuracies of both at a named checkpoint."""
        return accuracies(self.usual, place), accuracies(self.changed, place)


def twins(results: Results, study: Study, *questions: str, control: str | None = None) -> Iterator[Twins]:
    """Yield every variant of the questions (by default of all questions) on every cell with packed runs of both, in the study's order.

    The other run is the grid's, or that of the variant `control`.
    """
    pairs_by_cell: dict[tuple[str, ...], list[tuple[Run, Run]]] = defaultdict(list)
    for question in questions or (None,):
        for name, coordinates, cell in study.runs(question):
            twin = (
                study.cell(control, coordinates, cell.seed)
                if control
                else study.grid.cell(*coordinates.split(), cell.seed)
            )
            usual, changed = results.find(twin), results.find(cell)
            if usual and changed and usual is not changed:
                pairs_by_cell[*coordinates.split(), name].append((usual, changed))
    for keys, pairs in pairs_by_cell.items():
        yield Twins(*keys, *(list(runs) for runs in zip(*pairs, strict=True)))


def twin_change(name: str, usual: pd.Series, changed: pd.Series, keys: dict, unit: str = "accuracy") -> list[Row]:
    """Return a number of the twin runs, the same number of the variant's runs, and its change; `usual` and `changed` have one value per seed."""
    change = f"change {'at' if unit == 'accuracy' else 'of'} the {name}"
    return [
        number(f"{name}, twin", t_interval(usual), unit, **keys),
        number(name, t_interval(changed), unit, **keys),
        number(change, difference(changed, usual), "difference", **keys),
    ]


def with_means(rows: list[Row]) -> list[Row]:
    """Add the mean over workflows of every variant's differences, if enough cells have enough seeds."""
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["unit"] == "difference" and row["workflow"] != "single" and row["seeds"] >= RULES["least_seeds"]:
            means[row["variant"], row["number"]].append(row["value"])
    keys = {"workflow": ALL_CELLS, "policy": "", "task": ""}
    return rows + [
        number(name, t_interval(values), "difference", **keys, variant=variant)
        for (variant, name), values in means.items()
        if len(values) >= MIN_CELLS
    ]


def changes(results: Results, study: Study, variants_of: str) -> list[Row]:
    """Return falls, peak and end of each variant and its twin in the grid, means over a variant's cells, and the A/A pairs."""
    rows = []
    for twin in twins(results, study, variants_of, "aa"):
        keys = twin.keys()
        rows.append(number("runs", len(twin.changed), "count", **keys))
        for suffix, runs in ((", twin", twin.usual), ("", twin.changed)):
            rows.append(number(f"falls{suffix}", sum(run.falls for run in runs), "count", **keys))
            rows.append(number(f"ending fallen{suffix}", sum(run.ends_fallen for run in runs), "count", **keys))
        for place in REPORTED_STEPS:
            rows += twin_change(place, *twin.at(place), keys)
    return with_means(rows)


def matched_updates(results: Results, study: Study) -> list[Row]:
    """Compare one step per iteration with one step per batch of rows, and with the single agent."""
    rows = []
    for twin in twins(results, study, "updates"):
        gap = difference(accuracies(twin.changed, "peak"), results.accuracy("single", "sp", twin.task, "peak"))
        rows.append(number("peak − SA-RL", gap, "difference", **twin.keys()))
    return changes(results, study, "updates") + with_means(rows)


def phenomena_elsewhere(results: Results, study: Study) -> Iterator[Row]:
    """Yield the lines of `skill_tables.phenomena` in each variant with both policies, and the grid's SP − IP of the same seeds."""
    twin_of = {(twin.variant, twin.task, twin.workflow, twin.policy): twin for twin in twins(results, study)}
    for variant, task, (name, about) in product(study.variants, results.grid.tasks, skill_tables.PHENOMENA.items()):
        cells = {policy: (variant, task, about["workflow"], policy) for policy in POLICIES}
        if set(cells.values()) <= set(twin_of):
            changed = skill_tables.changes(about, {policy: twin_of[cell].changed for policy, cell in cells.items()})
            usual = skill_tables.changes(about, {policy: twin_of[cell].usual for policy, cell in cells.items()})
            keys = {"variant": variant, "task": task, "workflow": about["workflow"], "phenomenon": name}
            yield from (rows := list(skill_tables.phenomenon(changed, about, keys)))
            if rows:
                gap = (usual["change, sp"] - usual["change, ip"]).reindex(changed.index).dropna()
                yield number("SP − IP, twin", untested(t_interval(gap)), rows[-1]["unit"], **keys)


def skill_kept(pairs: Iterable[Twins]) -> pd.DataFrame:
    """Return the judging role's gain and the final accuracy with each variant."""
    rows = []
    for twin in pairs:
        keys = twin.keys() | {"role": SKILL_MEASURES[twin.workflow][0]}
        pairs = zip(twin.usual, twin.changed, strict=True)
        ends = [[gain_of(run, keys["role"])[-2:].mean() for run in pair] for pair in pairs]
        gains = pd.DataFrame(ends, columns=["usual", "changed"]).dropna()
        rows.append(number("runs", len(twin.changed), "count", **keys))
        rows += twin_change("gain", gains["usual"], gains["changed"], keys, "gain")
        rows += twin_change("end", *twin.at("end"), keys)
    return pd.DataFrame(rows)


def judges(results: Results, study: Study) -> pd.DataFrame:
    """Decide by the rule of `claims.yaml` whether an arm keeps the judging role's skill, compared with the control."""
    pairs = list(twins(results, study, "judges", control=DECLARED["judges"]["control"]))
    if not pairs:
        return pd.DataFrame()
    table, columns, rows = skill_kept([*pairs, *twins(results, study, "aa")]), [*Twins._fields[:4], "role"], []
    for keys, arm_rows in corrected(table).groupby(columns, sort=False):
        by = arm_rows.set_index("number")
        gained, lost = by.loc["change of the gain"], by.loc["change at the end"]
        protects = gained["p_holm"] < ALPHA and gained["value"] > 0 and lost["value"] >= -DECLARED["judges"]["lost"]
        rows.append(number("protects", float(protects), "count", **dict(zip(columns, keys, strict=True))))
    return pd.concat([table, pd.DataFrame(rows)], ignore_index=True)


def arms(results: Results, study: Study) -> dict[tuple[int, int, float], list[Run]]:
    """Return (steps per iteration, rows per step, multiple of the grid's rate) -> the single agent's runs; the grid is one arm."""
    runs_of_arm: dict[tuple[int, int, float], list[Run]] = {}
    for twin in twins(results, study, "factorial"):
        if len(twin.changed) < len(study.variants[twin.variant].seeds or study.seeds):
            continue  # an arm counts once all its runs are finished
        usual, changed = twin.usual[0].cell, twin.changed[0].cell
        steps, rows = map(int, ARM.match(twin.variant).groups())
        runs_of_arm[steps, rows, changed.learning_rate / usual.learning_rate] = twin.changed
        runs_of_arm[1, usual.n_problems * usual.num_generations, 1.0] = twin.usual
    return dict(sorted(runs_of_arm.items()))


def is_unstable(runs: list[Run], counted: str = "falls") -> bool:
    """Return whether an arm is unstable by the rule of `claims.yaml`; "ends_fallen" counts only terminal falls."""
    return sum(getattr(run, counted) for run in runs) >= DECLARED["factorial"]["unstable"]


def factorial(results: Results, study: Study) -> Iterator[Row]:
    """Yield the results of the single agent in every arm."""
    for (steps, rows, rate), runs in arms(results, study).items():
        keys = {"steps": steps, "rows": rows, "rate": f"{rate:g}"}
        n_steps = np.mean([len(table := run.table("ledger")) / table["iteration"].nunique() for run in runs])
        chi2 = np.median([run.table("roles")["chi2"].max() for run in runs])
        yield number("runs", len(runs), "count", **keys)
        yield number("falls", sum(run.falls for run in runs), "count", **keys)
        yield number("ending fallen", sum(run.ends_fallen for run in runs), "count", **keys)
        yield number("unstable", float(is_unstable(runs)), "count", **keys)
        for place in REPORTED_STEPS:
            yield number(place, t_interval(accuracies(runs, place)), "accuracy", **keys)
        yield number("steps per iteration", n_steps, "tokens", **keys)
        yield number("largest chi2, median", chi2, "ratio", **keys)


def predictors(results: Results, study: Study) -> Iterator[Row]:
    """Yield the threshold of each declared quantity that misjudges the fewest arms, for all falls and for terminal falls."""
    lines = [(*arm, is_unstable(runs), is_unstable(runs, "ends_fallen")) for arm, runs in arms(results, study).items()]
    known = pd.DataFrame(lines, columns=["steps", "rows", "rate", "unstable", "fallen"])
    for name, formula in DECLARED["factorial"]["predictors"].items() if lines else ():
        quantity, keys = known.eval(formula), {"quantity": name}
        limit, errors = _best_threshold(quantity, known["unstable"])
        yield number("threshold", limit if limit < np.inf else np.nan, "ratio", **keys)
        yield number("arms misjudged", errors, "count", **keys)
        yield number("unstable arms", known["unstable"].sum(), "count", **keys)
        errors = _best_threshold(quantity, known["fallen"])[1]
        yield number("arms misjudged, terminal falls", errors, "count", **keys)
        yield number("unstable arms, terminal falls", known["fallen"].sum(), "count", **keys)
        yield number("arms", len(known), "count", **keys)


def _best_threshold(quantity: pd.Series, unstable: pd.Series) -> tuple[float, int]:
    """Return the threshold that best separates unstable arms (inf: none is unstable), and how many arms it misjudges."""
    limits = [*np.unique(quantity), np.inf]
    errors = [int(((quantity >= limit) != unstable).sum()) for limit in limits]
    return limits[int(np.argmin(errors))], min(errors)


def power(results: Results, study: Study) -> Iterator[Row]:
    """Yield the spread of each compared difference, and the seeds that a paired t test needs for the declared effects."""
    for place in REPORTED_STEPS:
        for (comparison, cell), interval in compared(results, study, place).items():
            keys = {"compared": comparison, "cell": cell, "at": place}
            yield number("runs", interval.seeds, "count", **keys)
            yield number("SD (points)", 100 * interval.sd, "tokens", **keys)
            for effect in RULES["effects"]:
                needed = seeds_needed(interval.sd, effect) if interval.seeds > 1 else None
                yield number(f"seeds for {100 * effect:.0f} points", needed or np.nan, "count", **keys)


def compared(results: Results, study: Study, place: str) -> dict[tuple[str, str], Interval]:
    """Return (comparison, cell) -> the difference between policies, between two seeds of a cell, or of a variant."""
    intervals, within = {}, []
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        ends = {policy: results.accuracy(workflow, policy, task, place) for policy in POLICIES}
        within += [accuracy - accuracy.mean() for accuracy in ends.values() if len(accuracy) > 1]
        if (gap := difference(ends["ip"], ends["sp"])).seeds:
            intervals["IP − SP", f"{WORKFLOW_NAMES[workflow]}, {task_name(task)}"] = gap
    if within:  # two runs of one cell: sqrt 2 times the pooled deviation of a run from its cell
        deviations = pd.concat(within)
        sd = float(np.sqrt(2 * (deviations**2).sum() / (len(deviations) - len(within))))
        intervals["noise floor: two seeds of one cell", ALL_CELLS] = t_interval([0.0])._replace(
            sd=sd, seeds=len(deviations)
        )
    for twin in twins(results, study, "aa", "updates"):
        usual, changed = twin.at(place)
        intervals[f"{twin.variant} − grid", cell_name(*twin[:3])] = difference(changed, usual)
    return intervals


def controls(results: Results, study: Study) -> Iterator[Row]:
    """Yield the results of the single agent matched on iterations, updates or sampled tokens, and of the task's workflows.

    Every workflow's peak is also compared, paired by seed, with that of each variant of the single agent. A workflow with another
    number of problems per iteration than the grid is compared only with variants that have the same number, as declared.
    """
    usual = results.grid.cells()[0].n_problems
    for task in dict.fromkeys(coordinates.split()[2] for _, coordinates, _ in study.runs("controls")):
        runs = runs_by_variant(results, study, task)
        agents = {
            variant: agent_runs
            for (name, variant), agent_runs in runs.items()
            if name == SINGLE and variant in study.variants
        }
        # (a workflow's variant, the agent's) -> differences by seed, one for each workflow and policy
        gaps: dict[tuple[str, str], list[pd.Series]] = defaultdict(list)
        for (name, variant), cell_runs in runs.items():
            keys = {"task": task, "run": f"{name}, {variant}".removesuffix(", ")}
            tokens = np.mean([run.table("roles")["tokens"].sum() for run in cell_runs])
            yield number("runs", len(cell_runs), "count", **keys)
            yield number("tokens sampled (M)", tokens, "million", **keys)
            yield number("optimizer steps", np.mean([len(run.table("ledger")) for run in cell_runs]), "count", **keys)
            for place in REPORTED_STEPS:
                yield number(place, t_interval(accuracies(cell_runs, place)), "accuracy", **keys)
            for agent, agent_runs in agents.items() if name != SINGLE else ():
                gap = (accuracies(cell_runs, "peak") - accuracies(agent_runs, "peak")).dropna()
                if len(gap) and cell_runs[0].cell.n_problems in (usual, agent_runs[0].cell.n_problems):
                    yield number(f"peak − {agent}", t_interval(gap), "difference", **keys)
                    gaps[variant, agent].append(gap)
        for (variant, agent), cells in gaps.items():
            if len(cells) == len(WORKFLOW_POLICIES) - 1:  # every workflow and policy
                keys = {"task": task, "run": f"{ALL_CELLS}, {variant}".removesuffix(", ")}
                mean = pd.concat(cells, axis=1).dropna().mean(axis=1)
                yield number(f"peak − {agent}", t_interval(mean), "difference", **keys)


def runs_by_variant(results: Results, study: Study, task: str) -> dict[tuple[str, str], list[Run]]:
    """Return (name of a cell, variant) -> packed runs: of the single agent, the workflows, and the variants of both."""
    grid = sorted(results.grid.cells(), key=lambda cell: (cell.workflow != "single", cell.workflow))
    cells = [("as many iterations" if cell.workflow == "single" else "", cell) for cell in grid]
    cells += [(variant, cell) for question in ("controls", "updates") for variant, _, cell in study.runs(question)]
    runs = defaultdict(list)
    for variant, cell in cells:
        if cell.task == task and (run := results.find(cell)):
            runs[cell_name(cell.workflow, cell.policy_name), variant].append(run)
    return runs


def vote(answers: pd.DataFrame, k: int) -> pd.Series:
    """Map each problem to whether the most frequent of the first k answers is right; the first one wins a tie.

    `answers` has a row per rollout and problem; an answer does not vote if `extracted` is None.
    """
    first = answers[(answers["rollout"] < k) & answers["extracted"].notna()].sort_values("rollout", kind="stable")
    counts = first.groupby(["problem", "extracted"], sort=False)["correct"].agg(["size", "first"])
    chosen = counts.sort_values("size", ascending=False, kind="stable").groupby("problem")["first"].first()
    return chosen.reindex(sorted(answers["problem"].unique()), fill_value=False).astype(float)


def tokens_per_problem(seeds: Iterable[pd.DataFrame]) -> dict[str, float]:
    """Return kind of count -> the tokens of all answers to a problem, averaged over problems and seeds."""
    spent = [answers.groupby("problem")[["completion_tokens", "prompt_tokens"]].sum().mean() for answers in seeds]
    sampled, read = pd.concat(spent, axis=1).mean(axis=1)
    return {"vote": sampled, "vote, prompts counted": sampled + read}


def inference(results: Results, study: Study) -> Iterator[Row]:
    """Yield votes and best of k of the single agent at its peak, and the peak of each workflow, by tokens per problem.

    A workflow is compared, paired by seed, with the largest vote that takes no more tokens and the smallest that takes no fewer,
    once by sampled tokens and once by all tokens, prompts included.
    """
    draws_by_task: dict[str, dict[int, pd.DataFrame]] = defaultdict(dict)
    for draw in study.draws():
        answers = pack.read(results.folder, "evaluations", [draw.id])
        if len(answers):
            extracted = answers["answer"].map(draw.cell.make_task().extract)
            draws_by_task[draw.cell.task][draw.cell.seed] = answers.assign(extracted=extracted)
    for task, draws in draws_by_task.items():
        lines, votes = [], []
        for k in range(1, study.rollouts + 1):
            firsts = [answers[answers["rollout"] < k] for answers in draws.values()]
            spent = tokens_per_problem(firsts)
            votes.append((spent, pd.Series({seed: vote(answers, k).mean() for seed, answers in draws.items()})))
            lines.append((f"Single agent, vote of {k}" if k > 1 else "Single agent, once", *votes[-1], {}))
            if k > 1:
                best = [part.groupby("problem")["correct"].any().mean() for part in firsts]
                lines.append((f"Single agent, best of {k} (an oracle's choice)", spent, best, {}))
        for workflow, policy in product(WORKFLOWS, POLICIES):
            outcomes = results.own_evaluation(workflow, policy, task, "peak")
            if not len(outcomes):  # not all may be evaluated yet
                continue
            peaks, gaps = results.accuracy(workflow, policy, task, "peak"), {}
            spent = tokens_per_problem(part for _, part in outcomes.groupby("seed"))
            for name, tokens in spent.items():
                for right in [right for cost, right in votes if cost[name] <= tokens][-1:]:
                    gaps[f"minus the next smaller {name}"] = difference(peaks, right)
                for right in [right for cost, right in votes if cost[name] >= tokens][:1]:
                    gaps[f"minus the next larger {name}"] = difference(peaks, right)
            lines.append((f"{cell_name(workflow, policy)}, peak", spent, peaks, gaps))
        for name, tokens, right, gaps in sorted(lines, key=lambda part: part[1]["vote"]):
            keys = {"task": task, "run": name}
            yield number("sampled tokens per problem", tokens["vote"], "count", **keys)
            yield number("with prompts", tokens["vote, prompts counted"], "count", **keys)
            yield number("accuracy", t_interval(right), "accuracy", **keys)
            for label, interval in gaps.items():
                yield number(label, interval, "difference", **keys)
