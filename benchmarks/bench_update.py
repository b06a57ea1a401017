"""Compare the update on a pretrained model with that of another commit and of stock TRL, on the same rows.

    python benchmarks/bench_update.py OTHER --model FOLDER [--pairs 2] [--out results/bench/update.json]

OTHER is a checkout of another commit. An iteration of each workflow is rolled out once by this checkout (4 problems of
multiplication, 8 episodes each, replies of at most 48 tokens) and stored. A pair is two processes with one thread, one of each
checkout, that run one update on these rows with an adapter whose B is not zero; `--pairs` of them alternate. Stock TRL's `GRPOTrainer`
computes loss and gradient of the single agent's rows, padded by TRL, in bfloat16, for each number of rows in `STOCK_ROWS` per micro-batch.

Times are CPU-seconds of the process. `tokens` counts the tokens of all rows, `unique` counts shared prefixes once, and
`floor` is the time of the unique tokens' arithmetic at the speed of this processor's matrix products, measured in the same run: a
forward pass for all, a backward pass for those with an advantage, and the head for completion tokens.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from measuring import alone, shown, spread, write

HERE = Path(__file__).resolve().parents[1]
WORKFLOWS = ["single", "voting", "eval_opt"]
STOCK_ROWS = [4, 8, 16, 32]
N_PROBLEMS, N_EPISODES, N_TOKENS = 4, 8, 48
MICRO_BATCH_TOKENS = 4096


def options(folder: str, **changes: object) -> dict:
    """Return the configuration options of both trainers."""
    return {
        "output_dir": folder, "num_generations": N_EPISODES, "max_completion_length": N_TOKENS, "temperature": 0.7,
        "learning_rate": 2e-4, "use_cpu": True, "report_to": "none", "max_steps": 10, "gradient_checkpointing": False,
    } | changes  # fmt: skip


def make_trainer(workflow: str, model: str, folder: str, bf16: bool):
    """Build a trainer of either checkout."""
    from datasets import Dataset
    from peft import LoraConfig

    from multirole import EvalOpt, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single, Voting

    def right(completions: list, reference: list, **_: object) -> list[float]:
        return [
            1.0 if f"boxed{{{r}}}" in t else 0.5 if r in t else 0.0 for t, r in zip(completions, reference, strict=True)
        ]

    numbers = random.Random(0)
    pairs = [(numbers.randint(1, 99), numbers.randint(2, 9)) for _ in range(16)]
    rows = [{"prompt": f"Calculate {a} * {b}.", "task": "math", "reference": str(a * b)} for a, b in pairs]
    args = MultiRoleGRPOConfig(
        **options(
            folder, generation_batch_size=N_PROBLEMS * N_EPISODES, bf16=bf16, updates="one", max_prompt_tokens=4096,
            micro_batch_tokens=MICRO_BATCH_TOKENS, engine="transformers",
        )
    )  # fmt: skip
    kinds = {"single": Single, "voting": Voting, "eval_opt": EvalOpt}
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    trainer = MultiRoleGRPOTrainer(model, kinds[workflow](), right, args, Dataset.from_list(rows), peft_config=lora)
    trainer.create_optimizer_and_scheduler(10)
    trainer.model.train()
    return trainer


def record(workflow: str, model: str, path: str) -> dict:
    """Roll out an iteration and store its turns."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workflow, model, folder, bf16=False)
        started = time.process_time()
        inputs = [trainer.rows[i] for i in range(N_PROBLEMS) for _ in range(N_EPISODES)]
        episodes = trainer._generate_and_score_completions(inputs)
        seconds = time.process_time() - started
    turns = [
        {"problem": e.problem.id, "index": e.index, "reward": e.reward.value, "advantage": e.advantage}
        | {"turns": [vars(turn) for turn in e.turns]}
        for e in episodes
    ]
    Path(path).write_text(json.dumps(turns))
    return {"rollout": seconds}


def read_episodes(path: str) -> list:
    """Read the episodes that `record` has stored."""
    from multirole.core.types import Answer, Episode, Problem, Reward, Turn

    def turn_of(values: dict) -> Turn:
        return Turn(
            **{name: value for name, value in values.items() if name in Turn.__dataclass_fields__}
        )  # as of then

    return [
        Episode(
            Problem(e["problem"], "math", "", None), e["index"], [turn_of(turn) for turn in e["turns"]], Answer(""),
            Reward(e["reward"]), e["advantage"],
        )
        for e in json.loads(Path(path).read_text())
    ]  # fmt: skip


def perturb(model) -> None:
    """Set every adapter's B to random values, so that it has an effect."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.01 * torch.randn(parameter.shape, generator=generator)


def update(workflow: str, model: str, path: str, bf16: bool) -> dict:
    """Time one update on stored rows, in CPU-seconds; runs in either checkout."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workflow, model, folder, bf16)
        perturb(trainer.peft_model)
        rows = trainer.prepare_rows(read_episodes(path))
        started = time.process_time()
        steps, _ = trainer.update(trainer.model, rows)
        return {"update": time.process_time() - started, "norm": steps[0].grad_norm}


