"""Build every table, figure and claim from a grid's committed results (`multirole paper results/<scale>`)."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from multirole_study.experiment.settings import UserError
from multirole_study.inspector.landing_page import landing_page
from multirole_study.paper import at_a_glance, credit_accuracy_table, pack
from multirole_study.paper.claims import claims
from multirole_study.paper.figures import figures, figures_of_study
from multirole_study.paper.gradient_signal_table import signal_figure, signal_table
from multirole_study.paper.grid import Study
from multirole_study.paper.output import write_figure, write_tables
from multirole_study.paper.pages import write_page
from multirole_study.paper.results import Results
from multirole_study.paper.role_value_table import value_figure, value_table
from multirole_study.paper.tables import sentences, tables, tables_of_study

logger = logging.getLogger(__name__)


def build(folder: str | Path) -> Results:
    """Write `<folder>/tables/` and `<folder>/figures/`; ValueError if no run is finished."""
    results = Results(folder)
    if not results.runs:
        raise UserError(
            f"{folder} holds no finished run of its grid, so there is nothing to show. Run one first: make grid."
        )
    study = Study.read(folder)
    studied = tables_of_study(results, study) if study else []
    all_tables = [*tables(results), claims(results, sentences(results)), *studied]
    plates = [*figures(results), *(figures_of_study(results, study, studied) if study else ())]
    if (measured := pack.read_measurement(results.folder, "gradient_signal")) is not None:
        all_tables.append(signal_table(measured, results.grid.scale))
        plates.append(signal_figure(measured, results.grid.scale))
    if (credited := pack.read_measurement(results.folder, "credit_accuracy")) is not None:
        all_tables.append(credit_accuracy_table.accuracy_table(credited))
        plates.append(credit_accuracy_table.accuracy_figure(credited))
    if (valued := pack.read_measurement(results.folder, "role_value")) is not None:
        all_tables.append(value_table(valued, results.grid.scale))
        plates.append(value_figure(valued, results.grid.scale))
    write_tables(all_tables, results.folder / "tables")
    for plate in plates:
        write_figure(plate, results.folder / "figures")
    logger.info("%d tables and %d figures in %s; %d runs or evaluations missing", len(all_tables), len(plates), folder,
                len(results.missing()))  # fmt: skip
    return results


def publish(folder: Path) -> Path:
    """Write the result pages of a scale that has a `page.yaml`: Markdown and HTML of its results, and pages of some runs."""
    if (template := folder.absolute().parent / "README.md.jinja").exists():
        write_page(template, folder / "tables")
    if ((checkout := folder.absolute().parents[1]) / at_a_glance.PAGE).exists():
        at_a_glance.write(checkout)
    with TemporaryDirectory() as aside:
        return landing_page(folder, lambda run: pack.unpack(folder, run, aside), folder.parents[1] / "README.md")
