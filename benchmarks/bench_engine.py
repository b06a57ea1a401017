"""Compare the rollout engine with vLLM and HF `generate` on the same prompts, in CPU-seconds of one thread per token.

    OMP_NUM_THREADS=1 python benchmarks/bench_engine.py [--scale smollm2] [--model FOLDER] [--pairs 5] [--out results/bench/engine.json]

Two kinds of requests, with samples at temperature 1 of at most 64 tokens (`--tokens`):

- `groups`: 16 problems (`--problems`), each sampled 8 times.
- `turns`: the same problems, each with 4 conversations of three turns; the prompt of a turn is the conversation so far. Every engine continues
  the replies that it has sampled itself.

Every engine samples from the base (`base`) and from one LoRA adapter of rank 16 on all linear layers (`adapter`), which is merged for
`generate`. `defaults` is our engine without a choice of kernels (`multirole_cpu.kernels`). The scale tiny-r is measured in float32, in which it is
trained; any other model in bfloat16, in which our engine computes where the processor multiplies it, and else in float32. vLLM is the CPU build, compiled,
with its prefix cache; ours has one for models of at least ten million parameters. The engines for the base share one process and run
in turn, and so do those for the adapter. A ratio above 1 means that ours needs less time. Tokens are counted up to and including the end
of a reply. With `--out`, results of other processors in the file are kept, and the table of docs/speed.md is written.
"""

import argparse
import json
import os

os.environ |= {
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import alone, base_of, markdown, processor, randomize_adapters, run_requests, spread, write
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from multirole.engines.protocol import Engine, Request
from multirole_cpu.engine import TransformersEngine
from multirole_cpu.kernels import BFLOAT16, FLOAT32, use

N_PROBLEMS, N_TOKENS = 16, 64
RIVALS = ["vllm", "generate", "defaults"]
Prompts = list[list[int]]
Player = Callable[[Prompts, int], list[list[int]]]
"""(prompts, seed) -> replies."""
Rows = list[tuple[list[int], int]]
"""(prompt ids, max_tokens) of each row."""


# ---- engines


def run_generate(model: PeftModel, rows: Rows, eos: int, pad: int) -> int:
    """Run one left-padded `generate` call on all rows; return the number of tokens up to each row's cap or end-of-turn."""
    caps = [cap for _, cap in rows]
    return sum(len(reply[:cap]) for reply, cap in zip(generate(model, rows, eos, pad), caps, strict=True))


def generate(model: PeftModel, rows: Rows, eos: int, pad: int) -> list[list[int]]:
    """Return the replies of one left-padded `generate` call, up to and including the end-of-turn."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids, _ in rows])  # (N, T)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in rows])  # (N, T)
    settings = GenerationConfig(
        max_new_tokens=max(cap for _, cap in rows), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    with torch.inference_mode():
        out = model.generate(input_ids=tokens, attention_mask=mask, generation_config=settings)[:, longest:]
    return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in out.tolist()]


def run_engine(engine: Engine, rows: Rows, adapters: list[str | None]) -> int:
    """Run all rows at once, with adapters alternating by row; return the number of completion tokens."""
    requests = [
        Request(ids, adapters[key % len(adapters)], seed=key, max_tokens=cap, temperature=1.0)
        for key, (ids, cap) in enumerate(rows)
    ]
    return sum(len(done.token_ids) for done in run_requests(engine, requests))


def our_player(engine: Engine, adapter: str | None, n_tokens: int) -> Player:
    def replies(prompts: Prompts, seed: int) -> list[list[int]]:
        requests = [Request(ids, adapter, seed * 10_000 + i, n_tokens, 1.0) for i, ids in enumerate(prompts)]
        return [done.token_ids for done in run_requests(engine, requests)]

    return replies


def vllm_player(folder: str, adapter: str | None, dtype: torch.dtype, n_tokens: int) -> Player:
    """Build a player of `vllm.LLM.generate`, without LoRA layers for the base."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1} if adapter else {}
    llm = LLM(
        folder, dtype=str(dtype).removeprefix("torch."), max_model_len=1024, max_num_seqs=128, enable_prefix_caching=True,
        disable_log_stats=True, gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 28, logprobs_mode="processed_logprobs", **lora,
    )  # fmt: skip
    request = LoRARequest("adapter", 1, adapter) if adapter else None
    settings = SamplingParams(temperature=1.0, max_tokens=n_tokens, logprobs=0, detokenize=False)

    def replies(prompts: Prompts, seed: int) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False, lora_request=request
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return replies


def players(folder: str, dtype: torch.dtype, served: str, rivals: list[str], n_tokens: int) -> dict[str, Player]:
    """Return engine -> player of the base or of the adapter. The merge for `generate` is not timed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, adapter_name="adapter")
    torch.manual_seed(0)  # of `generate`
    randomize_adapters(model, 0.002, seed=0)
    engine = TransformersEngine(eos)
    engine.publish(model, 1)
    saved = Path(tempfile.mkdtemp())
    model.save_pretrained(saved)
    is_base = served == "base"
    adapter = None if is_base else "adapter"
    players_by_name = {"ours": our_player(engine, adapter, n_tokens)}
    if "defaults" in rivals:
        use(base, BFLOAT16 if engine.kernels.dtype == "bfloat16" else FLOAT32)
        plain_engine = TransformersEngine(eos)
        plain_engine.publish(model, 1)
        players_by_name["defaults"] = our_player(plain_engine, adapter, n_tokens)
    if "vllm" in rivals:
        players_by_name["vllm"] = vllm_player(folder, None if is_base else str(saved / "adapter"), dtype, n_tokens)
    if "generate" in rivals:
        plain = (model.unload() if is_base else model.merge_and_unload()).eval()
        players_by_name["generate"] = lambda prompts, seed: generate(
            plain, [(ids, n_tokens) for ids in prompts], eos, pad
        )
    return players_by_name


# ---- requests


def sums(tokenizer: PreTrainedTokenizerBase, n: int) -> Prompts:
    """Return chat prompts of `n` sums of three numbers below 100."""
    rng = random.Random(0)
    questions = [" + ".join(str(rng.randint(1, 99)) for _ in range(3)) for _ in range(n)]
    intro = "Solve the problem. Think briefly, then write the final answer in \\boxed{}.\n\n"
    return [chat(tokenizer, [f"{intro}What is {terms}?"]) for terms in questions]


def chat(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[int]:
    messages = [{"role": "user", "content": text} for text in texts]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def play_groups(player: Player, prompts: Prompts, follow_up: list[int], seed: int) -> int:
    """Count the tokens of 8 replies to each prompt."""
    return sum(map(len, player([ids for ids in prompts for _ in range(8)], seed)))


def play_turns(player: Player, prompts: Prompts, follow_up: list[int], seed: int) -> int:
    """Count the tokens of three replies in each of 4 conversations per prompt; `more` is between a reply and the next."""
    conversations, n_tokens = [ids for ids in prompts for _ in range(4)], 0
    for turn in range(3):
        replies = player(conversations, 3 * seed + turn)
        n_tokens += sum(map(len, replies))
        conversations = [ids + reply + follow_up for ids, reply in zip(conversations, replies, strict=True)]
    return n_tokens


REQUESTS = {"groups": play_groups, "turns": play_turns}


# ---- pairs


def measure(
    players: dict[str, Player], folder: str, n_pairs: int, n_problems: int
) -> dict[str, dict[str, list[float]]]:
    """Return kind of requests -> engine -> tokens per CPU-second of each repeat; engines alternate, after one warm-up."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = sums(tokenizer, n_problems)
    follow_up = chat(tokenizer, ["Check your answer, and write it again."])
    speeds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in players} for kind in REQUESTS}
    for repeat in range(n_pairs + 1):
        for kind, ask in REQUESTS.items():
            for name, player in players.items():
                started = time.process_time()
                n_tokens = ask(player, prompts, follow_up, 1 + repeat)
                if repeat:
                    speeds[kind][name].append(n_tokens / (time.process_time() - started))
    return speeds


