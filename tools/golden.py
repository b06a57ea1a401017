"""Compare what two commits train, bit for bit: weights, log-probs, metrics.

    python tools/golden.py OLD NEW [--only voting-ip packed] [--keep FOLDER]

Both commits are checked out into worktrees and run by this Python on this machine, because another processor rounds differently; so
there are no committed checksums. Each case is a small cell, trained by the commit's own `multirole train`. Compared are every file of
adapters, byte by byte, and every column of every table except the times. A column that only one commit has is listed, and is no
difference. The exit code is 1 if a value differs. It takes about five minutes per commit on two quiet cores.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

SMALL = "iterations=3 n_problems=2 n_episodes=4 n_validation=8 eval_every=3 save_every=1 warmup_iterations=0"
CASES = {
    **{
        f"{workflow}-{policy}": f"workflow={workflow} policy={policy}"
        for workflow in ("eval_opt", "voting", "orch_workers")
        for policy in ("ip", "sp")
    },
    "single": "workflow=single policy=sp task=code",
    "packed": "workflow=voting policy=ip model={packed} iterations=2 n_episodes=2 n_validation=4 eval_every=2",
    "endpoint": "workflow={tree}/examples/frameworks/openai_voting.py:voting policy=solver=a,judge=b",
    "staleness": "workflow=voting policy=sp max_staleness=1",
    "vllm": "workflow=voting policy=ip engine=vllm",
    "processes": "workflow=voting policy=ip n_processes=2",
    "credit": "workflow=voting policy=sp credit=leave_one_out",
    "coalitions": "workflow=voting policy=ip credit=shapley",
    "grades": "workflow=eval_opt policy=sp credit=critic process_reward=0.5",
    "resumed": "workflow=voting policy=ip",
}
"""Name -> parameters in addition to `SMALL`. The case "resumed" is killed after its first checkpoint and started again."""
NOT_COMPARED = ("seconds", "time", "memory", "gib")
"""Parts of names of columns that hold measurements of the machine."""


def packed_model(folder: Path) -> Path:
    """Write a random Qwen3 of about 11M parameters with the embedded tokenizer: large enough that shared prompts are packed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from multirole_study.experiment.base_models import locate
    from multirole_study.experiment.cell import Cell

    source = locate(Cell("single", "sp"))
    config = AutoConfig.from_pretrained(source)
    config.update({"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
                   "num_key_value_heads": 2, "head_dim": 64})  # fmt: skip
    if config.layer_types is not None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def train(tree: Path, name: str, results: Path, packed: Path) -> None:
    """Train one case by the commit in `tree`; RuntimeError with the end of its output if it fails."""
    settings = f"{SMALL} {CASES[name].format(tree=tree, packed=packed)}"
    parameters = dict(pair.split("=", 1) for pair in settings.split()) | {"results_dir": str(results / name)}
    command = [sys.executable, "-m", "multirole_study", "train"]
    command += [word for pair in parameters.items() for word in ("-p", *pair)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    if name == "resumed":
        kill_after_a_checkpoint(command, environment, tree, results / name)
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} in {tree}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def kill_after_a_checkpoint(command: list[str], environment: dict[str, str], tree: Path, results: Path) -> None:
    """Start the command and kill it as soon as it has saved a checkpoint."""
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not list(results.glob("*/*/checkpoints/checkpoint-*")):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)


def runs_of(results: Path) -> dict[str, Path]:
    """Return case -> folder of its run."""
    return {done.relative_to(results).parts[0]: done.parent for done in sorted(results.glob("*/*/*/DONE"))}


def differences(old: Path, new: Path) -> Iterator[str]:
    """Yield a line for each file, table or column of two runs that differs."""
    for pattern in ("adapters/**/*.safetensors", "*.parquet", "turns/*.parquet"):
        names = [{str(path.relative_to(run)) for path in run.glob(pattern)} for run in (old, new)]
        yield from (f"{name} is in one run only" for name in sorted(names[0] ^ names[1]))
        for name in sorted(names[0] & names[1]):
            if name.endswith(".parquet"):
                yield from (f"{name}: {text}" for text in differing_columns(old / name, new / name))
            elif (old / name).read_bytes() != (new / name).read_bytes():
                yield f"{name}: weights differ"


def differing_columns(old: Path, new: Path) -> Iterator[str]:
    """Yield a line for each column of two tables whose values differ."""
    tables = pd.read_parquet(old), pd.read_parquet(new)
    if len(tables[0]) != len(tables[1]):
        yield f"{len(tables[0])} and {len(tables[1])} rows"
        return
    shared = [name for name in tables[0] if name in tables[1] and not any(part in name for part in NOT_COMPARED)]
    for name in shared:
        values = [[as_plain(value) for value in table[name]] for table in tables]
        if n := sum(a != b for a, b in zip(*values, strict=True)):
            yield f"{name} differs in {n} of {len(values[0])} rows"


def as_plain(value: object) -> object:
    """Return a cell of a table so that equal values compare equal: lists as tuples, NaN as text."""
    if isinstance(value, np.ndarray | list):
        return tuple(map(as_plain, value))
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def only_in_one(old: Path, new: Path) -> list[str]:
    """Return the names of columns that only one of two runs has."""
    columns = [{f"{p.name}:{c}" for p in run.glob("*.parquet") for c in pd.read_parquet(p)} for run in (old, new)]
    return sorted(columns[0] ^ columns[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the runs here; finished ones are not trained again"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        packed = packed_model(root / "packed")
        finished = []
        for commit in (options.old, options.new):
            sha = subprocess.run(
                ["git", "rev-parse", "--short", commit], capture_output=True, text=True, check=True
            ).stdout.strip()
            tree, results = root / f"tree-{sha}", (options.keep or root).absolute() / f"runs-{sha}"
            if not tree.exists():
                subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), sha], check=True)
            try:
                for name in options.only:
                    if name not in runs_of(results):
                        print(f"{sha}  {name}", flush=True)
                        train(tree, name, results, packed)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)
            finished.append(runs_of(results))
        is_equal = True
        for name in options.only:
            lines = list(differences(finished[0][name], finished[1][name]))
            is_equal &= not lines
            print(f"{name:<16}{'equal' if not lines else 'DIFFERS'}")
            print("".join(f"    {line}\n" for line in lines), end="")
            if columns := only_in_one(finished[0][name], finished[1][name]):
                print(f"    only in one: {json.dumps(columns)}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
