"""Launch options of a cell: devices, processes, folders. They change results only by rounding."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from multirole.option_rules import broken_rules
from multirole_study.experiment.presets import MICRO_BATCH_TOKENS, is_tiny, preset_key
from multirole_study.experiment.settings import Settings, option


class Launch(Settings):
    """Launch options, which the notebooks list after the settings of a cell. Raises ValueError for invalid values.

    With `n_processes` above 1 this process starts the others, unless a launcher (torchrun, `accelerate launch`) did.
    """

    results_dir: str = option("parent of the run's folder", "runs", min_length=1)
    report_to: str = option(
        "trackers that receive every metric, such as trackio,wandb, as in TRL", "none", min_length=1
    )
    n_processes: int = option("number of processes, one per GPU", 1, ge=1)
    sharding: Literal["none", "fsdp2"] = option("sharding of the base model over GPUs", "none")
    vllm_gpu_memory_utilization: float = option("share of a GPU's memory for vLLM", 0.6, gt=0, lt=1)
    vllm_max_num_seqs: int | None = option("concurrent requests in vLLM; planned by default", None, ge=1, le=10**5)
    vllm_max_num_batched_tokens: int | None = option("tokens per vLLM step; planned by default", None, ge=1, le=10**7)
    vllm_server_base_url: str | None = option("addresses of vLLM servers, for engine vllm_server", None, min_length=1)
    vllm_server_model: str | None = option("name of the base model there; its folder by default", None, min_length=1)
    vllm_server_adapter_dir: str | None = option("folder for adapters that the servers see too", None, min_length=1)
    vllm_server_copy_command: str | None = option("command that copies {folder} to {host}, if they do not", None)
    vllm_server_timeout: float = option("seconds to wait for a server that does not answer", 240.0, gt=0)
    vllm_server_request_timeout: float = option("seconds a reply of a server may take", 1800.0, gt=0)
    vllm_server_evict: bool = option("unload adapters that other runs have left on the servers", False)
    micro_batch_tokens: int | None = option("padded tokens per forward pass; planned by default", None, ge=1, le=10**9)
    gradient_checkpointing: bool | None = option("recompute activations in backward; planned by default", None)

    def __init__(self, **options: Any) -> None:
        folder = options.get("results_dir")
        expanded = (
            {"results_dir": os.path.expanduser(folder)} if isinstance(folder, str) else {}
        )  # a shell does not expand paths in YAML
        super().__init__(**options | expanded)

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the model over the processes."""
        return self.sharding == "fsdp2"

    def recomputes(self, scale: str) -> bool:
        """Return whether gradient checkpointing is on; by default it is on at the paper's scales."""
        return not is_tiny(scale) if self.gradient_checkpointing is None else self.gradient_checkpointing

    def pass_tokens(self, scale: str) -> int:
        """Return the padded tokens per forward pass; by default the scale's."""
        return MICRO_BATCH_TOKENS[preset_key(scale)] if self.micro_batch_tokens is None else self.micro_batch_tokens

    def memory(self, scale: str) -> dict[str, Any]:
        """Return the values of `MEMORY_SETTINGS` that a run of this scale has, for its record."""
        settings = {name: value for name, value in self if name in MEMORY_SETTINGS}
        return settings | {
            "micro_batch_tokens": self.pass_tokens(scale), "gradient_checkpointing": self.recomputes(scale)
        }  # fmt: skip

    def check(self, cell: Settings) -> None:
        """Raise ValueError unless these options fit a cell's settings and each other: by the library's rules, and by those of `n_problems` and `sharding`."""
        changed = {name: (value, vars(ONE_PROCESS)[name]) for name, value in self if value != vars(ONE_PROCESS)[name]}
        planned = {name for name, value in self if name in MEMORY_SETTINGS and value is None}  # not known yet
        options = {name: value for name, value in self if name not in planned}
        settings = dict(cell) | options | {"use_vllm": False, "vllm_mode": "colocate"}
        facts = {"changed": changed, "world_size": self.n_processes, "is_sharded": self.is_sharded}
        problems = list(broken_rules(settings | facts))
        if settings["n_problems"] % self.n_processes:
            problems.append(
                f"`n_problems` must be a multiple of the {self.n_processes} processes, which share the problems of an iteration, "
                f"got {settings['n_problems']}."
            )
        if of_vllm := [
            name for name in changed if name in MEMORY_OF_VLLM and settings["engine"] in ("transformers", "generate")
        ]:
            problems.append(
                f"`{of_vllm[0]}={changed[of_vllm[0]][0]!r}` is for rollouts with vLLM, but `engine` is {settings['engine']!r}. Leave it out."
            )
        if self.is_sharded and self.n_processes == 1:
            problems.append(
                "`sharding='fsdp2'` shards the base model over several processes, and `n_processes` is 1. Write a larger n_processes, "
                "or sharding='none'."
            )
        if problems:
            raise ValueError("\n".join(problems))

    def by_launcher(self, n_processes: int) -> "Launch":
        """Return the options of a run as `n_processes` that a launcher has started. Raises ValueError if another number is wanted."""
        if self.n_processes not in (1, n_processes):
            raise ValueError(
                f"`n_processes` is {self.n_processes}, and a launcher has started {n_processes}, by the variable WORLD_SIZE. Leave `n_processes` "
                "out, or unset WORLD_SIZE if no launcher was meant: some schedulers set it."
            )
        return self.replace(n_processes=n_processes)

    def vllm_sizes(self) -> dict[str, Any]:
        """Return the vLLM batch sizes that are set, under the names of `MultiRoleGRPOConfig`."""
        names = ("vllm_max_num_seqs", "vllm_max_num_batched_tokens")
        return {name: value for name, value in self if name in names and value is not None}

    def vllm_servers(self) -> dict[str, Any]:
        """Return how vLLM's servers are reached, under the names of `MultiRoleGRPOConfig`."""
        return {name: value for name, value in self if name.startswith("vllm_server_")}


ONE_PROCESS = Launch()
MEMORY_OF_VLLM = ("vllm_gpu_memory_utilization", "vllm_max_num_seqs", "vllm_max_num_batched_tokens")
MEMORY_SETTINGS = ("micro_batch_tokens", "gradient_checkpointing", *MEMORY_OF_VLLM)
"""Options that decide what a run keeps in memory. They may change when it is resumed."""


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def spawn(
    parameters: dict[str, object], launch: Launch, run: Callable[[list[str]], object] = subprocess.check_call
) -> None:
    """Start `launch.n_processes` processes of `multirole train` on this machine and wait for them.

    `parameters` are a cell's fields; `run` executes the command line.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parameters.json"
        path.write_text(json.dumps(parameters | dict(launch)))
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={launch.n_processes}"]
        saving = "--shutdown-timeout=900"  # for the iteration and its checkpoint, after a signal; 30 s by default
        run([sys.executable, "-m", *launcher, saving, "-m", "multirole_study", "train", "--parameters", str(path)])
