"""Helpers of the benchmarks: measurements, also in a separate process, the spread of ratios, the tables of pages in docs/."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "src" / "multirole_study" / "models" / "tiny-r"
"""The base of the scale tiny-r."""


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return the seconds of one call by `clock`, by default those of the CPU."""
    started = clock()
    work()
    return clock() - started


def run_requests(engine: Any, requests: Sequence[Any]) -> list[Any]:
    """Play requests that are all added at once, and return their completions in order."""
    for key, request in enumerate(requests):
        engine.add(key, request)
    done: dict[int, Any] = {}
    while len(done) < len(requests):
        done.update(engine.step())
    return [done[key] for key in range(len(requests))]


def randomize_adapters(model: Any, sd: float, seed: int) -> None:
    """Set the B of every adapter to random values with this standard deviation, so that the adapter has an effect."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(sd * torch.randn(parameter.shape, generator=generator))


def alone(script: str, *arguments: str, checkout: Path = ROOT, python: str = sys.executable) -> dict:
    """Run a script with one thread on a checkout's sources, and return the JSON that it prints last; RuntimeError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, "-W", "ignore", script, *arguments]
    completed = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed in {checkout}:\n{completed.stderr[-3000:]}")
    return json.loads(completed.stdout.splitlines()[-1])


def base_of(scale: str) -> Path:
    """Return the folder of a scale's base, which is on this machine."""
    from multirole_study.experiment.base_models import locate
    from multirole_study.experiment.cell import Cell

    return locate(Cell("single", "sp", "math", scale))


def processor() -> str:
    """Return the name of this machine's processor, and its instructions that decide about speed: tables compare several."""
    import torch

    from multirole_study.experiment.record import cpu_model

    has = torch.cpu.get_capabilities()
    half = "AMX" if has.get("amx_bf16") else "AVX512-BF16" if has.get("avx512_bf16") else "no bfloat16"
    return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}, {half})"


def training_rows(trainer: Any) -> Any:
    """Return a trainer's indexed training rows, under the name that they have in its commit."""
    names = ("train_rows", "rows", "train_dataset")  # the last: older commits add the index to the dataset itself
    return next(getattr(trainer, name) for name in names if hasattr(trainer, name))


def rest(trainer: Any) -> None:
    """Free the memory of a trainer's engine, by the method that its commit has."""
    if hasattr(trainer, "player"):
        trainer.player.rest()
    else:
        trainer._rest_engine()


def spread(values: list[float]) -> dict[str, float]:
    """Return minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def markdown(titles: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; `titles` are separated as they are in it."""
    # not above: an older checkout, in which measurements run, has no such function
    from multirole_study.paper.output import markdown as table_of

    return table_of(titles.split(" | "), rows)


def shown(ratio: dict[str, float]) -> str:
    """Format a spread as a table's cell: median [minimum, maximum]."""
    return f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"


def write(name: str, out: Path | None, result: dict, table: str, page: str = "speed", of: str = "") -> None:
    """Write a benchmark's result to `out`, if given, and its table between its marks in docs/<page>.md.

    A page with several tables of one benchmark names each by `of`, the file of its result; a file that it does not name has no table.
    """
    if out is None:
        return
    out.write_text(json.dumps(result, indent=1) + "\n")
    path = ROOT / "docs" / f"{page}.md"
    mark = f"<!-- table: benchmarks/{name}.py writes it{f' from {of}' if of else ''} -->\n"
    before, mark, rest = path.read_text().partition(mark)
    if of and not mark:
        return
    path.write_text(f"{before}{mark}{table}\n{rest[rest.index('<!-- end -->') :]}")
