"""`multirole train | plan | doctor | inspect | paper | grade`: cells from a shell, by papermill's `-p NAME VALUE`.

`train` is what several processes run, each (`torchrun`, `accelerate launch`, srun); one process does as well through
papermill. Exit codes: 0 done, 1 does not fit or failed, 2 usage, 75 told to stop: the
same command continues.
"""

import argparse
import importlib
import logging
import sys

from multirole.experiment.launch import add_parameters, read_parameters

USAGE = "multirole {train,plan,doctor,inspect,paper,grade} ...; multirole COMMAND --help says more"


def train(argv: list[str]) -> int:
    """Train one cell to DONE in this process, or as one of several that a launcher started."""
    parser = argparse.ArgumentParser(prog="multirole train", description=train.__doc__)
    add_parameters(parser)
    arguments = parser.parse_args(argv)
    from multirole.core.distributed import processes
    from multirole.experiment.cell import Cell
    from multirole.experiment.run import run_cell
    from multirole.inspector.progress import Progress
    from multirole.inspector.reader import facts

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if processes().is_main_process:  # a line per iteration, and one on what was graded in it
        logging.getLogger("multirole").setLevel(logging.INFO)
    cell, launch = Cell.from_parameters(read_parameters(arguments))
    folder = run_cell(cell, launch, callbacks=[Progress()])
    if processes().is_main_process:
        sys.stdout.write(f"{facts(folder).to_string()}\n{folder}\n")
    return 0


COMMANDS = {
    "plan": "multirole.plan",
    "doctor": "multirole.doctor.command",
    "inspect": "multirole.inspector",
    "paper": "multirole.paper.build",
    "grade": "multirole.sandbox",
}
"""Whose `main` each command is; imported when asked for, since some take seconds to load."""


def main() -> int:
    """The command line."""
    command, argv = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command == "train":
        return train(argv)
    if command in COMMANDS:
        return importlib.import_module(COMMANDS[command]).main(argv)
    sys.stderr.write(f"usage: {USAGE}\n")
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
