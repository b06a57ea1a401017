"""Write one run as one page: `multirole inspect RESULTS_DIR` writes `inspector.html`, which needs only a browser.

`live_page` writes it while the run trains, and `side_by_side` writes two runs on one page.

The page shows the facts of the run, the curves of every role, the workflow with its shared adapters, the training groups if they
were recorded, and the recorded episodes at several checkpoints side by side. Its data are JSON inside the file. Text written by a
model is inserted as text, never as markup, and a content security policy allows only the page's scripts and no requests. Finished
and unfinished runs are read from disk.
"""

import base64
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from multirole.policy import shown, trained_part
from multirole.types import Structure
from multirole_study.experiment.cell import policy_name
from multirole_study.experiment.run_folder import read_config, read_provenance
from multirole_study.experiment.storage import write_text
from multirole_study.inspector import run_reader
from multirole_study.inspector.episodes import describe_episodes, questions_of, training_groups
from multirole_study.labels import colours_of
from multirole_study.signatures import HEDGES
from multirole_study.workflow_record import observed_edges, recorded_structure

PAGE_FILE = "inspector.html"
SCRIPTS = {
    "run.html": ("base.js", "text.js", "curves.js", "graph.js", "lanes.js", "episodes.js", "run.js"),
    "pair.html": ("base.js", "text.js", "curves.js", "lanes.js", "episodes.js", "pair.js"),
}
"""Template -> its scripts, which are one script on the page; other pages have `base.js` alone."""
DASHES = (None, "5 2.5", "1.5 2", "7 2 1.5 2")
"""Styles of lines beside the colours, for readers and printers that do not tell these apart."""
INDEXED = ("start", "best", "end", "first fall")
LOADER = PackageLoader("multirole_study.inspector", "page")
PAGES = Environment(loader=LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def describe_roles(config: dict, roles: pd.DataFrame, turns: pd.DataFrame, structure: Structure) -> list[dict]:
    """Return colour, slots, duty, and the adapter that it trains or who plays it, of every role, in the order of the turns; slots are read from the turns, else one."""
    trained = trained_part(config["policy"])
    duties = {role: duty.kind for role, duty in structure.duties.items()}
    names = [*(turns["role"] if len(turns) else []), *config["policy"], *(roles["role"] if len(roles) else [])]
    slots = turns.groupby("role")["slot"].max() + 1 if len(turns) else {}
    return [
        {
            "name": name,
            "colour": colour,
            "adapter": trained.get(name, ""),
            "played_by": "" if name in trained or name not in config["policy"] else shown(config["policy"][name]),
            "slots": int(slots.get(name, 1)),
            "duty": duties.get(name),
        }
        for name, colour in colours_of(list(dict.fromkeys(names))).items()
    ]


def collect_panels(folder: Path, iterations: list[int]) -> list[dict]:
    """Return the panels of a run with its series at these iterations, None where a series has no value."""
    return [
        vars(panel)
        | {"series": {name: run_reader.numbers(values.reindex(iterations)) for name, values in series.items()}}
        for panel, series in run_reader.curves(folder)
    ]


def collect(folder: Path, index: str | None = None, n_problems: int | None = None) -> dict:
    """Collect everything that the page shows of a run, as JSON data; `index` is the address of a page to link back to."""
    config = read_config(folder)
    provenance = read_provenance(folder, may_be_missing=True)
    structure = recorded_structure(config, provenance)
    metrics, roles, turns, outcomes, episodes = (
        run_reader.load(folder, name) for name in ("metrics", "roles", "turns", "eval", "episodes")
    )
    if n_problems and len(turns):
        turns = turns[turns["problem"].isin(turns["problem"].unique()[:n_problems])]
    iterations = sorted({int(i) for table in (metrics, roles) if len(table) for i in table["iteration"]})
    points = run_reader.validation(folder)
    described_roles = describe_roles(config, roles, turns, structure)
    return {
        "title": run_reader.title(config),
        "name": folder.resolve().name,
        "regime": run_reader.regime(config),
        "index": index,
        "state": run_reader.state(folder),
        "config": config | {"policy": policy_name(config["policy"])},
        "provenance": provenance,
        "iterations": iterations,
        "facts": run_reader.facts(folder).reset_index().to_dict("records"),
        "roles": described_roles,
        "lines": {
            role["name"]: {"colour": role["colour"], "dash": DASHES[i % len(DASHES)]}
            for i, role in enumerate(described_roles)
        },
        "edges": [asdict(edge) for edge in structure.edges or observed_edges(turns)],
        "edges_are_declared": bool(structure.edges),
        "rounds": int(turns["round"].max()) + 1 if len(turns) else 1,
        "panels": collect_panels(folder, iterations),
        "validation": [{"name": ""} | {name: run_reader.numbers(points[name]) for name in points}],
        "skills": run_reader.skills(folder),
        "role_changes": run_reader.role_changes(folder),
        "hedges": HEDGES,
        "training_groups": training_groups(episodes, config.get("num_generations") or 1),
        "questions": questions_of(episodes),
        "role_values": run_reader.role_values(folder),
        "episodes": describe_episodes(turns, outcomes, points, run_reader.load(folder, "turn_effects")),
    }


def source(name: str) -> str:
    """Read a style sheet or script of the pages."""
    return LOADER.get_source(PAGES, name)[0]


def render(template: str, data: dict | None = None, **parts: Any) -> str:
    """Render a page from its template, with inlined style and script and a policy that blocks other scripts."""
    scripts = SCRIPTS.get(template, ("base.js",))
    script = '"use strict";\n(() => {\n' + "\n".join(map(source, scripts)) + "\n})();\n"
    embedded = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {"refresh": None} | parts
    return PAGES.get_template(template).render(
        hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(source("style.css")),
        script=Markup(script),
        data=Markup(embedded.replace("<", "\\u003c")),  # so that it cannot close its script element
        **parts,
    )


def relative(page: Path, folder: Path) -> str:
    """Return the link to a page from a page in `folder`."""
    return quote(Path(os.path.relpath(page, folder)).as_posix())


def inspect_run(
    folder: str | Path, out: Path | None = None, index: Path | None = None, n_problems: int | None = None,
    refresh: int | None = None,
) -> Path:  # fmt: skip
    """Write the page of one run, by default `<folder>/inspector.html`; ValueError if the folder holds no run.

    It links back to `index`, by default the one that `inspect_all` wrote in a folder above. With `n_problems` it shows only
    the first of the recorded problems. The page loads itself again every `refresh` seconds, by default never.
    """
    folder = Path(folder)
    target = out if out is not None else folder / PAGE_FILE
    if index is None:
        index = next(
            (above / PAGE_FILE for above in folder.resolve().parents[:2] if (above / PAGE_FILE).exists()), None
        )
    data = collect(folder, relative(index, target.parent) if index else None, n_problems)
    write_text(target, render("run.html", data, title=data["title"], refresh=refresh))
    return target


def index_row(folder: Path, page: Path, index: Path) -> dict[str, Any]:
    """Return one run as a row of an index: the link to its page, its name and regime, and its facts."""
    config = read_config(folder)
    return {
        "link": relative(page, index.parent),
        "title": run_reader.title(config),
        "about": f"{folder.name}: {run_reader.regime(config)}",
        "facts": run_reader.facts(folder).to_dict("index"),
    }


def inspect_all(results_dir: Path) -> list[Path]:
    """Write the pages of all finished runs below a folder, then an index that links to them.

    ValueError if there are none, or, once all others are written, if a run cannot be read.
    """
    folders = [
        marker.parent for marker in sorted(results_dir.rglob("DONE")) if (marker.parent / "config.json").exists()
    ]
    index = results_dir / PAGE_FILE
    pages, rows, faults = [], [], []
    for folder in folders:
        try:
            if "cell" in read_config(folder, may_be_evaluation=True):
                continue
            page = inspect_run(folder, index=index)
            row = index_row(folder, page, index)
        except (ValueError, OSError, KeyError) as error:  # a damaged file
            faults.append(f"{folder}: {error!r}")
            continue
        pages.append(page)
        rows.append(row)
    if not pages and not faults:
        raise ValueError(
            f"{results_dir} contains no finished run{'' if results_dir.is_dir() else ': there is no such folder'}. Give a folder that does, or the folder of one run (the one with config.json). "
            "Packed runs become folders with multirole_study.paper.pack.unpack."
        )
    title = f"{len(pages)} runs in {results_dir.resolve().name}"
    write_text(index, render("index.html", title=title, facts=INDEXED, runs=rows))
    if faults:
        raise ValueError(
            f"{len(pages)} pages and the index {index} are written. These runs cannot be read: {'; '.join(faults)}"
        )
    return [*pages, index]
