"""Answer the declared questions of `claims_smollm2.yaml` from the packed runs of several scales or bases, side by side."""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import yaml

from multirole_study.compare.answers import Answer, Line, Question, judged
from multirole_study.compare.arms import find_runs
from multirole_study.compare.estimates import differences
from multirole_study.compare.intervals import t_interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import MEASURES
from multirole_study.compare.verdicts import Rule
from multirole_study.labels import POLICY_NAMES, WORKFLOW_NAMES
from multirole_study.paper.grid import Study
from multirole_study.paper.output import MISSING, Page, markdown
from multirole_study.paper.results import Results, Run

DECLARED = yaml.safe_load(Path(__file__).with_name("claims_smollm2.yaml").read_text(encoding="utf-8"))
QUESTIONS: dict[str, dict] = {question["name"]: question for question in DECLARED["questions"]}
"""Name -> declared question."""
SP_MINUS_IP = "sp − ip"
NAMES = {"share": "share_above_half"}
"""Word of claims_smollm2.yaml -> measure, where they differ."""


def question_of(declared: dict, line: dict, stages: tuple[tuple[int, ...], ...] = ()) -> Question:
    """Return a declared question about a line, whose seeds are read in stages."""
    measure = MEASURES[NAMES.get(declared["measure"], declared["measure"])]
    options = {name: line[name] for name in ("role", "metric", "gain") if name in line} | {"last": DECLARED["end"]}
    rule = Rule(has_margin=measure.has_margin, least_seeds=DECLARED["least_seeds"])
    return Question(
        measure, options, estimated_by={"margin": DECLARED["margin"]}, rule=rule, looks=Looks(stages=stages)
    )


def line_of(
    results: Results, study: Study | None, declared: dict, line: dict, policy: str, task: str, seeds: list[int]
) -> Line:
    """Return the runs of a line on a task under a policy, and those that are subtracted: the control's, or IP's from SP's."""
    changed = parameters_of(results, study, declared["variant"]) if "variant" in declared else {}
    place = line["workflow"], task

    def of_policy(name: str) -> dict[tuple[str, str], dict[int, Run]]:
        return {place: runs_of(results, line["workflow"], name, task, changed, seeds)}

    if policy == SP_MINUS_IP:
        return Line(of_policy("sp"), of_policy("ip"))
    if "minus" not in declared:
        return Line(of_policy(policy))
    control = parameters_of(results, study, declared["minus"])
    return Line(of_policy(policy), {place: runs_of(results, "single", "sp", task, control, seeds)})


def declared_seeds(results: Results, question: dict, task: str) -> list[int]:
    """Return the seeds by which a question is first judged: its own for the scale and task, those of the scale, or the grid's."""
    scale = results.grid.scale
    of_task = question.get("seeds", {}).get(f"{scale} {task}")
    return of_task or DECLARED["first_seeds"].get(scale) or results.grid.seeds


def all_seeds(results: Results) -> list[int]:
    """Return the grid's seeds and those that the declared rules add to undecided lines."""
    return [*results.grid.seeds, *DECLARED["later_seeds"].get(results.grid.scale, [])]


def answer(
    results: Results, study: Study | None, declared: dict, line: dict, policy: str, task: str = DECLARED["task"],
    seeds: list[int] | None = None,
) -> Answer:  # fmt: skip
    """Answer a question about a line, with the scale's later seeds if the declared ones leave it undecided and every later seed has runs.

    A policy that the question does not judge is shown by the seeds of the line that it does judge. `seeds` replaces all of these.
    """
    to_judge = declared.get("judged", [policy])
    if policy not in to_judge and seeds is None:
        seeds = answer(results, study, declared, line, to_judge[0], task).numbers["seed"].tolist()
    stages = [declared_seeds(results, declared, task) if seeds is None else seeds]
    if declared["name"] in DECLARED["later_in"] and seeds is None:
        stages += [DECLARED["later_seeds"].get(results.grid.scale, [])]
    question = question_of(declared, line, tuple(tuple(stage) for stage in stages if stage))
    read = [seed for stage in stages for seed in stage]
    (judged_line,) = judged(question, [question.numbers(*line_of(results, study, declared, line, policy, task, read))])
    return judged_line


def parameters_of(results: Results, study: Study | None, name: str) -> dict[str, object] | None:
    """Return what a variant of `DECLARED["scales"]`, such as "control", changes at this scale; None if the study does not have it.

    Nothing is changed in "grid", the cells of the grid.
    """
    if name == "grid":
        return {}
    variant = DECLARED["scales"].get(results.grid.scale, {}).get(name)
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
    return find_runs(results, (results.grid.cell(workflow, policy, task, seed, **(changed or {})) for seed in seeds))


def answers(results: Results, task: str = DECLARED["task"]) -> Iterator[dict[str, object]]:
    """Yield one row per question, line and policy of a base on a task: the mean, its interval, the seeds, and the verdict.

    A dash is the verdict of a line without runs, and of one that no question judges, or not on this base.
    """
    study = Study.read(results.folder)
    for question in DECLARED["questions"]:
        for line in question["lines"]:
            for policy in question["policies"]:
                judged_line = answer(results, study, question, line, policy, task)
                interval = judged_line.interval
                is_judged = (
                    interval.seeds
                    and policy in question.get("judged", question["policies"])
                    and results.grid.base in question.get("judged_on", [results.grid.base])
                )
                yield {
                    "question": question["name"],
                    "line": name_of(line, policy),
                    "base": results.grid.base,
                    "by seed": differences(judged_line.numbers).set_index("seed")["value"],
                    "mean": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                    "seeds": interval.seeds,
                    "verdict": judged_line.verdict if is_judged else MISSING,
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


def columns_of(bases: list[Results], task: str = DECLARED["task"]) -> list[pd.DataFrame]:
    """Return the answers of several bases on a task, a table for each. Raises ValueError for a scale without declared questions."""
    if unknown := {results.grid.scale for results in bases} - set(DECLARED["scales"]):
        raise ValueError(
            f"The questions of claims_smollm2.yaml are declared for the scales {', '.join(DECLARED['scales'])}, got runs of {', '.join(sorted(unknown))}."
        )
    return [pd.DataFrame(answers(results, task)).assign(scale=results.grid.scale) for results in bases]


def answers_page(columns: list[pd.DataFrame], task: str = DECLARED["task"]) -> Page:
    """Build the page `questions` of the answers of several bases (`columns_of`)."""
    return Page("questions", as_text(columns, task), values_of(columns))


def as_text(columns: list[pd.DataFrame], task: str = DECLARED["task"]) -> str:
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
        of_question = [column[column["question"] == question["name"]].to_dict("records") for column in columns]
        cells = [[rows[0]["line"], *map(_cell, rows)] for rows in zip(*of_question, strict=True)]
        bases = [column["base"].iloc[0] for column in columns]
        lines += ["", f"**{question['question']}**", "", markdown(["line", *bases], cells, "---")]
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
