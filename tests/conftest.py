"""Fixtures for all tests; those of library/ and study/ each have their own tokenizer. Each imports its heavy modules itself, because pytest-xdist's controller loads this file and runs no test."""

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

import email
import gc
import importlib.metadata
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

if threading.current_thread() is threading.main_thread():
    # A shell's background job ignores SIGINT, and one under nohup ignores SIGHUP. The runs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# fsync waits for a busy disk, and is not needed: what a killed process wrote is read again from the system's cache
os.fsync = lambda descriptor: None

# jsonschema, which nbformat imports, checks a few formats of text with it where it is installed. It takes seconds to build its grammar.
sys.modules["rfc3987_syntax"] = None

# accelerate parses a package's description at every backward pass, and TRL parses those of its packages for every model card
importlib.metadata.email = SimpleNamespace(message_from_string=cache(email.message_from_string))
importlib.metadata.packages_distributions = cache(importlib.metadata.packages_distributions)  # read by both at import

LONGEST = (
    "tables_agree_with_pandas",  # makes `grid_results`, for which another worker would wait
    "processes_equal_one", "library_stands_alone", "engine_vllm", "resume_equals_unbroken", "inspector", "what_trl_users_expect", "questions",
    "figures", "it_takes_what_trl_takes", "rollouts_do_not_wait", "engine_generate", "doctor", "study", "tiny_models", "sandbox", "sandbox_hostile",
    "pairs", "rollouts_do_not_wait_on_two_processes", "grid_runner", "pack", "leaderboard", "committed_tables", "openai_endpoint", "notebook",
    "evaluation_repeats_validation", "every_cell_runs", "paper_cell_runs_on_cpu", "vllm_server_command", "a_killed_server_leaves_no_process",
    "distillation", "rate_study", "tiny_pipe", "clock_study", "claims",
)  # fmt: skip
"""The slowest files. They run first, so that all workers end at about the same time: pytest-xdist hands out files in this order."""


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of the workers' processes with the whole suite, while they import the tests."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        from processes import serve_workers

        serve_workers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without collecting garbage, which would cost seconds, and exclude all imported modules from later collections."""
    gc.disable()
    result = yield
    if "torch" in sys.modules:
        # without a device, each seed is kept for one, with a text of the stack, which takes milliseconds
        import torch.mtia
        import torch.xpu

        torch.cuda.traceback = torch.xpu.traceback = torch.mtia.traceback = SimpleNamespace(format_stack=list)
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude also what a file's tests have imported: every training collects garbage, which otherwise costs seconds in a long session."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


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


@pytest.fixture
def make_model(tokenizer):
    """make_model(policy_map) -> PEFT model with one randomly initialised, effective adapter per name; same seed, same weights."""
    from trainers import build_model

    return lambda policy, seed=0: build_model(tokenizer, policy, seed)


@pytest.fixture
def make_library_trainer(tokenizer, tmp_path):
    """make_library_trainer(workflow, **config) -> a trainer of the toy model, built as TRL's is; see `trainers.library_trainer`."""
    from trainers import library_trainer

    return lambda workflow, *args, **config: library_trainer(workflow, tokenizer, tmp_path, *args, **config)
