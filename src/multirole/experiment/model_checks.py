"""Refuse a folder whose model or tokenizer cannot be trained and served, before any weights are read."""

import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from multirole.core.renderers import RENDERERS
from multirole.experiment.cell import Cell

SERVED = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""What the transformers engine can run (`engines.qwen3`)."""
TURN = "<|im_start|>"


def check_model(cell: Cell, folder: Path, engine: str) -> None:
    """Raise ValueError for a folder that cannot serve this cell."""
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            _read_json(folder, name)
    config = _read_json(folder, "config.json")
    kind, built = config.get("model_type"), config.get("architectures") or [CAUSAL.get(config.get("model_type"))]
    if kind not in CAUSAL or not set(built) & set(CAUSAL.values()):
        _refuse(folder, f"holds a {kind!r} model of architecture {built}, which is not a causal language model.")
    if engine == "transformers" and CAUSAL[kind] not in SERVED:
        served = " and ".join(SERVED)
        _refuse(folder, f"holds a {CAUSAL[kind]}, and the transformers engine serves {served}. Use engine='vllm'.")
    _check_weights(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError) as error:
        _refuse(folder, f"has no tokenizer that transformers can load ({str(error).splitlines()[0]}).", error)
    _check_tokenizer(folder, cell.renderer, tokenizer, config.get("vocab_size"))


def _refuse(folder: Path, problem: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"The model folder {str(folder)!r} {problem}") from cause


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError as error:
        _refuse(folder, f"has a {name} that is cut off or damaged ({error}).", error)


def _check_weights(folder: Path) -> None:
    """Refuse weights that are cut off, or of which files are missing."""
    index = "model.safetensors.index.json"
    if (folder / index).is_file():
        named = set(_read_json(folder, index)["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            _refuse(folder, f"lacks {missing}, which its {index} names.")
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            _refuse(folder, f"has a damaged {path.name} of {path.stat().st_size} bytes ({error}).", error)


def _check_tokenizer(folder: Path, renderer: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> None:
    """Refuse a tokenizer that cannot end a turn, write the cell's prompts, or keep within the embedding's rows."""
    highest = max(tokenizer.get_vocab().values())
    if vocabulary is not None and highest >= vocabulary:
        _refuse(folder, f"has a tokenizer with ids up to {highest}, but the model embeds ids up to {vocabulary - 1}.")
    if tokenizer.eos_token_id is None:
        _refuse(folder, "has a tokenizer without an end-of-sequence token, so no turn would end. Set its eos_token.")
    if renderer == "released_code" and len(tokenizer.encode(TURN, add_special_tokens=False)) != 1:
        _refuse(folder, f"has a tokenizer without {TURN}, which renderer='released_code' writes. Use 'chat_template'.")
    try:
        RENDERERS[renderer](tokenizer, [{"role": "user", "content": "Hello."}])
    except (jinja2.TemplateError, ValueError) as error:
        _refuse(folder, f"has a chat template that cannot write a user's message ({error}).", error)
