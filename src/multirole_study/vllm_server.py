"""`multirole vllm_server`: a vLLM server on this machine for the rollouts of a cell."""

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from multirole.core.policy import adapter_names
from multirole.engines.vllm_serve import serve_command, serve_environment
from multirole.engines.vllm_server_client import API_KEY
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import dtype_of
from multirole_study.experiment.launch import Launch

MEMORY_SHARE = 0.9
"""Share of a GPU's memory for a server that has the GPU to itself."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def command_of(
    cell: Cell, launch: Launch, host: str, port: int, more: Sequence[str] = (), memory_share: float = MEMORY_SHARE
) -> list[str]:
    """Return the command line of a server for a cell, with vLLM's batch sizes where the launch has them.

    `memory_share` is the part of the GPU's memory that the server takes.

    Raises ValueError for an address that other machines can reach if no key is set: whoever can call the server can make it load files.
    """
    if host not in LOOPBACK and not os.environ.get(API_KEY):
        raise ValueError(
            f"--host {host} can be reached from other machines, and the server would have no key. Set the environment variable {API_KEY} "
            "to a random text, here and where you train, for example to the output of `openssl rand -hex 16`."
        )
    return serve_command(
        str(locate(cell)), len(adapter_names(cell.policy)), cell.lora_rank, cell.max_prompt_tokens + cell.max_response_tokens,
        getattr(torch, dtype_of(cell)), host, port, more, gpu_memory_utilization=memory_share, **launch.vllm_sizes(),
    )  # fmt: skip


def as_text(command: Sequence[str]) -> str:
    """Format the command for a shell, with its environment variables and without the key."""
    return " ".join([*(f"{name}={value}" for name, value in serve_environment().items()), shlex.join(command)])


def start(command: Sequence[str]) -> None:
    """Replace this process by the server, which then receives its signals and sets its exit code. Raises ValueError without vLLM."""
    if find_spec("vllm") is None:
        raise ValueError(
            "The server is vLLM's, which is not installed: run `pip install '.[cuda]'`, or '.[cpu]' without a GPU, in a clone of the repository."
        )
    os.execvpe(command[0], list(command), os.environ | serve_environment())
