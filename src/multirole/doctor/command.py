"""`multirole doctor`: examine this machine and the trainer of a cell.

multirole doctor -p workflow voting -p policy ip -p task math -p scale tiny-s

Several processes are examined where a launcher starts them: torchrun --nproc_per_node 2 -m multirole doctor ...
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from multirole.doctor import examine, report
from multirole.experiment.cell import Cell
from multirole.experiment.launch import add_parameters, read_parameters
from multirole.experiment.preflight import look
from multirole.experiment.run import make_trainer, preflight


def main(argv: list[str]) -> int:
    """Print the preflight of a cell, then check that it trains what it says.

    The exit code is 0 if every check passes, 1 if one fails, 2 for a cell that cannot run.
    """
    parser = argparse.ArgumentParser(prog="multirole doctor", description=main.__doc__)
    add_parameters(parser)
    parser.add_argument("--json", metavar="FILE", help="also write what was found as JSON")
    arguments = parser.parse_args(argv)
    try:
        cell, launch = Cell.from_parameters(read_parameters(arguments))
        found = look(cell, launch)
        rows = [(line.what, "STOP" if line.stops else "", line.found, line.advice) for line in found]
        sys.stdout.write(
            f"{cell.id} at {cell.scale}\n\n{tabulate(rows, maxcolwidths=(None, None, 60, 60), tablefmt='plain')}\n"
        )
        sys.stdout.write("\n")
        sys.stdout.flush()
        preflight(cell, launch)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(cell, folder, launch)
            try:
                findings = examine(trainer, cell.make_task())
            finally:
                trainer.engine.close()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{report(findings)}\n")
    if arguments.json:
        preflight_lines, checks = [line._asdict() for line in found], [asdict(finding) for finding in findings]
        Path(arguments.json).write_text(json.dumps({"preflight": preflight_lines, "checks": checks}, indent=2) + "\n")
    return 0 if all(finding.holds for finding in findings) else 1
