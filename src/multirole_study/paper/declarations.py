"""Choose the kind of a declaration, from a study's YAML file (Snakefile) or from the record in a results folder (command line)."""

import shutil
from pathlib import Path

from multirole_study.paper.clock_study import ClockStudy
from multirole_study.paper.grid import Declaration, Grid, Study
from multirole_study.paper.rate_study import RateStudy

STUDIES = (Study, ClockStudy, RateStudy)
"""The kinds of declarations that have a record of their own."""


def declare(grid: Grid, fields: dict[str, object]) -> Declaration:
    """Create what a study file declares, from its fields besides the grid; the grid alone if there are none."""
    kind = RateStudy if "rates" in fields else ClockStudy if "lines" in fields else Study if fields else Declaration
    return kind(grid, **fields)


def copy_declaration(source: Path, target: Path) -> None:
    """Copy the records of a grid and its study from one results folder into another, which is made; nothing if there are none."""
    for name in ("grid.json", *(kind.RECORD for kind in STUDIES)):
        if (source / name).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def read_declaration(folder: str | Path, command: str) -> Declaration:
    """Read the study of a results folder whose tables `multirole <command>` builds. Raises ValueError if none is recorded."""
    for kind in STUDIES:
        study = kind.read(folder)
        if study is not None and study.command == command:
            return study
    raise ValueError(
        f"{folder} records no study for `multirole {command}`, so it is not known which runs belong to it. Pass a folder such as "
        "results/clock/tiny-r. The first lines of study_clock.yaml, study_credit.yaml and study_rates.yaml say how to train one."
    )
