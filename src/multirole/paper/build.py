"""`multirole paper results/<scale>`: every table, figure and claim from a grid's committed results, to files and the README."""

import argparse
import logging
from pathlib import Path

from multirole.paper.claims import claims
from multirole.paper.figures import figures
from multirole.paper.readme import rewrite
from multirole.paper.results import Results
from multirole.paper.study import Study
from multirole.paper.study_figures import study_figures
from multirole.paper.study_tables import study_tables
from multirole.paper.tables import tables
from multirole.paper.write import write_figure, write_tables

logger = logging.getLogger(__name__)


def build(folder: str | Path, readme: str | Path | None = None) -> Results:
    """Write `<folder>/tables/` and `<folder>/figures/`, and the README's blocks; ValueError where no run is finished."""
    results = Results(folder)
    if not results.runs:
        raise ValueError(
            f"{folder} holds no finished run of its grid, so there is nothing to show. Run one first: make grid."
        )
    study = Study.read(results.grid, folder)
    studied = study_tables(results, study) if study else []
    made = [*tables(results), claims(results), *studied]
    write_tables(made, results.folder / "tables")
    plates = [*figures(results), *(study_figures(results, study, studied) if study else ())]
    for plate in plates:
        write_figure(plate.figure, plate.caption, plate.name, results.folder / "figures")
    if readme is not None:
        rewrite(Path(readme), results, {table.name: table for table in made})
    logger.info("%d tables and %d figures in %s; %d runs or evaluations missing", len(made), len(plates), folder,
                len(results.missing()))  # fmt: skip
    return results


def main(argv: list[str]) -> int:
    """`multirole paper FOLDER [--readme README.md]`; 0 done."""
    parser = argparse.ArgumentParser(prog="multirole paper", description=__doc__)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, with the grid.json of the grid")
    parser.add_argument("--readme", type=Path, help="also rewrite the blocks of this Markdown file")
    arguments = parser.parse_args(argv)
    for name in build(arguments.folder, arguments.readme).missing():
        print(f"missing: {name}")
    print(f"{arguments.folder}/tables and {arguments.folder}/figures are written")
    return 0