def stock(model: str, path: str, n_rows: int) -> dict:
    """Time stock TRL's loss, gradient and optimizer step on the stored rows, in CPU-seconds."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from multirole.core.rows import Row, collate

    with tempfile.TemporaryDirectory() as folder:
        lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
        peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora)
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        args = GRPOConfig(
            **options(folder, per_device_train_batch_size=N_PROBLEMS * N_EPISODES, bf16=True, loss_type="grpo")
        )
        dataset = Dataset.from_dict({"prompt": ["a"]})
        trainer = GRPOTrainer(
            model=peft_model, reward_funcs=lambda **_: [0.0], args=args, processing_class=tokenizer, train_dataset=dataset
        )  # fmt: skip
        trainer.create_optimizer()
        perturb(trainer.model)
        rows = [Row(e, turn, "", e.advantage) for e in read_episodes(path) for turn in e.turns]
        whole = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = len(rows) // n_rows
        started = time.process_time()
        for start in range(0, len(rows), n_rows):
            part = {name: tensor[start : start + n_rows] for name, tensor in whole.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, part)
            trainer.accelerator.backward(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0))
        trainer.optimizer.step()
        return {"update": time.process_time() - started, "norm": norm}


def floor(model: str, path: str) -> dict:
    """Count tokens, and time their matrix products."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from multirole.core.prefix_tree import block_lengths, in_tree_order
    from multirole.core.rows import Row

    rows = [Row(e, turn, "", e.advantage) for e in read_episodes(path) for turn in e.turns]

    def unique(some: list) -> int:
        return sum(block_lengths(in_tree_order(some, lambda _: 0), lambda _: 0))

    def completions(some: list) -> int:
        return sum(len(row.turn.completion_ids) for row in some)

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model)
        base = AutoModelForCausalLM.from_config(config)
    body = sum(p.numel() for name, p in base.model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = config.vocab_size * config.hidden_size
    live = [row for row in rows if row.advantage]
    flop = 2 * (body * (unique(rows) + unique(live)) + head * (completions(rows) + 2 * completions(live)))
    x, w = torch.randn(2048, 576).bfloat16(), torch.randn(1536, 576).bfloat16()
    best = min(timed(lambda: torch.nn.functional.linear(x, w)) for _ in range(50))
    return {
        "rows": len(rows), "tokens": sum(row.length for row in rows), "unique": unique(rows), "completion": completions(rows),
        "live_rows": len(live), "tflop": flop / 1e12, "floor": flop / (2 * 2048 * 576 * 1536 / best),
    }  # fmt: skip


def timed(work) -> float:
    """Return the CPU-seconds of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def table(result: dict) -> str:
    """Return the rows of the page's table."""
    lines = [
        "| workflow | rows | tokens, unique | floor, s | this, s | commit before, s | ratio | float32: ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workflow, measured in result["workflows"].items():
        counted = measured["floor"]
        lines.append(
            f"| {workflow} | {counted['rows']} | {counted['tokens']:,}, {counted['unique']:,} | {counted['floor']:.1f} | "
            f"{measured['this']['median']:.1f} | {measured['other']['median']:.1f} | {shown(measured['ratio'])} | {shown(measured['ratio_float32'])} |"
        )
    if trl := result.get("stock"):
        lines += [
            "",
            f"Stock TRL, single agent, bfloat16, over this: {shown(trl['ratio'])} (rows per micro-batch: {trl['rows']}).",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--workflows", nargs="+", default=WORKFLOWS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_name, *rest = args.one
        work = {"record": record, "update": update, "stock": stock, "floor": floor}[measure_name]
        values = {"update": lambda w, m, p, b: (w, m, p, b == "1"), "stock": lambda m, p, n: (m, p, int(n))}
        print(json.dumps(work(*values.get(measure_name, lambda *arguments: arguments)(*rest))))
        return
    result: dict = {"pairs": args.pairs, "workflows": {}}
    common = [str(args.other), "--model", args.model, "--one"]
    with tempfile.TemporaryDirectory() as folder:
        for workflow in args.workflows:
            path = f"{folder}/{workflow}.json"
            rollout = alone(__file__, *common, "record", workflow, args.model, path)
            runs = [
                [
                    alone(__file__, *common, "update", workflow, args.model, path, bf16, checkout=checkout)["update"]
                    for checkout, bf16 in ((args.other, "0"), (HERE, "0"), (HERE, "1"))
                ]
                for _ in range(args.pairs)
            ]
            result["workflows"][workflow] = {
                "floor": alone(__file__, *common, "floor", args.model, path), "rollout_float32": rollout["rollout"],
                "other": spread([run[0] for run in runs]), "this": spread([run[2] for run in runs]),
                "ratio": spread([run[0] / run[2] for run in runs]),
                "ratio_float32": spread([run[0] / run[1] for run in runs]),
            }  # fmt: skip
            print(workflow, json.dumps(result["workflows"][workflow]), flush=True)
            if workflow == "single":
                by_rows = {n: alone(__file__, *common, "stock", args.model, path, str(n))["update"] for n in STOCK_ROWS}
                best = min(by_rows, key=by_rows.get)
                ratios = [
                    alone(__file__, *common, "stock", args.model, path, str(best))["update"] / run[2] for run in runs
                ]
                result["stock"] = {"rows": best, "seconds": by_rows, "ratio": spread(ratios)}
                print("stock", json.dumps(result["stock"]), flush=True)
    write("bench_update", args.out, result, table(result), "speed_update")


if __name__ == "__main__":
    main()
