"""The command line. Exit codes: 0 done, 1 a check failed or an error, 2 usage, 75 told to stop (the same command continues)."""

import argparse
import importlib
import logging
import os
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
    "completion": ("multirole.completion:main", "print a script that completes commands and parameters in a shell"),
}
"""name -> (function, help). Modules are imported when they are asked for: some take seconds."""


def train(argv: list[str]) -> int:
    """Train one cell to DONE."""
    from multirole.experiment.cell import Cell, cell_parameters
    from multirole.experiment.launch import is_launched, parameters_from
    from multirole.experiment.settings import refusing

    cell, launch = Cell.from_parameters(parameters_from("train", argv, cell_parameters()))
    from multirole import doctor, plan  # these import torch
    from multirole.core.distributed import processes
    from multirole.experiment.run import run_cell
    from multirole.inspector import inspect_run

    if not is_launched():
        with refusing():
            launch = plan.check(cell, launch)
    folder = run_cell(cell, launch, examine=doctor.examiner(cell, launch))
    if processes().is_main_process and (is_launched() or launch.n_processes == 1):  # else another has said it
        sys.stdout.write(f"  inspector   {inspect_run(folder)}\n")
    return 0


def evaluate(argv: list[str]) -> int:
    """Evaluate a trained cell, the base model, or a transfer."""
    from multirole.experiment.evaluation import Evaluation, evaluation_parameters, steps_of
    from multirole.experiment.launch import parameters_from
    from multirole.experiment.settings import refusing

    evaluation, launch = Evaluation.from_parameters(parameters_from("evaluate", argv, evaluation_parameters()))
    with refusing():
        steps_of(evaluation, launch.results_dir)
    from multirole.experiment.evaluate import run_evaluation

    run_evaluation(evaluation, launch)
    return 0


def main() -> int:
    """Run the command that is named."""
    commands = "\n".join(f"  {name:<12}{help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="multirole", epilog=f"commands:\n{commands}\n\n`multirole COMMAND --help` shows its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"multirole {__version__}")
    parser.add_argument("command", metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    from multirole.experiment.settings import Refused, did_you_mean

    if given.command not in COMMANDS:
        known = did_you_mean(given.command, COMMANDS) or f" Commands are {', '.join(COMMANDS)}."
        parser.error(f"there is no command {given.command!r}.{known}")
    module, _, function = COMMANDS[given.command][0].partition(":")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("multirole").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        return getattr(importlib.import_module(module), function)(given.arguments)
    except Refused as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
