"""Let the doctor examine a cell's trainer in this process, which may be one of several: a JSON line for each finding."""

import json
import sys
import tempfile
from dataclasses import asdict

from fsdp2_on_cpu import be_a_gpus_process

from multirole import doctor
from multirole.experiment.cell import Cell
from multirole.experiment.run import make_trainer


def examine(parameters: dict[str, object]) -> None:
    cell, launch = Cell.from_parameters(parameters)
    if launch.is_sharded:
        be_a_gpus_process()
    trainer = make_trainer(cell, tempfile.mkdtemp(), launch)
    findings = doctor.examine(trainer, cell.make_task())
    trainer.engine.close()
    for finding in findings:
        sys.stdout.write(json.dumps(asdict(finding) | {"rank": trainer.accelerator.process_index}) + "\n")
    sys.stdout.flush()
