"""The tables of the paper and of a study, as `tables.yaml` declares them, from a results folder; what is not finished is a dash."""

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from multirole.diagnostics.names import TASK_NAMES
from multirole.experiment.cell import Cell
from multirole.experiment.presets import is_tiny
from multirole.paper import claims, factorial, phenomena, setup_tables, signature_tables, skills, study_tables
from multirole.paper.dynamics import FIRST_ITERATIONS, dynamics
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.results import Results
from multirole.paper.statistics import ALL, RULES, difference, over_seeds, split_half_peak, t_interval
from multirole.paper.study import Study
from multirole.paper.write import Table, number, pivoted

DECLARED = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
Outcomes = dict[int, np.ndarray]
"""seed -> (P,) outcomes on the same problems in the same order."""


MODEL = "0.45M parameters, arithmetic in several habits of work, and programs with positions to be worked out (the paper: 0.6B to 4B)."
"""What a caption says of the embedded model."""


@cache
def sentences(results: Results) -> dict[str, str]:
    """What captions share: the regime and the sample, how the brackets are made, and what is missing."""
    cell, seeds = results.grid.cells()[0], results.grid.seeds
    times = cell.learning_rate / Cell("single", "sp", cell.task, cell.scale, preset=cell.preset).learning_rate
    times = {1.0: "", 3.0: "three times "}.get(round(times, 6), f"{times:.3g} times ")
    lr = f"{cell.learning_rate:.1e}".replace(".0e", "e").replace("e-0", "e-")
    rate = f"learning rate {lr}, {cell.lr_schedule} schedule, {times}the preset's rate"
    model = MODEL if is_tiny(cell.scale) else f"Scale {cell.scale}."
    regime = f"{model} Regime `{'stress' if times else 'paper'}`: {rate};"
    there = {task: sorted({key.seed for key in results.runs if key.task == task}) for task in results.grid.tasks}
    over = "; ".join(f"{named_seeds(of)} of {TASK_NAMES[task]}" for task, of in there.items() if of)
    if all(of == seeds for of in there.values()) or not over:
        over = named_seeds(seeds)
    counts = {
        "runs": (results.grid.cells(), results.runs),
        "evaluations": (results.grid.evaluations(), results.evaluations),
    }
    missing = [f"{len(asked) - len(done)} of {len(asked)} {what}" for what, (asked, done) in counts.items()]
    read = results.evaluated("own", "turns")
    facts = {
        "model": model,
        "grid_regime": "stress" if times else "paper",
        "window": claims.DECLARED["phenomena"]["window"],
        "rate": rate,
        "regime": f"{regime} {over}.",
        "sample": f"{regime} n = {cell.n_validation or 'all'} validation problems per task, one episode each; {over}.",
        "finished": f"Not finished: {' and '.join(missing)}." if results.missing() else "All runs are finished.",
        "cap": cell.max_response_tokens,
        "first": FIRST_ITERATIONS,
        "n_read": read.groupby("task")["problem"].nunique().min() if len(read) else 0,
        "margin": f"{100 * RULES['margin']:g}",
        "power": f"{RULES['power']:.0%}",
        "version": RULES["version"],
        "unstable": claims.DECLARED["factorial"]["unstable"],
        "lost": f"{100 * claims.DECLARED['judges']['lost']:g}",
    }
    for name, sentence in DECLARED["sentences"].items():
        facts[name] = sentence.format(**facts)
    return facts


def named_seeds(seeds: list[int]) -> str:
    """Write seeds for a caption."""
    return f"seeds {', '.join(map(str, seeds[:-1]))} and {seeds[-1]}" if seeds[1:] else f"seed {seeds[0]} alone"


def of_runs(results: Results, workflow: str, policy: str, task: str, at: str = "best") -> Outcomes:
    """Validation outcomes at a named checkpoint."""
    return {seed: run.at(at) for seed, run in results.runs_of(workflow, policy, task).items()}


def of_evaluations(results: Results, adapters: str, workflow: str, task: str) -> Outcomes:
    """Outcomes of a transfer, mean over rollouts."""
    table = results.evaluated(adapters)
    mine = table[(table["workflow"] == workflow) & (table["task"] == task)]
    means = mine.pivot_table("correct", "seed", "problem") if len(mine) else mine
    return dict(zip(means.index, means.to_numpy(float), strict=True))


def measured(of: dict[str, Outcomes], columns: list[str], **where: str) -> list[dict]:
    """A row per column: the mean of an outcome of `of`, or for "A − B" the difference of two, paired by seed and problem."""
    rows = []
    for column in columns:
        after, _, before = column.partition(" − ")
        seeds = [seed for seed in of[after] if not before or seed in of[before]]
        right = [np.stack([of[name][seed] for seed in seeds]) for name in (after, before) if name and seeds]
        found = difference(*right) if len(right) == 2 else over_seeds(*right) if right else np.nan
        rows.append(number(column, found, ("difference" if before else "accuracy") if seeds else "missing", **where))
    return rows