def summary(speeds: dict[str, dict[str, list[float]]]) -> dict[str, dict]:
    """Return rival and work -> spread of ratios, with the median speeds."""
    ratios_by_work = {}
    for work, by_who in speeds.items():
        for rival in by_who.keys() - {"ours"}:
            ratios = [ours / rival_speed for ours, rival_speed in zip(by_who["ours"], by_who[rival], strict=True)]
            medians = {"ours": statistics.median(by_who["ours"]), "theirs": statistics.median(by_who[rival])}
            ratios_by_work[f"{rival}, {work}"] = spread(ratios) | {
                "pairs": len(ratios),
                "tokens per CPU-second": medians,
            }
    return dict(sorted(ratios_by_work.items()))


def table(result: dict[str, dict]) -> str:
    """Return the table in docs/speed.md."""
    rows = []
    for machine, models in result.items():
        for model, ratios in models.items():
            for name, value in ratios.items():
                rival, work = name.split(", ", 1)
                sizes = value.get("problems", N_PROBLEMS), value.get("tokens", N_TOKENS)
                if sizes != (N_PROBLEMS, N_TOKENS):
                    work += f" ({sizes[0]} problems, {sizes[1]} tokens)"
                numbers = [f"{value[k]:.2f}" for k in ("median", "min", "max")]
                rows.append([machine, model, rival, work, *numbers, value["pairs"]])
    return markdown("processor | model | against | requests, served | median | from | to | pairs", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="tiny-r")
    parser.add_argument("--model", type=Path, help="a folder with another base than the scale's, sampled in bfloat16")
    parser.add_argument("--served", nargs="*", default=["base", "adapter"], choices=["base", "adapter"])
    parser.add_argument("--rivals", nargs="*", default=RIVALS, choices=RIVALS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--problems", type=int, default=N_PROBLEMS)
    parser.add_argument("--tokens", type=int, default=N_TOKENS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.model or base_of(args.scale)
    is_miniature = args.model is None and args.scale == "tiny-r"
    name, dtype = folder.name if args.model else args.scale, torch.float32 if is_miniature else torch.bfloat16
    if args.measure:
        torch.set_num_threads(1)
        engines = players(str(folder), dtype, *args.served, args.rivals, args.tokens)
        print(json.dumps(measure(engines, str(folder), args.pairs, args.problems)))
        return
    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    model = result.setdefault(processor(), {}).setdefault(f"{name}, {str(dtype).removeprefix('torch.')}", {})
    for served in args.served:
        options = [
            "--measure",
            *(("--model", str(folder)) if args.model else ("--scale", args.scale)),
            "--served",
            served,
            *("--pairs", str(args.pairs), "--problems", str(args.problems), "--tokens", str(args.tokens)),
        ]
        speeds = alone(str(Path(__file__).resolve()), *options, "--rivals", *args.rivals)
        ratios = summary({f"{kind}, {served}": by_who for kind, by_who in speeds.items()})
        sizes = {"problems": args.problems, "tokens": args.tokens}
        model.update({name: ratio | sizes for name, ratio in ratios.items()})
    print(table(result))
    write("bench_engine", args.out, result, table(result))


if __name__ == "__main__":
    main()
