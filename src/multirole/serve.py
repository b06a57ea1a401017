"""Serve what `trainer.save_model(folder)` or a checkpoint wrote, through OpenAI's API: a model per role.

    python -m multirole.serve FOLDER            # without the study; `multirole serve FOLDER` also serves its runs
    python -m multirole.serve --model BASE      # a base alone, under the name "base"

The base is the one that the adapters name, or `--model`. It computes in float32 on the processor, on the engine "transformers", where it is
installed and implements the base, or "generate". It needs the extra `openai`.
"""

import argparse
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from multirole.access import API_KEY, check_host, read_key
from multirole.bases.gguf_folder import local_base, split_revision
from multirole.chat.templates import Renderer, StartClock, chat_template
from multirole.engines import load_engine
from multirole.engines.context import Context
from multirole.engines.protocol import Sampling
from multirole.extras import needed_by
from multirole.openai_api.arguments import add_serving_arguments
from multirole.saving.layout import SERVING, newest_of, numbered_checkpoints, saved_adapters, saved_args

try:
    with needed_by("Serving roles"):
        from multirole.openai_api.serving import ModelServer, listening
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(str(error))

BASE = "base"
"""Name of the model of a base that is served alone."""
UNKNOWN_TOKENS = 4096
"""Largest prompt, and largest reply, of adapters whose folder does not tell those of their training, and of a base alone."""


@dataclass(frozen=True)
class SavedRoles:
    """Trained roles, and how they were sampled from in training.

    Args:
        folders: the folder of each adapter.
        policy: role -> adapter; None is the base.
        base: folder, GGUF file or name of the base model.
        sampling: the largest length of a reply in tokens, and the temperature.
        max_prompt_tokens: longest prompt, in tokens.
        render: turns messages into a prompt.
        revision: of the base on the Hub.
        tokenizer: its folder, if it is not the base's.
        eos_token_ids: the tokens that end a reply; by default the base's.
        strip_thoughts: whether thoughts are cut out of replies.
    """

    folders: Mapping[str, Path]
    policy: Mapping[str, str | None]
    base: str
    sampling: Sampling
    max_prompt_tokens: int
    render: Renderer = chat_template
    revision: str | None = None
    tokenizer: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    strip_thoughts: bool = True


