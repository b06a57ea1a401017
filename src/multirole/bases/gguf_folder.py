"""Convert a GGUF file once to a folder for transformers, in the Hub's cache of assets, by the file's SHA-256.

The folder is `<HF_HOME>/assets/multirole/gguf/default/<start of the SHA-256>-v1/`. It is written under a temporary name and renamed when it is
complete, under a lock: a killed process or a full disk leaves no partial folder, and several processes convert a file once. Weights are
dequantised to float32, up to `LARGE` parameters, and to bfloat16 above. `ORIGIN` in the folder says where it comes from.
"""

import json
import logging
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from multirole.bases.gguf_header import (
    HEAD,
    ROPE_FACTORS,
    Header,
    byte_size,
    config_of,
    dequantised,
    is_gguf,
    read_header,
    refusal,
)
from multirole.extras import needed_by
from multirole.files import publish, sha256

logger = logging.getLogger(__name__)

ORIGIN = "origin.json"
WEIGHTS = "model.safetensors"
LARGE = 10**9
"""Number of parameters above which weights are stored in bfloat16."""
VERSION = 1
"""Of the conversion. Folders of another version are not used."""
LLAMA3_ROPES = [
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
]  # fmt: skip
"""RoPE of Llama 3.1 and 3.2, of which a file has only the resulting factors."""


def local_base(model: str) -> str:
    """Return what transformers loads for a `model`: the converted folder of a GGUF file, and any other name unchanged.

    Raises ValueError for a GGUF file that cannot be converted; `gguf_header` says which.
    """
    return str(converted(Path(model).expanduser())) if is_gguf(model) else model


def split_revision(base: str) -> tuple[str, str | None]:
    """Return the name of a base and its revision, which a name on the Hub may end with: "Qwen/Qwen3-0.6B@025f7769"."""
    name, _, revision = base.partition("@")
    is_name = revision and not Path(base).expanduser().exists()
    return (name, revision) if is_name else (base, None)


def cache_folder(digest: str) -> Path:
    """Return where the folder of a file with this SHA-256 is kept."""
    from huggingface_hub import cached_assets_path

    return cached_assets_path("multirole", namespace="gguf") / f"{digest[:16]}-v{VERSION}"


def converted(path: Path) -> Path:
    """Return the folder with the model of a GGUF file and its tokenizer; convert the file unless this was done before."""
    from filelock import FileLock

    with needed_by(f"{path.name}, a GGUF file,"):
        import gguf  # noqa: F401
    header = read_header(path)
    digest = _digest(path, path.stat().st_mtime_ns)
    try:
        folder = cache_folder(digest)
        with FileLock(folder.with_suffix(".lock")):  # the system releases it when its holder dies
            if not is_complete(folder):
                _make(header, digest, folder)
    except OSError as error:
        raise ValueError(
            f"The folder for {path.name} in the Hub's cache cannot be written ({error}). Free some space, or set HF_HOME to a folder that can be "
            "written."
        ) from error
    return folder


@cache  # of a file of gigabytes, once per process, and again if it changed
def _digest(path: Path, _changed_at: int) -> str:
    return sha256(path)


