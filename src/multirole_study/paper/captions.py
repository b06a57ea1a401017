"""Say what a reader must know of a table or figure: the sentences that captions share, filled in from a results folder.

`tables.yaml` and `figures.yaml` hold the captions.
"""

import json
from functools import cache
from pathlib import Path

import yaml

from multirole_study.compare.measures import FIRST_ITERATIONS
from multirole_study.compare.rules import RULES
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import SMOLLM2, TINY
from multirole_study.labels import BASE_NAMES, TASKS_OF_BASES, task_name
from multirole_study.paper import claims
from multirole_study.paper.dynamics import MIN_CHI2, SMOOTHED
from multirole_study.paper.grid import WORKFLOW_POLICIES, Study
from multirole_study.paper.output import how_many
from multirole_study.paper.results import Results

DECLARED = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
FIGURES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
"""Figure -> its caption."""
SIGNATURES: dict[str, tuple[str, str]] = DECLARED["signatures"]
"""Signature of a role's texts -> its unit, and what the tables call it."""
MODEL_SENTENCES = {
    TINY: "0.45M parameters, math: arithmetic from left to right, code: list programs (the paper: 0.6B to 4B).",
    SMOLLM2: "SmolLM2-135M-Instruct, sums of two numbers, and functions from one sentence of English (the paper: 0.6B to 4B).",
}
"""Scale -> the sentence in captions about its model and problems."""


def about(results: Results, seeds: str | None = None) -> str:
    """Return the model, its tasks and the number of seeds, for the line below a figure; by default that of the grid's cells."""
    grid = results.grid
    known = {task: TASKS_OF_BASES[grid.scale, task] for task in grid.tasks if (grid.scale, task) in TASKS_OF_BASES}
    tasks = [f"{task_name(task)}: {known[task]}" if task in known else task_name(task) for task in grid.tasks]
    if seeds is None:
        cells = [(workflow, policy, task) for task in grid.tasks for workflow, policy in WORKFLOW_POLICIES]
        seeds = how_many([n for cell in cells if (n := len(results.runs_of(*cell)))] or [0])
    return "; ".join([BASE_NAMES.get(grid.base, grid.base), *tasks, f"n = {seeds} seeds"])


@cache
def sentences(results: Results) -> dict[str, str]:
    """Return the sentences that captions share: regime, sample, meaning of the brackets, and missing runs."""
    cell, seeds = results.grid.cells()[0], results.grid.seeds
    preset = Cell("single", "sp", cell.task, cell.scale, preset=cell.preset)
    name = regime_of(cell, preset)
    times = cell.learning_rate / preset.learning_rate
    times = "" if times == 1 else f"{times:.3g} times "
    lr = f"{cell.learning_rate:.1e}".replace(".0e", "e").replace("e-0", "e-")
    rate = f"learning rate {lr}, {cell.lr_schedule} schedule, {times}the preset's rate"
    model = MODEL_SENTENCES.get(cell.scale, f"Scale {cell.scale}.")
    if cell.model is not None:
        model = f"Base {results.grid.base}. {model}"
    regime = f"{model} {f'Regime `{name}`' if name else 'A regime of its own'}: {rate};"
    over = f"seeds {', '.join(map(str, seeds[:-1]))} and {seeds[-1]}" if seeds[1:] else f"seed {seeds[0]} alone"
    n_planned = len(results.grid.cells()), len(results.grid.evaluations())
    runs, evaluations = n_planned[0] - len(results.runs), n_planned[1] - len(results.evaluations)
    missing = f"{runs} of {n_planned[0]} runs and {evaluations} of {n_planned[1]} evaluations"
    read = results.evaluated("own", "turns")
    facts = RULES | {
        "model": model,
        "grid_regime": f"`{name}`" if name else "a regime of its own",
        "rate": rate,
        "regime": f"{regime} {over}.",
        "sample": f"{regime} n = {cell.n_validation or 'all'} validation problems per task, one episode each; {over}.",
        "finished": (f"Not finished: {missing}." if runs or evaluations else "All runs are finished.")
        + other_bases(results),
        "cap": cell.max_completion_length,
        "first": FIRST_ITERATIONS,
        "smoothed": SMOOTHED,
        "least": MIN_CHI2,
        "n_read": read.groupby("task")["problem"].nunique().min() if len(read) else 0,
        "margin": f"{100 * RULES['margin']:g}",
        "window": claims.DECLARED["phenomena"]["window"],
        "unstable": claims.DECLARED["factorial"]["unstable"],
        "lost": f"{100 * claims.DECLARED['judges']['lost']:g}",
    }
    for name, sentence in DECLARED["sentences"].items():
        facts[name] = sentence.format(**facts)
    return facts


def regime_of(cell: Cell, preset: Cell) -> str:
    """Return the name of the regime that a grid's cell is trained in, as tables.yaml describes them; empty for any other."""
    times = round(cell.learning_rate / preset.learning_rate, 6)
    changed = (times, cell.lr_schedule, cell.updates)
    names = {
        (1, preset.lr_schedule, preset.updates): "paper",
        (3, "constant", preset.updates): "stress",
        (3, "constant", "one"): "stress, one step",
    }
    return names.get(changed, "")


def other_bases(results: Results) -> str:
    """Return a sentence if runs of one task were trained on different bases, as on nodes of which one reached the Hub; else empty."""
    bases_by_task = {task: results.bases(task) for task in results.grid.tasks}
    return "".join(
        f" The bases differ on {task}: {'; '.join(f'{n} runs and evaluations of {base}' for base, n in bases.items())}."
        for task, bases in bases_by_task.items()
        if len(bases) > 1
    )


def made_from(results: Results, study: Study, question: str) -> str:
    """State the commit of a question's runs, which contains the rules that decide it."""
    ids = {cell.id for _, _, cell in study.runs(question)}
    provenances = [json.loads(text) for text in results.packed.loc[results.packed.index.isin(ids), "provenance"]]
    commits = sorted(
        {(provenance["git_sha"] or "unknown")[:7] for provenance in provenances}
    )  # unknown outside of a clone
    modified = sum(bool(provenance["git_dirty"]) for provenance in provenances)
    text = f"{len(provenances)} of {len(ids)} runs, from commit {' and '.join(commits)}, which holds the rules they are read by"
    return f"{text}; {modified} of them with changes to it that are not recorded." if modified else f"{text}."
