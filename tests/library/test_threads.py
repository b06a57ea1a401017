"""torch's threads on a CPU follow from the model's size and the cores that are free, unless the user has set them."""

import pytest
import torch

from multirole.update import threads
from multirole.update.threads import are_given, fitting_threads, use_fitting_threads


@pytest.mark.parametrize(
    ("n_parameters", "n_cores", "load", "n_processes", "expected"),
    [
        (450_000, 16, 0.0, 1, 1),  # too small for several, on an idle machine too
        (135_000_000, 2, 0.3, 1, 2),
        (135_000_000, 2, 1.0, 1, 2),  # the load is this process
        (135_000_000, 2, 2.0, 1, 1),
        (135_000_000, 2, 10.0, 1, 1),  # at least one
        (135_000_000, 16, 5.0, 1, 12),
        (135_000_000, 16, 4.0, 4, 4),  # four processes share what is free
    ],
)
def test_the_rule(n_parameters, n_cores, load, n_processes, expected):
    assert fitting_threads(n_parameters, n_cores, load, n_processes) == expected


def test_a_users_choice_is_seen():
    defaults = {16, 8}  # each of 8 cores counts twice
    assert not are_given(16, defaults, {}) and not are_given(8, defaults, {})
    assert are_given(16, defaults, {"OMP_NUM_THREADS": "16"}) and are_given(8, defaults, {"MKL_NUM_THREADS": "8"})
    assert are_given(3, defaults, {})  # by torch.set_num_threads
    assert not are_given(16, defaults, {"OMP_NUM_THREADS": ""})


@pytest.fixture
def machine(monkeypatch):
    """Eight idle cores; torch's threads are a number that the test reads."""
    state = {"threads": 8}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: state.update(threads=n))
    monkeypatch.setattr(threads, "available_cores", lambda: set(range(8)))
    monkeypatch.setattr(threads, "n_physical", len)
    monkeypatch.setattr(threads, "load_average", lambda: 0.5)
    monkeypatch.setattr(threads, "_chosen", [])
    for name in (*threads.VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return state


def test_a_second_and_larger_model_gets_threads_again(machine, caplog):
    caplog.set_level("INFO", logger=threads.__name__)
    use_fitting_threads(450_000)
    assert machine["threads"] == 1
    use_fitting_threads(450_000)
    assert len(caplog.messages) == 1 and "torch uses 1 of 8 threads: the model has 0.45M" in caplog.text
    use_fitting_threads(135_000_000)
    assert machine["threads"] == 8


@pytest.mark.parametrize("choice", ["environment", "call", "call after a choice"])
def test_a_users_choice_is_left_alone(machine, monkeypatch, choice):
    if choice == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
    if choice == "call after a choice":
        use_fitting_threads(450_000)
    if choice != "environment":
        machine["threads"] = 3
    before = machine["threads"]
    use_fitting_threads(450_000)
    assert machine["threads"] == before


def test_a_trainer_on_a_cpu_chooses(make_library_trainer, machine):
    from multirole import Single

    make_library_trainer(Single())
    assert machine["threads"] == 1
