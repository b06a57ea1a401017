"""Tables of a study (`study.json`): matched numbers of updates, remedies, and single-agent controls. None is in the paper.

Every run of a study differs from a run of the grid in one thing and shares its seed and problems, so that all differences are
paired by both.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.evaluate import named_steps
from multirole.paper.numbers import MISSING, percent, points
from multirole.paper.results import Key, Results, key_of, outcomes
from multirole.paper.statistics import Interval, bootstrap, difference, first_fall, method
from multirole.paper.write import Table
from multirole.record import folder_of, is_done
from multirole.study import Study
from multirole.tasks import TASKS

AT = ("best", "terminal")
SHOWN = {"best": "peak", "terminal": "end"}


class Twins(NamedTuple):
    """A cell of the grid and a variant of it: each seed's accuracy by step and outcomes (S, P) at "best" and "terminal"."""

    workflow: str
    policy: str
    task: str
    variant: str
    usual: dict[str, np.ndarray]
    changed: dict[str, np.ndarray]
    usual_curves: list[pd.Series]
    changed_curves: list[pd.Series]

    @property
    def label(self) -> str:
        """The cell as the tables name it."""
        return f"{self.workflow}, {self.policy.upper()}, {self.task}"

    @property
    def seeds(self) -> int:
        """How many seeds both have."""
        return len(self.usual_curves)


def twins(results: Results, study: Study, question: str) -> Iterator[Twins]:
    """Every variant of a question on every cell that has a finished run of both, in the study's order."""
    found: dict[tuple[str, ...], list[tuple[Key, pd.DataFrame, pd.DataFrame, dict[str, int]]]] = {}
    for name, _, cell in study.runs(question):
        folder, key = folder_of(cell, results.folder.parent), key_of(cell)
        if key in results.runs and is_done(folder):
            table = outcomes(pd.read_parquet(folder / "eval.parquet"))
            found.setdefault((*key[:3], name), []).append((key, results.correct(key), table, named_steps(folder)))
    for coordinates, runs in found.items():
        yield Twins(
            *coordinates,
            {at: np.stack([usual[results.steps(key)[at]] for key, usual, _, _ in runs]) for at in AT},
            {at: np.stack([changed[steps[at]] for _, _, changed, steps in runs]) for at in AT},
            [usual.mean() for _, usual, _, _ in runs],
            [changed.mean() for _, _, changed, _ in runs],
        )


def _falls(curves: list[pd.Series]) -> str:
    """How many seeds fall by 5 points or more."""
    return f"{sum(first_fall(curve) is not None for curve in curves)} of {len(curves)}"


def _values(twin: Twins, numbers: dict[str, Interval]) -> list[dict[str, object]]:
    cell = {"workflow": twin.workflow, "policy": twin.policy, "task": twin.task, "variant": twin.variant}
    return [cell | {"measure": name, **number._asdict()} for name, number in numbers.items()]


def verdict(interval: Interval) -> str:
    """What an interval of a difference says."""
    return ("more" if interval.low > 0 else "less") if interval.excludes_zero else "undecided"


def _paired(n: int) -> str:
    return (
        "The same seeds, problems, learning rate and schedule as the grid's runs. Validation accuracy in percent, differences in percentage "
        f"points, variant minus grid, paired by seed and problem; {method(n)}. Peaks are chosen on the problems they are read on; the "
        "end is the last checkpoint. Not in the paper."
    )


def matched_updates(results: Results, study: Study) -> Table:
    """Peak and end under a step per batch and under one step per iteration."""
    shown, values, n = [], [], 1
    for twin in twins(results, study, "updates"):
        numbers = {SHOWN[at]: bootstrap(twin.usual[at]) for at in AT}
        numbers |= {f"{SHOWN[at]}, {twin.variant}": bootstrap(twin.changed[at]) for at in AT}
        numbers |= {f"gain at the {SHOWN[at]}": difference(twin.changed[at], twin.usual[at]) for at in AT}
        single = results.outcomes("single", "sp", twin.task, "best")
        if single is not None:
            numbers[f"{twin.variant} − SA-RL, peaks"] = difference(twin.changed["best"], single)
        texts = {k: (percent if k.startswith(("peak", "end")) else points)(v) for k, v in numbers.items()}
        shown.append({"cell": twin.label, "seeds": twin.seeds} | texts)
        values += _values(twin, numbers)
        n = max(n, twin.seeds)
    caption = (
        "Only the number of optimizer steps differs: one per adapter and iteration instead of one per batch of rows, which is one per slot "
        f"and role. {_paired(n)}"
    )
    title = "One optimizer step per iteration against one per batch of rows"
    return Table("matched_updates", title, caption, pd.DataFrame(shown), pd.DataFrame(values))


