"""Choose between kernels that are equal up to rounding, by timing them on the machine that a run starts on.

Which kernel is fastest depends on the processor: attention of the query heads of a group in one call takes a sixth of the time of a call for each
head on a Zen 5, and 1.4 times as long on a processor with AMX. So `choose` times the candidates on tensors of the model's shapes, which
takes one to three seconds of CPU time.

Another choice may give other bits. So the choice is kept in a file of the machine (`cache_file`), and another run of the same model on it repeats to the
digit. The library keeps it in every checkpoint, too, and all processes of a run, and a resumed run, compute with it
(`multirole.update.passes.fast_passes.FastPasses.kernels`). Models below `MIN_PARAMETERS` have no choice: they compute as on any machine.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multirole_cpu import SERVED, packed_products
from multirole_cpu.attention_head import HEADS, LARGE, HeadKernels, statistics
from multirole_cpu.families import head_dim
from multirole_cpu.half_model import cpu_has_bfloat16, products_in
from multirole_cpu.kv_cache import fused_attention, product_attention
from multirole_cpu.sampling_head import SAMPLING_HEADS

logger = logging.getLogger(__name__)

MIN_PARAMETERS = 10_000_000
"""Smallest model whose kernels are chosen by their time."""
N_ROWS, LENGTH, N_TOKENS = 64, 128, 256
"""What is timed: attention of 64 rows with 128 tokens each, logits of 64 rows, and log-probs of 256 tokens."""
N_SAMPLED, N_SCORED = 24576, 4096
"""Words of a head for logits, twelve times those that `RoundedHead` computes twice, so that it does not look slow; and for log-probs."""
VERSION = 2
"""Of what is timed. A choice by another version is made again."""
REPEATS = 3
MARGIN = 0.9
"""A candidate replaces the first one if it takes less than this fraction of its time, because timings are noisy."""
ATTRIBUTE = "_multirole_kernels"
"""Where a base model holds its `Kernels`: copies of the model, which share its weights, then have them, too."""
Candidates = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Kernels:
    """How a model is computed. The defaults are those of a small model in float32.

    Args:
        dtype: that the engine computes in.
        attention: of a decoding step: two batched "products" (float32), or PyTorch's fused kernel with the query heads of a KV head in one
            call ("groups") or in one each ("heads").
        layers: whether the engine's weights of the layers are "plain" or "packed" by oneDNN.
        head: of sampling, a name in `sampling_head.SAMPLING_HEADS`.
        n_logits: largest number of logits that are computed at once.
        training_head, scoring_head: names in `attention_head.HEADS`, for tokens that are differentiated and for others.
    """

    dtype: str = "float32"
    attention: str = "products"
    layers: str = "plain"
    head: str = "plain"
    n_logits: int = 1 << 23
    training_head: str = "attention"
    scoring_head: str = "attention"

    @property
    def of_training(self) -> HeadKernels:
        return HeadKernels(self.training_head, self.scoring_head)


FLOAT32, BFLOAT16 = Kernels(), Kernels("bfloat16", attention="heads", layers="packed")
"""The kernels of a small model in either dtype."""
LARGE_N_LOGITS = 1 << 26
"""256 MiB. A head of 152k words is read once for 384 rows, instead of once for 55."""


def engine_dtype(base: Any) -> torch.dtype:
    """Return bfloat16 for a bfloat16 model on a processor that multiplies it in hardware, else float32."""
    is_supported = base.dtype == torch.bfloat16 and base.device.type == "cpu" and cpu_has_bfloat16()
    return torch.bfloat16 if is_supported else torch.float32


def has_choice(base: Any) -> bool:
    """Return whether the kernels of a model are chosen by their time: on a CPU, with at least `MIN_PARAMETERS`."""
    return base.device.type == "cpu" and base.num_parameters() >= MIN_PARAMETERS


def kernels_of(base: nn.Module) -> Kernels:
    """Return the kernels that a base model is computed with; chooses them if nobody has."""
    if ATTRIBUTE not in vars(base):
        use(base, choose_once(base) if has_choice(base) else _default(engine_dtype(base)))
    return vars(base)[ATTRIBUTE]


def use(base: nn.Module, kernels: Kernels) -> None:
    """Compute a base model with `kernels` from now on."""
    vars(base)[ATTRIBUTE] = kernels


def to_record(kernels: Kernels) -> dict[str, object]:
    """Return what a run records of its kernels."""
    return asdict(kernels)


def from_record(record: Mapping[str, Any], base: Any) -> Kernels:
    """Return recorded kernels; other ones, with a warning, if this processor computes the model in another dtype."""
    known = Kernels(**{field.name: record[field.name] for field in fields(Kernels) if field.name in record})
    dtype = _name(engine_dtype(base))
    if known.dtype == dtype:
        return known
    kernels = choose_once(base)
    logger.warning(
        "The run was started on a processor that computes this model in %s, and this one computes it in %s. So the run continues with other "
        "kernels (%s), and what it samples may differ from an uninterrupted run.", known.dtype, dtype, kernels,
    )  # fmt: skip
    return kernels


def cache_file() -> Path:
    """Return the file of this machine's choices. Without it, they are made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "multirole", "kernels.json")


