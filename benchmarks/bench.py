"""Measure ratios of rollouts and updates on this machine; print medians over alternating repeats and write them to `--out` as JSON.

    python benchmarks/bench.py [--repeats 5] [--out results/bench/bench.json]

- `rollout/*`: tokens per second of a workflow's rollout divided by those of the same engine with all requests at once, and the
  engine's steps in both; docs/speed.md has them as a table.
- `role-mixed rows`: the speed of one Voting-SP update, diagnostics included, divided by that of stock TRL's loss and optimizer on the
  same rows. The batch holds voters and aggregators, whose prompts differ in length, and stock TRL pads all of them to one
  length. Stock TRL never gets such a batch by itself, so this does not compare the two trainers: it shows what
  micro-batches of similar length save here.
- `iteration/ip_over_sp`: the time of a whole Voting iteration under IP divided by that under SP.
- `overlap/*`: the speed of episodes that continue at once divided by that of stages in lockstep, on 64 episodes whose completion
  lengths are lognormal (median 16, sigma 1, at most 256 tokens) instead of sampled.

Times are CPU time of this process (one thread), which a busy machine disturbs less than wall-clock time; IP over SP is
wall-clock.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from measuring import markdown, seconds_of, shown, spread, write

from multirole.engines.protocol import Completion, Engine, Request
from multirole.rollout.rollout import Attempt
from multirole.trainer import MultiRoleGRPOTrainer
from multirole.trl_parts import GRPOTrainer
from multirole.update.rows import collate
from multirole_cpu.engine import TransformersEngine
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import load_model, make_trainer, training_args

MEDIAN_LENGTH = 16
"""Tokens of the median reply, whose logarithm has the standard deviation 1."""
SLICE_ROWS = 32
"""Rows of stock TRL's slices of a generation batch."""


def alternate(
    first: Callable, second: Callable, repeats: int, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Return second's time / first's time for each pair, after a warm-up pair: the speed-up of first over second."""
    first(), second()
    return [seconds_of(second, clock) / seconds_of(first, clock) for _ in range(repeats)]


def trainer_of(cell: Cell, folder: str, engine: Engine | None = None) -> MultiRoleGRPOTrainer:
    """Build the cell's trainer on 256 problems, ready to take optimizer steps."""
    problems = cell.make_task().problems("train", 256)
    trainer = make_trainer(cell, folder, problems=(problems, problems[:8]), engine=engine)
    trainer.create_optimizer_and_scheduler(cell.max_steps)
    trainer.model.train()
    return trainer


def attempts(trainer: MultiRoleGRPOTrainer) -> list[Attempt]:
    """Return the attempts of one iteration."""
    args = trainer.args
    return [(problem, i) for problem in trainer.problems[: args.n_problems] for i in range(args.num_generations)]


def inputs(trainer: MultiRoleGRPOTrainer) -> list[dict]:
    """Return the same attempts as rows of the dataset, as the data loader yields them."""
    args = trainer.args
    return [trainer.train_rows[i] for i in range(args.n_problems) for _ in range(args.num_generations)]


class Watched:
    """An engine wrapper that records its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.requests, self.n_steps = engine, [], 0
        self.publish, self.sleep, self.close = engine.publish, engine.sleep, engine.close

    def add(self, key: int, request: Request) -> None:
        self.requests.append(request)
        self.engine.add(key, request)

    def step(self) -> list[tuple[int, Completion]]:
        self.n_steps += 1
        return self.engine.step()


class LongTail(Watched):
    """An engine wrapper with lognormal reply lengths by seed; with `is_lockstep` new requests wait until all running ones end."""

    def __init__(self, engine: Engine, is_lockstep: bool) -> None:
        super().__init__(engine)
        self.is_lockstep = is_lockstep
        self.held: list[tuple[int, Request]] = []
        self.running = 0

    def add(self, key: int, request: Request) -> None:
        normal = torch.randn(1, generator=torch.Generator().manual_seed(request.seed)).item()
        length = min(256, max(1, round(MEDIAN_LENGTH * math.exp(normal))))
        self.held.append((key, Request(request.prompt_ids, request.adapter, request.seed, length, request.temperature)))

    def step(self) -> list[tuple[int, Completion]]:
        if not (self.is_lockstep and self.running):
            for key, request in self.held:
                self.engine.add(key, request)
            self.running += len(self.held)
            self.held = []
        finished = self.engine.step()
        self.running -= len(finished)
        return finished


def bench_rollout(workflow: str, repeats: int, folder: str) -> tuple[list[float], dict[str, int]]:
    """Compare a workflow's rollouts with the same engine given all requests at once: ratio of tokens/s, and steps of both."""
    cell = Cell(workflow, "sp")
    trainer = trainer_of(cell, folder)
    engine = trainer.rollout.engine = Watched(trainer.engine)
    engine.publish(trainer.peft_model, 0)

    def rollout() -> None:
        trainer.rollout.run(attempts(trainer), 0, trainer.player.sampling)

    rollout()
    requests, counts = list(engine.requests), {"steps": engine.n_steps, "requests": len(engine.requests)}

    def all_at_once() -> None:
        engine.n_steps, n_left = 0, len(requests)
        for key, request in enumerate(requests):
            engine.engine.add(key, request)
        while n_left:
            n_left -= len(engine.step())
        counts["steps, all at once"] = engine.n_steps

    return alternate(rollout, all_at_once, repeats), counts


def stock_update(stock: GRPOTrainer, rows: dict[str, torch.Tensor], slice_rows: int, step_rows: int) -> None:
    """Run stock TRL's loss and optimizer on a collated generation batch (N, ...), with an optimizer step per `step_rows` rows."""
    model = stock.model.train()
    for start in range(0, len(rows["advantages"]), slice_rows):
        part = {name: tensor[start : start + slice_rows] for name, tensor in rows.items()}
        stock.compute_loss(model, part).backward()
        if (start + slice_rows) % step_rows == 0:
            stock._clip_grad_norm(model)
            stock.optimizer.step()
            stock.optimizer.zero_grad()


def bench_mixed_rows(repeats: int, folder: str) -> list[float]:
    """Compare the update on one iteration of Voting-SP rows with stock TRL's loss on the same mini-batches.

    Stock TRL pads the whole generation batch, voters and aggregators, to its longest prompt and completion and cuts slices
    of `SLICE_ROWS`.
    """
    cell = Cell("voting", "sp")
    trainer = trainer_of(cell, folder)
    rows = trainer.prepare_rows(trainer._generate_and_score_completions(inputs(trainer)))
    size = cell.n_problems * cell.num_generations
    model, tokenizer = load_model(cell)
    stock = GRPOTrainer(
        model=model, reward_funcs=lambda **_: [0.0], args=training_args(cell, folder), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}), eval_dataset=Dataset.from_dict({"prompt": ["a"]}),
    )  # fmt: skip
    stock.create_optimizer()
    stock.current_gradient_accumulation_steps = size // SLICE_ROWS

    def ours() -> None:
        trainer.update(trainer.model, rows)

    def theirs() -> None:
        whole = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
        whole["old_per_token_logps"] = whole["sampling_per_token_logps"]
        stock_update(stock, whole, SLICE_ROWS, size)

    return alternate(ours, theirs, repeats)


