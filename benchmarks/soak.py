"""Train one tiny cell for many iterations, and check that the process leaks neither memory nor file descriptors.

    python benchmarks/soak.py [--iterations 500] --out results/bench/soak

Writes soak.json and soak.png. Resident memory and open descriptors are read after every iteration. They count as flat if, over the last
half, a straight line through the memory rises by less than `BOUND` per iteration and descriptors do not rise. Some rise is
expected: the run's tables stay in memory until its end.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.storage import write_text

BOUND = 100.0  # kB per iteration: 50 MB in 500 iterations, where the paper's runs have 200
CELL = {
    "workflow": "voting", "policy": "ip", "task": "math", "n_problems": 2, "num_generations": 2, "n_validation": 4, "n_train": 8,
    "eval_steps": 25, "save_steps": 25, "max_completion_length": 24,
}  # fmt: skip


@dataclass
class Watch(TrainerCallback):
    """Callback that records memory and descriptors of the process after each iteration."""

    megabytes: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.megabytes.append(psutil.Process().memory_info().rss / 1e6)
        self.descriptors.append(len(os.listdir("/proc/self/fd")))


def slope(values: list[float]) -> float:
    """Return the rise per iteration of a straight line through the last half."""
    half = values[len(values) // 2 :]
    return float(np.polyfit(range(len(half)), half, 1)[0])


def plot(result: dict, path: Path) -> None:
    """Plot memory over iterations; descriptors are one line of text."""
    figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
    axes.plot(range(1, len(result["megabytes"]) + 1), result["megabytes"], linewidth=1.5)
    axes.set(xlabel="iteration", ylabel="resident memory (MB)", ylim=(0, 1.15 * max(result["megabytes"])))
    axes.spines[["top", "right"]].set_visible(False)
    first, most, last = (result["descriptors"][name] for name in ("first", "most", "last"))
    rise = f"{result['kilobytes_per_iteration']:.0f} kB per iteration over the last half"
    axes.set_title(
        f"one run, Voting-IP, miniature (0.45M)\nrise {rise}; open descriptors: {first} at the start, {most} at most, {last} at the end",
        fontsize=8,
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True, help="where to write, without an ending")
    parser.add_argument("--redraw", action="store_true", help="draw the JSON file again and train nothing")
    arguments = parser.parse_args()
    if arguments.redraw:
        plot(
            json.loads(arguments.out.with_suffix(".json").read_text(encoding="utf-8")),
            arguments.out.with_suffix(".png"),
        )
        return
    torch.set_num_threads(1)
    for package in ("multirole", "multirole_study"):
        logging.getLogger(package).setLevel(logging.WARNING)
    watch, cell, began = Watch(), Cell(**CELL | {"max_steps": arguments.iterations}), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        run_cell(cell, scratch, callbacks=[watch])
    rise = slope(watch.megabytes) * 1e3
    result = {
        "cell": CELL | {"max_steps": arguments.iterations},
        "seconds": round(time.monotonic() - began),
        "first_megabytes": round(watch.megabytes[0], 1),
        "half_megabytes": round(watch.megabytes[len(watch.megabytes) // 2], 1),
        "last_megabytes": round(watch.megabytes[-1], 1),
        "kilobytes_per_iteration": round(rise, 2),
        "bound_kilobytes_per_iteration": BOUND,
        "descriptors": {"first": watch.descriptors[0], "most": max(watch.descriptors), "last": watch.descriptors[-1]},
        "is_flat": rise < BOUND and slope(watch.descriptors) < 0.01,
        "megabytes": [round(value, 1) for value in watch.megabytes],
    }
    print(json.dumps({name: value for name, value in result.items() if name != "megabytes"}, indent=2))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plot(result, arguments.out.with_suffix(".png"))
    write_text(arguments.out.with_suffix(".json"), json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
