"""Locate a cell's base model (embedded, a local folder, or a pinned revision on the Hub) and read its shape.

Only `locate` downloads anything. A missing model is reported within seconds.
"""

import errno
import json
import logging
from pathlib import Path

from multirole.bases import gguf_folder
from multirole.bases.gguf_folder import local_base
from multirole.bases.gguf_header import is_gguf
from multirole.files import sha256
from multirole_study.embedded import embedded_model
from multirole_study.experiment import smollm2
from multirole_study.experiment.base_config import (
    NEEDED,
    HubName,
    complete_folder,
    config_of,
    hub_name,
    recorded_name,
    shape_of_model,
)
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS, OTHER_BASES, SMOLLM2, TINY_BASES, PinnedModel, Shape, is_tiny
from multirole_study.experiment.run_folder import read_config, read_provenance
from multirole_study.experiment.storage import checksums_of
from multirole_study.hub import hub_errors

FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
HUB_SECONDS = 5.0
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a download for which another source would be no remedy."""

logger = logging.getLogger(__name__)


def base_name(cell: Cell) -> str | None:
    """Return the folder, GGUF file or name on the Hub of an embedded or user-supplied model; None for a pinned model of the Hub."""
    if cell.model is not None and cell.model not in OTHER_BASES:
        return cell.model
    if is_tiny(cell.scale):
        return embedded_model(cell.model or TINY_BASES["code" if cell.task == "code" else "math"])
    return None


def shape_of(cell: Cell) -> Shape:
    """Return the base model's dimensions without loading or downloading it."""
    name = base_name(cell)
    return MODELS[cell.scale].shape if name is None else shape_of_model(name)


def is_served(cell: Cell) -> bool:
    """Return whether the engine "transformers" supports the architecture in the base model's config.json.

    It supports all pinned models.
    """
    from multirole_cpu import SERVED  # `fetch` runs without it

    name = base_name(cell)
    try:
        config = {} if name is None else config_of(name)
    except (OSError, ValueError):  # `shape_of` and the preflight report these
        config = {}
    architectures = config.get("architectures")
    return not architectures or architectures[0] in SERVED


def locate(cell: Cell, may_download: bool = True) -> Path:
    """Return the folder with the base model and its tokenizer; download it if needed.

    A model on this machine is preferred to a download, and the Hub to the package index. Raises ValueError, which says how
    to get the model, if it cannot be found.
    """
    name = base_name(cell)
    if name is not None:
        return _named(name, may_download)
    pinned, has_wheel = MODELS[cell.scale], cell.scale == SMOLLM2
    result = _snapshot(pinned, is_local=True)
    if has_wheel and not isinstance(result, Path):
        result = smollm2.find() or result
    if pinned.gguf is not None and not isinstance(result, Path):
        of_file = gguf_folder.cache_folder(pinned.gguf[1])
        result = of_file if gguf_folder.is_complete(of_file) else result
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
    of_gguf = ""
    if pinned.gguf is not None:
        of_gguf = f"; or run `multirole fetch {cell.scale} --gguf FILE` with {pinned.gguf[0]} of SHA-256 {pinned.gguf[1][:12]}..."
    raise ValueError(
        f"scale={cell.scale!r} needs {pinned.repo} at revision {pinned.revision}, which is not in this machine's cache{why}. "
        f"Where there is a network, run `hf download {pinned.repo} --revision {pinned.revision}` and set HF_HOME to that cache "
        f"here{of_gguf}; or pass a local copy with `-p model FOLDER` (in Python model=FOLDER); or use scale='tiny-r', whose model is in this package."
    )


def _named(model: str, may_download: bool) -> Path:
    """Return the folder of a base that is a folder, a GGUF file or a name on the Hub."""
    name = hub_name(model)
    if name is None:
        return Path(local_base(model)) if is_gguf(model) else complete_folder(Path(model).expanduser())
    result = _snapshot(name, is_local=True)
    if may_download and not isinstance(result, Path):
        result = _snapshot(name, is_local=False)
    if isinstance(result, Path):
        return complete_folder(result)
    raise ValueError(
        f"`model={model!r}` is not in the Hub's cache here and cannot be downloaded ({type(result).__name__}: {result})."
    )


