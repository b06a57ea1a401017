"""Build the tables of the paper and of a study, which `tables.yaml` declares, from a results folder. Unfinished cells render as a dash."""

import json
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pandas as pd
import yaml

from multirole_study.compare.corrections import ALL_CELLS
from multirole_study.compare.intervals import crossed_interval, difference, t_interval, untested
from multirole_study.compare.measures import FIRST_ITERATIONS, split_half_outcomes
from multirole_study.compare.rules import RULES
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS, OTHER_BASES, PAPER_SCALES, SMOLLM2, TINY
from multirole_study.paper import claims
from multirole_study.paper.grid import POLICIES, WORKFLOW_POLICIES, WORKFLOWS, Study
from multirole_study.paper.output import MISSING, Row, Table, number, pivoted, spread
from multirole_study.paper.results import REPORTED_STEPS, Results, accuracies
from multirole_study.signatures import signatures_of_frame

DECLARED = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
MODEL_SENTENCES = {
    TINY: "0.45M parameters, math: arithmetic from left to right, code: list programs (the paper: 0.6B to 4B).",
    SMOLLM2: "SmolLM2-135M-Instruct, sums of two numbers, and functions from one sentence of English (the paper: 0.6B to 4B).",
}
"""Scale -> the sentence in captions about its model and problems."""
SIZES = {"math": (12704, 1412), "code": (15252, 1000)}
"""Numbers of training and validation problems of the paper's tasks."""
COST = {
    "wall_seconds": ("wall-clock (h)", "hours"),
    "completion_tokens": ("tokens sampled (M)", "million"),
    "prompt_tokens": ("tokens read (M)", "million"),
    "optimizer_steps": ("optimizer steps", "count"),
}
"""Summed quantity -> its column and unit."""


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


def measured(accuracy_of: dict[str, pd.Series], columns: Iterable[str], **keys: str) -> Iterator[Row]:
    """Yield a row per column: the mean of an accuracy, or for "A − B" the difference of two, paired by seed."""
    for column in columns:
        after, _, before = column.partition(" − ")
        interval = difference(accuracy_of[after], accuracy_of[before]) if before else t_interval(accuracy_of[after])
        yield number(column, interval, "difference" if before else "accuracy", **keys)


def comparison(results: Results, columns: list[str]) -> Iterator[Row]:
    """Yield accuracies and differences of every workflow on every task; both policies share the untrained workflow."""
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        accuracy_of = {
            "base": results.base(workflow, task),
            "SA-RL": results.accuracy("single", "sp", task, "peak"),
            "IP": results.accuracy(workflow, "ip", task, "peak"),
            "SP": results.accuracy(workflow, "sp", task, "peak"),
        }
        for name, adapters in (("transfer", "transfer"), ("transfer to all", "transfer_all")):
            outcomes = results.evaluated(adapters, workflow=workflow, task=task)
            accuracy_of[name] = outcomes.groupby("seed")["correct"].mean() if len(outcomes) else pd.Series(dtype=float)
        yield from measured(accuracy_of, columns, task=task, workflow=workflow)


def checks(results: Results, columns: list[str]) -> Iterator[Row]:
    """Yield the gain over base, the peak chosen on other problems, and the gain at the end."""

    def split_half(*cell: str) -> pd.Series:
        halves = {seed: split_half_outcomes(run.correct).mean() for seed, run in results.runs_of(*cell).items()}
        return pd.Series(halves, dtype=float)

    for task, (workflow, policy) in product(results.grid.tasks, WORKFLOW_POLICIES):
        cell = workflow, policy, task
        accuracy_of = {
            name: results.accuracy(*cell, at) for name, at in (("base", "base"), ("peak", "peak"), ("final", "end"))
        }
        accuracy_of |= {"split-half peak": split_half(*cell), "SA-RL's": split_half("single", "sp", task)}
        cell_columns = [column for column in columns if workflow != "single" or "SA-RL" not in column]
        for row in measured(accuracy_of, cell_columns, task=task, workflow=workflow, policy=policy):
            is_tested = row["number"] != "final − peak"  # it can never be positive
            yield row if is_tested else row | {"p": np.nan, "p_match": np.nan}


def ip_against_sp(results: Results) -> Iterator[Row]:
    """Yield IP minus SP in every cell, and the mean over cells."""
    means: dict[str, list[float]] = {place: [] for place in REPORTED_STEPS}
    for task, workflow, place in product(results.grid.tasks, WORKFLOWS, REPORTED_STEPS):
        gap = difference(*(results.accuracy(workflow, policy, task, place) for policy in POLICIES))
        means[place].append(gap.mean)
        yield number("IP − SP", gap, "difference", task=task, workflow=workflow, at=place)
    for place, values in means.items():
        yield number("IP − SP", t_interval(values), "difference", task="", workflow=ALL_CELLS, at=place)


