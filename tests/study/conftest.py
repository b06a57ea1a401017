"""Fixtures of the study's tests. Each imports its heavy modules itself, because pytest-xdist's controller loads this file and runs no test."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of the embedded base tiny-r."""
    from transformers import AutoTokenizer

    from multirole_study.experiment.base_models import locate
    from multirole_study.experiment.cell import Cell

    return AutoTokenizer.from_pretrained(locate(Cell("single", "sp")))


@pytest.fixture(scope="session")
def grid_results(shared) -> Path:
    """The made-up results of a finished grid; read-only."""
    from paper_results import make_results

    return shared("grid", make_results)


@pytest.fixture(scope="session")
def finished(shared) -> Path:
    """The folder of `cells.SMALL_RUN`, trained to DONE; read-only."""
    from cells import SMALL_RUN

    from multirole_study.experiment.run import run_cell

    return shared("finished", lambda folder: run_cell(SMALL_RUN, folder))


@pytest.fixture(scope="module")
def run_folder(finished, tmp_path_factory) -> Path:
    """A copy of `finished`, to which a module's tests may add files."""
    results_dir = tmp_path_factory.mktemp("results")
    return Path(shutil.copytree(finished, results_dir / finished.parent.name / finished.name))


@pytest.fixture
def make_trainer(make_model, tokenizer, tmp_path):
    """make_trainer(cell, engine=None) -> the cell's trainer over the random model, ready for `optimizer_step` and `update`."""
    from cells import cell_trainer

    return lambda cell, engine=None, **kwargs: cell_trainer(
        cell, make_model(cell.policy), tokenizer, tmp_path, engine, **kwargs
    )
