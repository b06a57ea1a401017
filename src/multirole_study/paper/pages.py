"""Render pages of results: a person writes the sentences, and the tables supply the numbers and verdicts in them.

`results/README.md.jinja` becomes `results/README.md`. A template reads lines of the tables that `multirole paper` has written:

    {{ line("controls", run="Voting-IP", number="peak").interval }}   71.2 [69.1, 73.3]
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jinja2
import pandas as pd

from multirole_study.compare.corrections import corrected
from multirole_study.compare.estimates import units_of
from multirole_study.compare.intervals import t_interval
from multirole_study.compare.rules import ALPHA
from multirole_study.experiment.storage import write_text
from multirole_study.inspector.landing_page import landing_page
from multirole_study.labels import FORMS, MISSING, formatted
from multirole_study.paper import at_a_glance, pack
from multirole_study.paper.lines import matching, only


class Line(NamedTuple):
    """A number of a table with its interval, as texts; `-line` is the line of the opposite difference."""

    value: float
    low: float
    high: float
    unit: str
    seeds: int
    p_holm: float
    p_match_holm: float

    def __neg__(self) -> "Line":
        return self._replace(value=-self.value, low=-self.high, high=-self.low)

    def __str__(self) -> str:
        return self._texts()[0]

    def _texts(self) -> list[str]:
        return [formatted(value, self.unit).removeprefix("+") for value in self[:3]]

    @property
    def interval(self) -> str:
        """Format the number and its interval."""
        return self._with(" ")

    @property
    def points(self) -> str:
        """Format a difference and its interval in percentage points."""
        return self._with(" points ")

    @property
    def percent(self) -> str:
        """Format a change and its interval in percent."""
        return self._with(" % ")

    def _with(self, unit: str) -> str:
        value, low, high = self._texts()
        return f"{value}{unit}[{low}, {high}]"

    @property
    def verdict(self) -> str:
        """Return whether the difference is decided, equivalent to zero, or neither, after the correction over its table."""
        return "decided" if self.p_holm < ALPHA else "equivalent" if self.p_match_holm < ALPHA else "undecided"

    @property
    def is_decided(self) -> bool:
        """Return whether the difference is decided."""
        return self.verdict == "decided"


class Answer(NamedTuple):
    """A number with the verdict that its study's own rules give it."""

    number: Line
    verdict: str

    @property
    def points(self) -> str:
        """Format the difference in percentage points and the verdict, if there is one; a dash without runs."""
        return self._with_verdict(self.number.points)

    @property
    def percent(self) -> str:
        """Format the change in percent and the verdict, if there is one; a dash without runs."""
        return self._with_verdict(self.number.percent)

    def _with_verdict(self, text: str) -> str:
        if not self.number.seeds:
            return MISSING
        return text if self.verdict == MISSING else f"{text}: {self.verdict}"


class Tables:
    """The functions with which a template reads the tables of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def functions(self) -> dict[str, Callable[..., object]]:
        """Return name -> function, for a template."""
        methods = (self.line, self.lines, self.verdicts, self.runs, self.effect, self.answer, self.answers)
        return {function.__name__: function for function in (*methods, span, total)}

    @cache  # noqa: B019  (one instance per page)
    def _read(self, name: str) -> pd.DataFrame:
        return corrected(pd.read_csv(self.folder / f"{name}.csv"))

    @cache  # noqa: B019  (as above)
    def _answers(self, table: str) -> pd.DataFrame:
        return pd.read_csv(self.folder.parents[1] / f"{table}.csv").rename(columns={"difference": "value"})

    def lines(self, table: str, **columns: object) -> list[Line]:
        """Return the lines whose columns have these values (or one of the values in a list), in the table's order."""
        rows = matching(self._read(table), table, columns)
        rows = rows.reindex(columns=Line._fields).fillna({"seeds": 0}).astype({"seeds": int})
        return [Line(*row) for row in rows.itertuples(index=False)]

    def line(self, table: str, **columns: object) -> Line:
        """Return the line with these values; ValueError if there is none or more than one."""
        return only(self.lines(table, **columns), table, columns)

    def verdicts(self, claim: str, regime: str) -> str:
        """Format a claim's verdicts in a regime, such as "IP holds, SP fails"; those without a possible alternative are marked."""
        rows = self._read("claims").query("claim == @claim and regime == @regime").drop_duplicates("policy")
        known = [
            f"{row.policy.upper()} {row.verdict}{'' if pd.isna(row.vacuous) else ' (vacuous)'}"
            for row in rows.itertuples()
            if row.verdict != "–"
        ]
        return ", ".join(known) or "–"

    def runs(self, claim: str, regime: str, policy: str) -> str:
        """Format how many runs show a claim's pattern, such as "8 of 10"."""
        values = self._read("claims").query("claim == @claim and regime == @regime and policy == @policy")["value"]
        return f"{values.sum():.0f} of {len(values)}"

    def effect(self, claim: str, regime: str, policy: str | None = None) -> Line:
        """Format the number that decides a claim of a difference, with its interval; `policy` where both have a verdict."""
        rows = self._read("claims").query("claim == @claim and regime == @regime")
        units, _ = units_of(rows if policy is None else rows[rows["policy"] == policy])
        mean = t_interval(units)
        return Line(mean.mean, mean.low, mean.high, "difference", mean.seeds, mean.p, mean.p_match)

    def answers(self, table: str, **columns: object) -> list[Answer]:
        """Return the lines that `lines` would, of a table of answers that is named by its place in `results`, such as "seed1/tiny-r/questions"."""
        rows = matching(self._answers(table), table, columns)
        return [
            Answer(Line(row.value, row.low, row.high, "difference", row.seeds, math.nan, math.nan), row.verdict)
            for row in rows.itertuples()
        ]

    def answer(self, table: str, **columns: object) -> Answer:
        """Return the line of a table of answers with these values; ValueError if there is none or more than one."""
        return only(self.answers(table, **columns), table, columns)


def span(lines: Iterable[Line]) -> str:
    """Format the range of some numbers, such as "3.1 to 10.4"."""
    ordered = sorted(lines, key=lambda line: line.value)
    return f"{ordered[0]} to {ordered[-1]}"


def total(lines: Iterable[Line]) -> int:
    """Return the sum of some counts."""
    return round(sum(line.value * FORMS[line.unit][0] for line in lines))


def write_page(template: Path, tables: Path) -> Path:
    """Render a page; its file has the template's name without the last suffix. ValueError if a table has not the one line that is asked for."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    page = environment.from_string(template.read_text(encoding="utf-8"))
    write_text(template.with_suffix(""), page.render(Tables(tables).functions))
    return template.with_suffix("")


def publish(folder: Path) -> Path:
    """Write the result pages of a scale that has a `page.yaml`: Markdown and HTML of its results, and pages of some runs."""
    if (template := folder.absolute().parent / "README.md.jinja").exists():
        write_page(template, folder / "tables")
    if ((checkout := folder.absolute().parents[1]) / at_a_glance.PAGE).exists():
        at_a_glance.write(checkout)
    with TemporaryDirectory() as aside:
        return landing_page(folder, lambda run: pack.unpack(folder, run, aside), folder.parents[1] / "README.md")