def over_problems(results: Results) -> Iterator[Row]:
    """Yield differences of accuracies with intervals over seeds, and over seeds and validation problems, in every regime."""
    for (regime, changed), task, workflow in product(claims.REGIMES.items(), results.grid.tasks, WORKFLOWS):
        runs_of = {policy.upper(): results.runs_of(workflow, policy, task, **changed) for policy in POLICIES}
        runs_of["SA-RL"] = results.runs_of("single", "sp", task, **changed)
        for comparison, place in product(("IP − SA-RL", "SP − SA-RL", "IP − SP"), REPORTED_STEPS):
            after, before = (runs_of[name] for name in comparison.split(" − "))
            if seeds_of_both := [seed for seed in after if seed in before]:
                right = [
                    [run.correct[run.steps[place]] for run in (after[seed], before[seed])] for seed in seeds_of_both
                ]
                gaps = np.stack([x - y for x, y in right])  # (S, P)
                seeds, crossed = untested(t_interval(gaps.mean(axis=1))), crossed_interval(gaps)
                keys = {"regime": regime, "task": task, "workflow": workflow, "difference": comparison, "at": place}
                yield number("over seeds", seeds, "difference", **keys)
                yield number("over seeds and problems", crossed, "difference", **keys)
                times = (crossed.high - crossed.low) / (seeds.high - seeds.low)
                yield number("times as wide", times, "similarity", **keys)


def by_regime(results: Results) -> Iterator[Row]:
    """Yield the accuracy of every cell and of the single agent in every regime whose runs are packed."""
    for (regime, changed), task, (workflow, policy) in product(
        claims.REGIMES.items(), results.grid.tasks, WORKFLOW_POLICIES
    ):
        if runs := results.runs_of(workflow, policy, task, **changed):
            keys = {"regime": regime, "task": task, "workflow": workflow, "policy": policy}
            accuracy_at = {place: accuracies(runs.values(), place) for place in ("base", *REPORTED_STEPS)}
            yield number("runs", len(runs), "count", **keys)
            yield from measured(accuracy_at, accuracy_at, **keys)


