"""Execute the notebooks that show results, and resolve the paths of notebooks: where they begin, and links that work on their page."""

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from IPython.display import HTML
from nbformat import NotebookNode

from multirole_study.experiment.settings import UserError

READERS = ("tables", "figures", "mechanisms", "study")
"""Notebooks that show packed results. The last one needs `study.json`."""
START_TIMEOUT = 600
"""Seconds that a kernel may take to start, on a busy machine."""

NOTEBOOK = "JPY_SESSION_NAME"
"""Environment variable with the path of the notebook that a kernel executes, set by Jupyter's servers, `make cell` and the Snakefile."""


def use_root_of_clone() -> None:
    """Change to the clone's root if the kernel was started in its `notebooks/`, as Jupyter and `jupyter execute` do.

    So relative paths mean the same files as with papermill, which is run in the root. Elsewhere nothing changes.
    """
    folder = Path.cwd()
    if (
        folder.name == "notebooks"
        and (folder / "train_cell.ipynb").is_file()
        and (folder.parent / "grid.yaml").is_file()
    ):
        os.chdir(folder.parent)


def link(page: Path) -> HTML:
    """Return a link to a page, for the output of a notebook.

    It is relative to the executed notebook if `NOTEBOOK` names it, so that both can be moved together. papermill does not tell a kernel
    where it writes, so otherwise the link is absolute.
    """
    notebook = os.environ.get(NOTEBOOK)
    if notebook:
        target = quote(os.path.relpath(page.resolve(), Path(notebook).parent.resolve()).replace(os.sep, "/"))
    else:
        target = page.resolve().as_uri()
    return HTML(f'<a href="{target}" target="_blank">Open {escape(page.name)}</a>')


def execute_readers(folder: Path) -> list[Path]:
    """Execute the notebooks of `READERS` on packed results by papermill; write them and their HTML pages into `folder`, and return the pages.

    They hold no times and no random ids, so that equal results give equal files. One runs after another, because kernels that start at
    the same time may choose the same port. UserError where there are no notebooks, as outside a clone.
    """
    import nbformat
    from nbconvert import HTMLExporter
    from papermill import execute_notebook

    if not Path("notebooks/tables.ipynb").is_file():
        raise UserError(f"{Path.cwd()} holds no notebooks/. Run this command in the root of a clone of the repository.")
    exporter = HTMLExporter(exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True)
    pages = []
    for name in READERS[: None if (folder / "study.json").exists() else -1]:
        executed = folder / f"{name}.ipynb"
        notebook = execute_notebook(
            f"notebooks/{name}.ipynb", str(executed), {"results": str(folder)}, kernel_name="python3",
            progress_bar=False, report_mode=True, start_timeout=START_TIMEOUT,
        )  # fmt: skip
        remove_times(notebook)
        nbformat.write(notebook, executed)
        page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
        pages.append(executed.with_suffix(".html"))
        pages[-1].write_text(page, encoding="utf-8")
    return pages


def remove_times(notebook: NotebookNode) -> None:
    """Remove what papermill adds to an executed notebook that differs from run to run."""
    parameters = notebook.metadata.papermill.parameters
    notebook.metadata.papermill = NotebookNode(parameters=parameters)
    for cell in notebook.cells:
        cell.metadata = NotebookNode(
            {name: value for name, value in cell.metadata.items() if name in ("tags", "jupyter")}
        )
        if "injected-parameters" in cell.metadata.get("tags", ()):
            cell.id = "injected-parameters"
