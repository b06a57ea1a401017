"""Ratios of this machine and this run: rollouts against their own engine, training against stock TRL, IP against SP,
overlapped against lockstep stages. Prints medians over alternating repeats and writes them to `--out` as JSON.

    python benchmarks/bench.py [--repeats 5] [--out results/bench/bench.json]

Times are CPU time of this process (one thread), which a busy machine disturbs less than wall-clock time; IP over SP is
wall-clock. Overlap is measured on 64 episodes whose completion lengths are lognormal (median 16, sigma 1, at most
256 tokens) instead of sampled.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOTrainer

from multirole.core.engine import Completion, Engine, Request
from multirole.core.rows import collate
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.diagnostics.metrics import IterationDiagnostics
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell
from multirole.experiment.run import load_model, make_engine
from multirole.experiment.storage import write_text
from multirole.tasks import TASKS

GOALS = {
    "rollout/voting": (">=", 0.85), "rollout/eval_opt": (">=", 0.75), "rollout/orch_workers": (">=", 0.75),
    "training/stock_trl": (">=", 1.2), "iteration/ip_over_sp": ("<=", 1.10), "overlap/eval_opt": (">=", 1.2), "overlap/orch_workers": (">=", 1.2),
}  # fmt: skip


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of one call by `clock`."""
    started = clock()
    work()
    return clock() - started


