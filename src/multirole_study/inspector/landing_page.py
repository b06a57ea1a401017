"""Write `results/index.html`, which presents the results of one scale to a reader who has only a browser.

It has the README's findings, figures, tables and notebooks of `results/<scale>`, and a few of its runs in the inspector, with
links to files below `results/` only, so that the folder can be put on any static host. `<scale>/page.yaml` says which figures and runs.
"""

import re
from collections.abc import Callable
from pathlib import Path

import mistune
import yaml
from markupsafe import Markup

from multirole_study.experiment.storage import write_text
from multirole_study.inspector import INDEXED, index_row, inspect_run, relative, render

N_PROBLEMS = 12
"""Number of recorded problems on the page of a run, which keeps it below 400 kB."""
to_html = mistune.create_markdown(plugins=["table"])


def markup(text: str) -> Markup:
    """Convert Markdown to HTML; HTML in it is escaped."""
    return Markup(to_html(text))


def findings(readme: Path) -> Markup:
    """Return the text between the README's comments "findings" and "end of findings"."""
    text, start, end = readme.read_text(encoding="utf-8"), "<!-- findings:", "<!-- end of findings -->"
    match = re.search(rf"{start}[^>]*-->\s*\n(.*?)\n{end}", text, re.DOTALL)
    if not match:
        raise ValueError(f"{readme} has no findings between a comment that begins with `{start}` and `{end}`.")
    return markup(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]))  # its links point outside the results


def figure(path: Path, made_by: str) -> dict[str, object]:
    """Read one figure from the file with its caption."""
    first, rest = re.split(r"(?<!\d)\. ", path.read_text(encoding="utf-8").strip(), maxsplit=1)
    return {"name": path.stem, "first": f"{first}.", "rest": rest, "made_by": made_by}


def table(path: Path) -> dict[str, object]:
    """Read one table from its Markdown."""
    title, body = path.read_text(encoding="utf-8").removeprefix("# ").split("\n", 1)
    return {"name": path.stem, "title": title, "body": markup(body)}


def table_order(path: Path) -> tuple[bool, bool, str]:
    """Sort key: Table 1 first, then the paper's other tables, then those of the study."""
    return path.stem != "table_1", not path.stem.startswith("table_"), path.stem


def landing_page(folder: str | Path, unpack: Callable[[str], Path], readme: Path) -> Path:
    """Write the page of a scale next to its results, and `inspector/` with the pages of its runs.

    `unpack` returns the folder of a packed run.
    """
    folder = Path(folder)
    shown = yaml.safe_load((folder / "page.yaml").read_text(encoding="utf-8"))
    index = folder.parent / "index.html"
    runs = []
    for name, about in shown["runs"].items():
        run, page = unpack(name), index.parent / "inspector" / f"{name}.html"
        page.parent.mkdir(exist_ok=True)
        inspect_run(run, page, index, N_PROBLEMS)
        row = index_row(run, page, index)
        runs.append(row | {"about": f"{about} {row['about']}"})
    text = render(
        "landing.html",
        title=shown["title"],
        about=shown["about"],
        folder=relative(folder, index.parent),
        findings=findings(readme),
        figures=[figure(folder / "figures" / f"{name}.md", made_by) for name, made_by in shown["figures"].items()],
        facts=INDEXED,
        runs=runs,
        tables=[table(path) for path in sorted(folder.glob("tables/*.md"), key=table_order)],
        notebooks={f"{name}.html": about for name, about in shown["notebooks"].items()},
    )
    write_text(index, text)
    return index
