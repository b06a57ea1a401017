"""Stop a training run on a signal: finish the iteration, save a checkpoint, exit with code 75. A second signal kills it.

Before the first iteration and after the last there is nothing to save, and the run exits immediately. In a notebook the kernel
trains: a signal to papermill ends both at once, and the next run continues from the newest checkpoint (docker/README.md).
"""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil
from transformers import TrainerCallback, TrainerControl

from multirole.update.processes import gather_objects

logger = logging.getLogger(__name__)

RESUMABLE = 75  # EX_TEMPFAIL: the same command continues from the checkpoint
TERMINAL = (signal.SIGINT, signal.SIGHUP)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, *TERMINAL)
ECHO = 2.0  # seconds: a scheduler and a launcher may both pass on one signal
STOPPED = (
    "The run was stopped by a signal and is not finished. The same command continues from its newest checkpoint, or starts again "
    "if it has none."
)


class Stopped(SystemExit):
    """A signal stopped the run; the process exits with `RESUMABLE`."""

    def __str__(self) -> str:
        return STOPPED


class Stop(TrainerCallback):
    """Records a stop signal and, as a trainer callback on every process, stops training after the iteration."""

    def __init__(self) -> None:
        self.is_asked, self.is_training, self.since = False, False, 0.0
        self.launcher: subprocess.Popen[bytes] | None = None

    def ask(self, signum: int, _: FrameType | None) -> None:
        """Handle a signal."""
        name = signal.Signals(signum).name
        if self.is_asked:
            if time.monotonic() - self.since > ECHO:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        self.is_asked, self.since = True, time.monotonic()
        if self.launcher is not None:
            logger.warning("%s: passed on to the processes of this run", name)
            with suppress(psutil.NoSuchProcess):  # the launcher has already ended
                workers = psutil.Process(self.launcher.pid).children()
                for worker in workers:
                    worker.send_signal(signal.SIGUSR1)
                if not workers:  # the launcher has not started any yet
                    self.launcher.terminate()
        elif self.is_training:
            logger.warning("%s: the run stops after this iteration, saved. A second signal ends it at once.", name)
        else:
            self.end()

    def end(self) -> None:
        """Raise `Stopped` if a signal was received."""
        if self.is_asked:
            logger.warning(STOPPED)
            raise Stopped(RESUMABLE)

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Note that from now on a signal must wait for a checkpoint."""
        self.is_training = True

    def on_step_end(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        """Stop all processes after the same iteration, even if they received the signal at different times."""
        if any(gather_objects(self.is_asked)):
            self.is_asked = control.should_save = control.should_training_stop = True

    def on_train_end(self, *_: object, **__: object) -> None:
        """Note that everything is saved and a signal may exit immediately."""
        self.is_training = False

    def run(self, command: list[str]) -> None:
        """Run a launcher and pass signals on to its processes.

        Raises `Stopped` after a signal and CalledProcessError if a process failed.
        """
        guard = (
            ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        )  # a killed notebook sends no signal
        # a signal from a scheduler or terminal to the whole process group would kill torchrun and its processes
        with _handled(dict.fromkeys((signal.SIGUSR1, *TERMINAL), signal.SIG_IGN)):
            self.launcher = subprocess.Popen([*guard, *command], stdin=subprocess.DEVNULL)
        with self.launcher:
            code = self.launcher.wait()
        self.end()
        if code:
            raise subprocess.CalledProcessError(code, command)


@contextmanager
def _handled(handlers: dict) -> Iterator[None]:
    """Install signal handlers temporarily, except for signals that nohup or a shell's `&` ignores. No-op in threads."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {signum: signal.getsignal(signum) for signum in handlers if is_main}
    previous = {signum: now for signum, now in previous.items() if signum not in TERMINAL or now is not signal.SIG_IGN}
    for signum in previous:
        signal.signal(signum, handlers[signum])
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def handle_signals() -> Iterator[Stop]:
    """Install the stop-signal handlers for the duration of a run and yield its `Stop`."""
    stop = Stop()
    with _handled(dict.fromkeys(SIGNALS, stop.ask)):
        yield stop
