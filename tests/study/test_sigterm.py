"""A run that receives a stop signal saves its iteration, exits with 75, and resumes with the same result as an unbroken run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import psutil
import pytest
from cells import SMALL_RUN
from kill_run import same
from trainers import slow_but
from transformers import TrainerCallback

from multirole_study.experiment import stop_signals
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import checkpoints, folder_of, newest_intact
from multirole_study.experiment.stop_signals import RESUMABLE, SIGNALS, handle_signals


class Tell(TrainerCallback):
    """Sends the run a signal in its second iteration."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1:
            os.kill(os.getpid(), self.signum)


def told(signum: int, results_dir: Path) -> None:
    run_cell(SMALL_RUN, results_dir, callbacks=[Tell(signum)])


@pytest.mark.parametrize("signum", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_the_current_iteration_is_saved_and_the_run_continues_exactly(signum, finished, tmp_path):
    log = tmp_path / "log"
    assert processes.run(log, told, signum, tmp_path) == RESUMABLE == 75, log.read_text()[-2000:]
    folder = folder_of(SMALL_RUN, tmp_path)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"] and not (folder / "DONE").exists()
    assert sorted(path.name for path in folder.glob("turns/*")) == [f"step_0000{i}.parquet" for i in range(3)]
    run_cell(SMALL_RUN, tmp_path)
    assert same(finished, folder) == ""


def wait(is_training: bool, ready: Path) -> None:
    stop_signals.ECHO = 0.2
    with handle_signals() as stop:
        stop.is_training = is_training
        ready.touch()
        while True:
            time.sleep(0.1)


def test_before_training_a_signal_ends_the_run_at_once_and_a_second_one_does_not_wait(tmp_path):
    for is_training, signals, code in ((False, 1, RESUMABLE), (True, 2, -signal.SIGTERM)):
        ready = tmp_path / str(is_training)
        process = processes.start(tmp_path / "log", wait, is_training, ready)
        while not ready.exists():
            time.sleep(0.05)
        for _ in range(signals):
            assert process.is_alive()
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.5)  # a repeated delivery of one signal does not count as a second signal
        process.join(30)
        assert process.exitcode == code


@pytest.mark.parametrize("signum", SIGNALS)
def test_previous_handlers_are_restored(signum):
    before = signal.getsignal(signum)
    with handle_signals() as stop:
        assert signal.getsignal(signum) == stop.ask
    assert signal.getsignal(signum) == before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, RESUMABLE), (signal.SIGKILL, -signal.SIGKILL)])
def test_several_processes_stop_after_the_same_iteration(signum, code, tmp_path):
    fields = dict(SMALL_RUN) | {"max_steps": 300, "eval_steps": 300, "save_steps": 2}
    run = "import sys\nfrom multirole_study.experiment.cell import Cell\nfrom multirole_study.experiment.launch import Launch\nfrom multirole_study.experiment.run import run_cell\n"
    run += f"run_cell(Cell(**{fields!r}), Launch(results_dir={str(tmp_path)!r}, n_processes=2))"
    process = subprocess.Popen([sys.executable, "-c", run], env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (written := list(Path(tmp_path).glob("tiny-r/*/checkpoints/checkpoint-*"))):
        assert process.poll() is None
        time.sleep(0.2)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signum)
    assert process.wait(240) == code
    assert not psutil.wait_procs(workers, 240)[1]  # the launcher may end before them
    folder = written[0].parents[1]
    assert newest_intact(folder) == checkpoints(folder)[0] and not (folder / "DONE").exists()
