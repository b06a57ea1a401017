"""Tokens per CPU-second of TransformersEngine against HF `generate` (and VLLMEngine with --vllm) on the same rows.

    OMP_NUM_THREADS=1 python benchmarks/bench_engine.py [--vllm] [--repeats 5]

A random-initialised model of the shipped tiny-r shape (or `--hidden`, `--layers`), two LoRA adapters of rank 8 on all
linear layers. The engines alternate within one process; `generate` runs the base with one adapter merged in, all rows left-padded
in one call; the ratio is the median over repeats of (engine / generate). Every row samples at
temperature 1 until end-of-turn or the cap; generated tokens are counted per row, up to and
including end-of-turn. Only ratios are meant: absolute speeds depend on the machine and on what else it is doing.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from multirole.core.engine import Engine, Request
from multirole.engines.transformers_engine import TransformersEngine
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell

EOS, PAD, VOCAB = 1, 0, 510
Rows = list[tuple[list[int], int]]
"""(prompt ids, max_tokens) of each row."""


def build_model(hidden: int, layers: int) -> PeftModel:
    """A random Qwen3 with two non-trivial adapters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=hidden // 32, num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(model, lora, adapter_name="generator")
    model.add_adapter("aggregator", lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.set_adapter("generator")
    return model.eval()


def build_rows(kind: str) -> Rows:
    """384 rows: `groups` is 16 prompts x 24 copies of 64 tokens; `mixed` has distinct prompts of 16 to 320 tokens."""
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return torch.randint(2, VOCAB, (length,), generator=generator).tolist()

    if kind == "groups":
        return [(ids, 128) for ids in [prompt(64) for _ in range(16)] for _ in range(24)]
    lengths = torch.randint(16, 320, (384,), generator=generator).tolist()
    caps = torch.randint(16, 128, (384,), generator=generator).tolist()
    return [(prompt(length), cap) for length, cap in zip(lengths, caps, strict=True)]


def run_generate(model: PeftModel, rows: Rows, eos: int = EOS, pad: int = PAD) -> int:
    """One left-padded `generate` call on all rows; returns the tokens up to each row's own cap or end-of-turn."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids, _ in rows])  # (N, T)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in rows])  # (N, T)
    settings = GenerationConfig(
        max_new_tokens=max(cap for _, cap in rows), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    with torch.inference_mode():
        out = model.generate(input_ids=tokens, attention_mask=mask, generation_config=settings)[:, longest:]
    used = torch.where((out == eos).any(1), (out == eos).int().argmax(1) + 1, out.shape[1])
    return int(torch.minimum(used, torch.tensor([cap for _, cap in rows])).sum())


def run_engine(engine: Engine, rows: Rows, adapters: list[str | None]) -> int:
    """All rows at once, adapters taking turns by row; returns the tokens of the completions."""
    for key, (ids, cap) in enumerate(rows):
        engine.add(key, Request(ids, adapters[key % len(adapters)], seed=key, max_tokens=cap, temperature=1.0))
    n_done, n_tokens = 0, 0
    while n_done < len(rows):
        for _, completion in engine.step():
            n_done += 1
            n_tokens += len(completion.token_ids)
    return n_tokens


def start_vllm(model: PeftModel) -> Engine:
    """VLLMEngine on the same base (through a temporary folder) and the same adapters."""
    from multirole.engines.vllm_engine import VLLMEngine

    with tempfile.TemporaryDirectory() as folder:
        model.unload().save_pretrained(folder)
        AutoTokenizer.from_pretrained(locate(Cell("single", "sp"))).save_pretrained(folder)
        return VLLMEngine(folder, list(model.peft_config), 8, 512, max_num_seqs=384)


def speed(run: Callable[[], int]) -> float:
    """Tokens per second of process time."""
    start = time.process_time()
    return run() / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vllm", action="store_true", help="also measure VLLMEngine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(args.hidden, args.layers)
    merged = build_model(args.hidden, args.layers).merge_and_unload()
    engine = TransformersEngine(EOS)
    engine.publish(model, 1)
    vllm = start_vllm(build_model(args.hidden, args.layers)) if args.vllm else None
    if vllm:
        vllm.publish(model, 1)
    for kind in ("groups", "mixed"):
        rows = build_rows(kind)
        runs: dict[str, Callable[[], int]] = {
            "generate (merged weights)": lambda rows=rows: run_generate(merged, rows),
            "torch, 1 adapter": lambda rows=rows: run_engine(engine, rows, ["generator"]),
            "torch, 2 adapters": lambda rows=rows: run_engine(engine, rows, ["generator", "aggregator"]),
        }
        if vllm:
            runs["vllm, 2 adapters"] = lambda rows=rows: run_engine(vllm, rows, ["generator", "aggregator"])
        speeds = {name: [] for name in runs}
        for _ in range(args.repeats):
            for name, run in runs.items():
                speeds[name].append(speed(run))
        base = speeds["generate (merged weights)"]
        for name, values in speeds.items():
            ratios = [value / reference for value, reference in zip(values, base, strict=True)]
            print(
                f"{kind:7s} {name:26s} {statistics.median(values):8.0f} tok/cpu-s   "
                f"x{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}, n={len(ratios)})",
                flush=True,
            )


if __name__ == "__main__":
    main()