def bench_policies(repeats: int, folder: str) -> list[float]:
    """Return the wall-clock time of a whole Voting iteration, rollout and update, under IP divided by SP."""

    def iteration(trainer: MultiRoleGRPOTrainer) -> Callable[[], object]:
        def run() -> None:
            trainer.training_step(trainer.model, inputs(trainer))
            trainer.state.global_step += 1

        return run

    sp, ip = (iteration(trainer_of(Cell("voting", policy), folder)) for policy in ("sp", "ip"))
    return alternate(sp, ip, repeats, time.perf_counter)


def bench_overlap(workflow: str, repeats: int, folder: str) -> list[float]:
    """Compare episodes that continue at once with stages in lockstep, on 64 episodes with lognormal completion lengths."""
    cell = Cell(workflow, "sp", n_problems=8, max_prompt_tokens=1800)

    def play(is_lockstep: bool) -> Callable[[], object]:
        trainer = trainer_of(cell, folder, LongTail(TransformersEngine(-1, max_length=2100), is_lockstep))
        trainer.engine.publish(trainer.peft_model, 0)
        return lambda: trainer.rollout.run(attempts(trainer), 0, trainer.player.sampling)

    return alternate(play(False), play(True), repeats)


def main() -> None:
    """Run every benchmark and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="where to write the ratios as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ratios, steps = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for workflow in ("voting", "eval_opt", "orch_workers"):
            name = f"rollout/{workflow}"
            ratios[name], steps[name] = bench_rollout(workflow, args.repeats, folder)
        ratios["role-mixed rows"] = bench_mixed_rows(args.repeats, folder)
        ratios["iteration/ip_over_sp"] = bench_policies(args.repeats, folder)
        ratios |= {f"overlap/{w}": bench_overlap(w, args.repeats, folder) for w in ("eval_opt", "orch_workers")}
    report = {}
    for name, values in ratios.items():
        report[name] = spread(values) | {"pairs": len(values)} | steps.get(name, {})
        print(f"{name:22s} {shown(report[name])}")
    counted = ("requests", "steps", "steps, all at once", "pairs")
    rows = [[name.partition("/")[2], shown(report[name]), *(report[name][key] for key in counted)] for name in steps]
    table = markdown("workflow | rate | requests | engine steps | all at once | pairs", rows)
    write("bench", args.out, report, table)


if __name__ == "__main__":
    main()
