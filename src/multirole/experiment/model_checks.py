"""Refuse a model or tokenizer that cannot be trained and served: before the weights are read, and once they are."""

from pathlib import Path
from typing import Any, NoReturn

import jinja2
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from multirole.core.types import assistant, user
from multirole.experiment.cell import Cell
from multirole.experiment.released_code import RENDERERS

SERVED = ("Qwen3ForCausalLM", "LlamaForCausalLM")
"""What the transformers engine can run (`engines.qwen3`)."""
TURN = "<|im_start|>"


def check_model(cell: Cell, folder: Path, engine: str) -> None:
    """Raise ValueError for a folder that cannot serve this cell.

    Its tokenizer must end a turn, write the cell's prompts, and keep within the embedding's rows.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt"):
                pass
    except (ValueError, OSError, SafetensorError) as error:
        _refuse(folder, f"is incomplete or damaged ({str(error).splitlines()[0]}).", error)
    built = config.architectures or [CAUSAL.get(config.model_type)]
    if config.model_type not in CAUSAL or not set(built) & set(CAUSAL.values()):
        _refuse(
            folder,
            f"holds a {config.model_type!r} model of architecture {built}, which is not a causal language model.",
        )
    if engine == "transformers" and CAUSAL[config.model_type] not in SERVED:
        served = " and ".join(SERVED)
        _refuse(
            folder,
            f"holds a {CAUSAL[config.model_type]}, and the transformers engine serves {served}. Use engine='vllm'.",
        )
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        _refuse(
            folder, f"has a tokenizer with ids up to {highest}, but the model embeds ids up to {config.vocab_size - 1}."
        )
    if tokenizer.eos_token_id is None:
        _refuse(folder, "has a tokenizer without an end-of-sequence token, so no turn would end. Set its eos_token.")
    if cell.renderer == "released_code" and len(tokenizer.encode(TURN, add_special_tokens=False)) != 1:
        _refuse(folder, f"has a tokenizer without {TURN}, which renderer='released_code' writes. Use 'chat_template'.")
    talk = [user("Add 1."), assistant("It is 2."), user("Add 3.")]
    for i, message in enumerate(talk):
        other = [*talk[:i], message | {"content": "Hello."}, *talk[i + 1 :]]
        try:
            is_left_out = RENDERERS[cell.renderer](tokenizer, talk) == RENDERERS[cell.renderer](tokenizer, other)
        except (jinja2.TemplateError, ValueError) as error:
            _refuse(folder, f"has a chat template that cannot write messages ({error}).", error)
        if is_left_out:
            _refuse(folder, f"has a chat template that leaves out message {i + 1} of a conversation of {len(talk)}.")


def check_loaded(folder: Path, loading: dict[str, Any]) -> None:
    """Raise ValueError where weights were missing, of another shape, or of layers that the config does not have.

    transformers makes up what is missing, and only logs it.
    """
    odd = {"missing": loading["missing_keys"], "of another shape": map(str, loading["mismatched_keys"])}
    odd["not in its config.json"] = [key for key in loading["unexpected_keys"] if ".layers." in key]
    for what, names in odd.items():
        for name in sorted(names)[:1]:
            _refuse(folder, f"has weights that are {what}, the first is {name}.")


def _refuse(folder: Path, problem: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"The model folder {str(folder)!r} {problem}") from cause
