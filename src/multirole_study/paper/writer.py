"""Write the tables and figures that a notebook computes, and show them under its cells."""

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from multirole_study.labels import file_name, task_name
from multirole_study.paper.captions import DECLARED, FIGURES, about, sentences
from multirole_study.paper.output import (
    Page,
    Plate,
    Row,
    Table,
    paragraphs,
    pivoted,
    say_below,
    write_figure,
    write_page,
    write_tables,
)
from multirole_study.paper.results import Results


def checksum(folder: Path) -> str:
    """Return the first 12 digits of the SHA-256 of a folder's packed tables and JSON files, one after another in the order of their names.

    In the folder, `(LC_ALL=C; cat *.json *.parquet | sha256sum)` prints it.
    """
    digest = hashlib.sha256()
    for kind in ("json", "parquet"):
        for path in sorted(folder.glob(f"*.{kind}")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def shown_path(folder: Path) -> str:
    """Return a folder's path as a reader types it: from the working folder if it is below it, else as it was given."""
    inside = os.path.relpath(folder)
    return str(folder) if inside.startswith("..") else inside


class Writer:
    """Write tables and figures below the results that they are computed from, each with a footer that says how, and show them.

    `<results>/tables/` and `<results>/figures/` receive the files, and `<results>/` those of a `Page`. An item is named by its cell's id.

    Args:
        notebook: name of the notebook, such as "tables".
        packed: the results that the cells read.
        others: further results folders that the cells read.
        parameters: parameters of the notebook that decide what its cells compute, besides `results`.
    """

    def __init__(
        self, notebook: str, packed: Results, *others: str | Path, parameters: Mapping[str, str] | None = None
    ) -> None:
        self.notebook, self.packed = notebook, packed
        folders = [packed.folder, *map(Path, others)]
        self.inputs = " and ".join(f"`{shown_path(folder)}` (SHA-256 {checksum(folder)})" for folder in folders)
        self.options = "".join(f" -p {name} {shlex.quote(text)}" for name, text in (parameters or {}).items())
        self.tables: dict[str, Table | Page] = {}
        self.figures: dict[str, Plate] = {}
        """Name of a file -> what was written to it, and the same of tables."""

    def footer(self, cell: str) -> str:
        """Say how an item is computed: the cell, the packed inputs with their checksum, and the command."""
        return (
            f"Computed in cell `{cell}` of `notebooks/{self.notebook}.ipynb` from {self.inputs}: "
            f"`multirole paper {shown_path(self.packed.folder)} --only {cell}{self.options}`"
        )

    def table(self, cell: str, values: Iterable[Row] | pd.DataFrame, **facts: object) -> None:
        """Write a table with its title and caption of `tables.yaml`.

        Args:
            values: one row per number (`output.number`), or the lines as they are shown.
            facts: what the caption's names in braces stand for, besides `captions.sentences`.
        """
        numbers = values if isinstance(values, pd.DataFrame) else pd.DataFrame(list(values))
        declared = DECLARED["tables"][cell]
        caption = declared["caption"].format(**sentences(self.packed), **facts)
        shown = pivoted(numbers) if "number" in numbers else numbers
        self.finished(cell, Table(cell, declared["title"], caption, shown, numbers))

    def figure(self, cell: str, figure: Figure | None, task: str | None = None, **facts: object) -> None:
        """Write a figure with its caption of `figures.yaml`; one of a task is called `<cell>_<task>`. None is a figure without runs.

        The model and the number of seeds (`seeds` of `facts`, by default that of the grid) are written below it, unless the figure has a line there.
        """
        if figure is None:
            display(Markdown(f"`{cell}` has no runs yet."))
            return
        if not figure.get_supxlabel():
            say_below(figure, about(self.packed, facts.get("seeds")))
        named = {} if task is None else {"task": task_name(task)}
        caption = FIGURES[cell].format(**sentences(self.packed), **named, **facts)
        self.finished(cell, Plate(cell if task is None else file_name(f"{cell}_{task}"), figure, caption))

    def finished(self, cell: str, made: Table | Plate | Page) -> None:
        """Write and show a table, figure or page that has its caption; a table without lines is not written."""
        footer, folder = self.footer(cell), self.packed.folder
        if isinstance(made, Plate):
            write_figure(made, folder / "figures", footer)
            self.figures[made.name] = made
            display(
                Image(folder / "figures" / f"{made.name}.png", alt=made.name), Markdown(f"{made.caption}\n\n{footer}")
            )
        elif isinstance(made, Page):
            write_page(made, folder, footer)
            self.tables[made.name] = made
            display(Markdown(paragraphs(made.text, footer)))
        elif len(made.shown):
            write_tables([made], folder / "tables", footer)
            self.tables[made.name] = made
            display(Markdown(f"**{made.title}**\n\n{made._repr_markdown_()}\n\n{footer}"))
        else:
            display(Markdown(f"`{made.name}` has no runs yet."))