def choose_once(base: Any, is_half: bool | None = None) -> Kernels:
    """Return what `choose` returned before for a model of this shape on this machine, from `cache_file`; `choose` if it did not."""
    key, path = _machine_and_shape(base, is_half), cache_file()
    try:
        return Kernels(**_kept_choices(path)[key])
    except (KeyError, TypeError):  # none, or of another version
        kernels = choose(base, is_half)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(_kept_choices(path) | {key: to_record(kernels)}, file, indent=1)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("The choice of kernels is not kept, so the next run may make another one: %s", error)
    return kernels


def _kept_choices(path: Path) -> dict[str, Any]:
    """Return the choices in a file; none if there is no such file, or a damaged one."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _machine_and_shape(base: Any, is_half: bool | None) -> str:
    """Return what a choice depends on."""
    config, has = base.config.get_text_config(), torch.cpu.get_capabilities()
    machine = (
        has.get("cpu_name"),
        *(name for name, is_there in has.items() if is_there is True),
        torch.get_num_threads(),
    )
    sizes = (
        config.hidden_size,
        config.vocab_size,
        config.num_attention_heads,
        config.to_dict().get("num_key_value_heads"),
    )
    return " ".join(map(str, (VERSION, torch.__version__, type(base).__name__, base.dtype, is_half, *sizes, *machine)))


def choose(base: Any, is_half: bool | None = None) -> Kernels:
    """Time the candidates on random tensors of a base model's shapes, and return the fastest of each kind.

    `is_half` says whether log-probs and gradients are computed in bfloat16; by default they are if the model is. torch's own random numbers are
    not drawn.
    """
    started = time.perf_counter()
    dtype, config = engine_dtype(base), base.config.get_text_config()
    default = _default(dtype)
    is_half = base.dtype == torch.bfloat16 if is_half is None else is_half
    n_words, size = min(N_SAMPLED, config.vocab_size), config.hidden_size
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        # logits with a standard deviation of 3: those of plain random numbers are so far apart that `exp` returns denormals, which are slow
        head, hidden = normal(n_words, size), normal(max(N_ROWS, N_TOKENS), size).mul_(3 / size**0.5)
        kernels = default
        if type(base).__name__ in SERVED:
            kernels = replace(kernels, attention=fastest(_attention(base, dtype, normal)))
            if dtype == torch.float32:
                kernels = replace(kernels, layers=fastest(_layers(hidden[:N_ROWS], head)))
            sampling = hidden[:N_ROWS].to(dtype)
            kind = fastest(_sampling(sampling, head, len(sampling)))
            n_logits, n_at_once = LARGE_N_LOGITS, max(1, default.n_logits // config.vocab_size)  # rows
            if n_at_once < N_ROWS:
                sizes = {str(n_logits): N_ROWS, str(default.n_logits): n_at_once}
                n_logits = int(fastest({n: _sampling(sampling, head, rows)[kind] for n, rows in sizes.items()}))
            kernels = replace(kernels, head=kind, n_logits=n_logits)
        if config.vocab_size > LARGE:
            scored, rows = (
                x.to(torch.bfloat16 if is_half else torch.float32) for x in (hidden[:N_TOKENS], head[:N_SCORED])
            )
            with_gradient, without = (fastest(_vocabulary(scored, rows, needs_mean)) for needs_mean in (True, False))
            kernels = replace(kernels, training_head=with_gradient, scoring_head=without)
    logger.info("Chose kernels in %.2f s: %s", time.perf_counter() - started, kernels)
    return kernels


def fastest(candidates: Candidates) -> str:
    """Return the name of the fastest candidate, or of the first if none takes less than `MARGIN` of its time. Repeats take turns."""
    repeats = [{name: _seconds(work) for name, work in candidates.items()} for _ in range(REPEATS)]
    best = {name: min(seconds[name] for seconds in repeats) for name in candidates}
    first, quickest = next(iter(best)), min(best, key=lambda name: best[name])
    return quickest if best[quickest] < MARGIN * best[first] else first


def _seconds(work: Callable[[], object]) -> float:
    """Return the time of a call: of this thread's CPU where it computes alone, which other processes lengthen least."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    work()
    return clock() - started


