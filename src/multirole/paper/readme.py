"""The blocks of the README that are written from files: `<!-- name -->` to `<!-- end of name -->`.

Table 1, the claims and the study's tables of the results' scale, what each artefact of the paper costs here, the setup (Table 7), and the
ratios of the benchmarks.
"""

import json
from pathlib import Path

import pandas as pd

from multirole.experiment.storage import write_text
from multirole.paper.conclusions import in_short
from multirole.paper.results import Results
from multirole.paper.study import Study
from multirole.paper.twins import run_of
from multirole.paper.write import Table, markdown

ARTEFACTS = (
    ("Table 1, accuracy matrix", "tables"),
    ("Table 2, ratios per role", "tables"),
    ("Table 3, single-agent transfer", "tables"),
    ("Tables 4 to 6, signatures", "tables"),
    ("Table 7, hyper-parameters", "tables"),
    ("Figure 1, topology and routing", "figures"),
    ("Figures 2 and 3, gains; IP against SP", "figures"),
    ("Figures 4 to 6, dynamics, amplitudes, cliffs", "figures"),
    ("sec 5, the two mechanisms, measured", "mechanisms"),
    ("A.8, compute", "tables"),
)
CELLS = (
    "one cell of the matrix",
    "train_cell",
    "papermill notebooks/train_cell.ipynb OUT.ipynb -p workflow voting -p policy ip",
)
EVALUATION = (
    "its checkpoints, base, transfer",
    "eval_cell",
    "papermill notebooks/eval_cell.ipynb OUT.ipynb -p workflow voting -p policy ip",
)

STUDY = ("past the paper: matched setups, remedies, budgets", "study", "make study")


def _studied(results: Results) -> float:
    """Hours that the finished runs of a study took besides the grid's."""
    study, seconds = Study.read(results.grid, results.folder), 0.0
    for cell in study.cells() if study else ():
        if run := run_of(cell, results.folder.parent):
            metrics = run.table("metrics")
            seconds += (metrics["rollout_seconds"] + metrics["update_seconds"]).sum()
    return seconds / 3600


def artefacts(results: Results) -> str:
    """Paper artefact, notebook, command, cost and status as a Markdown table; costs are the recorded medians of this scale."""
    metrics = results.table("metrics").groupby(["workflow", "policy", "task", "seed"])
    minutes = (metrics["rollout_seconds"].sum() + metrics["update_seconds"].sum()) / 60
    scale, n_seeds = results.grid.scale, len(results.grid.seeds)
    complete = "reproduced" if not results.missing() else f"{len(results.missing())} runs missing"
    status = f"{complete} at {scale}, {n_seeds} seeds; ready, not run at the paper's scales"
    rows = [
        (CELLS[0], CELLS[1], CELLS[2], f"{minutes.median():.0f} minutes on a shared core at {scale}", status),
        (EVALUATION[0], EVALUATION[1], EVALUATION[2], "under a minute", status),
        (
            f"the whole matrix, {len(results.grid.cells())} cells",
            "all",
            "make grid",
            f"{minutes.sum() / 60:.1f} such hours",
            status,
        ),
        *((name, notebook, "make paper", "seconds, from committed results", status) for name, notebook in ARTEFACTS),
        (*STUDY, f"{_studied(results):.1f} such hours", f"ours, not in the paper; run at {scale}"),
    ]
    shown = [(name, _link(notebook), f"`{command}`", cost, state) for name, notebook, command, cost, state in rows]
    return markdown(pd.DataFrame(shown, columns=["paper artefact", "notebook", "command", "cost", "status"]))


def _link(notebook: str) -> str:
    return "both" if notebook == "all" else f"[{notebook}](notebooks/{notebook}.ipynb)"


def ratios(bench: Path) -> str:
    """The committed benchmark ratios (`benchmarks/bench.py`, `benchmarks/bench_sandbox.py`) as a Markdown table."""
    lines = ["| ratio | median | range | repeats | goal |", "|---|---|---|---|---|"]
    for name, r in json.loads((bench / "bench.json").read_text()).items():
        lines.append(
            f"| {name} | {r['median']:.2f} | {r['min']:.2f} to {r['max']:.2f} | {r['repeats']} | {r['goal']} |"
        )
    for name, w in json.loads((bench / "sandbox.json").read_text())["workloads"].items():
        if "goal" in w:
            lines.append(
                f"| sandbox/{name} | {w['fresh/ours']:.2f} | – | – | {w['goal'].removeprefix('fresh/ours ')} |"
            )
    return "\n".join(lines)


def alarms(bench: Path) -> str:
    """How well the alarms announced falls (`benchmarks/alarms.py`), in a sentence."""
    n = json.loads((bench / "alarms.json").read_text())["summary"]
    cases = json.loads((bench / "induced.json").read_text())
    told = [
        f"{case['expected']} in {case['announced']} of {case['seeds']} seeds"
        for case in cases.values()
        if case["expected"]
    ]
    controls = [case for case in cases.values() if not case["expected"]]
    return (
        f"Of {n['falls']} falls (validation 5 points below its best, in runs at three times the preset's learning rate or more), "
        f"{n['announced']:.0%} were announced, by a median of {n['median_warning']:.0f} iterations before the evaluation that shows "
        f"them. {n['healthy_runs']} healthy runs, at the preset's own learning rate, had {n['false_alarms']} false alarms in "
        f"{n['healthy_iterations']:,} iterations. (Goals: 90 %, more than 5, 1 in 1,000.) Of {n['strained_runs']} runs that were pushed "
        f"as hard and did not fall, {n['strained_runs_with_alarms']} had alarms. Made on purpose, the two failures of the paper are announced: "
        f"{' and '.join(told)}; of {sum(case['seeds'] for case in controls)} controls, {sum(case['announced'] for case in controls)} had "
        f"either alarm and {sum(case['seeds_with_any_alarm'] for case in controls)} another one."
    )


def _with_caption(table: Table) -> str:
    return f"{markdown(table.shown)}\n\n{table.caption}"


def blocks(results: Results, tables: dict[str, Table]) -> dict[str, str]:
    """Name of each block -> its Markdown."""
    found, setup = tables["claims"], tables["table_7"]
    short = found.shown[["the paper's claim", "sec", "here", "evidence"]]
    return {
        **{name: _with_caption(tables[name.replace(" ", "_")]) for name in ("table 1", "matched updates", "remedies")},
        "study in short": in_short(list(tables.values())),
        "claims": f"{markdown(short)}\n\n{found.caption}",
        "artefacts": artefacts(results),
        "setup": markdown(setup.shown),
        "alarms": alarms(results.folder.parent / "bench"),
        "ratios": ratios(results.folder.parent / "bench"),
    }


def rewrite(readme: Path, results: Results, tables: dict[str, Table]) -> None:
    """Replace every block of the file; ValueError where it lacks one's marks."""
    text = readme.read_text(encoding="utf-8")
    for name, block in blocks(results, tables).items():
        text = replace_block(text, name, block)
    write_text(readme, text)


def replace_block(text: str, name: str, block: str) -> str:
    """`text` with what stands between the marks of one block replaced."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(
            f"the file has not exactly one block {start!r} ... {end!r}: put both marks where the block belongs."
        )
    before, rest = text.split(start)
    return f"{before}{start}\n{block}\n{end}{rest.split(end)[1]}"
