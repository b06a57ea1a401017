"""Shared fixtures. Each imports its heavy modules itself, because pytest-xdist's controller loads this file and runs no test."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: the tests' numbers are a CPU's
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start, so that their sums round as here
for name in (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
):  # `make test` sets them, and a make inside a test would announce its directory
    os.environ.pop(name, None)

import gc
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

if threading.current_thread() is threading.main_thread():
    # A shell's background job ignores SIGINT, and one under nohup ignores SIGHUP. The runs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# fsync waits for a busy disk, and is not needed: what a killed process wrote is read again from the system's cache
os.fsync = lambda descriptor: None

LONGEST = (
    "committed_tables",
    "tables_agree_with_pandas",  # makes `grid_results`, for which another worker would wait
    "doctor", "notebook", "kl_anchor_and_process_reward", "plan", "figures", "grid_runner", "evaluation_repeats_validation", "exit_codes", "sandbox",
    "pairs", "inspector", "it_takes_what_trl_takes", "credit_accuracy", "what_trl_users_expect", "engine_vllm",
)  # fmt: skip
"""The slowest files. They run first, so that all workers end at about the same time: pytest-xdist hands out files in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_collection_finish() -> None:
    gc.freeze()  # exclude all imported modules from collection


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    from multirole_study.experiment.base_models import locate
    from multirole_study.experiment.cell import Cell

    return AutoTokenizer.from_pretrained(locate(Cell("single", "sp")))


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name, make) -> the path that `make(folder)` returns, called once, by the first of xdist's workers that asks for it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def get(name: str, make: Callable[[Path], Path]) -> Path:
        note = folder / f"{name}.path"
        with FileLock(f"{note}.lock"):
            if not note.exists():
                note.write_text(str(make(folder / name)))
        return Path(note.read_text())

    return get


@pytest.fixture(scope="session")
def grid_results(shared) -> Path:
    """The made-up results of a finished grid; read-only."""
    from paper_results import make_results

    return shared("grid", make_results)


@pytest.fixture(scope="session")
def finished(shared) -> Path:
    """The folder of `trainers.SMALL_RUN`, trained to DONE; read-only."""
    from trainers import SMALL_RUN

    from multirole_study.experiment.run import run_cell

    return shared("finished", lambda folder: run_cell(SMALL_RUN, folder))


@pytest.fixture(scope="module")
def run_folder(finished, tmp_path_factory) -> Path:
    """A copy of `finished`, to which a module's tests may add files."""
    results_dir = tmp_path_factory.mktemp("results")
    return Path(shutil.copytree(finished, results_dir / finished.parent.name / finished.name))


@pytest.fixture
def make_model(tokenizer):
    """make_model(policy_map) -> PEFT model with one randomly initialised, effective adapter per name; same seed, same weights."""
    from trainers import build_model

    return lambda policy, seed=0: build_model(tokenizer, policy, seed)


@pytest.fixture
def make_trainer(make_model, tokenizer, tmp_path):
    """make_trainer(cell, engine=None) -> the cell's trainer over the random model, ready for `optimizer_step` and `update`."""
    from trainers import cell_trainer

    return lambda cell, engine=None, **kwargs: cell_trainer(
        cell, make_model(cell.policy), tokenizer, tmp_path, engine, **kwargs
    )


@pytest.fixture
def make_library_trainer(tokenizer, tmp_path):
    """make_library_trainer(workflow, **config) -> a trainer without the study's callbacks, built as TRL's is."""
    from trainers import library_trainer

    return lambda workflow, *args, **config: library_trainer(workflow, tokenizer, tmp_path, *args, **config)
