"""The single agent at the budgets of the workflows: iterations, optimizer steps, sampled tokens, and tokens at inference."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pandas as pd

from multirole.experiment.cell import Cell
from multirole.experiment.record import is_done
from multirole.paper.numbers import MISSING, percent
from multirole.paper.results import Key, Results
from multirole.paper.statistics import bootstrap, method
from multirole.paper.study import Study
from multirole.paper.twins import SHOWN, Run, at, named, run_of
from multirole.paper.write import Table
from multirole.tasks import TASKS

SINGLE = "single"


def _cost(run: Run) -> tuple[int, int]:
    """Sampled tokens and optimizer steps of a whole run."""
    return int(run.table("roles")["tokens"].sum()), len(run.table("ledger"))


def controls(results: Results, study: Study) -> Table:
    """The single agent matched on iterations, updates and sampled tokens, beside the workflows of the same task."""
    runs: dict[tuple[str, str], list[Run]] = {}

    def add(name: str, cell: Cell) -> None:
        if run := run_of(cell, results.folder.parent):
            runs.setdefault((cell.task, name), []).append(run)

    for task in dict.fromkeys(where.split()[2] for _, where, _ in study.runs("controls")):
        usual = [cell for cell in results.grid.cells() if cell.task == task]
        for cell in sorted(usual, key=lambda cell: (cell.workflow_name != SINGLE, cell.workflow_name)):
            add("single agent, as many iterations" if cell.workflow_name == SINGLE else named(cell), cell)
        for question in ("controls", "updates"):
            for name, _, cell in study.runs(question):
                if cell.task == task:
                    add(f"{'single agent' if cell.workflow_name == SINGLE else named(cell)}, {name}", cell)
    shown, values = [], []
    for (task, name), found in runs.items():
        numbers = {shown_as: bootstrap(at(found, x)) for x, shown_as in SHOWN.items()}
        tokens, updates = np.mean([_cost(run) for run in found], axis=0)
        shown.append(
            {"task": task, "run": name, "seeds": len(found)}
            | {"tokens sampled": f"{tokens / 1e6:.2f}M", "optimizer steps": f"{updates:,.0f}"}
            | {measure: percent(number) for measure, number in numbers.items()}
        )
        about = {"task": task, "run": name, "tokens": tokens, "updates": updates}
        values += [about | {"measure": measure, **number._asdict()} for measure, number in numbers.items()]
    caption = (
        "The single agent given as many iterations as a workflow, as many optimizer steps, as many sampled tokens, or both, beside the "
        "workflows of the grid and those with one step per iteration. Tokens are completions sampled in training and optimizer steps those "
        f"of all adapters, over the whole run, means over seeds. Validation accuracy in percent; {method(len(study.seeds))}. Not in the paper."
    )
    title = "Single-agent controls at matched budgets"
    return Table("controls", title, caption, pd.DataFrame(shown), pd.DataFrame(values))


def _vote(answers: pd.DataFrame, k: int, task: str) -> pd.Series:
    """problem -> whether the most frequent of the first k extracted answers is right; of equals the first wins."""
    votes: dict[str, Counter] = {problem: Counter() for problem in answers["problem"]}
    is_right = {}
    first = answers[answers["rollout"] < k].sort_values("rollout")
    for problem, text, right in zip(first["problem"], first["answer"], first["correct"], strict=True):
        if (extracted := TASKS[task].extract(text)) is not None:
            votes[problem][extracted] += 1
            is_right.setdefault((problem, extracted), right)
    chosen = {
        problem: float(is_right[problem, found.most_common(1)[0][0]]) if found else 0.0
        for problem, found in votes.items()
    }
    return pd.Series(chosen).sort_index()


Row = tuple[str, float, np.ndarray]
"""(what answers, completion tokens per problem, outcomes (S, P))."""


def _drawn(tables: list[pd.DataFrame], k: int, task_name: str) -> Iterator[Row]:
    """The single agent's first k answers: a vote, and the best of them."""
    drawn = [table[table["rollout"] < k] for table in tables]
    spent = float(np.mean([table.groupby("problem")["completion_tokens"].sum().mean() for table in drawn]))
    votes = np.stack([_vote(table, k, task_name) for table in tables])
    yield f"single agent, vote of {k}" if k > 1 else "single agent, once", spent, votes
    if k > 1:
        best = [table.groupby("problem")["correct"].any().astype(float).sort_index() for table in drawn]
        yield f"single agent, best of {k} (an oracle's choice)", spent, np.stack(best)


def _peaks(results: Results, task: str) -> Iterator[Row]:
    """Each workflow of the grid at its peaks."""
    own = results.evaluated("own")
    cells = {(c.workflow_name, c.policy_name): c for c in results.grid.cells() if c.task == task}
    for (workflow, policy), cell in cells.items():
        keys = [Key(workflow, policy, task, seed) for seed in results.seeds(workflow, policy, task)]
        if workflow == SINGLE or not keys:
            continue
        spent = []
        for key in keys if len(own) else ():
            mine = own[(own[list(Key._fields)] == list(key)).all(axis=1)]
            spent.append(mine.loc[mine["step"] == results.steps(key)["best"], "completion_tokens"].mean())
        peaks = results.outcomes(workflow, policy, task, "best")
        yield f"{named(cell)}, peak", float(np.mean(spent)) if spent else np.nan, peaks


def inference(results: Results, study: Study) -> Table:
    """Votes and best of k of the single agent at its peak, beside the peak of each workflow, by completion tokens."""
    shown, values = [], []
    by_task: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for draw in study.draws():
        folder = draw.folder(results.folder.parent)
        if is_done(folder):
            tables = by_task.setdefault((draw.cell.task, draw.cell.task_name), [])
            tables.append(pd.read_parquet(folder / "eval.parquet"))
    for (task, task_name), tables in by_task.items():
        rows = [row for k in range(1, study.rollouts + 1) for row in _drawn(tables, k, task_name)]
        for name, tokens, right in sorted([*rows, *_peaks(results, task)], key=lambda row: row[1]):
            number = bootstrap(right)
            tokens_shown = MISSING if np.isnan(tokens) else f"{tokens:.0f}"
            shown.append(
                {"task": task, "run": name, "completion tokens per problem": tokens_shown, "accuracy": percent(number)}
            )
            values.append({"task": task, "run": name, "tokens": tokens, **number._asdict()})
    caption = (
        "Completion tokens are those of all roles. The single agent is read at its peak, its answers drawn independently; a vote takes the most "
        "frequent extracted answer, of equals the first; best of k knows the right answer and is an upper bound of any choice. "
        f"Validation accuracy in percent; {method(len(study.seeds))}. Not in the paper."
    )
    title = "The single agent at the inference tokens of a workflow"
    return Table("inference", title, caption, pd.DataFrame(shown), pd.DataFrame(values))
