"""Let the doctor examine a cell's trainer: `torchrun --nproc_per_node N tests/examine_here.py PARAMETERS.json` -> JSON lines."""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from multirole import doctor
from multirole.experiment.cell import Cell
from multirole.experiment.run import make_trainer

if __name__ == "__main__":
    cell, launch = Cell.from_parameters(json.loads(Path(sys.argv[1]).read_text()))
    trainer = make_trainer(cell, tempfile.mkdtemp(), launch)
    findings = doctor.examine(trainer, cell.make_task())
    trainer.engine.close()
    for finding in findings:
        sys.stdout.write(json.dumps(asdict(finding) | {"rank": trainer.accelerator.process_index}) + "\n")
