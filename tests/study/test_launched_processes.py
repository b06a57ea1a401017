"""A run as one of several processes that a launcher has started: their number, and what each of them gets."""

import subprocess
from types import SimpleNamespace

import pytest
from cells import SMALL_RUN
from transformers import TrainerCallback

from multirole_study.experiment import run
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.settings import UserError
from multirole_study.inspector.live_page import LivePage


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


TWO = Launch(n_processes=2)


@pytest.fixture
def spawns(monkeypatch):
    """Let a run of two processes start without checks; returns the list of what it has sent to them."""
    sent = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(run, "preflight", lambda *_: None)
    monkeypatch.setattr(run, "spawn", lambda *arguments: sent.append(arguments))
    return sent


def test_callbacks_that_cannot_be_sent_to_other_processes_are_refused(spawns, tmp_path):
    launch = TWO.replace(results_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"`callbacks` are objects of this process .* got \['TrainerCallback'\]"):
        run_cell(SMALL_RUN, launch, [LivePage(), TrainerCallback()])
    assert not spawns
    run_cell(SMALL_RUN, launch, [LivePage()])  # which `multirole train` adds
    assert len(spawns) == 1


def test_a_failed_process_is_a_sentence(spawns, monkeypatch, tmp_path):
    def spawn(*_):
        raise subprocess.CalledProcessError(1, ["python"])

    monkeypatch.setattr(run, "spawn", spawn)
    with pytest.raises(UserError, match="A process of the run has failed, and its message is above. The same command"):
        run_cell(SMALL_RUN, TWO.replace(results_dir=str(tmp_path)))
