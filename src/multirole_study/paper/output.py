"""Format tables from rows of numbers, and write tables and figures; the same results give the same bytes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from multirole_study.compare.corrections import corrected
from multirole_study.compare.intervals import Interval
from multirole_study.compare.rules import ALPHA
from multirole_study.compare.verdicts import NOT_RUN, NOT_TESTED
from multirole_study.experiment.storage import write_text
from multirole_study.labels import MISSING, POLICY_NAMES, TASK_NAMES, WORKFLOW_NAMES, formatted

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

DISPLAY_NAMES = {"task": TASK_NAMES, "workflow": WORKFLOW_NAMES, "policy": POLICY_NAMES}
LATEX = str.maketrans({"−": "$-$", "χ": "$\\chi$", "²": "$^2$", "×": "$\\times$", "–": "--"})
STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that figures look the same on every machine
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Table:
    """A table: the texts that a reader sees (`shown`) and its numbers (`values`)."""

    name: str
    title: str
    caption: str
    shown: pd.DataFrame
    values: pd.DataFrame

    def _repr_markdown_(self) -> str:
        """Format the table and its caption as Markdown."""
        return f"{self.shown.to_markdown(index=False, disable_numparse=True)}\n\n{self.caption}"


@dataclass(frozen=True)
class Plate:
    """A figure with its file name and its caption."""

    name: str
    figure: "Figure"
    caption: str


@dataclass(frozen=True)
class Page:
    """A text with several small tables, and their numbers."""

    name: str
    text: str
    values: pd.DataFrame


Row = dict[str, object]
"""One number of a table: the keys of its line, "number" (its column), "unit", "value", and its interval or range."""


def number(name: str, value: float | Interval, unit: str, **keys: object) -> Row:
    """Create one row of a table's values: `keys` identify the line of the table, `name` the column; NaN is a missing number."""
    fields = value._asdict() if isinstance(value, Interval) else {"mean": value}
    if np.isnan(fields["mean"]):
        fields, unit = {"mean": np.nan}, "missing"
    if unit == "accuracy" and "low" in fields:  # a t interval does not know that accuracies end at 0 and 1
        fields |= {
            name: float(np.clip(fields[name], 0.0, 1.0)) for name in ("low", "high")
        }  # NaN of a single unit stays
    return keys | {"number": name, "unit": unit, "value": fields.pop("mean")} | fields


def spread(values: Iterable[float], middle: str = "mean") -> dict[str, float]:
    """Summarize one value per seed by its middle ("mean" or "median") and its range; NaN if a seed has none."""
    series = pd.Series(list(values), dtype=float)
    return {"value": series.agg(middle), "low": series.min(), "high": series.max(), "seeds": int(series.count())}


def how_many(counts: Iterable[float]) -> str:
    """Format the number of units of some lines for a caption or a label, such as "64", or "64 to 128" if the lines differ."""
    least, most = min(counts := list(counts)), max(counts)
    return f"{least}" if least == most else f"{least} to {most}"


def cell_text(row: pd.Series | dict) -> str:
    """Format a number with its interval, or with its range if seeds differ.

    A star marks a decided difference, ≈ an equivalent one, both after Holm's correction (`statistics.corrected`).
    """
    if np.isnan(row["value"]):
        return MISSING if row["unit"] == "missing" else "undefined"
    text, low, high = (formatted(row.get(name, np.nan), row["unit"]) for name in ("value", "low", "high"))
    if "nan" in low or (low == high and row["unit"] not in ("accuracy", "difference", "change")):
        return text
    mark = "*" * (row.get("p_holm", np.nan) < ALPHA) + " ≈" * (row.get("p_match_holm", np.nan) < ALPHA)
    return f"{text} [{low}, {high}]{mark}"


def interval_text(interval: Interval, unit: str) -> str:
    """Format an interval as a number of a table, without a mark: beside it stands the p or the verdict."""
    return cell_text(number("", interval, unit))


def p_cell(p: float) -> str:
    """Format a p."""
    return MISSING if np.isnan(p) else f"{p:.3f}"


def verdict_cell(verdict: str) -> str:
    """Format a verdict, in bold unless there was nothing to judge."""
    return verdict if verdict in (MISSING, NOT_RUN, NOT_TESTED) else f"**{verdict}**"


def bounded(value: float, unit: str, low: float = np.nan, high: float = np.nan, missing: str = MISSING) -> str:
    """Format a measured number with its bounds, if it has any; infinite ones are ∞."""
    if pd.isna(value):
        return missing
    text, *bounds = ("∞" if np.isinf(one) else formatted(one, unit) for one in (value, low, high))
    return text if pd.isna(low) else f"{text} [{', '.join(bounds)}]"


