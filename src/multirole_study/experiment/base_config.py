"""Read the configuration of a base model that is given as a folder, a GGUF file or a name on the Hub, without loading it.

A cell needs its size to choose settings, a plan its shape. Of a GGUF file only the header is read, of a model on the Hub only config.json.
"""

import json
import math
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from multirole.bases.gguf_header import config_of as config_of_gguf
from multirole.bases.gguf_header import is_gguf, read_header
from multirole_study.embedded import embedded_model
from multirole_study.experiment.presets import MODELS, TINY, Shape
from multirole_study.hub import hub_errors

NEEDED = ("config.json", "tokenizer_config.json")
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


class HubName(NamedTuple):
    """A repository of the Hub and the revision that was asked for."""

    repo: str
    revision: str | None


def exists(path: str) -> bool:
    """Return whether there is a file or folder of this name."""
    return bool(path) and Path(path).expanduser().exists()


def hub_name(model: str) -> HubName | None:
    """Return the repository that a `model` names as `owner/name` or `owner/name@revision`; None for a path."""
    match = None if exists(model) or is_gguf(model) else HUB_NAME.fullmatch(model)
    return match and HubName(match["repo"], match["revision"])


def is_base(model: str) -> bool:
    """Return whether a `model` can be read as a base: it is there, or it is a name on the Hub."""
    return exists(model) or hub_name(model) is not None


def recorded_name(model: str) -> str:
    """Return how a run's record names a `model`: the whole name on the Hub, or the last part of a path."""
    return model if hub_name(model) else Path(model).name


def config_of(model: str) -> dict[str, Any]:
    """Return the content of config.json of a base model. Raises ValueError if it cannot be read."""
    if is_gguf(model):
        path = Path(model).expanduser()
        return config_of_gguf(_header(path, path.stat().st_mtime_ns if path.is_file() else 0))
    name = hub_name(model)
    path = _from_hub(name) if name else complete_folder(Path(model).expanduser()) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a valid JSON file: {error}.") from error


_header = cache(lambda path, _changed_at: read_header(path))


def complete_folder(folder: Path) -> Path:
    """Return a folder that holds a model and its tokenizer; ValueError if something is missing."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"The model folder {str(folder)!r} has no {missing or '*.safetensors'}. It must hold what `save_pretrained` of a model "
            "and of its tokenizer write."
        )
    return folder


def _from_hub(name: HubName) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return Path(hf_hub_download(name.repo, "config.json", revision=name.revision, local_files_only=True))
    errors: tuple[type[Exception], ...] = (*hub_errors(), ValueError)
    try:
        return Path(hf_hub_download(name.repo, "config.json", revision=name.revision))
    except errors as error:
        raise ValueError(
            f"`model={name.repo!r}` is no folder and no file here, and as a name on the Hub it has no config.json that can be read "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Pass an existing folder or GGUF file, or the name of a repository with "
            "safetensors, and run once where the Hub can be reached."
        ) from error


def shape_of_config(config: dict[str, Any], model: str) -> Shape:
    """Return a decoder's dimensions. Raises ValueError for a configuration without them."""
    if missing := [name for name in SIZES if name not in config]:
        raise ValueError(
            f"The model {model!r} is a {config.get('model_type')!r} whose config.json has no {missing}. "
            "Use a dense decoder, such as a Qwen3 or a Llama."
        )
    layers, hidden, intermediate, heads, vocab = (config[name] for name in SIZES)
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return Shape(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, bool(config.get("tie_word_embeddings")),
        has_qk_norms=config.get("model_type") == "qwen3", has_qkv_biases=config.get("model_type") == "qwen2",
    )  # fmt: skip


def shape_of_model(model: str) -> Shape:
    """Return the dimensions of a base model."""
    return shape_of_config(config_of(model), model)


def scale_of(model: str) -> str:
    """Return the scale whose own base is the nearest in size, in proportion; its settings are a base's defaults."""
    sizes = {TINY: shape_of_model(embedded_model())} | {name: pinned.shape for name, pinned in MODELS.items()}
    parameters = shape_of_model(model).parameters
    return min(sizes, key=lambda name: abs(math.log(sizes[name].parameters / parameters)))
