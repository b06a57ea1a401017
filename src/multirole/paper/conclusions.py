"""A study's conclusions in sentences (Markdown). Every number is a table's, and every verdict its interval's."""

from collections.abc import Iterable

import pandas as pd

from multirole.paper.numbers import fixed, percent, points
from multirole.paper.statistics import Interval
from multirole.paper.twins import SHOWN
from multirole.paper.write import Table

PLACES = tuple(SHOWN.values())


def _interval(row: dict[str, object]) -> Interval:
    return Interval(*(row[name] for name in Interval._fields))


def _measures(values: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """measure -> its rows."""
    return dict(list(values.groupby("measure")))


def _tally(rows: pd.DataFrame) -> str:
    """In how many cells a difference is above zero, below it, and undecided."""
    up, down = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
    return f"higher in {up} of {len(rows)} cells, lower in {down}, undecided in {len(rows) - up - down}"


def _is_decided(rows: pd.DataFrame) -> pd.Series:
    """Whether each interval lies on one side of zero."""
    return (rows["low"] > 0) | (rows["high"] < 0)


def _decided(rows: pd.DataFrame) -> str:
    return f"{_is_decided(rows).sum()} of {len(rows)}"


def _highest(rows: pd.DataFrame) -> dict[str, object] | None:
    """The row of the highest mean, if there is one."""
    return max(rows.to_dict("records"), key=lambda row: row["mean"], default=None)


def _listed(found: Iterable[str]) -> str:
    return ", ".join(found) or "none"


def _pairs(rows: pd.DataFrame) -> str:
    """IP minus SP, cell by cell."""
    return _listed(f"{row['workflow']} {row['task']} {points(_interval(row))}" for row in rows.to_dict("records"))


def _falls(by: dict[str, pd.DataFrame]) -> tuple[int, int, int]:
    """(runs of the variants that fall, of their twins in the grid, runs of each) from rows by measure."""
    return int(by["falls"]["mean"].sum()), int(by["falls, grid"]["mean"].sum()), int(by["falls"]["seeds"].sum())


def changes(table: Table) -> list[str]:
    """A sentence per variant: how many runs fall, and what becomes of end and peak."""
    said = []
    for variant, mine in table.values.groupby("variant", sort=False):
        by = _measures(mine)
        after, before, n = _falls(by)
        moved = "; ".join(f"the {place} is {_tally(by[f'change at the {place}'])}" for place in PLACES[::-1])
        said.append(
            f"**{variant.capitalize()}** ({n} runs): {after} fall, of their twins in the grid {before}; {moved}."
        )
    return said


def differences(table: Table) -> list[str]:
    """A sentence per variant and place: IP minus SP in the grid and under the variant, and whether the change is decided."""
    said = []
    for (variant, place), mine in table.values.groupby(["variant", "at"], sort=False):
        by = _measures(mine)
        said.append(
            f"**IP − SP at the {place}, {variant}**: {_pairs(by['variant'])}. Decided in {_decided(by['variant'])} cells, in the grid in "
            f"{_decided(by['grid'])}; the change is decided in {_decided(by['change'])}."
        )
    return said


def helped(table: Table) -> list[str]:
    """For each cell: under which remedies the end is decidedly higher, undecided or lower, and at what cost of the peak."""
    said = []
    for (workflow, policy, task), mine in table.values.groupby(["workflow", "policy", "task"], sort=False):
        by = {measure: rows.set_index("variant") for measure, rows in mine.groupby("measure")}
        ends, peaks, falls = by["change at the end"], by["change at the peak"], by["falls"]
        told = {
            name: f"{name} ({points(_interval(row))}, {falls['mean'][name]:.0f} of {falls['seeds'][name]} runs fall)"
            for name, row in ends.iterrows()
        }
        higher, lower = ends.index[ends["low"] > 0], ends.index[ends["high"] < 0]
        open_ = ends.index.difference(higher.union(lower), sort=False)
        cost = (f"{name} ({points(_interval(row))})" for name, row in peaks[peaks["high"] < 0].iterrows())
        said.append(
            f"**{workflow}, {policy.upper()}, {task}**, where {by['falls, grid']['mean'].max():.0f} of {falls['seeds'].max()} runs of "
            f"the grid fall: the end is higher with {_listed(told[name] for name in higher)}; undecided with "
            f"{_listed(told[name] for name in open_)}; lower with {_listed(told[name] for name in lower)}. Remedies that cost some of "
            f"the peak: {_listed(cost)}."
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
        if best := _highest(mine[~is_single]):
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
        best = _highest(mine[~mine["run"].str.startswith("single agent")])
        rest = f" The highest peak of a workflow: {best['run']} {percent(_interval(best))}." if best else ""
        said.append(f"**At inference**, {task}, the single agent: {'; '.join(votes)}.{rest}")
    return said


def _about_updates(table: Table) -> str:
    by = _measures(table.values)
    after, before, n = _falls(by)
    return (
        f"With one optimizer step per adapter and iteration {after} of {n} runs fall, with one per batch of rows {before} of {n}; "
        f"the end is {_tally(by['change at the end'])}."
    )


def _about_policies(table: Table) -> str:
    ends = table.values[table.values["at"] == "end"]
    by = _measures(ends)
    usual = by["grid"].drop_duplicates(["workflow", "task"])
    reach = [
        ("in the grid", usual),
        *((f"with {name}", mine) for name, mine in by["variant"].groupby("variant", sort=False)),
    ]
    form = fixed(1, 100, "+")
    reached = _listed(
        f"from {form(mine['low'].min())} to {form(mine['high'].max())} {name} ({len(mine)})" for name, mine in reach
    )
    told, told_elsewhere = (_pairs(rows[_is_decided(rows)]) for rows in (usual, by["variant"]))
    return (
        f"At the end IP and SP differ decidedly in {_decided(usual)} cells of the grid (IP − SP: {told}) and in "
        f"{_decided(by['variant'])} comparisons under other setups ({told_elsewhere}); what a setup changes of the difference is "
        f"decided in {_decided(by['change'])}. The 95 % intervals of the difference in points reach {reached}, cells in brackets."
    )


def _about_remedies(table: Table) -> str:
    by = _measures(table.values)
    ends, peaks = by["change at the end"], by["change at the peak"]
    falls = by["falls"].groupby("variant", sort=False)["mean"].sum()
    least = ends.groupby("variant", sort=False)["low"].min()
    costs = dict.fromkeys(peaks.loc[peaks["high"] < 0, "variant"])
    return (
        f"Remedies with which no run falls: {_listed(falls.index[falls == 0])}. With a decidedly higher end wherever they were tried: "
        f"{_listed(least.index[least > 0])}. With a decided loss at the peak: {_listed(costs)}."
    )


def _about_budgets(table: Table) -> str:
    ends = table.values[table.values["measure"] == "end"]
    is_single = ends["run"].str.startswith("single agent")
    best = [_highest(mine) for mine in (ends[is_single], ends[~is_single])]
    told = [f"{row['run']} ({percent(_interval(row))}, {row['tokens'] / 1e6:.2f}M tokens)" for row in best if row]
    return f"The highest ends of the single agent and of the workflows: {' against '.join(told)}."


SHORT = {
    "matched_updates": _about_updates,
    "policies": _about_policies,
    "remedies": _about_remedies,
    "controls": _about_budgets,
}
SECTIONS = {
    "(a) Updates, schedule and rows": (("matched_updates", changes), ("setup", changes), ("policies", differences)),
    "(b) Remedies": (("remedies", helped),),
    "(c) The single agent": (("controls", budgets), ("inference", answers)),
}


def in_short(made: list[Table]) -> str:
    """A study's conclusions in one paragraph; empty without a study's tables."""
    by_name = {table.name: table for table in made}
    return " ".join(told(by_name[name]) for name, told in SHORT.items() if name in by_name)


def conclusions(made: list[Table]) -> str:
    """What the study's tables say, in short and question by question."""
    by_name, parts = {table.name: table for table in made}, [in_short(made)]
    for title, sources in SECTIONS.items():
        said = [sentence for name, told in sources if name in by_name for sentence in told(by_name[name])]
        parts.append(f"### {title}\n\n" + ("\n".join(f"- {one}" for one in said) or "No finished runs yet."))
    return "\n\n".join(parts)