def _attention(base: Any, dtype: torch.dtype, normal: Callable[..., Tensor]) -> Candidates:
    """Return the candidates for attention of a decoding step."""
    config = base.config
    n_kv, n_q, d = config.num_key_value_heads, config.num_attention_heads, head_dim(base)
    q, (keys, values) = normal(N_ROWS, n_q, d).to(dtype), normal(2, N_ROWS, n_kv, LENGTH, d).to(dtype)
    mask = torch.zeros(N_ROWS, 1, 1, LENGTH)
    fused: Candidates = {
        name: partial(fused_attention, q, keys, values, mask, name == "groups") for name in ("groups", "heads")
    }
    if dtype == torch.bfloat16:
        return fused
    rows = N_ROWS * n_kv
    by_kv = q.view(rows, -1, d), keys.flatten(0, 1), values.flatten(0, 1), torch.zeros(rows, 1, LENGTH)
    return {"products": partial(product_attention, *by_kv)} | fused


def _layers(x: Tensor, weight: Tensor) -> Candidates:
    """Return the candidates for a product of few rows with a float32 weight (out, in)."""
    plain, packed = weight.t().contiguous(), packed_products.pack(weight)
    return {"plain": partial(torch.mm, x, plain), "packed": partial(packed_products.product, x, packed)}


def _sampling(hidden: Tensor, head: Tensor, n_at_once: int) -> Candidates:
    """Return the candidates for the logits of sampling, computed for `n_at_once` rows at once."""
    buffer = head.new_empty(len(hidden), len(head))

    def logits(kind: str) -> Callable[[], object]:
        rows = SAMPLING_HEADS[kind](head)
        return lambda: [rows.logits(part, buffer[: len(part)]) for part in hidden.split(n_at_once)]

    return {kind: logits(kind) for kind in _names(SAMPLING_HEADS, hidden.dtype)}


def _vocabulary(hidden: Tensor, head: Tensor, needs_mean: bool) -> Candidates:
    """Return the candidates for log-probs of tokens, with their gradient or without."""

    def work(kernel: str) -> None:
        with products_in("bf16") if hidden.dtype == torch.bfloat16 else nullcontext():
            statistics(hidden, head, 1.0, kernel, needs_mean, torch.zeros(len(hidden)))

    return {kernel: partial(work, kernel) for kernel in _names(HEADS, hidden.dtype)}


def _names(heads: Iterable[str], dtype: torch.dtype) -> list[str]:
    """Return the names of the heads that compute in a dtype: "bfloat16" takes bfloat16 alone."""
    return [name for name in heads if dtype == torch.bfloat16 or name != "bfloat16"]


def _default(dtype: torch.dtype) -> Kernels:
    return BFLOAT16 if dtype == torch.bfloat16 else FLOAT32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
