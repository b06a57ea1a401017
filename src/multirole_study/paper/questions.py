"""Answer the declared questions of `claims_smollm2.yaml` from the packed runs of several scales or bases, side by side."""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import yaml
from scipy.stats import t

from multirole_study.labels import POLICY_NAMES, WORKFLOW_NAMES
from multirole_study.paper.grid import Study
from multirole_study.paper.output import MISSING
from multirole_study.paper.results import Results, Run
from multirole_study.paper.skill_tables import start_and_change
from multirole_study.paper.statistics import ALPHA, Interval, t_interval

DECLARED = yaml.safe_load(Path(__file__).with_name("claims_smollm2.yaml").read_text(encoding="utf-8"))
SP_MINUS_IP = "sp − ip"


def end(run: Run, line: dict) -> float:
    """Return the mean accuracy over the last evaluations."""
    return float(run.accuracy.iloc[-DECLARED["end"] :].mean())


def fall(run: Run, line: dict) -> float:
    """Return the accuracy of the best evaluation minus `end`."""
    return float(run.accuracy.max()) - end(run, line)


def change(run: Run, line: dict) -> float:
    """Return the change of a role's metric, or of its gain over its trivial twin, from start to end; NaN if not measured."""
    return float(start_and_change(run, line)[1])


def share(run: Run, line: dict) -> float:
    """Return a role's median share of its adapter's gradient, minus one half."""
    return float(run.series("grad_share", line["role"]).median()) - 0.5


RUN_MEASURES = {function.__name__: function for function in (end, fall, change, share)}
ACCURACY_MEASURES = ("end", "fall")


def verdict(interval: Interval, is_accuracy: bool) -> str:
    """Return the answer that an interval gives by the declared rules."""
    if interval.seeds < DECLARED["least_seeds"] or math.isnan(interval.low):
        return "undecided"
    if interval.low > 0:
        return "yes"
    if interval.high < 0:
        return "no"
    p_match = t.sf((DECLARED["margin"] - abs(interval.mean)) / (interval.sd / interval.seeds**0.5), interval.seeds - 1)
    return "equivalent" if is_accuracy and p_match < ALPHA else "undecided"


def _verdict(question: dict, values: pd.Series) -> str:
    return verdict(t_interval(values), question["measure"] in ACCURACY_MEASURES)


def numbers(
    results: Results,
    study: Study | None,
    question: dict,
    line: dict,
    policy: str,
    task: str,
    seeds: list[int] | None = None,
) -> pd.Series:
    """Return seed -> a line's number on a task under a policy, or the difference between both policies; empty if there are no runs.

    Seeds are those for which the question is declared, by default the grid's.
    """
    if policy == SP_MINUS_IP:
        sp, ip = (numbers(results, study, question, line, one, task, seeds) for one in ("sp", "ip"))
        return (sp - ip).dropna()
    changed = parameters_of(results, study, question["variant"]) if "variant" in question else {}
    seeds = seeds or declared_seeds(results, question, task)
    values = _measured(runs_of(results, line["workflow"], policy, task, changed, seeds), question, line)
    if "minus" in question:
        control = parameters_of(results, study, question["minus"])
        values = values - _measured(runs_of(results, "single", "sp", task, control, seeds), question, line)
    return values.dropna()


def declared_seeds(results: Results, question: dict, task: str) -> list[int]:
    """Return the seeds by which a question is first judged: its own for the scale and task, those of the scale, or the grid's."""
    scale = results.grid.scale
    of_task = question.get("seeds", {}).get(f"{scale} {task}")
    return of_task or DECLARED["first_seeds"].get(scale) or results.grid.seeds


def judged_numbers(
    results: Results, study: Study | None, question: dict, line: dict, policy: str, task: str
) -> pd.Series:
    """Return `numbers`, with the scale's later seeds if the declared ones leave the line undecided and every later seed has runs.

    A policy that the question does not judge is shown by the seeds of the line that it does judge.
    """
    judged = question.get("judged", [policy])
    if policy not in judged:
        seeds = judged_numbers(results, study, question, line, judged[0], task).index.tolist()
        return numbers(results, study, question, line, policy, task, seeds)
    values = numbers(results, study, question, line, policy, task)
    later = DECLARED["later_seeds"].get(results.grid.scale, []) if question["name"] in DECLARED["later_in"] else []
    has_first = len(values) == len(declared_seeds(results, question, task))
    if not (later and has_first) or _verdict(question, values) != "undecided":
        return values
    more = numbers(results, study, question, line, policy, task, later)
    return pd.concat([values, more]) if len(more) == len(later) else values


def parameters_of(results: Results, study: Study | None, name: str) -> dict[str, object] | None:
    """Return what a variant of `DECLARED["scales"]`, such as "control", changes at this scale; None if the study does not have it.

    Nothing is changed in "grid", the cells of the grid.
    """
    if name == "grid":
        return {}
    variant = DECLARED["scales"][results.grid.scale].get(name)
    return study.variants[variant].parameters if study is not None and variant in study.variants else None


