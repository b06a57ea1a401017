"""The command line. Exit codes: 0 done, 1 a check failed or an error, 2 usage, 75 told to stop (the same command continues)."""

import argparse
import importlib
import logging
import sys

from multirole import __version__

COMMANDS = {
    "train": ("multirole.__main__:train", "train one cell, in this process or as one of several (torchrun)"),
    "evaluate": ("multirole.__main__:evaluate", "score a trained cell's checkpoints, the base model, or a transfer"),
    "plan": ("multirole.plan:main", "say whether a cell fits the memory and the disk"),
    "doctor": ("multirole.doctor.command:main", "check on this machine that a cell trains what it says"),
    "inspect": ("multirole.inspector:main", "write a page that shows a run"),
    "pack": ("multirole.paper.pack:main", "pack finished runs into one file per table"),
    "paper": ("multirole.paper.build:main", "build tables and figures from packed results"),
    "grade": ("multirole.sandbox:main", "grade a program against tests in the sandbox"),
}
"""name -> (function, help). Modules are imported when they are asked for: some take seconds."""


def train(argv: list[str]) -> int:
    """Train one cell to DONE."""
    from multirole.experiment.cell import Cell
    from multirole.experiment.launch import is_launched, parameters_from

    try:
        cell, launch = Cell.from_parameters(parameters_from("train", argv))
    except ValueError as error:
        return _refused(error)
    from multirole import doctor, plan
    from multirole.core.distributed import processes
    from multirole.experiment.run import preflight, run_cell
    from multirole.inspector.progress import Progress

    is_main = processes().is_main_process
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("multirole").setLevel(logging.INFO if is_main else logging.WARNING)
    try:
        if not is_launched():
            preflight(cell)
            plan.check(cell, launch)
    except ValueError as error:
        return _refused(error)
    folder = run_cell(cell, launch, callbacks=[Progress()], examine=doctor.examiner(cell))
    if is_main and (is_launched() or launch.n_processes == 1):  # else the first of the started processes has said it
        sys.stdout.write(f"{folder}\n")
    return 0


def evaluate(argv: list[str]) -> int:
    """Evaluate a trained cell, the base model, or a transfer."""
    from multirole.experiment.evaluation import Evaluation, steps_of
    from multirole.experiment.launch import parameters_from

    try:
        evaluation, launch = Evaluation.from_parameters(parameters_from("evaluate", argv))
        steps_of(evaluation, launch.results_dir)
    except ValueError as error:
        return _refused(error)
    from multirole.experiment.evaluate import run_evaluation

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("multirole").setLevel(logging.INFO)
    sys.stdout.write(f"{run_evaluation(evaluation, launch)}\n")
    return 0


def _refused(error: ValueError) -> int:
    sys.stderr.write(f"{error}\n")
    return 2


def main() -> int:
    """Run the command that is named."""
    commands = "\n".join(f"  {name:<10}{help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="multirole", epilog=f"commands:\n{commands}\n\n`multirole COMMAND --help` shows its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"multirole {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    module, _, function = COMMANDS[given.command][0].partition(":")
    return getattr(importlib.import_module(module), function)(given.arguments)


if __name__ == "__main__":
    sys.exit(main())
