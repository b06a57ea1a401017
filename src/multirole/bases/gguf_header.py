"""Read the header of a GGUF file, check that the file is whole, and describe its model as transformers would.

The header has the model's dimensions, its tokenizer, and the name, shape, type and place of each tensor. It is read in a second; the
package `gguf` parses it in ten for a vocabulary of 150,000 tokens, and does not say that a file is truncated. A file whose model,
tokenizer or tensors would be converted wrongly is refused here, before anything is computed.

Not covered: other architectures than `ARCHITECTURES`, mixtures of experts, tokenizers of SentencePiece, RoPE that is scaled in another way
than Llama 3's, and files for big-endian machines.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".gguf"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""llama.cpp's name of an architecture -> transformers' class. Mistral is a "llama" in llama.cpp."""
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of values -> those of `struct`."""
STRING, ARRAY = 8, 9
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds the factors of Llama 3's RoPE."""
SAME_HEAD, HEAD_ROWS = 0.2, 512
"""Largest mean difference of head and embedding, as a share of the head's mean size, at which they are roundings of one matrix, and how many
rows are compared.

Files of models with one matrix for both may store it twice, in two precisions: 0.04 in a 4-bit file. Two different matrices differ by
more than their size.
"""
SPLITS = ("qwen2", "llama-bpe", "smollm", "gpt-2")
"""Rules of splitting text into words that `gguf_tokenizer` has, by llama.cpp's names."""
LAYER = {
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
"""Names of llama.cpp's tensors -> names of transformers, below `model.layers.N.`."""
BIASES = {f"attn_{short}.bias": f"self_attn.{short}_proj.bias" for short in "qkv"}
QK_NORMS = {f"attn_{short}_norm.weight": f"self_attn.{short}_norm.weight" for short in "qk"}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
HEAD = {"output.weight": "lm_head.weight"}


class Tensor(NamedTuple):
    """A tensor of the file: its shape as torch has it, GGUF's type, and its first byte after the header."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself. `start` is the first byte after the header."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    start: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.fields.get("general.architecture"))

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture, such as "block_count". Raises ValueError if it is missing and has no default."""
        value = self.fields.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise refusal(self.path, f"does not say its {self.architecture}.{name}")
        return value

    def names(self) -> dict[str, str]:
        """Return transformers' name of each tensor but `ROPE_FACTORS`."""
        layer = LAYER | (QK_NORMS if self.architecture == "qwen3" else {})
        if self.architecture == "qwen2":
            layer |= BIASES
        elif "blk.0.attn_q.bias" in self.tensors:  # `attention_bias` of the others adds one to the output, too
            layer |= BIASES | {"attn_output.bias": "self_attn.o_proj.bias"}
        names = OUTSIDE | (HEAD if "output.weight" in self.tensors else {})
        for i in range(self.field("block_count")):
            names |= {f"blk.{i}.{name}": f"model.layers.{i}.{other}" for name, other in layer.items()}
        return names


def is_gguf(model: object) -> bool:
    """Return whether a `model` is given as a GGUF file."""
    return isinstance(model, str) and model.lower().endswith(SUFFIX)


def refusal(path: Path, why: str) -> ValueError:
    """Return the error for a file that cannot be a base."""
    return ValueError(f"The file {str(path)!r} {why}.")


def read_header(path: Path) -> Header:
    """Read a file's header. Raises ValueError for a file that is missing, damaged or truncated, or whose model cannot be converted."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, data)
            size = len(data)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise refusal(path, f"cannot be read ({error})") from error
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
        raise refusal(path, "is damaged or truncated: its header cannot be read. Download it again") from error
    _check(header, size)
    return header


class _Cursor:
    """Reads numbers and texts one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, kind: str, count: int = 1) -> tuple:
        values = struct.unpack_from(f"<{count}{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{kind}")
        return values

    def text(self) -> str:
        (length,) = self.numbers("Q")
        content = self.data[self.at : self.at + length]
        if len(content) < length:
            raise struct.error
        self.at += length
        return content.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, (count,) = self.numbers("I")[0], self.numbers("Q")
            if inner in NUMBERS:
                return self.numbers(NUMBERS[inner], count)
            return [self.value(inner) for _ in range(count)]
        return self.numbers(NUMBERS[kind])[0]


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise refusal(path, "is not a GGUF file")
    cursor.at = 4
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        raise refusal(
            path, f"has version {version} of GGUF, and versions 2 and 3 for little-endian machines can be read"
        )
    n_tensors, n_fields = cursor.numbers("Q", 2)
    fields = {cursor.text(): cursor.value(cursor.numbers("I")[0]) for _ in range(n_fields)}
    tensors = {}
    for _ in range(n_tensors):
        name, (n_dimensions,) = cursor.text(), cursor.numbers("I")
        shape = cursor.numbers("Q", n_dimensions)
        tensors[name] = Tensor(shape[::-1], cursor.numbers("I")[0], cursor.numbers("Q")[0])
    alignment = fields.get("general.alignment", 32)
    return Header(path, fields, tensors, cursor.at + -cursor.at % alignment)


