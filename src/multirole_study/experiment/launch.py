"""How and where a cell is run: devices, processes, folders. Nothing here changes a number of the run but its rounding."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from multirole_study.experiment.presets import is_tiny
from multirole_study.experiment.settings import Settings, option


class Launch(Settings):
    """Launch options, notebook parameters beside the settings of a cell; bad values raise ValueError.

    More than one process are started by this one, unless a launcher (torchrun, `accelerate launch`) has started this
    one already.
    """

    results_dir: str = option("the run's folder is made below it", "runs", min_length=1)
    report_to: str = option("trackers that get every metric, such as trackio,wandb, as in TRL", "none", min_length=1)
    n_processes: int = option("one per GPU", 1, ge=1)
    sharding: Literal["none", "fsdp2"] = option("of the base over GPUs", "none")
    vllm_memory: float = option("fraction of a GPU that the rollout engine may take", 0.6, gt=0, lt=1)
    vllm_max_num_seqs: int | None = option("requests at once in vLLM; by default the plan's", None, ge=1, le=10**5)
    vllm_max_num_batched_tokens: int | None = option("tokens of a vLLM step; by default planned", None, ge=1, le=10**7)
    gradient_checkpointing: bool | None = option("compute layers again in backward; by default as the plan needs", None)

    def __init__(self, **given: Any) -> None:
        folder = given.get("results_dir")
        home = {"results_dir": os.path.expanduser(folder)} if isinstance(folder, str) else {}  # no shell expands YAML
        super().__init__(**given | home)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model over the processes."""
        return self.sharding == "fsdp2"

    def recomputes(self, scale: str) -> bool:
        """Whether layers are computed again in backward instead of kept: at a paper scale, unless it is set."""
        return not is_tiny(scale) if self.gradient_checkpointing is None else self.gradient_checkpointing

    def check_processes(self, n_processes: int, n_problems: int) -> None:
        """Refuse a number of processes that the batch cannot be divided by (ValueError)."""
        if n_problems % n_processes:
            raise ValueError(
                f"`n_problems` must be a multiple of the {n_processes} processes, which share the problems of an iteration, "
                f"got {n_problems}."
            )

    def vllm_sizes(self) -> dict[str, Any]:
        """What is set of the sizes of vLLM's batches, under the names of `MultiRoleGRPOConfig`."""
        names = ("vllm_max_num_seqs", "vllm_max_num_batched_tokens")
        return {name: value for name, value in self if name in names and value is not None}


ONE_PROCESS = Launch()


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def spawn(
    parameters: dict[str, object], launch: Launch, run: Callable[[list[str]], object] = subprocess.check_call
) -> None:
    """Start `launch.n_processes` processes of `multirole train` on this machine by `run`, and wait for them.

    `parameters` are a cell's fields.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parameters.json"
        path.write_text(json.dumps(parameters | dict(launch)))
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={launch.n_processes}"]
        saving = "--shutdown-timeout=900"  # for the iteration and its checkpoint, after a signal; 30 s by default
        run([sys.executable, "-m", *launcher, saving, "-m", "multirole_study", "train", "--parameters", str(path)])
