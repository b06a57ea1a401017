"""Where a cell's base model is: in this package, in a local folder, or on the Hub at a pinned revision.

Nothing is downloaded before it is asked for, and what is missing is said within seconds.
"""

import json
from importlib.resources import files
from pathlib import Path

import jinja2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from multirole.core.renderers import RENDERERS
from multirole.experiment.cell import Cell
from multirole.experiment.presets import MODELS, Shape, is_tiny

FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
NEEDED = ("config.json", "tokenizer_config.json")
HUB_SECONDS = 5.0
SERVED = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""What the transformers engine can run (`qwen3`)."""
TURN = "<|im_start|>"


class MissingModel(ValueError):
    """The base model is not on this machine and cannot be fetched."""


def local_folder(cell: Cell) -> Path | None:
    """The model's folder if it is this package's or the user's; None for a pinned model."""
    if is_tiny(cell.scale):
        return Path(str(files("multirole").joinpath("models", cell.scale)))
    return None if cell.model is None else Path(cell.model).expanduser()


def shape_of(cell: Cell) -> Shape:
    """The base model's dimensions, without loading or downloading it."""
    folder = local_folder(cell)
    if folder is None:
        return MODELS[cell.scale].shape
    config = json.loads(_complete(folder).joinpath("config.json").read_text(encoding="utf-8"))
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in names if name not in config]:
        raise ValueError(
            f"model={str(folder)!r} is a {config.get('model_type')!r} model whose config.json has no {missing}: no dense "
            "decoder that a plan can be made for. Write the folder of a Qwen3 or a Llama, say."
        )
    layers, hidden, intermediate, heads, vocab = (config[name] for name in names)
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return Shape(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, bool(config.get("tie_word_embeddings"))
    )


def _complete(folder: Path) -> Path:
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing or not list(folder.glob("*.safetensors")):
        raise ValueError(
            f"model={str(folder)!r} holds no {missing or '*.safetensors'}, so it cannot be loaded as a model. Write a folder "
            "that `save_pretrained` of a model and of its tokenizer have filled."
        )
    return folder


def locate(cell: Cell, may_download: bool = True) -> Path:
    """The folder to load the base model and its tokenizer from; MissingModel says how to get it."""
    folder = local_folder(cell)
    if folder is not None:
        return _complete(folder)
    pinned = MODELS[cell.scale]
    try:
        return Path(
            snapshot_download(pinned.repo, revision=pinned.revision, allow_patterns=FILES, local_files_only=True)
        )
    except LocalEntryNotFoundError:
        pass
    why = "and downloads were not asked for"
    if may_download:
        try:
            return Path(
                snapshot_download(pinned.repo, revision=pinned.revision, allow_patterns=FILES, etag_timeout=HUB_SECONDS)
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
            why = f"and the Hub cannot be reached ({type(error).__name__})"
    raise MissingModel(
        f"scale={cell.scale!r} needs {pinned.repo} at revision {pinned.revision}; it is not in this machine's cache, {why}. "
        f"Where there is a network: hf download {pinned.repo} --revision {pinned.revision}, and set HF_HOME to that cache "
        "here; or write model=FOLDER with a local copy; or scale='tiny-s', whose model is in this package."
    )


def check_model(cell: Cell, folder: Path, engine: str) -> None:
    """Refuse a folder whose model or tokenizer cannot be trained and served (ValueError); reads no weights."""
    given = f"model={str(folder)!r}"
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        try:
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError as error:
            raise ValueError(
                f"{given} has a {name} that is no JSON ({error}): it is cut off or damaged. Put the whole file there, from where "
                "the model came from."
            ) from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind, known = config.get("model_type"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    built = config.get("architectures") or [known.get(kind)]
    if kind not in known or not set(built) & set(known.values()):
        raise ValueError(
            f"{given} holds a {kind!r} model of architecture {built}, which is no causal language model that transformers can "
            "load, and roles speak by sampling from one. Write the folder of a Qwen3 or a Llama, say."
        )
    if engine == "transformers" and known[kind] not in SERVED:
        raise ValueError(
            f"{given} cannot be served by the transformers engine: it is a {known[kind]}, and its forward pass is written for "
            f'{" and ".join(SERVED)}. Write another model\'s folder, or use engine="vllm".'
        )
    _check_weights(given, folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{given} has no tokenizer that transformers can load ({str(error).splitlines()[0]}). Put tokenizer.json and "
            "tokenizer_config.json there, as `save_pretrained` of the model's tokenizer writes them."
        ) from error
    _check_tokenizer(given, cell, tokenizer, config.get("vocab_size"))


def _check_weights(given: str, folder: Path) -> None:
    """Refuse weights that are cut off, or of which files are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            raise ValueError(
                f"{given} lacks {missing}, which its {index.name} names, so some layers have no weights. Put these files there."
            )
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{given} has a {path.name} of {path.stat().st_size} bytes that is no whole file of weights ({error}). Put the "
                "whole file there, from where the model came from."
            ) from error


def _check_tokenizer(given: str, cell: Cell, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> None:
    """Refuse a tokenizer that cannot end a turn, write the cell's prompts, or keep within the embedding's rows."""
    highest = max(tokenizer.get_vocab().values())
    if vocabulary is not None and highest >= vocabulary:
        raise ValueError(
            f"{given} has a tokenizer with ids up to {highest}, and the model embeds ids up to {vocabulary - 1}: the two are not "
            "of one model. Put the model's own tokenizer files there."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{given} has a tokenizer without an end-of-sequence token, so no reply would end before its cap. Write the token "
            'that ends a turn into its tokenizer_config.json, such as "eos_token": "<|im_end|>".'
        )
    if cell.renderer == "released_code" and len(tokenizer.encode(TURN, add_special_tokens=False)) != 1:
        raise ValueError(
            f"renderer='released_code' writes turns with {TURN}, which is no token of the tokenizer in {given}, so the model "
            "would read it as letters. Write renderer='chat_template', or the folder of a Qwen model."
        )
    try:
        RENDERERS[cell.renderer](tokenizer, [{"role": "user", "content": "Hello."}])
    except jinja2.TemplateError as error:
        raise ValueError(
            f"{given} has a chat template that cannot write a user's message ({error}). Put the model's own chat_template.jinja "
            "there."
        ) from error
