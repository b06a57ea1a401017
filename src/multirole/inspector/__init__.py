"""One run on one page: `multirole inspect RESULTS_DIR` writes `inspector.html`, a file that needs nothing but a browser.

The page holds the facts of the run, the curves of every role with the alarms on them, the workflow and who shares an adapter,
the training groups where they were recorded, and the recorded episodes at several checkpoints side by side. Its data are JSON
inside the file; what a model wrote is data there and text in the document, never markup, and a content security policy allows
no script but the page's own and no request at all. Finished and unfinished runs are read as they are on disk.
"""

import argparse
import base64
import hashlib
import html
import json
import os
import re
import sys
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from multirole.diagnostics.names import colours_of
from multirole.diagnostics.signatures import HEDGES
from multirole.experiment.storage import write_text
from multirole.inspector import reader
from multirole.inspector.episodes import describe_episodes, training_groups

FILE = "inspector.html"
SCRIPTS = ("base.js", "text.js", "curves.js", "graph.js", "episodes.js")
INDEXED = ("start", "best", "end", "first fall", "first alarm")


def describe_roles(config: dict, roles: pd.DataFrame, turns: pd.DataFrame) -> list[dict]:
    """Colour, adapter and slots of every role, in the order of the turns; slots as the turns show them, else one."""
    names = [*(turns["role"] if len(turns) else []), *config["policy"], *(roles["role"] if len(roles) else [])]
    slots = turns.groupby("role")["slot"].max() + 1 if len(turns) else {}
    return [
        {"name": name, "colour": colour, "adapter": config["policy"].get(name, ""), "slots": int(slots.get(name, 1))}
        for name, colour in colours_of(list(dict.fromkeys(names))).items()
    ]


def collect(folder: Path, index: str | None = None) -> dict:
    """Everything that the page shows of a run, as plain JSON data; `index` is the address of a page to link back to."""
    config, provenance = reader.read_config(folder), folder / "provenance.json"
    metrics, roles, turns, outcomes = (reader.load(folder, name) for name in ("metrics", "roles", "turns", "eval"))
    iterations = sorted({int(i) for table in (metrics, roles) if len(table) for i in table["iteration"]})
    points = reader.validation(folder)
    panels = [
        vars(panel) | {"series": {name: reader.numbers(one.reindex(iterations)) for name, one in series.items()}}
        for panel, series in reader.curves(folder)
    ]
    alarms = reader.load_alarms(folder)
    return {
        "title": reader.title(config),
        "name": folder.resolve().name,
        "index": index,
        "state": reader.state(folder),
        "config": config | {"policy": reader.policy_name(config["policy"])},
        "provenance": json.loads(provenance.read_text(encoding="utf-8")) if provenance.exists() else {},
        "iterations": iterations,
        "facts": reader.facts(folder).reset_index().to_dict("records"),
        "roles": describe_roles(config, roles, turns),
        "rounds": int(turns["round"].max()) + 1 if len(turns) else 1,
        "groups": reader.GROUPS,
        "panels": panels,
        "validation": {name: reader.numbers(points[name]) for name in points},
        "alarms": alarms.assign(**{name: reader.numbers(alarms[name]) for name in ("value", "threshold")}).to_dict("records"),
        "hedges": HEDGES,
        "training_groups": training_groups(reader.load(folder, "episodes"), config.get("n_episodes") or 1),
        "episodes": describe_episodes(turns, outcomes, points),
    }


def page_file(name: str) -> str:
    """A template, style sheet or script of this package."""
    return (files("multirole.inspector") / "page" / name).read_text(encoding="utf-8")


def render(template: str, title: str, data: dict | None = None, table: str = "") -> str:
    """A page from its template: style and script inside, and a policy that lets nothing else in."""
    scripts = SCRIPTS if data is not None else ("base.js",)
    script = '"use strict";\n(() => {\n' + "\n".join(map(page_file, scripts)) + "\n})();\n"
    embedded = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "hash": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": page_file("style.css"),
        "script": script,
        "table": table,
        "data": embedded.replace("<", "\\u003c"),  # so that it cannot end the script element it stands in
    }
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], page_file(template))  # what is put in is not looked at again


def inspect_run(folder: str | Path, out: Path | None = None, index: str | None = None) -> Path:
    """Write the page of one run, by default `<folder>/inspector.html`; ValueError if the folder holds no run.

    `index` is the relative address of a page that lists runs, which the page then links to.
    """
    data = collect(Path(folder), index)
    target = out if out is not None else Path(folder) / FILE
    write_text(target, render("run.html", data["title"], data))
    return target


def index_row(folder: Path, results_dir: Path) -> str:
    """One run as a row of the index: the link to its page, and its facts."""
    facts = reader.facts(folder).to_dict("index")
    cells = [f"{facts[fact]['value']} at\N{NO-BREAK SPACE}{facts[fact]['iteration']}" if fact in facts else "–" for fact in INDEXED]
    link = quote((folder / FILE).relative_to(results_dir).as_posix())
    title, name = html.escape(reader.title(reader.read_config(folder))), html.escape(folder.name)
    values = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f'<tr><td><a href="{link}">{title}</a><br><small class="muted">{name}</small></td>{values}</tr>'


def inspect_all(results_dir: Path) -> list[Path]:
    """The pages of all finished runs below a folder, then an index that links to them; ValueError where there is none."""
    runs = [config.parent for config in sorted(results_dir.rglob("config.json"))]
    runs = [folder for folder in runs if reader.state(folder) == "finished"]
    if not runs:
        raise ValueError(
            f"{results_dir} contains no finished run. Give a folder that does, or the folder of one run (the one with config.json)."
        )
    index = results_dir / FILE
    pages = [inspect_run(folder, index=Path(os.path.relpath(index, folder)).as_posix()) for folder in runs]
    rows = "\n".join(index_row(folder, results_dir) for folder in runs)
    write_text(index, render("index.html", f"{len(runs)} runs in {results_dir.resolve().name}", table=rows))
    return [*pages, index]


def main(argv: list[str]) -> int:
    """Write a page that shows one run, or one for every finished run below a folder and an index of them.

    Exit codes: 0 done, 2 a mistake in the command.
    """
    parser = argparse.ArgumentParser(prog="multirole inspect", description=(main.__doc__ or "").splitlines()[0])
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="a run's folder, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"of one run's page (default: {FILE} in its folder)")
    arguments = parser.parse_args(argv)
    is_one = arguments.out is not None or (arguments.results_dir / "config.json").exists()
    try:
        written = [inspect_run(arguments.results_dir, arguments.out)] if is_one else inspect_all(arguments.results_dir)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{path}  {path.stat().st_size / 1e6:.2f} MB\n" for path in written)
    return 0
