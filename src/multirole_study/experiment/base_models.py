"""Locate a cell's base model (embedded, a local folder, or a pinned revision on the Hub) and read its shape.

Only `locate` downloads anything. A missing model is reported within seconds.
"""

import errno
import json
import logging
from pathlib import Path

from multirole_study.embedded import embedded_model
from multirole_study.experiment import smollm2
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS, OTHER_BASES, SMOLLM2, TINY_BASES, PinnedModel, Shape, is_tiny
from multirole_study.experiment.run_folder import read_config
from multirole_study.experiment.storage import checksums_of

FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
NEEDED = ("config.json", "tokenizer_config.json")
HUB_SECONDS = 5.0
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a download for which another source would be no remedy."""

logger = logging.getLogger(__name__)


def local_folder(cell: Cell) -> Path | None:
    """Return the folder of an embedded or user-supplied model; None for a pinned model of the Hub."""
    if cell.model is not None and cell.model not in OTHER_BASES:
        return Path(cell.model).expanduser()
    if is_tiny(cell.scale):
        name = cell.model or TINY_BASES["code" if cell.task == "code" else "math"]
        return Path(embedded_model(name))
    return None


def shape_of(cell: Cell) -> Shape:
    """Return the base model's dimensions without loading or downloading it."""
    folder = local_folder(cell)
    if folder is None:
        return MODELS[cell.scale].shape
    path = _complete(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a valid JSON file: {error}.") from error
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in names if name not in config]:
        raise ValueError(
            f"The model folder {str(folder)!r} holds a {config.get('model_type')!r} model whose config.json has no {missing}. "
            "Use a dense decoder, such as a Qwen3 or a Llama."
        )
    layers, hidden, intermediate, heads, vocab = (config[name] for name in names)
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    is_tied = bool(config.get("tie_word_embeddings"))
    return Shape(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, is_tied, config.get("model_type") == "qwen3"
    )


def is_served(cell: Cell) -> bool:
    """Return whether the engine "transformers" supports the architecture in the base model's config.json.

    It supports all pinned models.
    """
    from multirole_cpu import SERVED  # `fetch` runs without it

    folder = local_folder(cell)
    try:
        config = {} if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # `shape_of` and the preflight report these
        config = {}
    architectures = config.get("architectures")
    return not architectures or architectures[0] in SERVED


def _complete(folder: Path) -> Path:
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"The model folder {str(folder)!r} has no {missing or '*.safetensors'}. It must hold what `save_pretrained` of a model "
            "and of its tokenizer write."
        )
    return folder


def locate(cell: Cell, may_download: bool = True) -> Path:
    """Return the folder with the base model and its tokenizer; download it if needed.

    A model on this machine is preferred to a download, and the Hub to the package index. Raises ValueError, which says how
    to get the model, if it cannot be found.
    """
    folder = local_folder(cell)
    if folder is not None:
        return _complete(folder)
    pinned, has_wheel = MODELS[cell.scale], cell.scale == SMOLLM2
    result = _snapshot(pinned, is_local=True)
    if has_wheel and not isinstance(result, Path):
        result = smollm2.find() or result
    why = ""
    if may_download and not isinstance(result, Path):
        result = _snapshot(pinned, is_local=False)
        why = f", and the Hub cannot be reached ({type(result).__name__}: {result})"
        if isinstance(result, OSError) and result.errno in DISK_ERRORS:
            raise ValueError(
                f"{pinned.repo} could not be written to the Hub's cache: {result}. Free some space, or set HF_HOME to a folder that can be "
                "written."
            )
        if has_wheel and not isinstance(result, Path):
            logger.warning(
                "The Hub cannot be reached (%s). The base is taken from the package index, with weights rounded to 4 bits (docs/smollm2.md).",
                type(result).__name__,
            )
            result = smollm2.fetch()
    if isinstance(result, Path):
        return result
    raise ValueError(
        f"scale={cell.scale!r} needs {pinned.repo} at revision {pinned.revision}, which is not in this machine's cache{why}. "
        f"Where there is a network, run `hf download {pinned.repo} --revision {pinned.revision}` and set HF_HOME to that cache "
        "here; or pass a local copy with `-p model FOLDER` (in Python model=FOLDER); or use scale='tiny-r', whose model is in this package."
    )


def _snapshot(pinned: PinnedModel, is_local: bool) -> Path | Exception:
    """Return the folder of a pinned model in the Hub's cache, or the error if it is incomplete.

    With `is_local` nothing is downloaded.
    """
    from huggingface_hub import snapshot_download

    # HTTPError is the base of its client's errors, which are no OSErrors
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(pinned.repo, revision=pinned.revision, allow_patterns=FILES,
                                        local_files_only=is_local, etag_timeout=HUB_SECONDS))  # fmt: skip
        return folder if _is_complete(folder) else FileNotFoundError(f"{folder} is an incomplete download")
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, HTTPError) as error:
        return error


def _is_complete(folder: Path) -> bool:
    """Return whether a folder of the Hub's cache has every weight file; an interrupted download lacks some."""
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    return all((folder / name).is_file() for name in {*NEEDED, *weights})


def describe(cell: Cell) -> dict[str, object]:
    """Return the base model's name, revision and SHA-256 of the weights, for the run's record."""
    pinned, folder = MODELS.get(cell.scale) if cell.model is None else None, locate(cell)
    name, revision = cell.scale if cell.model is None else folder.name, None
    if pinned is not None:
        name, revision = pinned.repo, pinned.revision
    if pinned is not None and folder == smollm2.cache_folder():
        name, revision = smollm2.NAME, smollm2.WHEEL_SHA256
    return {"name": name, "revision": revision, "sha256": checksums_of(folder, "*.safetensors")}


def model_of_run(run: Path, model: str | None) -> str | None:
    """Return the `model` that makes a run's cell again: the embedded base that the run names, None for its scale's own, or `model`.

    Raises ValueError if the run had a user-supplied base, of which only the name is recorded, and `model` is None.
    """
    recorded = read_config(run).get("model")
    if model is None and recorded is not None and recorded not in OTHER_BASES:
        raise ValueError(
            f"{run} was trained on the base model {recorded!r}. Pass the folder of this model with `--model`."
        )
    return recorded if model is None else model


def check_base_of_run(run: Path, cell: Cell) -> None:
    """Raise ValueError if the base model of `cell` has other weights than the one that a run was trained on."""
    recorded = json.loads((run / "provenance.json").read_text(encoding="utf-8"))["model"]
    if describe(cell)["sha256"] != recorded["sha256"]:
        raise ValueError(
            f"{run} was trained on the base model {recorded['name']!r}, and the weights in {locate(cell)} are others. Its adapters fit no "
            "other base."
        )


def layer_class(cell: Cell) -> str:
    """Return the class name of the decoder layers of a scale's model."""
    return MODELS[cell.scale].layer if cell.scale in MODELS else "Qwen3DecoderLayer"
