"""A run as one of several processes that a launcher has started: their number, and what each of them gets."""

from types import SimpleNamespace

import pytest
from cells import SMALL_RUN
from transformers import TrainerCallback

from multirole_study.experiment import run
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.settings import UserError


def test_another_number_of_processes_than_the_launchers_is_refused(tmp_path, monkeypatch):
    """Otherwise eight GPUs are asked for and one is used, where a scheduler sets WORLD_SIZE in every container."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="`n_processes` is 2, and a launcher has started 1, by the variable WORLD_SIZE"):
        run_cell(SMALL_RUN, Launch(results_dir=str(tmp_path), n_processes=2))
    assert not list(tmp_path.iterdir())
    launch = Launch(n_processes=2)
    assert launch.by_launcher(2) == launch == Launch().by_launcher(2)


class Given(Exception):
    pass


def test_every_process_gets_the_callbacks_of_a_run(tmp_path, monkeypatch):
    """They may take part in collectives, or change the gradient."""
    callback, passed = TrainerCallback(), []

    def make_trainer(cell, folder, launch, callbacks, *_, **__):
        passed.extend(callbacks)
        raise Given

    other = SimpleNamespace(is_main_process=False, num_processes=2, wait_for_everyone=lambda: None)
    monkeypatch.setattr(run, "processes", lambda: other)
    monkeypatch.setattr(run, "gather_objects", lambda item: [None, item])
    monkeypatch.setattr(run, "make_trainer", make_trainer)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Given):
        run_cell(SMALL_RUN, tmp_path, [callback])
    assert callback in passed
