"""Serve the roles of a finished run, or of what `save_model` wrote, as models of OpenAI's API (`multirole serve FOLDER`)."""

from collections.abc import Sequence
from pathlib import Path

from multirole.chat.templates import StartClock
from multirole.engines.protocol import Sampling
from multirole.policy import served_part
from multirole.serve import SavedRoles, base_alone, read_saved, serve
from multirole_study.experiment.base_models import check_base_of_run, locate, model_of_run
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import TASKS
from multirole_study.experiment.released_code import RENDERERS
from multirole_study.experiment.run_folder import adapters_folder, read_config, recorded_start, saved_steps


def adapters_at(folder: Path, step: int | None) -> Path:
    """Return the folder of a run's adapters at an evaluated step, by default the last one; ValueError if there is none."""
    saved = saved_steps(folder)
    if not saved:
        raise ValueError(f"{folder} holds no adapters. Give the folder of a run that has been evaluated at least once.")
    if step is not None and step not in saved:
        raise ValueError(f"`--step` must be one of the saved steps {saved}, got {step}.")
    return adapters_folder(folder, saved[-1] if step is None else step)


def roles_of_run(folder: Path, step: int | None, model: str | None) -> SavedRoles:
    """Return the roles of a run at an evaluated step. `model` is the folder of the base if the run had a user-supplied one."""
    config = read_config(folder)
    source = adapters_at(folder, step)
    task = config["task"] if config["task"] in TASKS else "math"
    cell = Cell("single", "sp", task, config["scale"], model=model_of_run(folder, model))
    check_base_of_run(folder, cell)
    policy = served_part(config["policy"])
    return SavedRoles(
        {name: source / name for name in policy.values() if name is not None}, policy, str(locate(cell)),
        Sampling(config["max_completion_length"], config["temperature"]), config["max_prompt_tokens"],
        StartClock(recorded_start(folder)).bind(RENDERERS[config["renderer"]]),
    )  # fmt: skip


def serve_folder(
    folder: Path | None, step: int | None, host: str, port: int, model: str | None, ignore: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> None:  # fmt: skip
    """Serve a run, saved adapters or, without a folder, a base alone, until a signal arrives. ValueError for another folder, and for what `serve` refuses."""
    if folder is None:
        return serve(base_alone(model), host, port, ignore, trust_remote_code)
    if (folder / "config.json").is_file():
        return serve(roles_of_run(folder, step, model), host, port, ignore, trust_remote_code)
    if step is not None:
        raise ValueError(f"`--step` chooses among the evaluations of a run, and {folder} is none. Leave it out.")
    return serve(read_saved(folder, model), host, port, ignore, trust_remote_code)