def policies_at_matched_updates(results: Results, study: Study) -> Table:
    """IP minus SP with a step per batch and with one step per iteration: how much of the difference is the steps'."""
    by_cell = {(t.workflow, t.task, t.policy): t for t in twins(results, study, "updates")}
    shown, values, n = [], [], 1
    for (workflow, task, policy), ip in by_cell.items():
        sp = by_cell.get((workflow, task, "sp"))
        if policy != "ip" or sp is None or sp.seeds != ip.seeds:
            continue
        for at in AT:
            usual, one = ip.usual[at] - sp.usual[at], ip.changed[at] - sp.changed[at]  # (S, P)
            numbers = {
                "as the paper steps": bootstrap(usual),
                "one step each": bootstrap(one),
                "change": bootstrap(one - usual),
            }
            shown.append(
                {"cell": f"{workflow}, {task}", "at": SHOWN[at], "seeds": ip.seeds}
                | {f"IP − SP, {k}" if k != "change" else k: points(v) for k, v in numbers.items()}
            )
            values += [
                {"workflow": workflow, "task": task, "at": at, "measure": k, **v._asdict()} for k, v in numbers.items()
            ]
        n = max(n, ip.seeds)
    caption = (
        "The difference between the policies under both numbers of optimizer steps. The learning-rate schedule is clocked per iteration "
        f"throughout, so it is matched already. Percentage points, paired by seed and problem; {method(n)}. Not in the paper."
    )
    title = "IP against SP at matched numbers of updates"
    return Table("policies_at_matched_updates", title, caption, pd.DataFrame(shown), pd.DataFrame(values))


def remedies(results: Results, study: Study) -> Table:
    """What each remedy does to the peak and to the end of a cell that falls."""
    shown, values, n = [], [], 1
    found = [*twins(results, study, "remedies"), *twins(results, study, "updates")]
    cells = dict.fromkeys(
        t.label for t in found if t.variant not in study.variants or study.variants[t.variant].question == "remedies"
    )
    for label in cells:
        for twin in (t for t in found if t.label == label):
            numbers = {f"change at the {SHOWN[at]}": difference(twin.changed[at], twin.usual[at]) for at in AT}
            shown.append(
                {
                    "cell": label,
                    "remedy": twin.variant,
                    "seeds": twin.seeds,
                    "falls, grid": _falls(twin.usual_curves),
                    "falls": _falls(twin.changed_curves),
                    "peak": percent(bootstrap(twin.changed["best"])),
                    "end": percent(bootstrap(twin.changed["terminal"])),
                }
                | {name: points(number) for name, number in numbers.items()}
                | {
                    "the end is": verdict(numbers["change at the end"]),
                    "the peak is": verdict(numbers["change at the peak"]),
                }
            )
            values += _values(twin, numbers)
            n = max(n, twin.seeds)
    caption = (
        f"Each remedy is one field of Cell. {_paired(n)} A run falls where an evaluation lies 5 points below the best one before it. "
        "More, less and undecided are what the intervals of the last differences say."
    )
    return Table("remedies", "Remedies on cells that fall", caption, pd.DataFrame(shown), pd.DataFrame(values))


def _cost(folder: Path) -> tuple[int, int]:
    """Sampled tokens and optimizer steps of a whole run."""
    ledger = pd.read_parquet(folder / "ledger.parquet", columns=["tokens"])
    roles = pd.read_parquet(folder / "roles.parquet", columns=["tokens"])
    return int(roles["tokens"].sum()), len(ledger)


