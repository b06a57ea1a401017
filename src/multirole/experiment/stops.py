"""SIGTERM and SIGUSR1 end a training run after the iteration at hand, with a checkpoint and exit code 75; again, at once.

Before the first iteration and after the last there is nothing to save, and the run ends where it stands. In a notebook the kernel
trains and papermill, which is what people and schedulers signal, dies of SIGTERM at once; the kernel would follow within a
second. Here it takes papermill's end for a SIGTERM of its own.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from unittest.mock import ANY

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from multirole.core.distributed import gather_objects

logger = logging.getLogger(__name__)

RESUMABLE = 75  # EX_TEMPFAIL: the same command goes on from the checkpoint
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO = 2.0  # seconds: a scheduler and a launcher may both pass on one signal


class Stopped(SystemExit):
    """The run was told to stop; the process exits with `RESUMABLE`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = RESUMABLE

    def __str__(self) -> str:
        return self.args[0]


class Stop(TrainerCallback):
    """Whether a run was told to stop. As a callback of the trainer, on every process, it ends the training in order."""

    def __init__(self) -> None:
        self.is_asked, self.is_training, self.since = False, False, 0.0
        self.launcher: int | None = None

    def ask(self, signum: int, _: FrameType | None) -> None:
        """The handler of `SIGNALS`."""
        if self.is_asked and time.monotonic() - self.since > ECHO:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if self.is_asked:
            return
        self.is_asked, self.since = True, time.monotonic()
        name = signal.Signals(signum).name
        if self.launcher is not None:
            logger.warning("%s: passed on to the processes of this run", name)
            for worker in psutil.Process(self.launcher).children():
                worker.send_signal(signal.SIGUSR1)
        elif self.is_training:
            logger.warning(
                "%s: the run stops after this iteration, with a checkpoint. Once more, and it ends at once", name
            )
        else:
            self.end()

    def end(self) -> None:
        """Raise `Stopped` if the run was told to stop."""
        if self.is_asked:
            message = (
                "The run was told to stop and is not finished. The same command continues from its newest checkpoint."
            )
            logger.warning(message)
            raise Stopped(message)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """From now on there is something to save."""
        self.is_training = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Processes are told at different times, and all must stop after the same iteration."""
        if any(gather_objects(self.is_asked)):
            self.is_asked = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Everything is saved."""
        self.is_training = False

    def run(self, command: list[str], check: bool, stdin: int) -> None:
        """`subprocess.run` of a launcher, whose processes are told as well; `Stopped` if they were."""
        with _ignored(signal.SIGUSR1):  # by torchrun, which a scheduler may tell as well, and which would die of it
            process = subprocess.Popen(command, stdin=stdin)
        with process:
            self.launcher = process.pid
            code = process.wait()
        self.end()
        if check and code:
            raise subprocess.CalledProcessError(code, command)


@contextmanager
def _ignored(signum: signal.Signals) -> Iterator[None]:
    """For the processes that are started meanwhile, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signum, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signum, handler)


@contextmanager
def heeding() -> Iterator[Stop]:
    """Heed the signals for as long as a run lasts. In a thread other than the main one Python hears none."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {signum: signal.signal(signum, stop.ask) for signum in SIGNALS}
    try:
        with _outliving_papermill(stop):
            yield stop
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


@contextmanager
def _outliving_papermill(stop: Stop) -> Iterator[None]:
    """In a kernel, let the end of its parent be a SIGTERM, and not the `os._exit` of ipykernel's parent poller."""
    poller = _poller()
    if poller is None:
        yield
        return
    parent, watched, is_over = os.getppid(), poller.parent_pid, threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            if os.getppid() != parent:
                if not stop.is_asked:
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    poller.parent_pid = ANY  # equal to whatever process the parent is
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        poller.parent_pid = watched  # now it ends a kernel whose papermill is gone


def _poller() -> threading.Thread | None:
    """The thread by which this kernel, if it is one, watches its parent."""
    if "ipykernel.kernelapp" not in sys.modules:
        return None
    from ipykernel.kernelapp import IPKernelApp

    return IPKernelApp.instance().poller if IPKernelApp.initialized() else None
