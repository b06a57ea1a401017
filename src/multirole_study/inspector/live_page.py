"""Write the inspector's page of a run while it trains, so that a browser shows the run so far."""

import logging
import shutil
import tempfile
import time
from pathlib import Path

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.types import Episode
from multirole_study.experiment.announce import say
from multirole_study.experiment.record import Recorder
from multirole_study.inspector import PAGE_FILE, inspect_run

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 30
"""Seconds after which a browser loads the page again. The page of a finished run is loaded once."""
MAX_SHARE = 0.01
"""Share of the time of training that pages may take; an evaluation writes none while those so far have taken more."""


class LivePage(MultiRoleCallback):
    """Rewrites `inspector.html` in the run's folder after evaluations. Pass it after the callbacks that record.

    The first evaluation always writes the page. Later ones write it if all pages so far took less than `MAX_SHARE` of the time since. The
    record in the folder is that of the last checkpoint, so the tables so far are written to a temporary folder. A page that cannot be
    written is logged, and training goes on.
    """

    added_by_train = True
    """`multirole train` adds one in every process (`run_cell`)."""

    def __init__(self) -> None:
        self.started, self.spent = time.monotonic(), 0.0  # s
        self.n_pages = 0

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:
        recorder = trainer.recorder
        before = time.monotonic()
        if recorder is None or self.n_pages and self.spent > MAX_SHARE * (before - self.started):
            return
        try:
            page = write_page(recorder)
        except (ValueError, OSError, KeyError) as error:  # of the data, or of the disk
            logger.warning("The page of the run at iteration %d is not written: %r.", trainer.state.global_step, error)
            return
        self.n_pages += 1
        self.spent += time.monotonic() - before
        if self.n_pages == 1:
            say(f"  inspector   {page}, which shows the run while it trains")


def write_page(recorder: Recorder) -> Path:
    """Write the page of the record so far; return its path."""
    folder = recorder.folder
    with tempfile.TemporaryDirectory() as place:
        view = Path(place) / folder.name
        view.mkdir()
        recorder.write(view)
        for name in ("config.json", "provenance.json"):
            shutil.copyfile(folder / name, view / name)
        (view / "turns").symlink_to(folder.resolve() / "turns")
        return inspect_run(view, folder / PAGE_FILE, refresh=REFRESH_SECONDS)