def _check(header: Header, size: int) -> None:
    """Raise ValueError unless the file is whole and its model can be converted."""
    for problem in _problems(header, size):
        raise refusal(header.path, problem)


def _problems(header: Header, size: int) -> Iterator[str]:
    instead = "Pass the folder, or the name on the Hub, of the model that it was made from"
    fields = header.fields
    if (n_parts := fields.get("split.count", 0)) > 1:
        yield f"is one of {n_parts} parts of a model. Join them with llama.cpp's `llama-gguf-split --merge`, and pass the whole file"
    if header.architecture not in ARCHITECTURES:
        yield f"holds a model of the architecture {header.architecture!r}, and {', '.join(ARCHITECTURES)} can be converted. {instead}"
    if header.field("expert_count", 0):
        yield f"holds a mixture of experts, which cannot be converted. {instead}"
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        yield f"has a tokenizer of kind {kind!r} that splits text as {split!r}, and kind 'gpt2' with {', '.join(SPLITS)} can be converted. {instead}"
    if header.fields.get(f"{header.architecture}.rope.scaling.type", "none") != "none":
        yield f"scales RoPE by {header.field('rope.scaling.type')!r}, which cannot be converted. {instead}"
    if header.field("attention.sliding_window", 0):
        yield f"attends to windows of {header.field('attention.sliding_window')} tokens, which cannot be converted. {instead}"
    names = header.names()
    if missing := sorted(names.keys() - header.tensors.keys()):
        yield f"lacks the tensor {missing[0]} (and {len(missing) - 1} more). Download it again, or take another file"
    if unknown := sorted(header.tensors.keys() - names.keys() - {ROPE_FACTORS}):
        yield f"has the tensor {unknown[0]}, which no {ARCHITECTURES[header.architecture]} has. {instead}"
    vocabulary, tokens = header.tensors["token_embd.weight"].shape[0], fields.get("tokenizer.ggml.tokens", ())
    if len(tokens) != vocabulary:
        yield f"names {len(tokens)} tokens and embeds {vocabulary}"
    end = max(header.start + tensor.offset + byte_size(header, name) for name, tensor in header.tensors.items())
    if end > size:
        yield f"is truncated: it has {size} bytes of {end}. Download it again"


def byte_size(header: Header, name: str) -> int:
    """Return the number of bytes of a tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    tensor, count = header.tensors[name], 1
    for length in tensor.shape:
        count *= length
    try:
        block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError) as error:
        raise refusal(header.path, f"has the tensor {name} in GGUF's type {tensor.type}, which is not known") from error
    return count // block * n_bytes


def config_of(header: Header) -> dict[str, Any]:
    """Return the content of transformers' config.json, without the ids of special tokens and the dtype."""
    architecture, field = header.architecture, header.field
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", field("rope.dimension_count", hidden // heads))
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "num_hidden_layers": field("block_count"),
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": shares_head(header),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _decimal(field("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": _decimal(field("rope.freq_base", 10000.0))},
        "hidden_act": "silu",
    }
    if architecture == "qwen2" and head_dim * heads == hidden:
        del config["head_dim"]  # the class has no such field
    if architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if architecture == "llama":
        config["mlp_bias"] = False
    return config


def shares_head(header: Header) -> bool:
    """Return whether head and embedding are one matrix: the file has no head, or one that differs from the embedding by rounding.

    The first rows are compared.
    """
    if "output.weight" not in header.tensors:
        return True
    embedding, head = (dequantised(header, name, HEAD_ROWS) for name in ("token_embd.weight", "output.weight"))
    return bool((embedding - head).abs().mean() <= SAME_HEAD * head.abs().mean())


def dequantised(header: Header, name: str, n_rows: int | None = None) -> Any:
    """Return a tensor of the file in float32, or its first rows."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    tensor = header.tensors[name]
    kind = GGMLQuantizationType(tensor.type)
    native = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(kind)
    shape = tensor.shape if native else quant_shape_to_byte_shape(tensor.shape, kind)
    data = np.memmap(header.path, native or np.uint8, "r", header.start + tensor.offset, shape)[:n_rows]
    try:
        return torch.from_numpy(np.array(dequantize(data, kind), dtype=np.float32).reshape(-1, *tensor.shape[1:]))
    except NotImplementedError as error:
        raise refusal(
            header.path, f"has weights of the type {kind.name}, which the package gguf cannot read"
        ) from error


def _decimal(value: float) -> float:
    """Return the decimal number that was rounded to float32."""
    return float(f"{value:.6g}")
