"""How well the alarms announce falls: replays them over recorded runs and prints three numbers.

    python benchmarks/alarms.py RESULTS_DIR... [--levels] [--out FILE.json]

A run *falls* at the first evaluation that lies 5 points below the best one before it. A *healthy* run does not, and trains at the
preset's own learning rate and schedule; one that was pushed harder and did not fall is *strained*: alarms there may be right about
a role all the same, so they are counted apart. The numbers:

- announced: falls with an alarm before that evaluation, over all falls. Goal: at least 0.9.
- false alarms per 1,000 iterations of healthy runs. Goal: at most 1.
- warning: median over the announced falls of the iterations from the first alarm to the evaluation that shows the fall.
  Goal: more than 5. The fall itself lies somewhere after the evaluation before, so the warning counted to that one is
  printed beside it: the truth is in between, and a run that is evaluated more often tells more.

An alarm counts however long before the fall it rang. Each run's alarms, and those that could not be evaluated for want of a
metric, are listed. `--levels` prints what the thresholds of `alarm_rules` are set by: how far each metric's level, a median
over iterations, ever was from its baseline in healthy runs, for roles with one slot and with several.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from itertools import groupby, product
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from multirole.diagnostics.alarm_rules import READ, THRESHOLDS, WATCHED
from multirole.diagnostics.alarms import Alarms
from multirole.experiment.presets import defaults
from multirole.experiment.record import is_done
from multirole.experiment.storage import write_text
from multirole.paper.statistics import first_fall


def find_runs(folders: list[Path]) -> list[Path]:
    """Finished runs at or below these folders."""
    found = {path.parent for folder in folders for path in folder.glob("**/roles.parquet")}
    runs = sorted(folder for folder in found if is_done(folder))
    if not runs:
        raise ValueError(f"{[str(f) for f in folders]} hold no finished run: pass a results folder, such as results")
    return runs


def fall_of(folder: Path) -> tuple[int, int] | None:
    """A run's first fall, None for a healthy run."""
    return first_fall(pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"].mean())


def is_pushed(folder: Path) -> bool:
    """Whether a run trains at another learning rate or schedule than its scale's own."""
    config = json.loads((folder / "config.json").read_text())
    own = defaults(config["workflow"], config["task"], config["scale"], config["preset"])
    return any(config[name] != own[name] for name in ("learning_rate", "lr_schedule"))


def prepare(folder: Path) -> tuple[Alarms, list[dict]]:
    """A run's alarms before its first row, and its rows. Slots are read off the recorded turns, for any workflow."""
    policy = json.loads((folder / "config.json").read_text())["policy"]
    turns = pd.concat(
        pd.read_parquet(path, columns=["role", "slot"]) for path in sorted(folder.glob("turns/*.parquet"))
    )
    slots = turns.groupby("role")["slot"].max() + 1
    alarms = Alarms(policy, {role: int(slots.get(role, 1)) for role in policy})
    return alarms, pq.read_table(folder / "roles.parquet").to_pylist()


def levels(folders: list[Path]) -> pd.DataFrame:
    """Metric x slots over every iteration after the baseline: highest level, rise, fall and ratio to the baseline.

    `capped_rise` is `History.rise` with the threshold of chi2 or chi2_after.
    """
    rows = []
    for folder in folders:
        alarms, turns = prepare(folder)
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
                    name = metric if history.slots[role] > 1 else f"{metric}_one"
                    rise = history.rise(role, metric, THRESHOLDS[name].value)
                    values["capped_rise"] = None if rise is None else rise[0]
                if metric == "coherence":
                    values["mean"] = history.mean(role, metric)
                slots = "one" if history.slots[role] == 1 else "several"
                rows.append({"metric": metric, "slots": slots} | values)
    return pd.DataFrame(rows).groupby(["metric", "slots"]).max()


def examine(folder: Path) -> dict[str, object]:
    """One run's line: whether and when it falls, what was announced and when."""
    (alarms, rows), fall = prepare(folder), fall_of(folder)
    alarms.replay(rows)
    before, shown = fall or (None, None)
    early = [row for row in alarms.log if shown is None or row["iteration"] < shown]
    first = early[0] if early else None
    return {
        "run": folder.name,
        "iterations": len(alarms.history.iterations),
        "pushed": is_pushed(folder),
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
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--levels", action="store_true", help="also print how far healthy metrics move")
    parser.add_argument("--out", type=Path, help="also write the runs and the numbers as JSON")
    arguments = parser.parse_args(argv)
    folders = find_runs(arguments.folders)
    runs = [examine(folder) for folder in folders]
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
        healthy = [f for f, run in zip(folders, runs, strict=True) if not run["fall"] and not run["pushed"]]
        print(levels(healthy).round(4).to_string())
    if arguments.out:
        write_text(arguments.out, json.dumps({"summary": numbers, "runs": runs}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
