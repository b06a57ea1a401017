"""Write two runs on one page: their curves in common panels, and the same problems next to each other."""

from pathlib import Path
from typing import Any

from multirole_study.experiment.storage import write_text
from multirole_study.inspector import DASHES, collect, collect_panels, render
from multirole_study.inspector.episodes import contrast

NAMES = ("A", "B")
MAX_CHARACTERS = 600_000
"""Characters of all texts on a page, which keep it below 1 MB."""


def merged_roles(runs: list[dict]) -> list[dict]:
    """Return the roles of both runs, in the order of the first; slots are the larger number."""
    roles: dict[str, dict] = {}
    for role in (role for run in runs for role in run["roles"]):
        same = roles.setdefault(role["name"], dict(role))
        same["slots"] = max(same["slots"], role["slots"])
    return list(roles.values())


def series_name(role: str, run: str) -> str:
    """Return the name of a series: the role and the run, or the run alone."""
    return f"{role}, {run}" if role else run


def merged_panels(folders: list[Path], iterations: list[int]) -> list[dict]:
    """Return each panel that a run has once, with the series of both runs."""
    panels: dict[tuple[str, str], dict] = {}
    for name, folder in zip(NAMES, folders, strict=True):
        for panel in collect_panels(folder, iterations):
            same = panels.setdefault((panel["table"], panel["column"]), panel | {"series": {}})
            same["series"] |= {series_name(role, name): values for role, values in panel["series"].items()}
    return list(panels.values())


def shown_text(turn: dict, room: int) -> dict:
    """Return a turn of a run's page without its tokens and with at most `room` characters of its text; the middle of a longer one is left out."""
    n_head, hidden = turn.get("gap", (None, 0))
    if n_head is None:
        text = turn.get("text", "".join(turn["pieces"]))
        head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    else:
        head, tail = "".join(turn["pieces"][:n_head]), "".join(turn["pieces"][n_head:])
    pieces = [head[: room // 2], tail[max(0, len(tail) - room // 2) :]]
    hidden += len(head) + len(tail) - sum(map(len, pieces))
    facts = {name: value for name, value in turn.items() if name not in ("ratios", "text", "gap")}
    return facts | {"pieces": pieces} | ({"gap": [1, hidden]} if hidden else {})


def merged_episodes(runs: list[dict]) -> dict | None:
    """Return the problems with turns in both runs at the checkpoints that each run's page shows first; None without any."""
    parts = [run["episodes"] for run in runs]
    if None in parts:
        return None
    columns = [{str(step) for step in part["columns"]} for part in parts]
    n_turns = sum(
        len(episode["turns"])
        for part, shown in zip(parts, columns, strict=True)
        for problem in part["problems"]
        for step, episode in problem["steps"].items()
        if step in shown
    )
    room = MAX_CHARACTERS // max(1, n_turns)
    steps: list[dict] = []
    by_problem: dict[str, dict] = {}
    for name, part in zip(NAMES, parts, strict=True):
        shown = [info for info in part["steps"] if info["step"] in part["columns"]]
        steps += [info | {"step": f"{name} {info['step']}", "run": name, "at": info["step"]} for info in shown]
        for problem in part["problems"]:
            entry = by_problem.setdefault(problem["problem"], problem | {"steps": {}, "runs": set()})
            entry["runs"].add(name)
            for info in shown:
                if episode := problem["steps"].get(str(info["step"])):
                    turns = [shown_text(turn, room) for turn in episode["turns"]]
                    entry["steps"][f"{name} {info['step']}"] = episode | {"turns": turns}
    common = [problem for problem in by_problem.values() if len(problem["runs"]) == len(NAMES)]
    last = {info["run"]: info["step"] for info in steps}
    pairs = [NAMES, NAMES[::-1]]
    return {
        "steps": steps,
        "left_out": sum(part["left_out"] + len(part["steps"]) for part in parts) - len(steps),
        "columns": [last[name] for name in NAMES],
        "contrasts": [contrast(f"{a}_only", f"{a} right, {b} wrong, at the last", last[a], last[b]) for a, b in pairs],
        "n_validation": parts[0]["n_validation"],
        "n_lost": None,
        "forked": [],
        "problems": [{key: value for key, value in problem.items() if key != "runs"} for problem in common],
    }


def differing_settings(configs: list[dict]) -> list[list[Any]]:
    """Return [setting, value in A, value in B] for the settings that differ; None where a run has no such setting."""
    first, second = configs
    names = dict.fromkeys([*first, *second])
    return [[name, first.get(name), second.get(name)] for name in names if first.get(name) != second.get(name)]


def collect_pair(folders: list[Path]) -> dict:
    """Collect everything that the page shows of two runs, as JSON data."""
    runs = [collect(folder) for folder in folders]
    roles = merged_roles(runs)
    iterations = sorted({iteration for run in runs for iteration in run["iterations"]})
    colours = {"": "var(--ink)"} | {role["name"]: role["colour"] for role in roles}
    return {
        "title": " and ".join(run["title"] for run in runs),
        "runs": [
            {"name": name, "folder": run["name"], "n_iterations": (run["iterations"] or [0])[-1]}
            | {key: run[key] for key in ("title", "regime", "state", "facts")}
            for name, run in zip(NAMES, runs, strict=True)
        ],
        "differing": differing_settings([run["config"] for run in runs]),
        "roles": roles,
        "lines": {
            series_name(role, name): {"colour": colour, "dash": dash}  # colours are those of the roles in both runs
            for role, colour in colours.items()
            for name, dash in zip(NAMES, DASHES, strict=False)
        },
        "rounds": max(run["rounds"] for run in runs),
        "iterations": iterations,
        "panels": merged_panels(folders, iterations),
        "validation": [part | {"name": name} for name, run in zip(NAMES, runs, strict=True) for part in run["validation"]],
        "skills": [row | {"run": name} for name, run in zip(NAMES, runs, strict=True) for row in run["skills"]],
        "facts": [],
        "hedges": runs[0]["hedges"],
        "episodes": merged_episodes(runs),
    }  # fmt: skip


def inspect_pair(first: Path, second: Path, out: Path | None = None) -> Path:
    """Write the page of two runs, by default `<first>/against_<name of second>.html`.

    ValueError if a folder holds no run, or if both are the same.
    """
    if first.resolve() == second.resolve():
        raise ValueError(f"{first} is given twice. Name two runs, or one alone for its own page.")
    data = collect_pair([first, second])
    target = out if out is not None else first / f"against_{second.resolve().name}.html"
    write_text(target, render("pair.html", data, title=data["title"]))
    return target
