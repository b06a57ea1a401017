"""One training iteration's cost at the paper's scales, with random weights and made-up tokens: memory and speed.

    python benchmarks/bench_gpu.py --out results/gpu/bench_gpu.json                  # three scales on one GPU
    python benchmarks/bench_gpu.py --rehearse                                        # a toy shape on this CPU, nothing kept

Per scale, on one device:
- `update/ip`, `update/sp`: what follows the rollout in one Voting iteration, diagnostics included, on the same rows (`--problems` x
  8 episodes of three voters and an aggregator, math lengths): peak memory and tokens per second; `ip_over_sp` their times;
- `logprobs/fused`, `logprobs/full`: the log-prob pass through the chunked head and through materialised logits;
- `rollout/transformers`: the transformers engine, 64 rows of one adapter;
- `rollout/vllm`: the same requests through vLLM, where it is installed.
Weights are random, so losses mean nothing; lengths are lognormal with a median of a fifth of the cap.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from multirole.core.engine import Engine, Request
from multirole.core.inputs import add_adapters
from multirole.core.policy import adapter_names
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Answer, Episode, Problem, Reward, Turn
from multirole.engines.transformers_engine import TransformersEngine
from multirole.experiment.cell import Cell
from multirole.experiment.models import locate
from multirole.experiment.presets import MODELS, Shape
from multirole.experiment.run import make_trainer
from multirole.experiment.storage import write_text

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOY = Shape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512)
TOY_LENGTHS = {"max_prompt_tokens": 256, "max_response_tokens": 32, "micro_batch_tokens": 1024}


def random_model(shape: Shape, cell: Cell, seed: int = 0) -> PeftModel:
    """A Qwen3 of this shape with random weights in the cell's dtype, and one adapter per name of its policy."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=True, max_position_embeddings=40960,
    )  # fmt: skip
    with DEVICE:
        base = Qwen3ForCausalLM(config).to(torch.bfloat16 if cell.dtype == "bfloat16" else torch.float32)
    lora = LoraConfig(r=cell.lora_rank, lora_alpha=cell.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return add_adapters(base, lora, adapter_names(cell.policy))


def voting_episodes(cell: Cell, vocab: int, seed: int = 0) -> list[Episode]:
    """Episodes with made-up tokens: three voters on a short prompt, an aggregator that has read all of them."""
    rng = random.Random(seed)

    def reply(cap: int) -> list[int]:
        length = min(cap, max(8, round(rng.lognormvariate(math.log(cap / 5), 0.7))))
        return [rng.randrange(vocab) for _ in range(length)]

    episodes = []
    for i in range(cell.n_problems):
        question = [rng.randrange(vocab) for _ in range(min(200, cell.max_prompt_tokens // 4))]
        for index in range(cell.n_episodes):
            voters = [reply(cell.max_response_tokens) for _ in range(3)]
            read = (question + [token for ids in voters for token in ids])[: cell.max_prompt_tokens]
            turns = [
                Turn("generator", s, 0, question, ids, [-1.0] * len(ids), "", "stop") for s, ids in enumerate(voters)
            ]
            chosen = reply(max(16, cell.max_response_tokens // 4))
            turns.append(Turn("aggregator", 0, 0, read, chosen, [-1.0] * len(chosen), "", "stop"))
            problem = Problem(str(i), cell.task_label, "", None)
            advantage = rng.choice((-1.0, 1.0))
            episodes.append(Episode(problem, index, turns, Answer(""), Reward(0.0, "", False), advantage))
    return episodes


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call, and peak device memory during it in GiB (0 on a CPU)."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0


def trainer_of(cell: Cell, model: PeftModel, folder: str) -> MultiRoleGRPOTrainer:
    """The cell's trainer, ready to take optimizer steps; its engine is never asked."""
    tokenizer = AutoTokenizer.from_pretrained(locate(Cell("voting", "sp")))  # any: tokens here are made up
    problems = [Problem(str(i), cell.task_label, "", None) for i in range(cell.n_problems)]
    trainer = make_trainer(
        cell, folder, problems=(problems, problems[:1]), model=(model, tokenizer), engine=TransformersEngine(eos_id=-1)
    )
    trainer.create_optimizer_and_scheduler(cell.iterations)
    return trainer


def bench_update(cell: Cell, shape: Shape, folder: str) -> dict[str, float]:
    """The rows' log-probs and all optimizer steps of one iteration, after a small one that warms up."""
    trainer = trainer_of(cell, random_model(shape, cell), folder)
    episodes = voting_episodes(cell, shape.vocab)
    trainer.model.train()

    def update(episodes: list[Episode]) -> None:
        trainer.update(trainer.model, trainer.prepare_rows(episodes))

    update(episodes[:2])
    seconds, peak = measured(lambda: update(episodes))
    turns = [turn for episode in episodes for turn in episode.turns]
    trained = sum(len(turn.completion_ids) for turn in turns)
    read = trained + sum(len(turn.prompt_ids) for turn in turns)
    return {"seconds": seconds, "peak_gib": peak, "rows": len(turns), "tokens": read, "completion_tokens": trained,
            "tokens_per_second": read / seconds}  # fmt: skip


@torch.no_grad()
def bench_logprobs(cell: Cell, shape: Shape, folder: str) -> dict[str, dict[str, float]]:
    """Log-probs of a few long rows: TRL's chunked head against logits for every position and every word."""
    trainer = trainer_of(cell, random_model(shape, cell), folder)
    length = cell.max_response_tokens
    ids = torch.randint(shape.vocab, (4, length + 200), device=DEVICE)
    mask = torch.ones_like(ids)

    def full() -> torch.Tensor:
        with trainer.accelerator.autocast():
            logits = trainer.accelerator.unwrap_model(trainer.model)(input_ids=ids).logits[:, -length - 1 : -1]
        return (logits.float() / cell.temperature).log_softmax(-1).gather(2, ids[:, -length:, None])[..., 0]

    def fused() -> torch.Tensor:
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]

    gap = (full() - fused()).abs().max().item()
    both = {name: measured(work) for name, work in (("fused", fused), ("full", full))}
    return {f"logprobs/{name}": {"seconds": s, "peak_gib": peak, "tokens_per_second": ids.numel() / s, "max_gap": gap}
            for name, (s, peak) in both.items()}  # fmt: skip


def bench_engine(engine: Engine, cell: Cell, shape: Shape, model: PeftModel) -> dict[str, float]:
    """64 rows of one adapter, 8 to a prompt, each to its cap: random weights never end a turn by themselves."""
    rng = random.Random(0)
    prompts = [[rng.randrange(shape.vocab) for _ in range(100)] for _ in range(8)]
    cap = min(512, cell.max_response_tokens)
    engine.publish(model, 0)

    def play() -> None:
        for key in range(64):
            engine.add(key, Request(prompts[key // 8], adapter_names(cell.policy)[0], key, cap, cell.temperature))
        left = 64
        while left:
            left -= len(engine.step())

    play()
    seconds, peak = measured(play)
    return {"seconds": seconds, "peak_gib": peak, "tokens_per_second": 64 * cap / seconds, "rows": 64, "tokens": cap}


def bench_scale(scale: str, shape: Shape, n_problems: int, lengths: dict[str, int]) -> dict[str, object]:
    """Everything of one scale; each part frees its model before the next."""
    report: dict[str, object] = {"shape": asdict(shape), "n_problems": n_problems}
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("sp", "ip"):
            cell = Cell("voting", policy, scale=scale, n_problems=n_problems, **lengths)
            report[f"update/{policy}"] = bench_update(cell, shape, folder)
        report["ip_over_sp"] = report["update/ip"]["seconds"] / report["update/sp"]["seconds"]
        report |= bench_logprobs(cell, shape, folder)
        model = random_model(shape, cell)
        torch_engine = TransformersEngine(eos_id=-1, max_length=1024)
        report["rollout/transformers"] = bench_engine(torch_engine, cell, shape, model)
        torch_engine.close()
        if DEVICE.type == "cuda" and find_spec("vllm"):
            from multirole.engines.vllm_engine import VLLMEngine

            model.get_base_model().save_pretrained(folder)
            AutoTokenizer.from_pretrained(locate(Cell("voting", "sp"))).save_pretrained(folder)
            vllm = VLLMEngine(folder, adapter_names(cell.policy), cell.lora_rank, 1024)
            report["rollout/vllm"] = bench_engine(vllm, cell, shape, model)
            vllm.close()
    return report


def main() -> None:
    """Print one line per measurement; `--out` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--problems", type=int, default=8, help="problems per iteration (the paper: 64)")
    parser.add_argument("--rehearse", action="store_true", help="a toy shape, to see that everything runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.rehearse and DEVICE.type == "cpu":
        parser.error("no GPU is visible, and the paper's shapes take hours on a CPU. Write --rehearse for a toy shape.")
    shapes = {name: TOY if args.rehearse else MODELS[name].shape for name in args.scales}
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    report: dict[str, object] = {"device": device, "torch": torch.__version__, "rehearsal": args.rehearse}
    for name, shape in shapes.items():
        lengths = TOY_LENGTHS if args.rehearse else {}
        report[name] = bench_scale(name, shape, 2 if args.rehearse else args.problems, lengths)
        for what, numbers in report[name].items():
            print(name, what, json.dumps(numbers))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.out, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
