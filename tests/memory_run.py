"""Measures memory in a process of its own for `test_plan`: python memory_run.py JOBS.json -> one JSON line per job.

glibc would keep freed blocks for itself and blur the peak (up to 1.7 times the live tensors were seen), so the caller sets
MALLOC_MMAP_THRESHOLD_ to give every large block back to the system at once; then the resident set is what is alive.
"""

import functools
import gc
import json
import sys
from pathlib import Path

import torch

from multirole.core.engine import Request
from multirole.core.rows import Row
from multirole.core.types import Answer, Episode, Problem, Reward, Turn
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell
from multirole.experiment.trainer import load_model, make_trainer


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def forget_peak() -> None:
    """Start VmHWM anew from the present resident set (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def update(cell: Cell, checkpointed: bool, folder: str) -> None:
    """A step of each adapter on one row, which makes the moments, and one with a full micro-batch per role."""
    problems = [Problem(str(i), "math", "question", None) for i in range(cell.n_problems)]
    trainer = make_trainer(cell, folder, problems=(problems, problems[:1]))
    trainer.callback_handler.callbacks = []
    if checkpointed:  # Trainer.train does it, with these arguments
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.create_optimizer_and_scheduler(2)
    trainer.model.train()
    n_prompt, n_reply = cell.max_prompt_tokens, cell.max_response_tokens
    tokens = functools.partial(torch.randint, 2, 500, generator=torch.Generator().manual_seed(0))
    rows = []
    for role, adapter in cell.policy.items():
        for i in range(cell.micro_batch_tokens // (n_prompt + n_reply)):
            prompt, reply = tokens((n_prompt,)).tolist(), tokens((n_reply,)).tolist()
            turn = Turn(role, 0, 0, prompt, reply, [-6.0] * n_reply, "", "length", "answered")
            episode = Episode(problems[0], i, turns=[turn], answer=Answer(""), reward=Reward(1.0, "", True))
            rows.append(Row(episode, turn, adapter, 1.0))
    for n_rows in (1, len(rows)):
        for adapter in trainer.adapters:
            mine = [row for row in rows if row.adapter == adapter][:n_rows]
            trainer.optimizer_step(trainer.model, adapter, mine, len(mine), 1e-5)


def rollout(cell: Cell) -> None:
    """All generator turns of an iteration, to their last allowed token."""
    model, _ = load_model(cell)
    for parameter in model.parameters():
        parameter.sum()  # the file's pages are mapped, and read only now
    engine = TransformersEngine(-1, max_length=cell.max_prompt_tokens + cell.max_response_tokens)
    engine.publish(model, 0)
    tokens = functools.partial(torch.randint, 2, 500, generator=torch.Generator().manual_seed(0))
    adapter, running = cell.policy["generator"], 0
    for _ in range(cell.n_problems):
        prompt = tokens((cell.max_prompt_tokens,)).tolist()
        for _ in range(cell.n_episodes):
            engine.add(running, Request(prompt, adapter, running, cell.max_response_tokens, cell.temperature))
            running += 1
    while running:
        running -= len(engine.step())
    engine.close()


def main() -> None:
    """Run the jobs of the file in order, after a first one that loads what libraries load late."""
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text())
    small = {"micro_batch_tokens": 16, "max_prompt_tokens": 8, "max_response_tokens": 8}
    update(Cell(**jobs[0]["cell"] | small), True, str(path.parent / "out"))
    for job in jobs:
        gc.collect()
        forget_peak()
        before = resident()
        cell = Cell(**job["cell"])
        if job["kind"] == "update":
            update(cell, job["checkpointed"], str(path.parent / "out"))
        else:
            rollout(cell)
        sys.stdout.write(json.dumps({"before": before, "peak": resident("VmHWM")}) + "\n")


if __name__ == "__main__":
    main()
