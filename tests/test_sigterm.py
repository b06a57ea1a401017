"""A run that is told to stop saves the iteration at hand, exits with 75, and continues as if it had never stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kill_run import same

from multirole.experiment.cell import Cell
from multirole.experiment.checkpoints import checkpoints, newest_whole
from multirole.experiment.folders import folder_of
from multirole.experiment.run import run_cell
from multirole.experiment.stops import RESUMABLE, SIGNALS, heeding

FIELDS = {
    "workflow": "voting", "policy": "ip", "iterations": 4, "n_problems": 2, "n_episodes": 2, "n_validation": 4, "n_train": 8,
    "save_every": 4, "eval_every": 2, "max_response_tokens": 24, "learning_rate": 5e-3,
}  # fmt: skip
TOLD = """
import os, signal, sys
from transformers import TrainerCallback
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.experiment.run import run_cell

class Tell(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.{signal})

run_cell(Cell(**{fields!r}), Launch(results_dir=sys.argv[1]), callbacks=[Tell()])
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_iteration_at_hand_is_saved_and_the_run_continues_exactly(name, tmp_path):
    script = TOLD.format(signal=name, fields=FIELDS)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == RESUMABLE == 75, done.stderr[-2000:]
    cell, folder = Cell(**FIELDS), folder_of(Cell(**FIELDS), tmp_path)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"] and not (folder / "DONE").exists()
    assert sorted(path.name for path in folder.glob("turns/*")) == ["step_00000.parquet", "step_00002.parquet"]
    run_cell(cell, tmp_path)
    unbroken = run_cell(cell, tmp_path / "unbroken")
    for more in ("adapters/step_00002", "checkpoints/checkpoint-2"):  # the unbroken run has none of that iteration
        shutil.rmtree(folder / more)
    assert same(unbroken, folder) == ""


def test_before_training_it_ends_at_once_and_a_second_signal_does_not_wait(tmp_path):
    wait = "import signal, time\nfrom multirole.experiment.stops import *\nwith heeding() as stop:\n    stop.is_training = {}\n"
    wait += "    print('ready', flush=True)\n    while True:\n        time.sleep(0.1)"
    for is_training, signals, code in ((False, 1, RESUMABLE), (True, 2, -signal.SIGTERM)):
        process = subprocess.Popen([sys.executable, "-c", wait.format(is_training)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        for _ in range(signals):
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            time.sleep(2.5)  # the echo of a signal is no second one
        assert process.wait(30) == code


@pytest.mark.parametrize("signum", SIGNALS)
def test_handlers_of_others_are_put_back(signum):
    before = signal.getsignal(signum)
    with heeding() as stop:
        assert signal.getsignal(signum) == stop.ask
    assert signal.getsignal(signum) == before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heeding():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_several_processes_stop_after_the_same_iteration(tmp_path):
    fields = FIELDS | {"iterations": 300, "eval_every": 300, "save_every": 2}
    run = "import sys\nfrom multirole.experiment.cell import Cell\nfrom multirole.experiment.launch import Launch\nfrom multirole.experiment.run import run_cell\n"
    run += f"run_cell(Cell(**{fields!r}), Launch(results_dir={str(tmp_path)!r}, n_processes=2))"
    process = subprocess.Popen([sys.executable, "-c", run], env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (found := list(Path(tmp_path).glob("tiny-s/*/checkpoints/checkpoint-*"))):
        assert process.poll() is None
        time.sleep(0.2)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == RESUMABLE
    assert not [worker for worker in workers if worker.is_running()]
    folder = found[0].parents[1]
    assert newest_whole(folder) == checkpoints(folder)[0] and not (folder / "DONE").exists()
