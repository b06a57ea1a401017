"""The command line. Exit codes: 0 done, 1 a check failed or an error, 2 usage, 75 told to stop (the same command continues).

Commands are parsed here, and modules imported once a command is known to be right: some take seconds.
"""

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path

from multirole import __version__
from multirole.experiment.settings import Refused, did_you_mean, refusing

COMMANDS = {
    "train": ("multirole.__main__:train", "train one cell, in this process or as one of several (torchrun)"),
    "evaluate": ("multirole.__main__:evaluate", "score a trained cell's checkpoints, the base model, or a transfer"),
    "plan": ("multirole.plan:main", "say whether a cell fits the memory and the disk"),
    "doctor": ("multirole.__main__:doctor", "train two iterations of a cell on this machine: checks, speed and memory"),
    "inspect": ("multirole.__main__:inspect", "write a page that shows a run"),
    "pack": ("multirole.__main__:pack", "pack finished runs into one file per table"),
    "paper": ("multirole.__main__:paper", "build tables and figures from packed results"),
}
"""name -> (function, help)."""


def train(argv: list[str]) -> int:
    """Train one cell to DONE."""
    from multirole.experiment.cell import Cell, cell_parameters
    from multirole.experiment.launch import is_launched, parameters_from

    cell, launch = Cell.from_parameters(parameters_from("train", argv, cell_parameters()))
    from multirole import plan
    from multirole.core.distributed import processes  # this imports torch
    from multirole.experiment.run import run_cell
    from multirole.inspector import inspect_run

    with refusing():
        if is_launched():  # memory and disk are its user's to plan
            launch = plan.settled(cell, launch.replace(n_processes=processes().num_processes))
        else:
            launch = plan.check(cell, launch)
    folder = run_cell(cell, launch)
    if processes().is_main_process and (is_launched() or launch.n_processes == 1):  # else another has said it
        sys.stdout.write(f"  inspector   {inspect_run(folder)}\n")
    return 0


def evaluate(argv: list[str]) -> int:
    """Evaluate a trained cell, the base model, or a transfer."""
    from multirole.experiment.evaluation import Evaluation, evaluation_parameters, steps_of
    from multirole.experiment.launch import parameters_from

    evaluation, launch = Evaluation.from_parameters(parameters_from("evaluate", argv, evaluation_parameters()))
    with refusing():
        steps_of(evaluation, launch.results_dir)
    from multirole.experiment.run import run_evaluation
    from multirole.plan import settled

    run_evaluation(evaluation, settled(evaluation.cell, launch))
    return 0


def doctor(argv: list[str]) -> int:
    """Print the preflight of a cell, train two iterations, check what they did, and measure their time and memory.

    The exit code is 0 if every check passes, 1 if one fails, 2 for a cell that cannot run. For several processes, write
    torchrun --nproc_per_node 2 -m multirole doctor -p workflow voting -p policy ip
    """
    from multirole.experiment.cell import Cell
    from multirole.experiment.launch import read_command

    parser = argparse.ArgumentParser(prog="multirole doctor", description=doctor.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found as JSON")
    arguments, given = read_command(parser, argv)
    cell, launch = Cell.from_parameters(given)
    from multirole import doctor as smoke_run  # this imports torch
    from multirole import plan
    from multirole.core.distributed import processes

    n = processes().num_processes
    with refusing():
        if launch.n_processes not in (1, n):
            raise ValueError(
                f"`n_processes` is {launch.n_processes}, but the doctor examines the processes that a launcher starts, here {n}. "
                f"Write: torchrun --nproc_per_node {launch.n_processes} -m multirole doctor ..."
            )
        launch = plan.settled(cell, launch.replace(n_processes=n))
        return smoke_run.run(cell, launch, arguments.json)


def inspect(argv: list[str]) -> int:
    """Write a page that shows one run, or one for every finished run below a folder and an index of them."""
    parser = argparse.ArgumentParser(prog="multirole inspect", description=inspect.__doc__)
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="a run's folder, or a folder of runs")
    out = "of one run's page (default: inspector.html in its folder)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    arguments = parser.parse_args(argv)
    from multirole.inspector import inspect_all, inspect_run

    is_one = arguments.out is not None or (arguments.results_dir / "config.json").exists()
    with refusing():
        written = [inspect_run(arguments.results_dir, arguments.out)] if is_one else inspect_all(arguments.results_dir)
    sys.stdout.writelines(f"{path}  {path.stat().st_size / 1e6:.2f} MB\n" for path in written)
    return 0


def pack(argv: list[str]) -> int:
    """Pack finished runs into one file per table."""
    parser = argparse.ArgumentParser(prog="multirole pack", description=pack.__doc__)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, which gets the packed tables")
    there = "where the folders of the runs are (default: there)"
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help=there)
    arguments = parser.parse_args(argv)
    folder = arguments.folder
    from multirole.paper import pack as packing
    from multirole.paper.grid import detailed

    with refusing():
        added, held = packing.pack(folder, arguments.runs, detailed(folder)), packing.index(folder)
    if held.empty:
        raise Refused(f"{folder} holds no finished run. Give the folder of a scale, such as runs/tiny-r.")
    sys.stdout.write("\n".join([*added, f"packed {len(added)} runs and evaluations; {folder} holds {len(held)}\n"]))
    return 0


def paper(argv: list[str]) -> int:
    """Build every table, figure and claim from a grid's committed results."""
    parser = argparse.ArgumentParser(prog="multirole paper", description=paper.__doc__)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, with the grid.json of the grid")
    parser.add_argument(
        "--page",
        action="store_true",
        help="write only the pages of results, from the tables and figures that are there",
    )
    arguments = parser.parse_args(argv)
    folder = arguments.folder
    from multirole.paper.grid import Grid

    with refusing():
        Grid.read(folder)
    try:
        from multirole.paper.build import build, publish
    except ModuleNotFoundError as error:  # of the extra `study`
        raise Refused(
            f"Tables and figures need {error.name}, which is not installed. Install multirole with its 'study' extra."
        ) from error

    lines = [] if arguments.page else [f"missing: {name}" for name in build(folder).missing()]
    page_of = folder / "page.yaml", folder.absolute().parents[1] / "README.md"  # what to show, and whose findings
    if all(path.exists() for path in page_of):
        lines.append(f"{publish(folder)} is written")
    if not arguments.page:
        lines.append(f"{folder}/tables and {folder}/figures are written")
    sys.stdout.writelines(f"{line}\n" for line in lines)
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