def read_saved(folder: Path, base: str | None = None, render: Renderer | None = None) -> SavedRoles:
    """Read a folder that `save_model` or a checkpoint wrote. ValueError if it holds no adapters, or too little to serve them.

    Adapters without a record of their roles, as PEFT or TRL writes them, are served under their own names.

    Args:
        folder: holds a folder per adapter.
        base: the base model, instead of the one that the adapters name.
        render: what the trainer was given as `render`, which is not saved.
    """
    adapters = saved_adapters(folder)
    if not adapters:
        inside = newest_of(numbered_checkpoints(folder))
        why = (
            "there is no adapter_config.json in it or in a folder of it"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise ValueError(
            f"{folder} holds no adapters: {why}. {f'Serve {inside}' if inside else 'Give the folder of `save_model`'}."
        )
    record = folder / SERVING
    facts: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    policy = facts.get("policy") or saved_args(folder).get("policy") or {name: name for name in adapters}
    names = [name for name in policy.values() if name is not None]  # None: the base
    if missing := sorted(set(names) - set(adapters)):
        raise ValueError(
            f"{folder} maps roles to the adapters {missing} and holds {sorted(adapters)}. Save the model again, or copy all of it."
        )
    if facts.get("has_own_render") and render is None:
        raise ValueError(
            f"{folder} was trained with a `render` of its own, which is not saved, so prompts would differ. Serve it from Python: "
            "`serve(read_saved(folder, render=...), host, port)` of multirole.serve."
        )
    config = PeftConfig.from_pretrained(str(adapters[names[0]]))
    if base:
        base, revision = split_revision(base)
    else:
        base, revision = config.base_model_name_or_path, facts.get("revision") or config.revision
    if not base:
        raise ValueError(
            f"The adapters in {folder} name no base model. Pass its folder, or its name on the Hub, with `--model`."
        )
    options = {"strftime_now": StartClock(facts.get("started"))} | (facts.get("chat_template_kwargs") or {})
    return SavedRoles(
        {name: adapters[name] for name in names}, policy, base,
        Sampling(facts.get("max_completion_length", UNKNOWN_TOKENS), facts.get("temperature", 1.0)),
        facts.get("max_prompt_tokens", UNKNOWN_TOKENS), render or functools.partial(chat_template, **options), revision,
        str(folder) if (folder / "tokenizer_config.json").is_file() else None,
        tuple(facts.get("eos_token_ids", ())), facts.get("strip_thoughts", True),
    )  # fmt: skip


def base_alone(base: str | None) -> SavedRoles:
    """Return a base without adapters, as one role called "base". ValueError without the name of one."""
    if not base:
        raise ValueError(
            "There is nothing to serve. Give a folder of saved adapters, or a base model alone with `--model`: its folder, its GGUF file or its name "
            "on the Hub."
        )
    base, revision = split_revision(base)
    return SavedRoles({}, {BASE: None}, base, Sampling(UNKNOWN_TOKENS, 1.0), UNKNOWN_TOKENS, revision=revision)


def load_server(saved: SavedRoles, ignore: Sequence[str] = (), trust_remote_code: bool = False) -> ModelServer:
    """Load base and adapters into an engine. `ignore` names request fields that are dropped. ValueError if they cannot be loaded."""
    folder_or_name = local_base(saved.base)
    options = {"revision": saved.revision or "main", "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(saved.tokenizer or folder_or_name, **options)
        base = AutoModelForCausalLM.from_pretrained(folder_or_name, dtype=torch.float32, **options)
    except OSError as error:
        raise ValueError(
            f"The base model {saved.base!r} cannot be loaded: {error}\nPass a folder of this machine, or a name on the Hub, with `--model`."
        ) from error
    model: Any = base
    try:
        for name, folder in saved.folders.items():
            if model is base:
                model = PeftModel.from_pretrained(base, str(folder), adapter_name=name)
            else:
                model.load_adapter(str(folder), adapter_name=name)
    except RuntimeError as error:  # torch's, for weights of another shape
        raise ValueError(f"The adapter in {folder} does not fit the base model {saved.base!r}: {error}") from error
    model.eval()
    ends = saved.eos_token_ids or _ends(base.generation_config.eos_token_id, tokenizer.eos_token_id)
    longest = saved.max_prompt_tokens + saved.sampling.max_tokens
    engine = load_engine("auto", model, is_float32=True).from_model(model, ends, tokenizer.pad_token_id or 0, longest)
    context = Context.of(model)
    return ModelServer(
        engine, tokenizer, saved.policy, saved.sampling, saved.max_prompt_tokens, saved.render, tuple(dict.fromkeys(ignore)),
        strip_thoughts=saved.strip_thoughts, context=None if context is None else context.tokens,
    )  # fmt: skip


def _ends(of_base: int | list[int] | None, of_tokenizer: int | None) -> list[int]:
    """Return the tokens that end a reply, from the base's generation config and its tokenizer."""
    ends = [of_base] if isinstance(of_base, int) else of_base or []
    return list(dict.fromkeys([*ends, *([] if of_tokenizer is None else [of_tokenizer])]))


def serve(saved: SavedRoles, host: str, port: int, ignore: Sequence[str] = (), trust_remote_code: bool = False) -> None:
    """Serve trained roles until a signal arrives. ValueError if the address is in use, or others can reach it without a key."""
    check_host(host)
    listening(host, port).close()  # before the model is loaded
    disable_progress_bar()
    server = load_server(saved, ignore, trust_remote_code)

    def announce(url: str) -> None:
        key = "any" if read_key() is None else f"that of {API_KEY}"
        lines = [
            f"Serving the models {', '.join(saved.policy)} at temperature {saved.sampling.temperature:g}, unless a request has another. Ctrl-C ends it.",
            f"  base_url    {url}", f"  api_key     {key}",
        ]  # fmt: skip
        if ignore:
            lines.insert(1, f"Of requests, {json.dumps(list(ignore))} are ignored.")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    with suppress(KeyboardInterrupt):
        server.run(host, port, announce)


def main() -> None:
    """Serve a folder that is named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m multirole.serve", description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="what `trainer.save_model` wrote, or a checkpoint; without it, --model alone",
    )
    add_serving_arguments(parser)
    options = parser.parse_args()
    try:
        saved = read_saved(options.folder, options.model) if options.folder else base_alone(options.model)
        serve(saved, options.host, options.port, options.ignore, options.trust_remote_code)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
