"""Run the notebooks that compute every table and figure from packed results (`multirole paper results/<scale>`)."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from papermill import execute_notebook

from multirole_study.experiment.settings import UserError, did_you_mean
from multirole_study.paper.compared_study import ComparedStudy
from multirole_study.paper.declarations import STUDIES
from multirole_study.paper.results import Results

OF_A_GRID = ("tables", "figures", "mechanisms")
OF_A_STUDY = {
    "paper": (*OF_A_GRID, "study", "questions", "overview"),
    "clock": ("clock",),
    "rates": ("rates",),
    "leaderboard": ("credit",),
    "compare": ("compare",),
}
"""Kind of a study (`Declaration.command`) -> the notebooks that compute its tables and figures."""
BY_NAME = ("questions", "overview")
"""Notebooks that are run only if they are asked for, because their parameters name further results folders."""
FOLDER = Path("notebooks")
START_TIMEOUT = 600
"""Seconds that a kernel may take to start, on a busy machine."""


def notebooks_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the notebooks for a results folder: those of the studies that it records, or of a grid alone."""
    studies = [study for kind in STUDIES if (study := kind.read(folder)) is not None]
    named = [name for study in studies for name in OF_A_STUDY[study.command]]
    return tuple(dict.fromkeys(named)) or OF_A_GRID


def items_of(notebook: NotebookNode) -> list[str]:
    """Return the ids of the cells that write a table or a figure, which is what their tags say."""
    return [cell.id for cell in notebook.cells if {"table", "figure"} & set(cell.metadata.get("tags", ()))]


def parameters_of(notebook: NotebookNode) -> set[str]:
    """Return the names that the cell tagged `parameters` declares."""
    sources = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    declared = [statement for source in sources for statement in ast.parse(source).body]
    return {statement.target.id for statement in declared if isinstance(statement, ast.AnnAssign)}


def run_notebooks(
    folder: Path, only: Iterable[str] = (), parameters: Mapping[str, object] | None = None
) -> list[Path]:  # fmt: skip
    """Compute all tables and figures of a results folder `<results_dir>/<scale>`, and return what was written besides them.

    Each notebook is run by papermill and written, with a page of its code and output, into the folder. They hold no times and no random
    ids, so that equal results give equal files. One runs after another, because kernels that start at the same time may choose the
    same port.

    Args:
        only: names of notebooks, which are run alone, or of tables and figures: then only their cells are run, and no notebook is written.
            By default, all notebooks of the folder but those in `BY_NAME`.
        parameters: parameters besides `results`, which is the folder; each notebook gets those that it declares.

    Raises:
        UserError: outside a clone, without a finished run, and for a name or parameter that no notebook to be run has.
    """
    names, only = notebooks_of(folder), list(only)
    if missing := [name for name in names if not (FOLDER / f"{name}.ipynb").is_file()]:
        raise UserError(
            f"{Path.cwd()} holds no {FOLDER}/{missing[0]}.ipynb. Run this command in the root of a clone of the repository."
        )
    compared = ComparedStudy.read(folder)
    if Results(folder).packed.empty and not (compared and compared.packed_in):
        raise UserError(
            f"{folder} holds no finished run of its grid, so there is nothing to show. Run one first: make grid."
        )
    notebooks = {name: nbformat.read(FOLDER / f"{name}.ipynb", as_version=4) for name in names}
    items = {item: name for name, notebook in notebooks.items() for item in items_of(notebook)}
    if unknown := [name for name in only if name not in notebooks and name not in items]:
        known = did_you_mean(unknown[0], [*notebooks, *items]) or f" There are {', '.join([*notebooks, *items])}."
        raise UserError(f"No notebook of {folder} is called or computes {unknown[0]!r}.{known}")
    chosen = {items.get(name, name) for name in only} | set(only) & set(notebooks) or set(names) - set(BY_NAME)
    declared = {name: parameters_of(notebooks[name]) - {"results"} for name in names if name in chosen}
    for name in parameters or {}:
        if not any(name in of_notebook for of_notebook in declared.values()):
            known = sorted(set().union(*declared.values()))
            advice = did_you_mean(name, known) or f" Besides `results` they have {', '.join(known) or 'none'}."
            raise UserError(f"`{name}` is not a parameter of the notebooks to be run, {', '.join(declared)}.{advice}")
    written = []
    for name, known_here in declared.items():
        notebook = notebooks[name]
        its_parameters = {key: text for key, text in (parameters or {}).items() if key in known_here}
        asked = [item for item in only if items.get(item) == name]
        if name in only or not only:
            written += write_executed(execute(notebook, folder, its_parameters), folder / f"{name}.ipynb")
        else:
            left_out = set(items_of(notebook)) - set(asked)
            notebook.cells = [cell for cell in notebook.cells if cell.id not in left_out]
            execute(notebook, folder, its_parameters)
    return written


def execute(notebook: NotebookNode, folder: Path, parameters: Mapping[str, object]) -> NotebookNode:
    """Execute a notebook on a results folder, with further parameters."""
    all_parameters = {"results": str(folder), **parameters}
    return execute_notebook(
        notebook, None, all_parameters, kernel_name="python3", progress_bar=False, start_timeout=START_TIMEOUT,
        extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # without its notices about local sockets, and about the interrupt that ends it
    )  # fmt: skip


def write_executed(notebook: NotebookNode, path: Path) -> list[Path]:
    """Write an executed notebook and a page of it, code included; return both files."""
    remove_what_differs(notebook)
    nbformat.write(notebook, path)
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": path.stem}})
    path.with_suffix(".html").write_text(page, encoding="utf-8")
    return [path, path.with_suffix(".html")]


def remove_what_differs(notebook: NotebookNode) -> None:
    """Remove what differs between two executions on equal results: times, random ids, the version of Python, and warnings about the machine."""
    notebook.metadata.papermill = NotebookNode(parameters=notebook.metadata.papermill.parameters)
    notebook.metadata.language_info.pop("version", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.metadata = NotebookNode({name: value for name, value in cell.metadata.items() if name == "tags"})
        if "injected-parameters" in cell.metadata.get("tags", ()):
            cell.id = "injected-parameters"