def convert_pinned(scale: str, path: Path) -> Path:
    """Convert the GGUF file that may stand in for a scale's pinned model, and return its folder. Raises ValueError for another file."""
    gguf = MODELS[scale].gguf if scale in MODELS else None
    if gguf is None:
        raise ValueError(
            f"The base of scale={scale!r} has no GGUF file that stands in for it. Use `-p model FILE` instead."
        )
    if (digest := sha256(path)) != gguf[1]:
        raise ValueError(
            f"{path} is another file than {gguf[0]}: its SHA-256 is {digest} and must be {gguf[1]}. Train it with `-p model FILE` instead."
        )
    return Path(local_base(str(path)))


def _snapshot(pinned: PinnedModel | HubName, is_local: bool) -> Path | Exception:
    """Return the folder of a pinned model in the Hub's cache, or the error if it is incomplete.

    With `is_local` nothing is downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(pinned.repo, revision=pinned.revision, allow_patterns=FILES,
                                        local_files_only=is_local, etag_timeout=HUB_SECONDS))  # fmt: skip
        return folder if _is_complete(folder) else FileNotFoundError(f"{folder} is an incomplete download")
    except hub_errors() as error:
        return error


def _is_complete(folder: Path) -> bool:
    """Return whether a folder of the Hub's cache has every weight file; an interrupted download lacks some."""
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    return all((folder / name).is_file() for name in {*NEEDED, *weights})


def describe(cell: Cell) -> dict[str, object]:
    """Return the base model's name, revision and SHA-256 of the weights, for the run's record."""
    pinned, folder = MODELS.get(cell.scale) if cell.model is None else None, locate(cell)
    name, revision = cell.scale if cell.model is None else recorded_name(cell.model), None
    if cell.model is not None and (of_hub := hub_name(cell.model)):
        name, revision = of_hub.repo, folder.name  # a snapshot has the name of its commit
    if pinned is not None:
        name, revision = pinned.repo, pinned.revision
    if (folder / gguf_folder.ORIGIN).is_file():
        origin = gguf_folder.origin_of(folder)
        name, revision = f"{origin['file']}, {origin['quantisation']} weights in {origin['dtype']}", origin["sha256"]
    if pinned is not None and folder == smollm2.cache_folder():
        name, revision = smollm2.NAME, smollm2.WHEEL_SHA256
    return {"name": name, "revision": revision, "sha256": checksums_of(folder, "*.safetensors")}


def model_of_run(run: Path, model: str | None) -> str | None:
    """Return the `model` that makes a run's cell again: the embedded base that the run names, None for its scale's own, or `model`.

    Raises ValueError if the run had a user-supplied base, of which only the name is recorded, and `model` is None.
    """
    recorded = read_config(run).get("model")
    if model is None and recorded is not None and recorded not in OTHER_BASES and not hub_name(recorded):
        raise ValueError(
            f"{run} was trained on the base model {recorded!r}. Pass this model, a folder or a GGUF file, with `--model`."
        )
    return recorded if model is None else model


def check_base_of_run(run: Path, cell: Cell) -> None:
    """Raise ValueError if the base model of `cell` has other weights than the one that a run was trained on."""
    recorded = read_provenance(run)["model"]
    if describe(cell)["sha256"] != recorded["sha256"]:
        raise ValueError(
            f"{run} was trained on the base model {recorded['name']!r}, and the weights in {locate(cell)} are others. Its adapters fit no "
            "other base."
        )


def layer_class(cell: Cell) -> str:
    """Return the class name of the decoder layers of a scale's model."""
    return MODELS[cell.scale].layer if cell.scale in MODELS else "Qwen3DecoderLayer"