def signatures_of(turns: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Return (role, signature) -> its value over the turns of one checkpoint, and ("", "iteration") -> its step.

    `first_*` is over turns of round 0; `slots_*` are quantiles of each problem's mean length over the slots of a role (Panel A3).
    """
    values = {("", "iteration"): turns["step"].iloc[0]}
    for prefix, part in (("", turns), ("first_", turns[turns["round"] == 0])):
        of_roles = signatures_of_frame(part).set_index("role").drop(columns="step")
        of_roles["no_verdict_rate"] = 1 - of_roles["verdict_rate"]
        values |= {(role, prefix + name): value for (role, name), value in of_roles.stack().items()}
    for role, role_turns in turns.groupby("role"):
        lengths = role_turns.groupby("problem")["completion_tokens"].mean()
        values[role, "slots_p50"], values[role, "slots_p95"] = np.quantile(lengths, [0.5, 0.95])
    return values


def readings(results: Results, workflow: str, policy: str, task: str) -> dict[str, list[dict[tuple[str, str], float]]]:
    """Return checkpoint -> one measurement per seed that has it."""
    turns_at = {"base": results.evaluated("base", "turns", workflow=workflow, task=task)}
    for name in ("early", "best", "terminal"):
        turns_at[name] = results.own_evaluation(workflow, policy, task, name, "turns")
    return {
        name: [signatures_of(turns) for _, turns in checkpoint_turns.groupby("seed")]
        for name, checkpoint_turns in turns_at.items()
    }


def panel_values(results: Results, panels: dict[str, dict], labels: dict[str, tuple[str, str]]) -> Iterator[Row]:
    """Yield the mean and range over seeds of the signatures of these panels at each checkpoint.

    A panel is its "cell" and, per role, the names of its signatures; `labels` maps such a name to its unit and label.
    """
    for panel, spec in panels.items():
        measured = readings(results, *spec["cell"].split())
        named = [("", "iteration"), *((role, name) for role in spec if role != "cell" for name in spec[role])]
        for role, name in named:
            unit, label = labels[name]
            keys = {"panel": panel, "role": role, "signature": label}
            for checkpoint, seeds in measured.items():
                if known := [seed[role, name] for seed in seeds if (role, name) in seed]:
                    yield keys | {"number": checkpoint, "unit": unit} | spread(known)


def n_problems(cell: Cell) -> list[int]:
    """Return the numbers of all training and validation problems of a finite generated task."""
    return [len(cell.make_task().problems(split)) for split in ("train", "validation")]


def hyper_parameters(results: Results, settings: list[list[str]]) -> pd.DataFrame:
    """Build the table of hyper-parameters: the paper's, this project's preset, and this grid's."""
    grid = results.grid

    def filled(text: str, cell: Cell) -> str:
        counts = {"train": cell.n_train, "validation": cell.n_validation}
        if None in counts.values():  # all problems; the numbers of the paper's data sets are known without a download
            sizes = SIZES[cell.task] if cell.scale in PAPER_SCALES else n_problems(cell)
            counts = {split: n or size for (split, n), size in zip(counts.items(), sizes, strict=True)}
        text = text.format(cell=cell, rows=cell.n_problems * cell.num_generations, **counts)
        return text.replace("e-0", "e-").replace("None", "none")

    repos = ", ".join(f"{MODELS[scale].repo} at {MODELS[scale].revision[:8]}" for scale in PAPER_SCALES)
    model_name = f"{grid.base}, embedded" if grid.parameters.get("model") in (None, *OTHER_BASES) else grid.base
    if grid.scale in MODELS and "model" not in grid.parameters:
        model_name = MODELS[grid.scale].repo
    rows = [
        ("Base models", "Qwen3 0.6B, 1.7B, 4B", repos, model_name),
        ("Seeds per cell", "1 (A.1)", "1", f"{len(grid.seeds)}: {', '.join(map(str, grid.seeds))}"),
    ]
    for setting, paper, text, *keys in settings:
        workflow, task = keys or ("voting", "math")
        grid_value = filled(text, grid.cell(workflow, "sp", task, grid.seeds[0])) if task in grid.tasks else MISSING
        rows.append((setting, paper, filled(text, Cell(workflow, "sp", task, "1.7b")), grid_value))
    grid_value = ", ".join(f"{name}={value}" for name, value in grid.parameters.items()) or "none"
    rows.append(("Options that the grid sets beside its scale's preset", "–", "–", grid_value))
    return pd.DataFrame(rows, columns=["setting", "paper", "preset", "grid"])


def compute(results: Results) -> Iterator[Row]:
    """Yield the cost of every cell summed over seeds, the total, and the tokens of the evaluations."""
    lines: list[tuple[str, str, str, int, pd.DataFrame]] = []
    for task, (workflow, policy) in product(results.grid.tasks, WORKFLOW_POLICIES):
        if runs := results.runs_of(workflow, policy, task).values():
            spent = pd.concat([run.table("metrics") for run in runs])
            spent["wall_seconds"] = spent["rollout_seconds"] + spent["update_seconds"]
            lines.append((task, workflow, policy, len(runs), spent))
    everything = pd.concat([line[-1] for line in lines]) if lines else pd.DataFrame()
    lines.append(("training, sum", "", "", len(results.runs), everything))
    kinds = [evaluation.adapters for evaluation in results.evaluations]
    lines += [(f"evaluations, {k}", "", "", kinds.count(k), results.evaluated(k)) for k in dict.fromkeys(kinds)]
    for task, workflow, policy, runs, spent in lines:
        keys = {"task": task, "workflow": workflow, "policy": policy}
        yield number("runs", runs, "count", **keys)
        for name, (label, unit) in COST.items():
            if name in spent:
                yield number(label, spent[name].sum(), unit, **keys)


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


def make(
    results: Results, study: Study | None, name: str, title: str, measure: str, caption: str, question: str = "",
    **options: object,
) -> Table:  # fmt: skip
    """Compute and format one declared table; text values are shown unchanged."""
    measured_by = resolve_name(f"multirole_study.paper.{measure}")
    values = pd.DataFrame(measured_by(*(results, study) if study else (results,), **options))
    shown = pivoted(values) if "number" in values else values
    facts = sentences(results) | ({"made_from": made_from(results, study, question)} if study and question else {})
    return Table(name, title, caption.format(**facts), shown, values)


def tables(results: Results) -> list[Table]:
    """Build the paper's tables, in its order."""
    return [make(results, None, **declared) for declared in DECLARED["paper"]]


def tables_of_study(results: Results, study: Study) -> list[Table]:
    """Build the study's tables whose runs are finished."""
    study_tables = [make(results, study, **declared) for declared in DECLARED["study"]]
    return [table for table in study_tables if len(table.shown)]
