"""Choose the kind of a declaration, from a study's YAML file (Snakefile) or from the record in a results folder (command line)."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.old_names import current_name
from multirole_study.experiment.settings import UserError, did_you_mean, looked_in, user_errors, value
from multirole_study.paper.clock_study import ClockStudy
from multirole_study.paper.compared_study import ComparedStudy
from multirole_study.paper.grid import Declaration, Grid, Study
from multirole_study.paper.rate_study import RateStudy

STUDIES = (Study, ClockStudy, RateStudy, ComparedStudy)
"""The kinds of declarations that have a record of their own."""

EXAMPLES = {
    "clock": ("studies/clock.yaml", "results/clock/tiny-r"),
    "leaderboard": ("studies/credit.yaml", "results/credit/tiny-r"),
    "compare": ("docs/extending.md", "runs/tiny-r"),
    "rates": ("studies/rates.yaml", "results/rates/tiny-r"),
}
"""Kind of a study -> the file that declares it, and a folder of such runs."""


FIELDS = ("seeds", "parameters", "base_rollouts", "workflows", "policies", "tasks")
"""The fields of a `Grid` besides its scale."""
OPTIONS = ("scale", "results_dir", "study", "gpus", *FIELDS)
"""The options of grid.yaml, which the command line overrides."""


@user_errors()
def declaration_of(config: Mapping[str, Any]) -> tuple[Declaration, int]:
    """Return what Snakemake's configuration declares, and the GPUs of a training job. Raises UserError for values that cannot work."""
    for name in config:
        if name not in OPTIONS and name != "scales":
            if current_name(name) in Cell.model_fields and name + "s" not in OPTIONS:
                raise UserError(f"`{name}` is a setting of the cells. Write 'parameters={{{name}: {config[name]}}}'.")
            known = did_you_mean(name, OPTIONS) or f" Options are {', '.join(OPTIONS)}."
            raise UserError(f"`{name}` is not an option of a grid.{known}")
    declared = _read_study(Path(str(config["study"]))) if config.get("study") else {}
    study_grid = declared.pop("grid", None) or {}  # a study may declare cells other than the scale's
    chosen = config["scales"]["default"] | config["scales"].get(config["scale"], {}) | study_grid | dict(config)
    gpus = value(str(chosen["gpus"]))
    if not isinstance(gpus, int) or gpus < 0:
        raise ValueError(f"`gpus` must be a number of GPUs, got {chosen['gpus']!r}.")
    fields = {name: chosen[name] for name in FIELDS if name in chosen}
    if not isinstance(fields["parameters"], dict):
        raise UserError(f"`parameters` must be a map such as {{max_steps: 60}}, got {fields['parameters']!r}.")
    # --config leaves text in lists and maps
    fields["parameters"] = {name: value(str(text)) for name, text in fields["parameters"].items()}
    if isinstance(fields["seeds"], list):
        fields["seeds"] = [value(str(seed)) for seed in fields["seeds"]]
    return declare(Grid(config["scale"], **fields), declared), gpus


def _read_study(path: Path) -> dict[str, Any]:
    """Read a study's YAML file; ValueError if it holds anything else."""
    if not path.is_file():
        raise ValueError(f"STUDY must name a file such as studies/main.yaml, got {str(path)!r}{looked_in(path)}.")
    try:
        declared = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a valid YAML file: {error}") from error
    if not isinstance(declared, dict) or not isinstance(declared.get("grid") or {}, dict):
        raise UserError(f"{path} must hold a map of fields, as studies/main.yaml does, and its `grid` another one.")
    return declared


def declare(grid: Grid, fields: dict[str, object]) -> Declaration:
    """Create what a study file declares, from its fields besides the grid; the grid alone if there are none."""
    kinds = {"rates": RateStudy, "lines": ClockStudy, "questions": ComparedStudy}
    kind = next((kind for name, kind in kinds.items() if name in fields), Study if fields else Declaration)
    return kind(grid, **fields)


def copy_declaration(source: Path, target: Path) -> None:
    """Copy the records of a grid and its study from one results folder into another, which is made; nothing if there are none."""
    for name in ("grid.json", *(kind.RECORD for kind in STUDIES)):
        if (source / name).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def differing_records(source: Path, target: Path) -> list[str]:
    """Return the names of the records that two results folders have both, and not alike, such as one whose learning rate was chosen since."""
    names = [kind.RECORD for kind in STUDIES]
    in_both = [name for name in names if (source / name).is_file() and (target / name).is_file()]
    return [name for name in in_both if (source / name).read_text() != (target / name).read_text()]


def read_declaration(folder: str | Path, command: str) -> Declaration:
    """Read the study of a kind (`Declaration.command`) in a results folder. Raises ValueError if none is recorded."""
    study_file, example = EXAMPLES[command]
    for kind in STUDIES:
        study = kind.read(folder)
        if study is not None and study.command == command:
            return study
    raise ValueError(
        f"{folder} records no study like {study_file}, so it is not known which runs belong to it. Pass a folder such as "
        f"{example}. The first lines of {study_file} say how to train its runs."
    )
