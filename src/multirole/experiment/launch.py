"""How and where a cell is run: devices, processes, folders. Nothing here changes a number of the run but its rounding."""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SHARDINGS = ("none", "fsdp2")


@dataclass(frozen=True)
class Launch:
    """Launch options, notebook parameters beside the fields of a cell; bad values raise ValueError.

    Args:
        results_dir: the run's folder is made below it.
        n_processes: processes on this machine, one per GPU. More than one are started by this one, unless a launcher
            (torchrun, `accelerate launch`, srun) has started this one already.
        sharding: "none" keeps the frozen base whole on every GPU; "fsdp2" shards it over them (torch `fully_shard`).
        vllm_memory: fraction of each GPU's memory that the rollout engine may take.
        vllm_tensor_parallel: GPUs that share one rollout engine; the processes' number must be a multiple of it.
    """

    results_dir: str = "runs"
    n_processes: int = 1
    sharding: str = "none"
    vllm_memory: float = 0.6
    vllm_tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("n_processes", "vllm_tensor_parallel"):
            value = vars(self)[name]
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is no number of GPUs. Write {name}=2, say.")
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding={self.sharding!r} is not known. Write one of {list(SHARDINGS)}.")
        if type(self.vllm_memory) not in (int, float) or not 0 < self.vllm_memory < 1:
            raise ValueError(
                f"vllm_memory={self.vllm_memory!r} is no fraction of a GPU's memory. Write vllm_memory=0.6, say."
            )
        if not isinstance(self.results_dir, str) or not self.results_dir:
            raise ValueError(f"results_dir={self.results_dir!r} names no folder. Write results_dir='runs', say.")

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model over the processes."""
        return self.sharding == "fsdp2"

    def check_processes(self, n_processes: int, n_problems: int) -> None:
        """Refuse a number of processes that the batch or the engines cannot be divided by (ValueError)."""
        if n_problems % n_processes:
            raise ValueError(
                f"{n_processes} processes cannot share the {n_problems} problems of an iteration evenly, and the "
                "episodes of a problem stay together. Write an n_problems that is a multiple of the processes."
            )
        if n_processes % self.vllm_tensor_parallel:
            raise ValueError(
                f"vllm_tensor_parallel={self.vllm_tensor_parallel} does not divide {n_processes} processes. "
                "Write a divisor, or start more processes."
            )


ONE_PROCESS = Launch()
LAUNCH_OPTIONS = tuple(field.name for field in fields(Launch))


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def spawn(parameters: dict[str, object], launch: Launch, run: Callable[..., object] = subprocess.run) -> None:
    """Start `launch.n_processes` processes of `multirole train` on this machine and wait for them.

    `parameters` are a cell's fields. Raises CalledProcessError when one fails; its traceback is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parameters.json"
        path.write_text(json.dumps(parameters | asdict(launch)))
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={launch.n_processes}"]
        run([sys.executable, *command, "-m", "multirole", "train", "--parameters", str(path)],
            check=True, stdin=subprocess.DEVNULL)  # fmt: skip


def value(text: str) -> object:
    """`-p NAME VALUE`: a Python constant where it reads as one (1e-3, None, True), else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_parameters(arguments: argparse.Namespace) -> dict[str, object]:
    """The parameters of the command line: a JSON file's, then the `-p` pairs."""
    given = json.loads(Path(arguments.parameters).read_text()) if arguments.parameters else {}
    return given | {name: value(text) for name, text in arguments.pair}


def add_parameters(parser: argparse.ArgumentParser) -> None:
    """The two ways to say which cell."""
    parser.add_argument("-p", dest="pair", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a field of Cell or a launch option, as for papermill")  # fmt: skip
    parser.add_argument("--parameters", metavar="FILE", help="a JSON file of parameters")
