"""`multirole doctor`: examine the trainer of a cell.

multirole doctor -p workflow voting -p policy ip -p task math -p scale tiny-s
"""

import argparse
import sys
import tempfile

from multirole.doctor import examine, report
from multirole.experiment.cell import Cell
from multirole.experiment.launch import add_parameters, read_parameters
from multirole.experiment.run import make_trainer, preflight


def main(argv: list[str]) -> int:
    """Check that a cell trains what it says: 0 if every check passes, 1 if one fails, 2 for a cell that cannot run."""
    parser = argparse.ArgumentParser(prog="multirole doctor", description=main.__doc__)
    add_parameters(parser)
    try:
        cell, launch = Cell.from_parameters(read_parameters(parser.parse_args(argv)))
        preflight(cell)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(cell, folder, launch)
            try:
                findings = examine(trainer, cell.make_task())
            finally:
                trainer.engine.close()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{cell.id} at {cell.scale}\n\n{report(findings)}\n")
    return 0 if all(finding.holds for finding in findings) else 1
