"""Where a cell's base model is (in this package, a local folder, or on the Hub at a pinned revision), and its shape.

Nothing is downloaded before it is asked for, and a missing model is reported within seconds.
"""

import json
from importlib.resources import files
from pathlib import Path

from multirole.engines import SERVED
from multirole_study.experiment import smollm2
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import MODELS, SMOLLM2, TINY_BASES, PinnedModel, Shape, is_tiny
from multirole_study.experiment.storage import sums_of

FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
NEEDED = ("config.json", "tokenizer_config.json")
HUB_SECONDS = 5.0


def local_folder(cell: Cell) -> Path | None:
    """The model's folder if it is this package's or the user's; None for a pinned model."""
    if is_tiny(cell.scale):
        name = TINY_BASES["code" if cell.task == "code" else "math"]
        return Path(str(files("multirole_study").joinpath("models", name)))
    return None if cell.model is None else Path(cell.model).expanduser()


def shape_of(cell: Cell) -> Shape:
    """The base model's dimensions, without loading or downloading it."""
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
    """Whether the engine "transformers" implements the base model's architecture, by its config.json; the pinned ones are."""
    folder = local_folder(cell)
    try:
        config = {} if folder is None else json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # which `shape_of` and the preflight report
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
    """The folder to load the base model and its tokenizer from; ValueError says how to get it.

    A base that is on this machine comes before one that would be downloaded, and the Hub's before that of the package index.
    """
    folder = local_folder(cell)
    if folder is not None:
        return _complete(folder)
    pinned, has_wheel = MODELS[cell.scale], cell.scale == SMOLLM2
    found = _snapshot(pinned, is_local=True)
    if has_wheel and not isinstance(found, Path):
        found = smollm2.find() or found
    why = ""
    if may_download and not isinstance(found, Path):
        found = _snapshot(pinned, is_local=False)
        if has_wheel and not isinstance(found, Path):
            found = smollm2.fetch()
        why = f", and the Hub cannot be reached ({type(found).__name__})"
    if isinstance(found, Path):
        return found
    raise ValueError(
        f"scale={cell.scale!r} needs {pinned.repo} at revision {pinned.revision}, which is not in this machine's cache{why}. "
        f"Where there is a network, run `hf download {pinned.repo} --revision {pinned.revision}` and set HF_HOME to that cache "
        "here; or pass a local copy with `-p model FOLDER` (in Python model=FOLDER); or use scale='tiny-r', whose model is in this package."
    )


def _snapshot(pinned: PinnedModel, is_local: bool) -> Path | Exception:
    """The folder of a pinned model in the Hub's cache, where `is_local` downloads nothing; the error where it is not whole."""
    import httpx  # the Hub's client; its errors are no OSErrors
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(pinned.repo, revision=pinned.revision, allow_patterns=FILES,
                                        local_files_only=is_local, etag_timeout=HUB_SECONDS))  # fmt: skip
        return folder if _is_whole(folder) else FileNotFoundError(f"{folder} is half a download")
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, httpx.HTTPError) as error:
        return error


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the Hub's cache has every file of weights; of an interrupted download it has some."""
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    return all((folder / name).is_file() for name in {*NEEDED, *weights})


def describe(cell: Cell) -> dict[str, object]:
    """The base model for the record of a run: where it is from, at which revision, and the SHA-256 of its weights."""
    pinned, folder = MODELS.get(cell.scale) if cell.model is None else None, locate(cell)
    name, revision = cell.scale if cell.model is None else folder.name, None
    if pinned is not None:
        name, revision = pinned.repo, pinned.revision
    if pinned is not None and folder == smollm2.cache_folder():
        name, revision = smollm2.NAME, smollm2.WHEEL_SHA256
    return {"name": name, "revision": revision, "sha256": sums_of(folder, "*.safetensors")}


def layer_class(cell: Cell) -> str:
    """The class of the decoder layers of a scale's model."""
    return MODELS[cell.scale].layer if cell.scale in MODELS else "Qwen3DecoderLayer"
