"""Print and save the completions of an evaluation with TRL's `log_completions`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multirole.rollout.replies import transcript
from multirole.types import Episode


def evaluation_logs(
    prompts: list[Any], episodes: list[Episode], rewards: dict[str, list[float]], advantages: list[float], extra: dict[str, list]
) -> dict[str, Any]:  # fmt: skip
    """Return an evaluation's episodes in the form of TRL's `_logs`; `rewards` are by reward function, `extra` are columns that they have logged."""
    completions = [transcript(episode) for episode in episodes]
    return {
        "images": [],
        "prompt": prompts,
        "completion": completions,
        "rewards": rewards,
        "advantages": advantages,
        "extra": extra,
    }


@contextmanager
def save_separately(folder: Path, step: int, prefix: str) -> Iterator[None]:
    """Context manager of the first process: save TRL's table under the evaluation's name, without overwriting the training table of the step."""
    table = folder / f"completions_{step:05d}.parquet"
    trained = table.read_bytes() if table.exists() else None
    yield
    if table.exists():
        os.replace(table, folder / f"{prefix}_completions_{step:05d}.parquet")
        if trained is not None:
            table.write_bytes(trained)