def markdown(titles: Sequence[str], rows: Iterable[Iterable[object]], rule: str = " --- ") -> str:
    """Return a Markdown table; `rule` is a cell of the line below the titles."""
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (titles, *rows))
    return "\n".join([head, f"|{'|'.join([rule] * len(titles))}|", *lines])


def pivoted(values: pd.DataFrame) -> pd.DataFrame:
    """Pivot to one line per combination of the columns before "number" and one column per number, as texts in order of `values`."""
    keys = list(values.columns[: values.columns.get_loc("number")])
    texts = values.assign(text=[cell_text(row) for row in corrected(values).to_dict("records")])
    lines = texts[keys].drop_duplicates()
    wide = texts.pivot(index=keys, columns="number", values="text").reindex(columns=texts["number"].unique())
    shown = lines.merge(wide.fillna(MISSING).reset_index(), on=keys, how="left").astype(object)
    if {"workflow", "policy"} <= set(keys):
        shown.loc[shown["workflow"] == "single", "policy"] = "SA-RL"
    shown = shown.assign(**{key: shown[key].replace(DISPLAY_NAMES[key]) for key in keys if key in DISPLAY_NAMES})
    return shown.rename(columns=lambda name: name.replace("chi2", "χ²"))


def latex(table: Table) -> str:
    """Format a `table` environment as wide as the text; needs the packages booktabs and graphicx."""
    body = table.shown.to_latex(index=False, escape=True)
    caption = f"{table.title}. {table.caption}".replace("%", "\\%").replace("_", "\\_").replace("#", "\\#")
    return (
        f"\\begin{{table}}\n\\centering\\small\n\\caption{{{caption}}}\n\\label{{tab:{table.name}}}\n"
        f"\\resizebox{{\\textwidth}}{{!}}{{%\n{body}}}\n\\end{{table}}\n".replace("**", "")
    ).translate(LATEX)


def write_tables(tables: Iterable[Table], folder: Path, footer: str = "") -> None:
    """Write `<name>.md`, `.tex` and `.csv` of each table; the Markdown ends with the footer."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        write_text(folder / f"{table.name}.md", paragraphs(f"# {table.title}", table._repr_markdown_(), footer))
        write_text(folder / f"{table.name}.tex", latex(table))
        write_text(folder / f"{table.name}.csv", table.values.to_csv(index=False, float_format="%.6g"))


def write_page(page: Page, folder: Path, footer: str = "") -> None:
    """Write the text, which ends with the footer, as `<name>.md`, and the numbers as `<name>.csv`."""
    write_text(folder / f"{page.name}.md", paragraphs(page.text.rstrip("\n"), footer))
    write_text(folder / f"{page.name}.csv", page.values.to_csv(index=False, float_format="%.6g"))


def write_figure(plate: Plate, folder: Path, footer: str = "") -> None:
    """Write `<name>.png`, `.pdf`, and the caption and footer as `.md`, and close the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):  # the kind of font is read when saving
        plate.figure.savefig(folder / f"{plate.name}.pdf", metadata={"CreationDate": None})
        plate.figure.savefig(folder / f"{plate.name}.png", metadata={"Software": None})
    write_text(folder / f"{plate.name}.md", paragraphs(plate.caption, footer))
    plt.close(plate.figure)


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws a figure or a plate in `STYLE`, in which the layout is computed, too; None stays."""

    @wraps(draw)
    def drawn(*args: object, **kwargs: object) -> Any:
        import matplotlib.pyplot as plt

        with plt.rc_context(STYLE):
            made = draw(*args, **kwargs)
            if made is not None:
                (made.figure if isinstance(made, Plate) else made).draw_without_rendering()
            return made

    return drawn


def labelled(figure: "Figure") -> dict[str, "Artist"]:
    """Return label -> the last handle with this label in any panel of a figure, for a legend of the whole figure."""
    return {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }


def say_below(figure: "Figure", text: str) -> None:
    """Write a line in small letters below a figure: what a reader needs who sees no caption, such as the model and the number of seeds."""
    figure.supxlabel(text, x=0.99, ha="right", fontsize=6.5, color="0.35")


def paragraphs(*texts: str) -> str:
    """Join the texts that are not empty as paragraphs of a Markdown file."""
    return "\n\n".join(filter(None, texts)) + "\n"
