"""One run on one page: `multirole inspect RESULTS_DIR` writes `inspector.html`, a file that needs nothing but a browser.

The page holds the curves of every role with the alarms on them, the workflow and who shares an adapter, and the recorded
episodes at several checkpoints side by side. Its data are JSON inside the file; what a model wrote is data there and text
in the document, never markup, and a content security policy allows no script but the page's own and no request at all.
Nothing is trained, sampled or graded: only what `record` left on disk is read, of finished and of unfinished runs.
"""

import argparse
import base64
import hashlib
import html
import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from multirole.diagnostics.signatures import HEDGES
from multirole.experiment.record import is_done
from multirole.experiment.storage import write_text
from multirole.inspector import findings, tables, turns

FILE = "inspector.html"
SCRIPTS = ("base.js", "curves.js", "graph.js", "text.js", "episodes.js")


def collect(folder: Path) -> dict:
    """Everything that the page shows of a run, as plain JSON data."""
    config = tables.read_config(folder)
    metrics, roles = tables.read_table(folder, "metrics"), tables.read_table(folder, "roles")
    evaluations, points = tables.read_table(folder, "eval"), tables.validation_points(folder)
    recorded = turns.turn_files(folder)
    played = pd.concat(
        [pd.read_parquet(path, columns=["role", "slot", "round"]) for path in recorded.values()] or [pd.DataFrame()]
    )
    names = tables.role_names(config, roles, played)
    described = tables.describe_roles(names, config, played)
    curves = tables.curves(metrics, roles, names)
    fell, best = findings.fall(points), findings.best_step(points)
    found = findings.moves(roles, best) if fell else []
    return {
        "name": folder.resolve().name,
        "config": config | {"policy": tables.policy_name(config["policy"])},
        "provenance": tables.provenance(folder),
        "status": tables.status(folder, config, curves["iterations"]),
        "result": findings.result_sentence(points),
        "rule": findings.RULE,
        "findings": findings.role_sentences(points, roles),
        "moves": [vars(move) for move in found],
        "roles": described,
        "role_rows": findings.role_rows(roles, names, found),
        "graph": tables.graph(config, described, played),
        "groups": tables.GROUPS,
        "curves": curves,
        "validation": points,
        "best": best,
        "alarms": tables.alarms(folder),
        "hedges": HEDGES,
        "episodes": turns.episodes(folder, points, evaluations),
    }


def embed(data: dict) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def fill(template: str, parts: dict[str, str]) -> str:
    """`template` with each `@@name@@` replaced once; what is put in is not looked at again."""
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], template)


def page_file(name: str) -> str:
    """A template, style sheet or script of this package."""
    return (files("multirole.inspector") / "page" / name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """How a content security policy names a script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def title(config: dict, name: str) -> str:
    """The cell in a few words; `name` is its folder's."""
    words = (config.get(field) for field in ("workflow", "policy", "task", "scale"))
    return " · ".join([*(str(word) for word in words if word), f"seed {config.get('seed', '?')}"]) or name


def render(template: str, name: str, data: dict | None = None, table: str = "") -> str:
    """A page from its template: style and script inside, and a policy that lets nothing else in."""
    scripts = SCRIPTS if data is not None else ("base.js",)
    script = '"use strict";\n(() => {\n' + "\n".join(map(page_file, scripts)) + "\n})();\n"
    return fill(
        page_file(template),
        {
            "title": html.escape(name),
            "hash": script_hash(script),
            "style": page_file("style.css"),
            "script": script,
            "table": table,
            "rule": html.escape(findings.RULE),
            "data": embed(data) if data is not None else "null",
        },
    )


def inspect_run(folder: Path, out: Path | None = None) -> Path:
    """Write the page of one run, by default `<folder>/inspector.html`; ValueError if the folder holds no run."""
    data = collect(folder)
    target = out if out is not None else folder / FILE
    write_text(target, render("run.html", title(data["config"], data["name"]), data))
    return target


def finished_runs(results_dir: Path) -> list[Path]:
    """The folders of all finished runs below a folder, in the order of their names."""
    return [config.parent for config in sorted(results_dir.rglob("config.json")) if is_done(config.parent)]


def index_row(folder: Path, results_dir: Path) -> str:
    """One run as a row of the index: its numbers, what its roles did, and the link to its page."""
    config, points = tables.read_config(folder), tables.validation_points(folder)
    roles = tables.read_table(folder, "roles")
    best, fell = findings.best_step(points), findings.fall(points)
    accuracy = dict(zip(points["step"], points["accuracy"], strict=True))
    shown = (
        [findings.percent(accuracy[s]) for s in (points["step"][0], best, points["step"][-1])]
        if accuracy
        else ["–"] * 3
    )
    found = findings.moves(roles, best) if fell else []
    first = f"{found[0].role}, {found[0].metric} at {found[0].iteration}" if found else "–" if fell else "held"
    cells = [config.get("scale"), config.get("seed"), *shown, "–" if best is None else best]
    numbers = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
    link = quote((folder / FILE).relative_to(results_dir).as_posix())
    return f'<tr><td><a href="{link}">{html.escape(folder.name)}</a></td>{numbers}<td>{html.escape(first)}</td></tr>'


def write_index(results_dir: Path, runs: list[Path]) -> Path:
    """A page that lists runs and links to theirs."""
    rows = "\n".join(index_row(folder, results_dir) for folder in runs)
    target = results_dir / FILE
    write_text(target, render("index.html", f"Runs of {results_dir.resolve().name}", table=rows))
    return target


def main(argv: list[str]) -> int:
    """Write a page that shows one run, or one for every finished run below a folder and an index of them.

    Exit codes: 0 done, 2 a mistake in the command.
    """
    parser = argparse.ArgumentParser(prog="multirole inspect", description=(main.__doc__ or "").splitlines()[0])
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="a run's folder, or a folder of runs")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where one run's page goes (default: {FILE} in its folder)"
    )
    arguments = parser.parse_args(argv)
    folder, out = arguments.results_dir, arguments.out
    try:
        if (folder / "config.json").exists():
            written = [inspect_run(folder, out)]
        else:
            written = inspect_all(folder, out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for path in written:
        sys.stdout.write(f"{path}  {path.stat().st_size / 1e6:.2f} MB\n")
    return 0


def inspect_all(results_dir: Path, out: Path | None) -> list[Path]:
    """The pages of all finished runs below a folder, then their index; ValueError where there is none."""
    if not results_dir.is_dir():
        raise ValueError(
            f"{results_dir} is no folder, so it holds no run. Write the folder of a run, or a folder of runs."
        )
    if out is not None:
        raise ValueError(
            f"--out {out} names one file, and {results_dir} is a folder of runs. Leave --out away, or name one run."
        )
    runs = finished_runs(results_dir)
    if not runs:
        raise ValueError(
            f"{results_dir} holds no finished run. Write the folder of the unfinished run itself (the one with config.json), "
            "or finish it first."
        )
    return [*(inspect_run(folder) for folder in runs), write_index(results_dir, runs)]
