"""How well the alarms announce falls: replays them over recorded runs and prints three numbers.

    python benchmarks/alarms.py results/tiny-s [--runs PATTERN...] [--levels] [--out FILE.json]

`multirole.diagnostics.falls` defines a *fall*. A *healthy* run does not fall, and trains at the preset's own learning rate and
schedule; one that was pushed harder and did not fall is *strained*: alarms there may be right about a role all the same, so
they are counted apart. The numbers:

- announced: falls with an alarm before that evaluation, over all falls.
- false alarms per 1,000 iterations of healthy runs.
- warning: median over the announced falls of the iterations from the first alarm to the evaluation that shows the fall.
  The fall itself lies somewhere after the evaluation before, so the warning counted to that one is printed beside it: the
  truth is in between, and a run that is evaluated more often tells more.

An alarm counts however long before the fall it rang. Each run's alarms, and those that could not be evaluated for want of a
metric, are listed. `--levels` prints what the thresholds of `alarm_rules` are set by: how far each metric's level, a median
over iterations, ever was from its baseline in healthy runs, for roles with one slot and with several.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from fnmatch import fnmatch
from itertools import groupby, product
from pathlib import Path

import pandas as pd

from multirole.diagnostics.alarm_rules import READ, THRESHOLDS, WATCHED
from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.falls import first_fall
from multirole.experiment.cell import Cell
from multirole.experiment.storage import write_text
from multirole.paper import pack


def find_runs(folder: Path, patterns: list[str]) -> dict[str, Cell]:
    """Name -> cell of the packed runs whose names match a pattern."""
    index = pack.index(folder)
    runs = index[index["kind"] == "run"] if len(index) else index
    found = {
        run.run: Cell(**json.loads(run.settings))
        for run in runs.itertuples()
        if any(fnmatch(run.run, pattern) for pattern in patterns)
    }
    if not found:
        raise ValueError(
            f"{folder} holds no packed run whose name matches {patterns}. Pass a folder such as results/tiny-s."
        )
    return found


def is_pushed(cell: Cell) -> bool:
    """Whether a run trains at another learning rate or schedule than its scale's own."""
    return bool({"learning_rate", "lr_schedule"} & set(cell.changed()))


def prepare(folder: Path, name: str, cell: Cell) -> tuple[Alarms, list[dict]]:
    """A run's alarms before its first row, and its rows."""
    return Alarms(cell.policy, cell.make_workflow().roles), pack.read(folder, "roles", [name]).to_dict("records")


def levels(folder: Path, runs: dict[str, Cell]) -> pd.DataFrame:
    """Metric x slots over every iteration after the baseline: highest level, rise, fall and ratio to the baseline.

    `capped_rise` is `History.rise` with the threshold of chi2 or chi2_after.
    """
    rows = []
    for name, cell in runs.items():
        alarms, turns = prepare(folder, name, cell)
        history = alarms.history
        for iteration, group in groupby(turns, key=lambda row: row["iteration"]):
            alarms.update(iteration, {row["role"]: {k: row[k] for k in row if k in READ} for row in group})
            for role, metric in product(history.policy, WATCHED):
                pair = history.pair(role, metric)
                if pair is None:
                    continue
                ratio = pair[0] / pair[1] if pair[1] > 0 else None
                values = {"level": pair[0], "rise": pair[0] - pair[1], "fall": pair[1] - pair[0], "ratio": ratio}
                if metric in ("chi2", "chi2_after"):
                    limit = metric if history.slots[role] > 1 else f"{metric}_one"
                    rise = history.rise(role, metric, THRESHOLDS[limit].value)
                    values["capped_rise"] = None if rise is None else rise[0]
                if metric == "coherence":
                    values["mean"] = history.mean(role, metric)
                slots = "one" if history.slots[role] == 1 else "several"
                rows.append({"metric": metric, "slots": slots} | values)
    return pd.DataFrame(rows).groupby(["metric", "slots"]).max()


def examine(folder: Path, name: str, cell: Cell) -> dict[str, object]:
    """One run's line: whether and when it falls, what was announced and when."""
    alarms, rows = prepare(folder, name, cell)
    fall = first_fall(pack.read(folder, "eval", [name], ["run", "step", "correct"]).groupby("step")["correct"].mean())
    alarms.replay(rows)
    before, shown = fall[:2] if fall else (None, None)
    early = [row for row in alarms.log if shown is None or row["iteration"] < shown]
    first = early[0] if early else None
    return {
        "run": name,
        "iterations": len(alarms.history.iterations),
        "pushed": is_pushed(cell),
        "fall": None if fall is None else [before, shown],
        "alarms": [[row["iteration"], row["alarm"], row["role"]] for row in alarms.log],
        "first": None if first is None else f"{first['iteration']} {first['alarm']} ({first['role']})",
        "warning": None if fall is None or first is None else [before - first["iteration"], shown - first["iteration"]],
        "not_evaluated": alarms.not_evaluated(),
    }


def summarise(runs: list[dict]) -> dict[str, object]:
    """The three numbers, with the counts behind them; None where there is nothing to count."""
    fallen = [run for run in runs if run["fall"]]
    healthy = [run for run in runs if not run["fall"] and not run["pushed"]]
    strained = [run for run in runs if not run["fall"] and run["pushed"]]
    warnings = [run["warning"] for run in fallen if run["warning"]]
    iterations, false = sum(run["iterations"] for run in healthy), sum(len(run["alarms"]) for run in healthy)
    return {
        "falls": len(fallen),
        "announced": len(warnings) / len(fallen) if fallen else None,
        "healthy_runs": len(healthy),
        "healthy_iterations": iterations,
        "false_alarms": false,
        "false_alarms_per_1000": 1000 * false / iterations if iterations else None,
        "strained_runs": len(strained),
        "strained_runs_with_alarms": sum(bool(run["alarms"]) for run in strained),
        "median_warning": statistics.median(shown for _, shown in warnings) if warnings else None,
        "median_warning_to_evaluation_before": statistics.median(before for before, _ in warnings)
        if warnings
        else None,
        "first_alarms": dict(Counter(run["first"].split()[1] for run in fallen if run["first"])),
    }


def main(argv: list[str]) -> None:
    """Print every run, then the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, whose runs are packed")
    parser.add_argument("--runs", nargs="+", default=["*"], metavar="PATTERN", help="names of runs, such as '*-s3-*'")
    parser.add_argument("--levels", action="store_true", help="also print how far healthy metrics move")
    parser.add_argument("--out", type=Path, help="also write the runs and the numbers as JSON")
    arguments = parser.parse_args(argv)
    found = find_runs(arguments.folder, arguments.runs)
    runs = [examine(arguments.folder, name, cell) for name, cell in found.items()]
    for run in runs:
        still = "strained" if run["pushed"] else "healthy"
        state = f"falls between {run['fall'][0]} and {run['fall'][1]}" if run["fall"] else still
        print(f"{run['run']}: {run['iterations']} iterations, {state}")
        print(f"    alarms: {'; '.join(f'{i} {name} ({role})' for i, name, role in run['alarms']) or 'none'}")
        for name, reason in run["not_evaluated"].items():
            print(f"    not evaluated: {name}: {reason}")
    numbers = summarise(runs)
    print(json.dumps(numbers, indent=2))
    if arguments.levels:
        healthy = {run["run"]: found[run["run"]] for run in runs if not run["fall"] and not run["pushed"]}
        print(levels(arguments.folder, healthy).round(4).to_string())
    if arguments.out:
        write_text(arguments.out, json.dumps({"summary": numbers, "runs": runs}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
