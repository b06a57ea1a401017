"""Time a training pass and a decoding step of small Llamas with one and two torch threads, for the numbers in `update/threads.py`.

    python benchmarks/bench_threads.py

Prints wall and CPU time of the fastest of four repetitions, and the load of the machine, on which they depend: run it idle and busy.
"""

import os
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = ((96, 4, 600), (192, 6, 600), (384, 8, 49_152), (576, 30, 49_152))
"""Hidden size, layers and vocabulary; the last is SmolLM2-135M's."""
REPEATS, DECODING_STEPS = 4, 8


def build(hidden: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64 or 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 8 // 3,
                                        num_hidden_layers=layers, **heads))  # fmt: skip


def fastest(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU milliseconds of the repetition with the smallest wall time."""
    times = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        times.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    return min(times)


def main() -> None:
    for shape in SHAPES:
        model = build(*shape)
        ids, last = torch.randint(0, 600, (16, 128)), torch.randint(0, 600, (32, 1))

        @torch.no_grad()
        def decode(model: LlamaForCausalLM = model, last: torch.Tensor = last) -> None:
            for _ in range(DECODING_STEPS):
                model.model(last)

        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            update = fastest(lambda model=model, ids=ids: model.model(ids).last_hidden_state.mean().backward())
            wall, cpu = (value / DECODING_STEPS for value in fastest(decode))
            print(
                f"{sum(p.numel() for p in model.parameters()) / 1e6:6.1f}M parameters, {n_threads} threads, load {os.getloadavg()[0]:4.1f}: "
                f"forward and backward of 2048 tokens {update[0]:.0f} ms (CPU {update[1]:.0f}), decoding 32 rows {wall:.1f} ms (CPU {cpu:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
