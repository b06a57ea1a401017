"""Run the cells of a notebook in this process, without a kernel, on a copy of packed results."""

import json
from pathlib import Path
from unittest.mock import patch

from multirole_study.paper.output import Plate, Table
from multirole_study.paper.writer import Writer

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def items_of(notebook: str) -> dict[str, dict]:
    """The cells that write a table or a figure, by their id."""
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: cell for cell in cells if {"table", "figure"} & set(cell["metadata"].get("tags", ()))}


def linked(results: Path, folder: Path) -> Path:
    """A folder with links to packed results, which tables and figures can be written into."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*results.glob("*.parquet"), *results.glob("*.json")]:
        (folder / path.name).symlink_to(path.absolute())
    return folder


def computed(notebook: str, results: Path, *only: str, **parameters: str) -> dict[str, Table]:
    """The tables that the cells of a notebook write into `results`, by the name of the file; `only` names the items."""
    return run_cells(notebook, results, *only, **parameters).tables


def drawn(notebook: str, results: Path, *only: str, **parameters: str) -> dict[str, Plate]:
    """The figures that the cells of a notebook draw; no file of them is written, which would take long."""
    with patch("multirole_study.paper.writer.write_figure"), patch("multirole_study.paper.writer.Image"):
        return run_cells(notebook, results, *only, **parameters).figures


def run_cells(notebook: str, results: Path, *only: str, **parameters: str) -> Writer:
    left_out = set(items_of(notebook)) - set(only) if only else set()
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code" and cell["id"] not in left_out:
            exec(compile("".join(cell["source"]), f"{notebook}.ipynb: {cell['id']}", "exec"), names)  # noqa: S102
            if "parameters" in cell["metadata"].get("tags", ()):
                names |= {"results": str(results)} | parameters
    return names["write"]