def runs_of(
    results: Results,
    workflow: str,
    policy: str,
    task: str,
    changed: dict[str, object] | None,
    seeds: list[int] | None = None,
) -> dict[int, Run]:
    """Return seed -> packed run of a cell, of the grid's seeds or `seeds`; empty where `changed` is None."""
    seeds = [] if changed is None else results.grid.seeds if seeds is None else seeds
    cells = {seed: results.grid.cell(workflow, policy, task, seed, **(changed or {})) for seed in seeds}
    return {seed: run for seed, cell in cells.items() if (run := results.find(cell))}


def _measured(runs: dict[int, Run], question: dict, line: dict) -> pd.Series:
    return pd.Series({seed: RUN_MEASURES[question["measure"]](run, line) for seed, run in runs.items()}, dtype=float)


def answers(results: Results, task: str = DECLARED["task"]) -> Iterator[dict[str, object]]:
    """Yield one row per question, line and policy of a base on a task: the mean, its interval, the seeds, and the verdict.

    A dash is the verdict of a line without runs, and of one that no question judges, or not on this base.
    """
    study = Study.read(results.folder)
    for question in DECLARED["questions"]:
        for line in question["lines"]:
            for policy in question["policies"]:
                values = judged_numbers(results, study, question, line, policy, task)
                interval = t_interval(values)
                is_judged = (
                    interval.seeds
                    and policy in question.get("judged", question["policies"])
                    and results.grid.base in question.get("judged_on", [results.grid.base])
                )
                yield {
                    "question": question["name"],
                    "line": name_of(line, policy),
                    "base": results.grid.base,
                    "by seed": values,
                    "mean": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                    "seeds": interval.seeds,
                    "verdict": _verdict(question, values) if is_judged else MISSING,
                }


def name_of(line: dict, policy: str) -> str:
    """Name a line by workflow, measure and policy."""
    subject = line.get("role") or line.get("gain")
    names = [
        WORKFLOW_NAMES[line["workflow"]],
        *([subject] if subject else []),
        POLICY_NAMES.get(policy, policy.upper()),
    ]
    return ", ".join(names)


def columns_of(folders: list[Path], task: str = DECLARED["task"]) -> list[pd.DataFrame]:
    """Return the answers of several results folders on a task, a table for each. Raises ValueError for a scale without declared questions."""
    bases = [Results(folder) for folder in folders]
    if unknown := {results.grid.scale for results in bases} - set(DECLARED["scales"]):
        raise ValueError(
            f"The questions of claims_smollm2.yaml are declared for the scales {', '.join(DECLARED['scales'])}, got runs of {', '.join(sorted(unknown))}."
        )
    return [pd.DataFrame(answers(results, task)).assign(scale=results.grid.scale) for results in bases]


def table(columns: list[pd.DataFrame], task: str = DECLARED["task"]) -> str:
    """Format the answers of several bases (`columns_of`) as Markdown: a table for each question, with a column for each base.

    Two bases of one scale have a third column: the second minus the first, paired by seed, without a verdict.
    """
    if len({column["scale"].iloc[0] for column in columns}) == 1 and len(columns) == 2:
        columns = [*columns, difference_of_bases(*columns)]
    rules = f"Rules: claims_smollm2.yaml, version {DECLARED['version']}; {len(columns[0])} lines, no correction for their number."
    answers_are = (
        "*Yes*: the interval lies above zero; *no*: below; *equivalent*: accuracies within "
        f"{100 * DECLARED['margin']:.0f} points. A dash has no run; the falls of one policy, which cannot be below zero, have no verdict."
    )
    lines = [f"Task: {task}. {rules} Means over seeds with 95 % t intervals. {answers_are}"]
    for question in DECLARED["questions"]:
        lines += [
            "",
            f"**{question['question']}**",
            "",
            f"| line | {' | '.join(column['base'].iloc[0] for column in columns)} |",
            f"|---|{'---|' * len(columns)}",
        ]
        of_question = [column[column["question"] == question["name"]] for column in columns]
        for rows in zip(*(part.to_dict("records") for part in of_question), strict=True):
            lines.append(f"| {rows[0]['line']} | {' | '.join(map(_cell, rows))} |")
        if "note" in question:
            lines += ["", question["note"]]
    return "\n".join([*lines, ""])


def values_of(columns: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the answers of several bases as one table of numbers; a line without runs has none."""
    names = ["question", "line", "base", "mean", "low", "high", "seeds", "verdict"]
    return pd.concat(columns, ignore_index=True)[names].rename(columns={"mean": "value"})


def difference_of_bases(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return the answers of the second base minus those of the first, paired by seed."""
    intervals = [t_interval((b - a).dropna()) for a, b in zip(first["by seed"], second["by seed"], strict=True)]
    values = [{name: getattr(interval, name) for name in ("mean", "low", "high", "seeds")} for interval in intervals]
    name = f"{second['base'].iloc[0]} − {first['base'].iloc[0]}"
    return first[["question", "line"]].assign(base=name, verdict=MISSING).join(pd.DataFrame(values, first.index))


def _cell(row: dict) -> str:
    if not row["seeds"]:
        return MISSING
    mean, low, high = (f"{row[name]:+.3f}".replace("-", "−") for name in ("mean", "low", "high"))
    count = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
    number = f"{mean}, {count}" if math.isnan(row["low"]) else f"{mean} [{low}, {high}], {count}"
    return number if row["verdict"] == MISSING else f"**{row['verdict']}**: {number}"
