"""Signals end a training run after the iteration at hand, with a checkpoint and exit code 75; a second one ends it at once.

Before the first iteration and after the last there is nothing to save, and the run ends where it is. In a notebook the kernel
trains: a signal to papermill ends both at once, and the run continues from its newest checkpoint (docker/README.md).
"""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil
from transformers import TrainerCallback, TrainerControl

from multirole.core.distributed import gather_objects

logger = logging.getLogger(__name__)

RESUMABLE = 75  # EX_TEMPFAIL: the same command continues from the checkpoint
TERMINAL = (signal.SIGINT, signal.SIGHUP)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, *TERMINAL)
ECHO = 2.0  # seconds: a scheduler and a launcher may both pass on one signal
STOPPED = "The run was told to stop and is not finished. The same command continues from its newest checkpoint."


class Stopped(SystemExit):
    """The run was told to stop; the process exits with `RESUMABLE`."""

    def __str__(self) -> str:
        return STOPPED


class Stop(TrainerCallback):
    """Whether a run was told to stop. As a callback of the trainer, on every process, it ends the training in order."""

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
            for worker in psutil.Process(self.launcher.pid).children():
                worker.send_signal(signal.SIGUSR1)
        elif self.is_training:
            logger.warning("%s: the run stops after this iteration, saved. A second signal ends it at once.", name)
        else:
            self.end()

    def end(self) -> None:
        """Raise `Stopped` if the run was told to stop."""
        if self.is_asked:
            logger.warning(STOPPED)
            raise Stopped(RESUMABLE)

    def on_step_begin(self, *_: object, **__: object) -> None:
        """From now on there is something to save."""
        self.is_training = True

    def on_step_end(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        """Processes are told at different times, and all must stop after the same iteration."""
        if any(gather_objects(self.is_asked)):
            self.is_asked = control.should_save = control.should_training_stop = True

    def on_train_end(self, *_: object, **__: object) -> None:
        """Everything is saved."""
        self.is_training = False

    def run(self, command: list[str]) -> None:
        """Run a launcher whose processes are told as well; `Stopped` if they were, CalledProcessError if one failed."""
        guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []  # a killed notebook tells nobody
        # torchrun would die of a signal that a scheduler or a terminal sends to the whole group, and end its processes
        with _handled(dict.fromkeys((signal.SIGUSR1, *TERMINAL), signal.SIG_IGN)):
            self.launcher = subprocess.Popen([*guard, *command], stdin=subprocess.DEVNULL)
        with self.launcher:
            code = self.launcher.wait()
        self.end()
        if code:
            raise subprocess.CalledProcessError(code, command)


@contextmanager
def _handled(handlers: dict) -> Iterator[None]:
    """Handle signals this way for a while, but not those that nohup or a shell's `&` ignores. Threads handle none."""
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
    """Heed the signals for as long as a run lasts."""
    stop = Stop()
    with _handled(dict.fromkeys(SIGNALS, stop.ask)):
        yield stop