def alternate(
    first: Callable, second: Callable, repeats: int, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """second's time / first's time, pair by pair, after one uncounted pair: first's speed-up over second."""
    first(), second()
    return [seconds(second, clock) / seconds(first, clock) for _ in range(repeats)]


def make_trainer(cell: Cell, folder: str, engine: Engine | None = None) -> MultiRoleGRPOTrainer:
    model, tokenizer = load_model(cell)
    problems = TASKS[cell.task_name].problems("train", 256)
    engine = engine or make_engine(cell, tokenizer)
    trainer = MultiRoleGRPOTrainer(cell, model, tokenizer, engine, problems, problems[:8], folder)
    trainer.create_optimizer_and_scheduler(cell.iterations)
    return trainer


def attempts(trainer: MultiRoleGRPOTrainer) -> list:
    """The episodes of one iteration."""
    cell = trainer.cell
    return [(problem, i) for problem in trainer.problems[: cell.n_problems] for i in range(cell.n_episodes)]


class Watched:
    """An engine that remembers what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.requests = engine, []
        self.step, self.publish, self.sleep, self.close = engine.step, engine.publish, engine.sleep, engine.close

    def add(self, key: int, request: Request) -> None:
        self.requests.append(request)
        self.engine.add(key, request)


class LongTail(Watched):
    """Requests with lognormal lengths drawn from their seeds; `is_lockstep` holds new ones until all running are done."""

    def __init__(self, engine: Engine, is_lockstep: bool, median: float = 16.0, sigma: float = 1.0) -> None:
        super().__init__(engine)
        self.is_lockstep, self.median, self.sigma = is_lockstep, median, sigma
        self.held: list[tuple[int, Request]] = []
        self.running = 0
        self.step = self._step

    def add(self, key: int, request: Request) -> None:
        normal = torch.randn(1, generator=torch.Generator().manual_seed(request.seed)).item()
        length = min(256, max(1, round(self.median * math.exp(self.sigma * normal))))
        self.held.append((key, Request(request.prompt_ids, request.adapter, request.seed, length, request.temperature)))

    def _step(self) -> list[tuple[int, Completion]]:
        if not (self.is_lockstep and self.running):
            for key, request in self.held:
                self.engine.add(key, request)
            self.running += len(self.held)
            self.held = []
        done = self.engine.step()
        self.running -= len(done)
        return done


def bench_rollout(workflow: str, repeats: int, folder: str) -> list[float]:
    """Workflow-driven rollouts against the same engine given the same requests all at once: tokens/s ratio."""
    cell = Cell(workflow, "sp")
    engine = Watched(make_engine(cell, load_model(cell)[1]))
    trainer = make_trainer(cell, folder, engine)
    trainer._publish()
    trainer.rollout.run(attempts(trainer), 0, cell.sampling())
    requests = list(engine.requests)

    def all_at_once() -> None:
        for key, request in enumerate(requests):
            engine.engine.add(key, request)
        left = len(requests)
        while left:
            left -= len(engine.step())

    return alternate(lambda: trainer.rollout.run(attempts(trainer), 0, cell.sampling()), all_at_once, repeats)


def bench_training(repeats: int, folder: str, slice_rows: int = 32) -> list[float]:
    """Our optimizer steps on one iteration of Voting-SP rows, against stock TRL's loss on the same mini-batches.

    Stock TRL pads the whole generation batch to its longest prompt and completion and cuts slices of `slice_rows`.
    """
    cell = Cell("voting", "sp")
    trainer = make_trainer(cell, folder)
    rows = trainer._rows(trainer.play(attempts(trainer), 0))
    size = cell.n_problems * cell.n_episodes
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    model, tokenizer = load_model(cell)
    stock = GRPOTrainer(
        model=model, reward_funcs=lambda **_: [0.0], args=cell.grpo_config(folder), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}), eval_dataset=Dataset.from_dict({"prompt": ["a"]}),
    )  # fmt: skip
    stock.create_optimizer()
    stock.current_gradient_accumulation_steps = size // slice_rows

    def ours() -> None:
        for batch in batches:
            trainer.optimizer_step(trainer.model, "shared", batch, size, 0.0, IterationDiagnostics(rows, 0.2, 0.28))

    def theirs() -> None:
        whole = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
        whole["old_per_token_logps"] = whole["sampling_per_token_logps"]
        for start in range(0, len(rows), slice_rows):
            part = {name: tensor[start : start + slice_rows] for name, tensor in whole.items()}
            stock.compute_loss(model.train(), part).backward()
            if (start + slice_rows) % size == 0:
                stock._clip_grad_norm(model)
                stock.optimizer.step()
                stock.optimizer.zero_grad()

    return alternate(ours, theirs, repeats)


def bench_policies(repeats: int, folder: str) -> list[float]:
    """Wall-clock time of one whole Voting iteration, rollout and update, under IP over SP."""

    def iteration(trainer: MultiRoleGRPOTrainer) -> Callable[[], object]:
        rows = [{"prompt": p.question, "index": trainer.problems.index(p)} for p, _ in attempts(trainer)]

        def run() -> None:
            trainer.training_step(trainer.model, rows)
            trainer.state.global_step += 1

        return run

    sp, ip = (iteration(make_trainer(Cell("voting", policy), folder)) for policy in ("sp", "ip"))
    return alternate(sp, ip, repeats, time.perf_counter)


def bench_overlap(workflow: str, repeats: int, folder: str) -> list[float]:
    """64 episodes with lognormal completion lengths: episodes that move on at once, against stages in lockstep."""
    cell = Cell(workflow, "sp", n_problems=8, max_prompt_tokens=1800)

    def play(is_lockstep: bool) -> Callable[[], object]:
        trainer = make_trainer(cell, folder, LongTail(TransformersEngine(eos_id=-1, max_length=2100), is_lockstep))
        trainer._publish()
        return lambda: trainer.rollout.run(attempts(trainer), 0, cell.sampling())

    return alternate(play(False), play(True), repeats)


def main() -> None:
    """Run every benchmark and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="where to write the ratios as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ratios = {
            f"rollout/{w}": bench_rollout(w, args.repeats, folder) for w in ("voting", "eval_opt", "orch_workers")
        }
        ratios["training/stock_trl"] = bench_training(args.repeats, folder)
        ratios["iteration/ip_over_sp"] = bench_policies(args.repeats, folder)
        ratios |= {f"overlap/{w}": bench_overlap(w, args.repeats, folder) for w in ("eval_opt", "orch_workers")}
    report = {}
    for name, values in ratios.items():
        sign, goal = GOALS[name]
        median = statistics.median(values)
        is_met = median >= goal if sign == ">=" else median <= goal
        report[name] = {"median": round(median, 3), "min": round(min(values), 3), "max": round(max(values), 3),
                        "repeats": len(values), "goal": f"{sign} {goal}", "is_met": is_met}  # fmt: skip
        print(f"{name:22s} {median:5.2f}  [{min(values):.2f}, {max(values):.2f}]  goal {sign} {goal}"
              f"  {'met' if is_met else 'MISSED'}")  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.out, json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
