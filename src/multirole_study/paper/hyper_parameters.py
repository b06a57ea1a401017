"""Table 7: the paper's hyper-parameters beside the preset's and those of a grid. `hyper_parameters.yaml` holds the paper's text."""

from pathlib import Path

import pandas as pd
import yaml

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS, OTHER_BASES, PAPER_SCALES
from multirole_study.paper.grid import Grid
from multirole_study.paper.output import MISSING

SETTINGS: list[list[str]] = yaml.safe_load(
    Path(__file__).with_name("hyper_parameters.yaml").read_text(encoding="utf-8")
)["settings"]
"""(setting, the paper's text, a cell's value as a format), and the workflow and task of the cell where they matter."""
SIZES = {"math": (12704, 1412), "code": (15252, 1000)}
"""Numbers of training and validation problems of the paper's tasks."""


def n_problems(cell: Cell) -> list[int]:
    """Return the numbers of all training and validation problems of a finite generated task."""
    return [len(cell.make_task().problems(split)) for split in ("train", "validation")]


def setting_of(cell: Cell, text: str) -> str:
    """Fill in the value that a cell has for a setting, such as "{cell.lora_rank}"."""
    counts = {"train": cell.n_train, "validation": cell.n_validation}
    if None in counts.values():  # all problems; the numbers of the paper's data sets are known without a download
        sizes = SIZES[cell.task] if cell.scale in PAPER_SCALES else n_problems(cell)
        counts = {split: n or size for (split, n), size in zip(counts.items(), sizes, strict=True)}
    text = text.format(cell=cell, rows=cell.n_problems * cell.num_generations, **counts)
    return text.replace("e-0", "e-").replace("None", "none")


def base_models(grid: Grid) -> tuple[str, str]:
    """Return the base models of the preset at the paper's scales, and that of the grid."""
    repos = ", ".join(f"{MODELS[scale].repo} at {MODELS[scale].revision[:8]}" for scale in PAPER_SCALES)
    name = f"{grid.base}, embedded" if grid.parameters.get("model") in (None, *OTHER_BASES) else grid.base
    return repos, MODELS[grid.scale].repo if grid.scale in MODELS and "model" not in grid.parameters else name


def settings_beside_the_papers(grid: Grid) -> pd.DataFrame:
    """Return one row per setting: the paper's text, the preset at a scale of the paper, and the grid; a dash for a task that the grid lacks."""
    preset_base, grid_base = base_models(grid)
    rows = [
        ("Base models", "Qwen3 0.6B, 1.7B, 4B", preset_base, grid_base),
        ("Seeds per cell", "1 (A.1)", "1", f"{len(grid.seeds)}: {', '.join(map(str, grid.seeds))}"),
    ]
    for setting, paper, text, *coordinates in SETTINGS:
        workflow, task = coordinates or ("voting", "math")
        of_grid = setting_of(grid.cell(workflow, "sp", task, grid.seeds[0]), text) if task in grid.tasks else MISSING
        rows.append((setting, paper, setting_of(Cell(workflow, "sp", task, "1.7b"), text), of_grid))
    of_grid = ", ".join(f"{name}={value}" for name, value in grid.parameters.items()) or "none"
    rows.append(("Options that the grid sets beside its scale's preset", "–", "–", of_grid))
    return pd.DataFrame(rows, columns=["setting", "paper", "preset", "grid"])