def is_complete(folder: Path) -> bool:
    """Return whether a converted folder is there, with every file as long as it was written."""
    try:
        sizes = origin_of(folder)["sizes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def origin_of(folder: Path) -> dict[str, Any]:
    """Return where a converted folder comes from: name and SHA-256 of the file, its quantisation, and what was done."""
    return json.loads((folder / ORIGIN).read_text(encoding="utf-8"))


def _make(header: Header, digest: str, folder: Path) -> None:
    numbers = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    need, free = numbers * (4 if numbers <= LARGE else 2) + 2 * 10**7, shutil.disk_usage(folder.parent).free
    if free < need:
        raise ValueError(
            f"{header.path.name} takes {need // 10**6} MB when it is converted, and {folder.parent} has {free // 10**6} MB free. Free some space, "
            "or set HF_HOME to a folder on a larger disk."
        )
    logger.warning("Converting %s once, to %d MB in %s.", header.path.name, need // 10**6, folder)
    temporary = folder.with_suffix(".tmp")
    for left in (temporary, folder):  # by a killed process, and damaged since
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    try:
        about = convert(header, temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        origin = {"file": header.path.name, "sha256": digest, **about, "sizes": sizes}
        (temporary / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        publish(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def convert(header: Header, folder: Path) -> dict[str, Any]:
    """Write the model and its tokenizer to a folder, and return what was decided: quantisation, dtype, and whether head and embedding are one."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from multirole.bases.gguf_tokenizer import build_tokenizer

    weights, config, tokenizer = read_weights(header), config_of(header), build_tokenizer(header)
    numbers = sum(weight.numel() for weight in weights.values())
    dtype = torch.float32 if numbers <= LARGE else torch.bfloat16
    if ROPE_FACTORS in header.tensors:
        config["rope_parameters"] |= _llama3_rope(header, config)
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text_end = header.fields.get("tokenizer.ggml.eos_token_id", tokenizer.eos_token_id)
    # of a folder without a version, transformers fears that it has Mistral's old tokenizer
    about = {"dtype": str(dtype).removeprefix("torch."), "transformers_version": transformers.__version__}
    generation = ends | {"eos_token_id": [*dict.fromkeys([tokenizer.eos_token_id, text_end])]}
    save_file({name: weights[name].to(dtype) for name in sorted(weights)}, folder / WEIGHTS, metadata={"format": "pt"})
    for name, content in (
        ("config", config | ends | about),
        ("generation_config", generation),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return {
        "name": header.fields.get("general.name"), "architecture": header.architecture, "quantisation": quantisation(header),
        "dtype": about["dtype"], "head_is_embedding": config["tie_word_embeddings"], "parameters": numbers,
    }  # fmt: skip


def quantisation(header: Header) -> str:
    """Return llama.cpp's name of how most weights are rounded, such as "Q4_K_M"."""
    from gguf import LlamaFileType

    try:
        return LlamaFileType(header.fields["general.file_type"]).name.removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        return "unknown"


def read_weights(header: Header) -> dict[str, Any]:
    """Return the tensors in float32, by their names in transformers."""
    names, config = header.names(), config_of(header)
    if (
        config["tie_word_embeddings"] and HEAD.keys() <= names.keys()
    ):  # two roundings of one matrix; that with more bits is kept
        (head,), embedding = HEAD, "token_embd.weight"
        names[max(head, embedding, key=lambda name: byte_size(header, name))] = names[embedding]
        del names[min(embedding, head, key=lambda name: byte_size(header, name))]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, other in names.items():
        weight = dequantised(header, name)
        part = name.split(".")[-2]
        if header.architecture == "llama" and part in heads:
            weight = interleaved_to_halves(weight, heads[part])
        weights[other] = weight
    return weights


def interleaved_to_halves(weight: Any, heads: int) -> Any:
    """Reorder the rows of q or k (out, ...) of a Llama from llama.cpp's RoPE layout (adjacent pairs) to transformers' (halves)."""
    pairs = weight.reshape(heads, len(weight) // heads // 2, 2, -1)  # (heads, half, 2, in)
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _llama3_rope(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE that give the file's factors. Raises ValueError if none do."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = dequantised(header, ROPE_FACTORS)
    dims = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
    plain = config["rope_parameters"]["rope_theta"] ** -dims
    for parameters in LLAMA3_ROPES:
        scaled = LlamaConfig(
            hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"], head_dim=config["head_dim"],
            rope_parameters=config["rope_parameters"] | parameters, max_position_embeddings=config["max_position_embeddings"],
        )  # fmt: skip
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")
        if torch.allclose(plain / frequencies, factors, rtol=1e-3):
            return parameters
    raise refusal(header.path, "scales RoPE by factors that are not those of Llama 3.1 or 3.2")
