"""What `multirole doctor` does, once its cell is known to be right."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from multirole.core.distributed import processes
from multirole.doctor import examine, report
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.experiment.preflight import look
from multirole.experiment.progress import say
from multirole.experiment.run import make_trainer, preflight


def run(cell: Cell, launch: Launch, json_file: Path | None = None) -> int:
    """Print the preflight and the findings of every check, from the first of several processes; 1 where a check fails.

    ValueError or OSError where the cell cannot run.
    """
    is_main, found = processes().is_main_process, look(cell, launch)
    rows = [(line.what, "STOP" if line.stops else "", line.found, line.advice) for line in found]
    if is_main:
        say(f"{cell.id} at {cell.scale}\n\n{tabulate(rows, maxcolwidths=(None, None, 60, 60), tablefmt='plain')}\n")
    preflight(cell, launch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, folder, launch)
        try:
            findings = examine(trainer, cell.make_task())
        finally:
            trainer.engine.close()
    if is_main:
        say(report(findings))
    if is_main and json_file:
        lines, checks = [line._asdict() for line in found], [asdict(finding) for finding in findings]
        json_file.write_text(json.dumps({"preflight": lines, "checks": checks}, indent=2) + "\n")
    return 0 if all(finding.holds for finding in findings) else 1
