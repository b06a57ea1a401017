"""Resolve the paths of notebooks: where they begin, and links that work on their page."""

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from IPython.display import HTML

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
