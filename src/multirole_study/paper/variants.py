"""Find the runs of a study's variants and pair them with the grid's; vote over the answers of a single agent.

A run of a study differs from a run of the grid in one setting and shares its seed and problems. Pairing by seed removes little
noise, because two runs that differ only by rounding diverge after some iterations: the A/A row of every table shows how much.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole_study.compare.corrections import ALL_CELLS
from multirole_study.compare.estimates import MIN_CELLS
from multirole_study.compare.intervals import Interval, difference, t_interval
from multirole_study.compare.rules import RULES
from multirole_study.labels import cell_name
from multirole_study.paper import pack
from multirole_study.paper.claims import DECLARED
from multirole_study.paper.grid import Grid, Study
from multirole_study.paper.output import Row, number
from multirole_study.paper.phenomena import changes_by_seed
from multirole_study.paper.results import Results, Run, accuracies

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


def beside_twin(name: str, usual: pd.Series, changed: pd.Series, keys: dict, unit: str = "accuracy") -> list[Row]:
    """Return the mean of the twin runs, that of the variant's runs, and the mean of their difference by seed, each with its t interval.

    `usual` and `changed` have one value per seed.
    """
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


def changes_beside_twins(line: dict[str, str], pairs: dict[str, Twins | None]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return `changes_by_seed` of a phenomenon in a variant's runs, and in the grid's runs of the same seeds; `pairs` maps policies.

    Both are empty unless the variant has runs under every policy.
    """
    if not all(pairs.values()):
        return pd.DataFrame(), pd.DataFrame()
    changed = changes_by_seed(line, {policy: twin.changed for policy, twin in pairs.items()})
    usual = changes_by_seed(line, {policy: twin.usual for policy, twin in pairs.items()})
    return changed, usual.reindex(changed.index).dropna()


def lines_of_arms(table: pd.DataFrame) -> Iterator[tuple[dict[str, str], pd.DataFrame]]:
    """Yield the keys of each arm's line in a table of variants and roles, and its numbers by name."""
    columns = [*Twins._fields[:4], "role"]
    for keys, rows in table.groupby(columns, sort=False):
        yield dict(zip(columns, keys, strict=True)), rows.set_index("number")


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


def best_threshold(quantity: pd.Series, unstable: pd.Series) -> tuple[float, int]:
    """Return the threshold that best separates unstable arms (inf: none is unstable), and how many arms it misjudges."""
    limits = [*np.unique(quantity), np.inf]
    errors = [int(((quantity >= limit) != unstable).sum()) for limit in limits]
    return limits[int(np.argmin(errors))], min(errors)


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


def peaks_minus(agents: dict[str, list[Run]], runs: list[Run], grid: Grid) -> Iterator[tuple[str, pd.Series]]:
    """Yield the variants of the single agent, and by seed the peak of a cell's runs minus the variant's, in the seeds that both have.

    Runs with another number of problems per iteration than the grid are compared only with variants that have the same number, as declared.
    """
    usual = grid.cells()[0].n_problems
    for agent, agent_runs in agents.items():
        gap = (accuracies(runs, "peak") - accuracies(agent_runs, "peak")).dropna()
        if len(gap) and runs[0].cell.n_problems in (usual, agent_runs[0].cell.n_problems):
            yield agent, gap


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


def draws_by_task(packed: Results, study: Study) -> dict[str, dict[int, pd.DataFrame]]:
    """Return task -> seed -> the answers that a single agent drew at its peak, with what is `extracted` of each."""
    draws: dict[str, dict[int, pd.DataFrame]] = defaultdict(dict)
    for draw in study.draws():
        answers = pack.read(packed.folder, "evaluations", [draw.id])
        if len(answers):
            extracted = answers["answer"].map(draw.cell.make_task().extract)
            draws[draw.cell.task][draw.cell.seed] = answers.assign(extracted=extracted)
    return draws


def nearest_votes(
    spent: dict[str, float], votes: list[tuple[dict[str, float], pd.Series]]
) -> Iterator[tuple[str, pd.Series]]:
    """Yield the largest vote that takes no more tokens than were spent, and the smallest that takes no fewer, by each kind of count.

    `votes` are (tokens by kind, accuracy by seed), from the smallest.
    """
    for kind, tokens in spent.items():
        for right in [right for cost, right in votes if cost[kind] <= tokens][-1:]:
            yield f"smaller {kind}", right
        for right in [right for cost, right in votes if cost[kind] >= tokens][:1]:
            yield f"larger {kind}", right


def noise_floor(cells: list[pd.Series]) -> Interval:
    """Return the deviation of the difference between two seeds of one cell, pooled over cells; `cells` have one value per seed."""
    deviations = pd.concat([values - values.mean() for values in cells])
    sd = float(np.sqrt(2 * (deviations**2).sum() / (len(deviations) - len(cells))))
    return t_interval([0.0])._replace(sd=sd, seeds=len(deviations))
