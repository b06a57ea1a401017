"""Write `results/index.html`, which presents the committed results to a reader who has only a browser.

It has the README's findings, figures, tables and notebooks of `results/<scale>`, and a few of its runs in the inspector. Sections of
other studies under `results/`, such as that of a language model, have their figures, tables and pages. Links lead to files below
`results/` only, so that the folder can be put on any static host. `<scale>/page.yaml` says what is shown.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def figure(path: Path, made_by: str, results: Path) -> dict[str, object]:
    """Read one figure from the file with its caption and footer; `file` is its path without the suffix, from the page in `results`."""
    caption, _, footer = path.read_text(encoding="utf-8").strip().partition("\n\n")
    first, rest = re.split(r"(?<!\d)\. ", caption, maxsplit=1)
    return {
        "file": relative(path.with_suffix(""), results), "first": f"{first}.", "rest": rest, "footer": markup(footer), "made_by": made_by,
    }  # fmt: skip


def table(path: Path, results: Path, title: str = "") -> dict[str, object]:
    """Read one table from its Markdown; its heading is the title unless one is given."""
    text = path.read_text(encoding="utf-8")
    if text.startswith("# "):
        heading, text = text.removeprefix("# ").split("\n", 1)
        title = title or heading
    formats = [suffix for suffix in ("csv", "tex") if path.with_suffix(f".{suffix}").exists()]
    return {
        "file": relative(path.with_suffix(""), results), "title": title, "body": markup(text), "formats": formats,
    }  # fmt: skip


def study(declared: dict[str, Any], results: Path) -> dict[str, object]:
    """Read the section of a study: paths of page.yaml are below `results`, and those of figures and tables have no suffix."""
    return {
        "id": declared["id"],
        "title": declared["title"],
        "about": markup(declared["about"]),
        "figures": [figure(results / f"{name}.md", made_by, results) for name, made_by in declared["figures"].items()],
        "pages": declared.get("pages", {}),
        "tables": [table(results / f"{name}.md", results, title or "") for name, title in declared["tables"].items()],
    }


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
    results, plates = index.parent, shown["figures"].items()
    text = render(
        "landing.html",
        title=shown["title"],
        about=shown["about"],
        findings=findings(readme),
        figures=[figure(folder / "figures" / f"{name}.md", made_by, results) for name, made_by in plates],
        facts=INDEXED,
        runs=runs,
        tables=[table(path, results) for path in sorted(folder.glob("tables/*.md"), key=table_order)],
        studies=[study(declared, results) for declared in shown.get("studies", [])],
        notebooks={f"{name}.html": about for name, about in shown["notebooks"].items()},
    )
    write_text(index, text)
    return index
