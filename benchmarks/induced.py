"""Two failures made on purpose and a healthy control, over seeds: does the right alarm announce each?

    python benchmarks/induced.py RUNS_DIR [--seeds 10] [--out results/bench/induced.json]

- amplification: Voting-IP whose three generators are one, drawn with the same sampling seed. Each slot repeats the others'
  rows, so what should average noise adds up instead. Announced by gradient_amplification.
- capture: one long role and one terse role on one adapter. Eval-Opt-SP with one round; the evaluator's rows are never
  trained (`train_after`), so that the generator owns the whole gradient and carries the evaluator along. Announced by
  sp_role_capture_tokens.
- control: Voting-IP and Eval-Opt-SP as they are, at the preset's own learning rate, not decayed. Announced by neither; other alarms
  of theirs are listed.

Runs that are there are not trained again. The alarms are replayed from the recorded rows, so that a changed threshold needs
no training. The runs are short: what is asked is whether the cause is announced, not what it leads to.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq

from multirole.core import rollout
from multirole.diagnostics.alarms import Alarms
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.experiment.record import folder_of, is_done
from multirole.experiment.run import run_cell
from multirole.experiment.storage import write_text

COMMON = {"task": "math", "n_validation": 64, "lr_schedule": "constant"}
PUSHED = COMMON | {"learning_rate": 6e-3}
NEVER = 1000  # iterations
CASES: dict[str, tuple[Callable[[int], Cell], str | None]] = {
    "amplification": (lambda seed: Cell("voting", "ip", seed=seed, iterations=12, **PUSHED), "gradient_amplification"),
    "capture": (
        lambda seed: Cell(
            "eval_opt", "sp", seed=seed, rounds=1, train_after=f"evaluator={NEVER}", iterations=20, **PUSHED
        ),
        "sp_role_capture_tokens",
    ),
    "control, voting": (lambda seed: Cell("voting", "ip", seed=seed, iterations=20, **COMMON), None),
    "control, eval_opt": (lambda seed: Cell("eval_opt", "sp", seed=seed, iterations=20, **COMMON), None),
}


def one_draw(draw: Callable[..., int]) -> Callable[..., int]:
    """`rollout.turn_seed` that is blind to the slot: same-role slots with the same prompt write the same text."""
    return lambda seed, iteration, problem, episode, role, slot, round: draw(
        seed, iteration, problem, episode, role, 0, round
    )


def train(name: str, cell: Cell, folder: Path) -> Path:
    """One run, in a folder of its case: a duplicated run has the same cell as an honest one."""
    results_dir = str(folder / name.replace(", ", "-"))
    where = folder_of(cell, results_dir)
    if not is_done(where):
        draw = one_draw(rollout.turn_seed) if name == "amplification" else rollout.turn_seed
        with mock.patch.object(rollout, "turn_seed", draw):
            run_cell(cell, Launch(results_dir=results_dir))
    return where


def alarms_of(cell: Cell, folder: Path) -> list[list[object]]:
    """[iteration, alarm, role] of everything that the present thresholds announce in a recorded run."""
    alarms = Alarms(cell.policy, cell.make_workflow().roles)
    alarms.replay(pq.read_table(folder / "roles.parquet").to_pylist())
    return [[row["iteration"], row["alarm"], row["role"]] for row in alarms.log]


def summarise(expected: str | None, runs: list[list[list[object]]]) -> dict[str, object]:
    """In how many seeds the expected alarm rang (either of the two, for a control), when, and what else did."""
    names = [expected] if expected else [alarm for _, alarm in CASES.values() if alarm]
    first = [next((i for i, alarm, _ in run if alarm in names), None) for run in runs]
    return {
        "expected": expected,
        "seeds": len(runs),
        "announced": sum(i is not None for i in first),
        "first_iterations": first,
        "seeds_with_any_alarm": sum(bool(run) for run in runs),
        "alarms": runs,
    }


def main() -> None:
    """Train what is missing, replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for name, (cell_of, expected) in CASES.items():
        cells = [cell_of(seed) for seed in range(given.seeds)]
        found[name] = summarise(expected, [alarms_of(cell, train(name, cell, given.folder)) for cell in cells])
        shown = {key: value for key, value in found[name].items() if key != "alarms"}
        print(f"{name}: {json.dumps(shown)}", flush=True)
    if given.out:
        write_text(given.out, json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