def controls(results: Results, study: Study) -> Table:
    """The single agent matched on iterations, updates and sampled tokens, beside the workflows of the same task."""
    runs: dict[tuple[str, str], list] = {}
    tasks = dict.fromkeys(where.split()[2] for _, where, _ in study.runs("controls"))
    for task in tasks:
        usual = [(k, results.runs[k]) for k in results.runs if k.task == task]
        for key, folder in sorted(usual, key=lambda pair: (pair[0].workflow != "single", pair[0].workflow)):
            name = (
                "single agent, as many iterations"
                if key.workflow == "single"
                else f"{key.workflow}, {key.policy.upper()}"
            )
            runs.setdefault((task, name), []).append(folder)
    for question, prefix in (("controls", "single agent, {}"), ("updates", "{1}, {0}")):
        for name, where, cell in study.runs(question):
            folder, (workflow, policy, task) = folder_of(cell, results.folder.parent), where.split()
            if is_done(folder) and task in tasks:
                runs.setdefault((task, prefix.format(name, f"{workflow}, {policy.upper()}")), []).append(folder)
    shown, values = [], []
    for (task, name), folders in runs.items():
        tables = [outcomes(pd.read_parquet(folder / "eval.parquet")) for folder in folders]
        steps = [named_steps(folder) for folder in folders]
        numbers = {SHOWN[at]: bootstrap(np.stack([t[s[at]] for t, s in zip(tables, steps, strict=True)])) for at in AT}
        tokens, updates = np.mean([_cost(folder) for folder in folders], axis=0)
        shown.append(
            {
                "task": task,
                "run": name,
                "seeds": len(folders),
                "tokens sampled": f"{tokens / 1e6:.2f}M",
                "optimizer steps": f"{updates:,.0f}",
            }
            | {k: percent(v) for k, v in numbers.items()}
        )
        values += [
            {"task": task, "run": name, "measure": k, "tokens": tokens, "updates": updates, **v._asdict()}
            for k, v in numbers.items()
        ]
    caption = (
        "The single agent given as many iterations as a workflow, as many optimizer steps, as many sampled tokens, or both, beside the "
        "workflows of the grid and those with one step per iteration. Tokens are completions sampled in training and optimizer steps those "
        f"of all adapters, over the whole run, means over seeds. Validation accuracy in percent; {method(len(study.seeds))}. Not in the paper."
    )
    return Table(
        "controls", "Single-agent controls at matched budgets", caption, pd.DataFrame(shown), pd.DataFrame(values)
    )


def _vote(answers: pd.DataFrame, k: int, task: str) -> pd.Series:
    """problem -> whether the most frequent of the first k extracted answers is right; of equals the first wins."""
    extract = TASKS[task].extract
    first = answers[answers["rollout"] < k].sort_values("rollout").copy()
    first["extracted"] = [extract(text) for text in first["answer"]]

    def one(group: pd.DataFrame) -> bool:
        given = group.dropna(subset="extracted")
        if given.empty:
            return False
        chosen = given["extracted"].value_counts(sort=False).idxmax()
        return bool(given.loc[given["extracted"] == chosen, "correct"].iloc[0])

    return first.groupby("problem")[["extracted", "correct"]].apply(one).astype(float).sort_index()


def inference(results: Results, study: Study) -> Table:
    """Votes and best of k of the single agent at its peak, at about the completion tokens of each workflow's peak."""
    root, shown, values = results.folder.parent, [], []
    by_task: dict[str, list[pd.DataFrame]] = {}
    for draw in study.draws():
        if is_done(draw.folder(root)):
            by_task.setdefault(draw.cell.task, []).append(pd.read_parquet(draw.folder(root) / "eval.parquet"))
    for task, tables in by_task.items():
        task_name = results.grid.cell("single", "sp", task, study.seeds[0]).task_name
        rows: list[tuple[str, float, np.ndarray]] = []
        for k in range(1, study.rollouts + 1):
            spent = np.mean([t[t["rollout"] < k].groupby("problem")["completion_tokens"].sum().mean() for t in tables])
            rows.append(
                (
                    f"single agent, vote of {k}" if k > 1 else "single agent, once",
                    spent,
                    np.stack([_vote(t, k, task_name) for t in tables]),
                )
            )
            if k > 1:
                best = [
                    t[t["rollout"] < k].groupby("problem")["correct"].any().astype(float).sort_index() for t in tables
                ]
                rows.append((f"single agent, best of {k} (an oracle's choice)", spent, np.stack(best)))
        own = results.evaluated("own")
        for cell in (
            c
            for c in results.grid.cells()
            if c.task == task and c.workflow_name != "single" and c.seed == study.seeds[0]
        ):
            peaks, spent = results.outcomes(cell.workflow_name, cell.policy_name, task, "best"), []
            for seed in results.seeds(cell.workflow_name, cell.policy_name, task):
                key = Key(cell.workflow_name, cell.policy_name, task, seed)
                mine = own[(own[list(Key._fields)] == list(key)).all(axis=1)] if len(own) else own
                spent.append(
                    mine[mine["step"] == results.steps(key)["best"]]["completion_tokens"].mean()
                    if len(mine)
                    else np.nan
                )
            if peaks is not None:
                rows.append((f"{cell.workflow_name}, {cell.policy_name.upper()}, peak", float(np.mean(spent)), peaks))
        for name, tokens, right in sorted(rows, key=lambda row: row[1]):
            number = bootstrap(right)
            shown.append(
                {
                    "task": task,
                    "run": name,
                    "completion tokens per problem": MISSING if np.isnan(tokens) else f"{tokens:.0f}",
                    "accuracy": percent(number),
                }
            )
            values.append({"task": task, "run": name, "tokens": tokens, **number._asdict()})
    caption = (
        "Completion tokens are those of all roles. The single agent is read at its peak, its answers drawn independently; a vote takes the most "
        "frequent extracted answer, of equals the first; best of k knows the right answer and is an upper bound of any choice. "
        f"Validation accuracy in percent; {method(len(study.seeds))}. Not in the paper."
    )
    return Table(
        "inference",
        "The single agent at the inference tokens of a workflow",
        caption,
        pd.DataFrame(shown),
        pd.DataFrame(values),
    )


