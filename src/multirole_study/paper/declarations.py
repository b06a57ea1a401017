"""Choose the kind of a declaration, from a study's YAML file (Snakefile) or from the record in a results folder (command line)."""

import shutil
from pathlib import Path

from multirole_study.paper.clock_study import ClockStudy
from multirole_study.paper.grid import Declaration, Grid, Study
from multirole_study.paper.rate_study import RateStudy

STUDIES = (Study, ClockStudy, RateStudy)
"""The kinds of declarations that have a record of their own."""

EXAMPLES = {
    "clock": ("study_clock.yaml", "results/clock/tiny-r"),
    "leaderboard": ("study_credit.yaml", "results/credit/tiny-r"),
    "rates": ("study_rates.yaml", "runs/rates/tiny-r"),
}
"""Command -> the file that declares its study, and a folder of such runs."""


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
    study_file, example = EXAMPLES[command]
    for kind in STUDIES:
        study = kind.read(folder)
        if study is not None and study.command == command:
            return study
    raise ValueError(
        f"{folder} records no study for `multirole {command}`, so it is not known which runs belong to it. Pass a folder such as "
        f"{example}. The first lines of {study_file} say how to train its runs."
    )
