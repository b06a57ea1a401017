"""Measure the cost of calls through OpenAI's API: rollouts of Voting, native and as an agent, in interleaved pairs of CPU-seconds.

    python benchmarks/bench_endpoint.py [--model FOLDER] [--pairs 3] [--write]

Both play the same episodes and sample the same tokens (`turn_seeds="prompt"`). Calls stay in memory. `--write` stores the numbers in
results/bench/endpoint.json.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from datasets import Dataset
from measuring import ROOT, TINY, spread
from peft import LoraConfig

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Voting, from_openai
from multirole.workflows.prompts import render
from multirole.workflows.voting import list_candidates, parse_selection


async def vote(question, client):
    async def ask(role, text):
        reply = await client.chat.completions.create(model=role, messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    texts = await asyncio.gather(*(ask("generator", question) for _ in range(3)))
    candidates = render("general", "aggregator", question=question, candidates=list_candidates(texts))
    return texts[parse_selection(await ask("aggregator", candidates), 3)[0]]


def make_trainer(workflow, model: str, folder: str) -> MultiRoleGRPOTrainer:
    rows = Dataset.from_list([{"prompt": f"What is {i} + {i + 3}?"} for i in range(4)])
    args = MultiRoleGRPOConfig(
        folder, policy="sp", turn_seeds="prompt", generation_batch_size=32, num_generations=8, max_steps=1,
        max_completion_length=48, bf16=False, use_cpu=True, report_to="none", gradient_checkpointing=False,
    )  # fmt: skip
    lora = LoraConfig(r=8, target_modules="all-linear")
    return MultiRoleGRPOTrainer(
        model, workflow, lambda completions, **_: [0.0] * len(completions), args, rows, peft_config=lora
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workflows = {
            "native": Voting(prompts="general"),
            "endpoint": from_openai(vote, {"generator": 3, "aggregator": 1}, "voting"),
        }
        trainers = {
            name: make_trainer(workflow, options.model, f"{folder}/{name}") for name, workflow in workflows.items()
        }
        attempts = [(problem, i) for problem in trainers["native"].problems for i in range(8)]
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        texts: dict[str, list[str]] = {}
        for _ in range(options.pairs + 1):  # the first pair warms up
            for name, trainer in trainers.items():
                start = time.process_time()
                episodes = trainer.play(attempts, 0)
                seconds[name].append(time.process_time() - start)
                texts[name] = [turn.text for episode in episodes for turn in episode.turns]
    assert texts["native"] == texts["endpoint"]
    ratios = [after / before for before, after in zip(seconds["native"][1:], seconds["endpoint"][1:], strict=True)]
    result = {
        "model": Path(options.model).name, "calls": len(texts["native"]), "pairs": options.pairs,
        "native_cpu_s": median(seconds["native"][1:]), "endpoint_cpu_s": median(seconds["endpoint"][1:]),
        "ratio": spread(ratios),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.write:
        path = ROOT / "results" / "bench" / "endpoint.json"
        recorded = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(recorded | {result["model"]: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