def comparison(results: Results, columns: list[str]) -> pd.DataFrame:
    """Accuracies and differences of every workflow on every task; both policies share the untrained workflow."""
    rows = []
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        of = {
            "base": of_runs(results, workflow, "ip", task, "base") | of_runs(results, workflow, "sp", task, "base"),
            "SA-RL": of_runs(results, "single", "sp", task),
            "IP": of_runs(results, workflow, "ip", task),
            "SP": of_runs(results, workflow, "sp", task),
            "transfer": of_evaluations(results, "transfer", workflow, task),
            "transfer to all": of_evaluations(results, "transfer_all", workflow, task),
        }
        rows += measured(of, columns, task=task, workflow=workflow)
    return pd.DataFrame(rows)


def checks(results: Results, columns: list[str]) -> pd.DataFrame:
    """The gain over base, the peak chosen on other problems, and what is left at the end."""
    rows, places = [], {"base": "base", "peak": "best", "final": "terminal"}
    for task, (workflow, policy) in product(results.grid.tasks, [*product(WORKFLOWS, POLICIES), ("single", "sp")]):
        cell = workflow, policy, task
        of = {name: of_runs(results, *cell, at) for name, at in places.items()}
        of["split-half peak"] = {seed: split_half_peak(run.correct) for seed, run in results.runs_of(*cell).items()}
        rows += measured(of, columns, task=task, workflow=workflow, policy=policy)
    return pd.DataFrame(rows)


def ip_against_sp(results: Results) -> pd.DataFrame:
    """IP minus SP in every cell, and the mean over cells."""
    rows, means = [], {}
    places = (("peak", "best"), ("end", "terminal"))
    for (task, workflow), (name, at) in product(product(results.grid.tasks, WORKFLOWS), places):
        of = {policy.upper(): of_runs(results, workflow, policy, task, at) for policy in POLICIES}
        rows += measured(of, ["IP − SP"], task=task, workflow=workflow, at=name)
        means.setdefault(name, []).append(rows[-1]["value"])
    for name, values in means.items():
        found, where = t_interval(values), {"task": "", "workflow": ALL, "at": name}
        rows.append(number("IP − SP", found, "missing" if np.isnan(found.mean) else "difference", **where))
    return pd.DataFrame(rows)


def by_regime(results: Results) -> pd.DataFrame:
    """Accuracy of every cell and of the single agent in every regime, as far as its runs are packed."""
    rows, cells = [], [*product(WORKFLOWS, POLICIES), ("single", "sp")]
    for (name, regime), task, (workflow, policy) in product(
        claims.regimes_of(results).items(), results.grid.tasks, cells
    ):
        if curves := [run.accuracy for run in regime.runs(workflow, policy, task).values()]:
            where = {"regime": name, "task": task, "workflow": workflow, "policy": policy}
            places = {
                "base": [c.iloc[0] for c in curves],
                "peak": [c.max() for c in curves],
                "end": [c.iloc[-1] for c in curves],
            }
            rows.append(number("runs", len(curves), "count", **where))
            rows += [number(place, t_interval(of), "accuracy", **where) for place, of in places.items()]
    return pd.DataFrame(rows)


MEASURES = {
    "comparison": comparison,
    "by_regime": by_regime,
    "checks": checks,
    "ip_against_sp": ip_against_sp,
    "dynamics": dynamics,
    "signatures": signature_tables.panel_values,
    "hyper_parameters": setup_tables.hyper_parameters,
    "compute": setup_tables.compute,
    "skills": skills.skills,
    "trivial_twins": skills.trivial_twins,
    "phenomena": phenomena.phenomena,
    "matched_updates": study_tables.matched_updates,
    "setup": study_tables.setup,
    "factorial": factorial.of_arms,
    "predictors": factorial.predictors,
    "contrasts": factorial.contrasts,
    "power": study_tables.power,
    "coverage": study_tables.covered,
    "judges": study_tables.judges,
    "controls": study_tables.controls,
    "inference": study_tables.inference,
}


def made_from(results: Results, study: Study, question: str) -> str:
    """Say which commit a question's runs were made from: it holds the rules that they are read by."""
    runs = {cell.id for _, _, cell in study.runs(question)} & set(results.packed.index)
    commits = {json.loads(results.packed.loc[run, "provenance"])["git_sha"][:7] for run in runs}
    asked = len({cell.id for _, _, cell in study.runs(question)})
    return f"{len(runs)} of {asked} runs, from commit {' and '.join(sorted(commits))}, which holds the rules they are read by."


def make(
    results: Results, study: Study | None, name: str, title: str, measure: str, caption: str, question: str = "",
    **options: object,
) -> Table:  # fmt: skip
    """Measure and draw one declared table; values that are texts are shown as they are."""
    if measure == "signatures":
        options["labels"] = DECLARED["signatures"]
    values = MEASURES[measure](*(results, study) if study else (results,), **options)
    shown = pivoted(values) if "number" in values else values
    facts = sentences(results) | ({"made_from": made_from(results, study, question)} if study and question else {})
    return Table(name, title, caption.format(**facts), shown, values)


def tables(results: Results) -> list[Table]:
    """Make the paper's tables, in its order."""
    return [make(results, None, **declared) for declared in DECLARED["paper"]]


def tables_of_study(results: Results, study: Study) -> list[Table]:
    """Make the study's tables, as far as their runs are finished."""
    made = [make(results, study, **declared) for declared in DECLARED["study"]]
    return [table for table in made if len(table.shown)]