def ledger_example(results: Results, task: str = "math") -> pd.DataFrame:
    """The second iteration's ledger of the first seed's runs: what each adapter's optimizer steps were made of."""
    ledger = results.table("ledger")
    mine = ledger[(ledger["task"] == task) & (ledger["seed"] == results.grid.seeds[0]) & (ledger["iteration"] == 2)]
    by_adapter = mine.groupby(["workflow", "policy", "adapter"], sort=False)
    return by_adapter.agg(
        steps=("step", "size"),
        rows=("rows", "sum"),
        tokens=("tokens", "sum"),
        lr=("lr", "first"),
        grad_norm=("grad_norm", "mean"),
    ).round(4)


def findings(made: list[Table]) -> str:
    """What the study's tables say, in sentences (Markdown); every verdict is its interval's."""
    by_name, lines = {table.name: table for table in made}, []
    if updates := by_name.get("matched_updates"):
        ends = updates.values[updates.values["measure"] == "gain at the end"]
        up, down = int((ends["low"] > 0).sum()), int((ends["high"] < 0).sum())
        lines.append(
            f"**Steps.** With one step per adapter and iteration the end is higher in {up} of {len(ends)} cells, lower in "
            f"{down}, undecided in {len(ends) - up - down}."
        )
    if policies := by_name.get("policies_at_matched_updates"):
        for (workflow, task, at), mine in policies.values.groupby(["workflow", "task", "at"], sort=False):
            by = {row["measure"]: _interval(row) for row in mine.to_dict("records")}
            lines.append(
                f"**IP against SP**, {workflow} {task}, {SHOWN[at]}: {points(by['as the paper steps'])} as the paper steps, "
                f"{points(by['one step each'])} with one step each; the change, {points(by['change'])}, is "
                f"{'decided' if by['change'].excludes_zero else 'undecided'}."
            )
    if spent := by_name.get("controls"):
        for row in spent.values.to_dict("records"):
            if row["measure"] == "end" and row["run"].startswith("single agent"):
                lines.append(
                    f"**{row['run']}**, {row['task']}: {row['updates']:,.0f} optimizer steps on {row['tokens'] / 1e6:.2f}M sampled "
                    f"tokens end at {percent(_interval(row))}."
                )
    if tried := by_name.get("remedies"):
        for row in tried.shown.to_dict("records"):
            lines.append(
                f"**{row['remedy']}** on {row['cell']}: falls in {row['falls']} runs instead of {row['falls, grid']}; end "
                f"{row['change at the end']} ({row['the end is']}), peak {row['change at the peak']} ({row['the peak is']})."
            )
    return "\n".join(f"- {line}" for line in lines) or "No finished runs yet."


def _interval(row: dict[str, object]) -> Interval:
    return Interval(*(row[name] for name in Interval._fields))


def study_tables(results: Results, study: Study) -> list[Table]:
    """Every table of the study that has a finished run."""
    made = [f(results, study) for f in (matched_updates, policies_at_matched_updates, remedies, controls, inference)]
    return [table for table in made if len(table.shown)]
