"""A study's conclusions in sentences (Markdown). Every number is a table's, and every verdict its interval's."""

from collections.abc import Iterable

import pandas as pd

from multirole.paper.numbers import percent, points
from multirole.paper.statistics import Interval
from multirole.paper.twins import SHOWN
from multirole.paper.write import Table

PLACES = tuple(SHOWN.values())


def _interval(row: dict[str, object]) -> Interval:
    return Interval(*(row[name] for name in Interval._fields))


def _tally(rows: pd.DataFrame) -> str:
    """In how many cells a difference is above zero, below it, and undecided."""
    up, down = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
    return f"higher in {up} of {len(rows)} cells, lower in {down}, undecided in {len(rows) - up - down}"


def _decided(rows: pd.DataFrame) -> str:
    return f"{int(((rows['low'] > 0) | (rows['high'] < 0)).sum())} of {len(rows)}"


def _listed(found: Iterable[str]) -> str:
    return ", ".join(found) or "none"


def changes(table: Table) -> list[str]:
    """A sentence per variant: how many runs fall, and what becomes of end and peak."""
    said = []
    for variant, mine in table.values.groupby("variant", sort=False):
        by = dict(list(mine.groupby("measure")))
        before, after, n = (
            int(by[k][c].sum()) for k, c in (("falls, grid", "mean"), ("falls", "mean"), ("falls", "seeds"))
        )
        moved = "; ".join(f"the {place} is {_tally(by[f'change at the {place}'])}" for place in PLACES[::-1])
        said.append(
            f"**{variant.capitalize()}** ({n} runs): {after} fall, of their twins in the grid {before}; {moved}."
        )
    return said


def differences(table: Table) -> list[str]:
    """A sentence per variant and place: IP minus SP in the grid and under the variant, and whether the change is decided."""
    said = []
    for (variant, place), mine in table.values.groupby(["variant", "at"], sort=False):
        by = dict(list(mine.groupby("measure")))
        cells = [
            f"{row['workflow']} {row['task']} {points(_interval(row))}" for row in by["variant"].to_dict("records")
        ]
        said.append(
            f"**IP − SP at the {place}, {variant}**: {_listed(cells)}. Decided in {_decided(by['variant'])} cells, in the grid in "
            f"{_decided(by['grid'])}; the change is decided in {_decided(by['change'])}."
        )
    return said


def helped(table: Table) -> list[str]:
    """For each cell: under which remedies the end is decidedly higher, undecided or lower, and at what cost of the peak."""
    said = []
    for (workflow, policy, task), mine in table.values.groupby(["workflow", "policy", "task"], sort=False):
        by = {measure: rows.set_index("variant") for measure, rows in mine.groupby("measure")}
        ends, peaks = by["change at the end"], by["change at the peak"]

        def told(rows: pd.DataFrame, by: dict = by) -> str:
            return _listed(
                f"{row['variant']} ({points(_interval(row))}, {by['falls'].loc[row['variant'], 'mean']:.0f} of "
                f"{by['falls'].loc[row['variant'], 'seeds']:.0f} runs fall)"
                for row in rows.reset_index().to_dict("records")
            )

        cost = _listed(
            f"{row['variant']} ({points(_interval(row))})"
            for row in peaks[peaks["high"] < 0].reset_index().to_dict("records")
        )
        said.append(
            f"**{workflow}, {policy.upper()}, {task}**, where {int(by['falls, grid']['mean'].max())} of "
            f"{int(by['falls, grid']['seeds'].max())} runs of the grid fall: the end is higher with {told(ends[ends['low'] > 0])}; "
            f"undecided with {told(ends[(ends['low'] <= 0) & (ends['high'] >= 0)])}; lower with {told(ends[ends['high'] < 0])}. "
            f"Remedies that cost some of the peak: {cost}."
        )
    return said


def budgets(table: Table) -> list[str]:
    """Where the single agent ends at each budget, and the best end of the workflows."""
    said = []
    for task, mine in table.values[table.values["measure"] == "end"].groupby("task", sort=False):
        is_single = mine["run"].str.startswith("single agent")
        for row in mine[is_single].to_dict("records"):
            said.append(
                f"**{row['run'].capitalize()}**, {task}: {row['updates']:,.0f} optimizer steps on {row['tokens'] / 1e6:.2f}M sampled "
                f"tokens end at {percent(_interval(row))}."
            )
        if not is_single.all():
            best = max(mine[~is_single].to_dict("records"), key=lambda row: row["mean"])
            said.append(
                f"The highest end of a workflow on {task} is that of {best['run']}: {percent(_interval(best))}, with "
                f"{best['updates']:,.0f} steps on {best['tokens'] / 1e6:.2f}M tokens."
            )
    return said


def answers(table: Table) -> list[str]:
    """What the single agent's votes reach at inference, and the best peak of a workflow."""
    said = []
    for task, mine in table.values.groupby("task", sort=False):
        is_vote = mine["run"].str.contains("vote of|once")
        votes = (
            f"{row['run'].removeprefix('single agent, ')}, {percent(_interval(row))} at {row['tokens']:.0f} tokens"
            for row in mine[is_vote].to_dict("records")
        )
        workflows = mine[~mine["run"].str.startswith("single agent")]
        best = max(workflows.to_dict("records"), key=lambda row: row["mean"], default=None)
        rest = f" The highest peak of a workflow: {best['run']} {percent(_interval(best))}." if best else ""
        said.append(f"**At inference**, {task}, the single agent: {'; '.join(votes)}.{rest}")
    return said


SECTIONS = {
    "(a) Updates, schedule and rows": (("matched_updates", changes), ("setup", changes), ("policies", differences)),
    "(b) Remedies": (("remedies", helped),),
    "(c) The single agent": (("controls", budgets), ("inference", answers)),
}


def conclusions(made: list[Table]) -> str:
    """What the study's tables say, question by question."""
    by_name, parts = {table.name: table for table in made}, []
    for title, sources in SECTIONS.items():
        said = [sentence for name, told in sources if name in by_name for sentence in told(by_name[name])]
        parts.append(f"### {title}\n\n" + ("\n".join(f"- {one}" for one in said) or "No finished runs yet."))
    return "\n\n".join(parts)
