"""Serve the roles of a finished run as models of OpenAI's API (`multirole serve RUN`)."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from multirole.core.chat import StartClock
from multirole.core.engine import Sampling
from multirole.endpoint.serving import ModelServer, listening
from multirole.engines.transformers_engine import TransformersEngine
from multirole_study.experiment.base_models import check_base_of_run, locate, model_of_run
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import TASKS
from multirole_study.experiment.progress import say
from multirole_study.experiment.released_code import RENDERERS
from multirole_study.experiment.run_folder import adapters_folder, read_config, recorded_start, saved_steps

IGNORED = ("temperature", "seed", "top_p", "stop")
"""Request fields that are ignored, because most clients send them; the run's temperature is used."""


def adapters_at(folder: Path, step: int | None) -> Path:
    """Return the folder of a run's adapters at an evaluated step, by default the last one; ValueError if there is none."""
    saved = saved_steps(folder)
    if not saved:
        raise ValueError(f"{folder} holds no adapters. Give the folder of a run that has been evaluated at least once.")
    if step is not None and step not in saved:
        raise ValueError(f"`--step` must be one of the saved steps {saved}, got {step}.")
    return adapters_folder(folder, saved[-1] if step is None else step)


def serve_run(
    folder: Path, step: int | None, host: str, port: int, model: str | None, ignore: Sequence[str] = ()
) -> None:
    """Serve a run's adapters until a signal arrives. `model` is the folder of the base if the run had a user-supplied one.

    `ignore` names fields of requests that are dropped besides `IGNORED`. ValueError if the port is in use.
    """
    disable_progress_bar()
    listening(host, port).close()  # before the model is loaded
    ignored = tuple(dict.fromkeys([*IGNORED, *ignore]))
    config = read_config(folder)
    source = adapters_at(folder, step)
    task = config["task"] if config["task"] in TASKS else "math"
    cell = Cell("single", "sp", task, config["scale"], model=model_of_run(folder, model))
    check_base_of_run(folder, cell)
    base_folder = locate(cell)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    names = list(dict.fromkeys(config["policy"].values()))
    peft_model = PeftModel.from_pretrained(base, str(source / names[0]), adapter_name=names[0])
    for name in names[1:]:
        peft_model.load_adapter(str(source / name), adapter_name=name)
    longest = config["max_prompt_tokens"] + config["max_response_tokens"]
    end_ids = base.generation_config.eos_token_id or []
    end_ids = [end_ids] if isinstance(end_ids, int) else end_ids
    engine = TransformersEngine(*{tokenizer.eos_token_id, *end_ids}, max_length=longest)
    engine.publish(peft_model, 0)
    sampling = Sampling(config["max_response_tokens"], config["temperature"])
    server = ModelServer(
        engine,
        tokenizer,
        config["policy"],
        sampling,
        config["max_prompt_tokens"],
        StartClock(recorded_start(folder)).bind(RENDERERS[config["renderer"]]),
        ignored,
    )

    def announce(url: str) -> None:
        models = ", ".join(config["policy"])
        say(f"Serving {folder.name} at {source.name}: models {models}; temperature {sampling.temperature:g}.")
        say(f"Of requests, {json.dumps(ignored)} are ignored. Ctrl-C ends it.\n  base_url    {url}")

    with suppress(KeyboardInterrupt):
        server.run(host, port, announce)
