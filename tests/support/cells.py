"""Trainers of the study's cells over random weights, and canned episodes of them."""

from pathlib import Path

import pandas as pd
import torch
from fsdp2_on_cpu import be_a_gpus_process
from peft import PeftModel
from safetensors.torch import load_file
from trainers import episodes_of, ready
from transformers import PreTrainedTokenizerBase

from multirole.types import Episode, Problem
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import make_trainer
from multirole_study.experiment.run import run_cell
from multirole_study.tasks.tiny_chain import PROMPTS

SMALL_RUN = Cell(
    "voting", "ip", max_steps=4, n_problems=2, num_generations=2, n_validation=4, n_train=8, eval_steps=1, save_steps=3,
    max_completion_length=24, warmup_steps=0, learning_rate=5e-3,
)  # fmt: skip
"""A cell that is evaluated after each of its four iterations and saved after two. The fixture `finished` is its run."""


def cell_trainer(cell: Cell, model: PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path, engine=None, **kwargs):
    """Build the cell's trainer over a model, ready for `optimizer_step` and `update`."""
    problems = [Problem(str(i), PROMPTS, f"question {i}", None) for i in range(64)]
    trainer = make_trainer(
        cell, str(folder / "out"), problems=(problems, problems[:4]), model=(model, tokenizer), engine=engine, **kwargs
    )
    return ready(trainer)


def make_episodes(cell: Cell, **kwargs) -> list[Episode]:
    """Return finished episodes of a cell; see `episodes_of`. tiny-r has 544 tokens."""
    return episodes_of(cell.make_workflow().roles, cell.num_generations, logprob=-6.2, **kwargs)


def compare_runs(one: Path, other: Path, tables: str = "*.parquet", atol: float = 0.0) -> None:
    """Raise AssertionError if the tables of two runs, but for their columns of seconds, or their adapters differ by more than `atol`."""
    for path in sorted(one.glob(tables)):
        a, b = (pd.read_parquet(run / path.relative_to(one)) for run in (one, other))
        a, b = (frame.drop(columns=[name for name in frame if name.endswith("seconds")]) for frame in (a, b))
        tolerance = {"atol": atol, "rtol": atol} if atol else {"check_exact": True}
        pd.testing.assert_frame_equal(a, b, obj=path.name, **tolerance)
    for path in sorted(one.glob("adapters/**/*.*")):
        twin = other / path.relative_to(one)
        if not atol:
            assert path.read_bytes() == twin.read_bytes(), f"{path}: other bytes"
        elif path.suffix == ".safetensors":
            torch.testing.assert_close(load_file(twin), load_file(path), atol=atol, rtol=0.0)


def run_sharded(parameters: dict[str, object]) -> None:
    """Run a cell under FSDP2 in this process, as one of several."""
    be_a_gpus_process()
    run_cell(*Cell.from_parameters(parameters))
