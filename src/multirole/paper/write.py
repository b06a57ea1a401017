"""Writes a table or a figure in every format, with its caption; the same results give the same bytes."""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from multirole.experiment.storage import write_text

STYLE = {
    "figure.dpi": 110,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "multirole",
    "pdf.fonttype": 42,
}
"""Of every figure: one font that matplotlib ships, so that no machine draws it otherwise."""


@dataclass(frozen=True)
class Table:
    """A table as a reader sees it, and the numbers behind it.

    `shown` holds text, ready to print; `values` the same results as numbers, one row per number or cell, for machines.
    """

    name: str
    title: str
    caption: str
    shown: pd.DataFrame
    values: pd.DataFrame


def markdown(frame: pd.DataFrame) -> str:
    """A frame of texts as a Markdown table; the index is left out."""
    rows = [list(map(str, frame.columns)), ["---"] * len(frame.columns), *frame.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def latex(table: Table) -> str:
    """A `table` environment as wide as the text; needs the packages booktabs and graphicx."""
    body = table.shown.style.hide(axis="index").format(_escape).format_index(_escape, axis=1)
    text = body.to_latex(
        hrules=True, caption=f"{_escape(table.title)}. {_escape(table.caption)}", label=f"tab:{table.name}"
    )
    start, end = "\\begin{tabular}", "\\end{tabular}"
    text = text.replace(start, "\\resizebox{\\textwidth}{!}{%\n" + start).replace(end, end + "}")
    return text.replace("\\begin{table}", "\\begin{table}\n\\centering\\small")


def _escape(text: object) -> str:
    marks = {
        "\\": "\\textbackslash{}",
        "−": "$-$",
        "×": "$\\times$",
        "χ²": "$\\chi^2$",
        "–": "--",
        "≥": "$\\geq$",
        "≤": "$\\leq$",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "*": "",  # bold, in Markdown
    }
    plain = "".join("\\" + c if c in "&%$#_{}" else marks.get(c, c) for c in str(text).replace("χ²", "\0"))
    return plain.replace("\0", marks["χ²"])


def write_tables(tables: list[Table], folder: Path) -> None:
    """`<name>.md`, `.tex` and `.csv` of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        text = f"# {table.title}\n\n{markdown(table.shown)}\n\n{table.caption}\n"
        write_text(folder / f"{table.name}.md", text)
        write_text(folder / f"{table.name}.tex", latex(table))
        write_text(folder / f"{table.name}.csv", table.values.to_csv(index=False, float_format="%.6g"))


def write_figure(figure: Figure, caption: str, name: str, folder: Path) -> None:
    """`<name>.pdf`, `.png` and the caption as `.md`; closes the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):  # the kind of font is read when saving
        figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
        figure.savefig(folder / f"{name}.png", dpi=STYLE["figure.dpi"] * 1.4, metadata={"Software": None})
    write_text(folder / f"{name}.md", caption + "\n")
    plt.close(figure)
