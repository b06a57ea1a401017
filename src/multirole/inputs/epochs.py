"""Count epochs of the training rows: HF's loop sees the whole run as one epoch."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from multirole.inputs.streams import StreamedRows


class EpochCount(TrainerCallback):
    """Sets `state.epoch` and `state.num_train_epochs`. It must be the first callback, so that the others read them.

    A stream has no length; for it HF's count stays, the finished fraction of the run.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer  # whose rows may be replaced between two calls of `train`

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the number of epochs, and those that a resumed run has finished."""
        if not isinstance(self.trainer.train_rows, StreamedRows):
            state.num_train_epochs = -(-state.max_steps * self.trainer.args.n_problems // len(self.trainer.train_rows))
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the finished epochs."""
        if not isinstance(self.trainer.train_rows, StreamedRows):
            state.epoch = state.global_step * self.trainer.args.n_problems / len(self.trainer.train_rows)
