"""What diagnostics cost: the update half of one iteration with them over the same without, alternating in one process.

    python benchmarks/bench_diagnostics.py [--repeats 3] [--out results/bench/diagnostics.json]

Voting-SP on a random-weight Qwen3 (`SHAPE`), 64 episodes of two voters and an aggregator, every completion 800 to 1,200 tokens.
`paper` trains as the paper's cells do (temperature 0.7, pi_old recomputed), `tiny` as the embedded scales do (temperature 1,
pi_old sampled). Counted are `prepare_rows`, `update` and the iteration's metrics, in CPU time of one thread, which a busy machine
disturbs less than wall-clock time. Below each ratio: what part of the time with diagnostics each of them takes. Gradient
checkpointing is off, which makes a pass without gradient relatively dearer than at the paper's scales. No GPU was measured.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from bench_gpu import random_model, trainer_of

from multirole.core.hooks import Iteration
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Answer, Episode, Reward, Turn
from multirole.diagnostics import metrics
from multirole.experiment.cell import Cell
from multirole.experiment.presets import Shape
from multirole.experiment.storage import write_text

SHAPE = Shape(layers=2, hidden=64, intermediate=192, heads=2, kv_heads=1, head_dim=32, vocab=512)
SETTINGS = {
    "paper": {"temperature": 0.7, "old_logprobs": "recomputed"},
    "tiny": {"temperature": 1.0, "old_logprobs": "sampled"},
}
SIZES = {"n_voters": 2, "n_problems": 8, "n_episodes": 8, "max_response_tokens": 1200, "micro_batch_tokens": 4096}
COSTS = {  # name -> (owner, attribute) of what is clocked
    "sampled rows scored again": (MultiRoleGRPOTrainer, "logprobs_of"),
    "gradient parts": (metrics.RoleDiagnostics, "on_gradient_parts"),
    "texts": (metrics, "signatures"),
}


def long_episodes(trainer: MultiRoleGRPOTrainer, seed: int = 0) -> list[Episode]:
    """Made-up tokens and words: every slot of every role replies once, with about 1,000 tokens."""
    rng, episodes = random.Random(seed), []
    for problem in trainer.problems:
        for index in range(trainer.args.num_generations):
            turns = []
            for role, slots in trainer.workflow.roles.items():
                for slot in range(slots):
                    prompt, reply = (
                        [rng.randrange(2, SHAPE.vocab) for _ in range(n)] for n in (100, rng.randint(800, 1200))
                    )
                    text = " ".join(f"word{token}" for token in reply)
                    turns.append(Turn(role, slot, 0, prompt, reply, [-6.2] * len(reply), text, "stop", "answered"))
            advantage = rng.choice((-1.0, 1.0))
            episodes.append(Episode(problem, index, turns, Answer(""), Reward(0.0, "", False), advantage))
    return episodes


def half(
    trainer: MultiRoleGRPOTrainer, n_episodes: int | None = None, during: AbstractContextManager | None = None
) -> float:
    """CPU seconds of one iteration's update half on canned episodes; `during` surrounds all but `prepare_rows`."""
    episodes = long_episodes(trainer)[:n_episodes]
    trainer.model.train()
    started = time.process_time()
    rows = trainer.prepare_rows(episodes)
    with during or nullcontext():
        steps, _ = trainer.update(trainer.model, rows)
        trainer._finish_iteration(Iteration(trainer.state.global_step + 1, episodes, rows, steps, {}))
    trainer.state.global_step += 1
    return time.process_time() - started


@contextmanager
def clocks(spent: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds spent in each of `COSTS`."""

    def clocked(name: str, work: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            started = time.process_time()
            result = work(*args, **named)
            spent[name] += time.process_time() - started
            return result

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in COSTS.items():
            stack.enter_context(mock.patch.object(owner, attribute, clocked(name, vars(owner)[attribute])))
        yield


def bench(options: dict[str, object], repeats: int, folder: str) -> tuple[list[float], dict[str, float]]:
    """Ratios with over without, pair by pair, and the median part of the former that each of `COSTS` takes."""
    on, off = (warm_trainer(options | {"diagnostics": is_on}, folder) for is_on in (True, False))
    ratios, parts = [], []
    for _ in range(repeats):
        spent = dict.fromkeys(COSTS, 0.0)
        without, whole = half(off), half(on, during=clocks(spent))
        ratios.append(whole / without)
        parts.append({name: seconds / whole for name, seconds in spent.items()})
    return ratios, {name: statistics.median(part[name] for part in parts) for name in COSTS}


def warm_trainer(options: dict[str, object], folder: str) -> MultiRoleGRPOTrainer:
    """A trainer that has warmed up."""
    cell = Cell("voting", "sp", **SIZES, **options)
    trainer = trainer_of(cell, random_model(SHAPE, cell), folder)
    half(trainer, 2)
    return trainer


def main() -> None:
    """Print a line per setting, and under it one per cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="where to write the ratios as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for name, options in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            ratios, parts = bench(options, args.repeats, folder)
        median = statistics.median(ratios)
        report[name] = {"median": round(median, 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3),
                        "repeats": len(ratios),
                        "from_parts": round(1 / (1 - sum(parts.values())), 3),
                        "parts": {cost: round(part, 4) for cost, part in parts.items()}}  # fmt: skip
        print(f"diagnostics/{name:10s} {median:5.3f}  [{min(ratios):.3f}, {max(ratios):.3f}]")
        for cost, part in parts.items():
            print(f"    {cost:26s} {part:7.2%} of the update half")
        print(f"    {'these alone make':26s} {report[name]['from_parts']:7.3f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.out, json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
