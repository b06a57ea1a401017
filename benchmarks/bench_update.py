"""Compare iterations on a pretrained model with those of another commit and of stock TRL, and their updates on the same rows.

    python benchmarks/bench_update.py OTHER --scale smollm2 [--pairs 2] [--out results/bench/update.json]

`--model FOLDER` takes another base than a scale's. OTHER is a checkout of another commit. An iteration of each workflow is rolled out once by this checkout (4 problems of
multiplication, 8 episodes each, replies of at most 48 tokens) and stored. A pair is two processes with one thread, one of each
checkout, that roll out the same problems and then run one update on the stored rows, with an adapter whose B is not zero. This checkout
computes in bfloat16, the other one in float32, or with `--other-dtype bfloat16` in bfloat16, too. Stock TRL's
`GRPOTrainer` does the same with the single agent's prompts and rows, in bfloat16, for each base and number of rows per micro-batch in `STOCK`.
The fastest of them is also measured with its head mended: `generate` passes the head a slice of the prompts' last positions, which is not contiguous,
and torch expands a frozen head for each row of such an input; with a copy of the slice it does not.

Times are CPU-seconds of the process, the start of the engine included. An iteration is the update and the rollout, whose time is
scaled to the number of tokens of the stored rows, since replies are sampled anew. `tokens` counts the tokens of all rows, `unique` counts
shared prefixes once, and `floor` is the time of the unique tokens' arithmetic in an update at the speed of this processor's matrix products,
measured in the same run: a forward pass for all, a backward pass for those with an advantage, and the head for completion tokens.

With --out, pairs are added to those of the same processor, model and other commit in the file; all other results are kept. Rows are read from
--rows, where they are stored.
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from measuring import (
    ROOT,
    alone,
    base_of,
    processor,
    randomize_adapters,
    rest,
    seconds_of,
    shown,
    spread,
    training_rows,
    write,
)

WORKFLOWS = ["single", "voting", "eval_opt"]
STOCK = [("float32", 16), ("float32", 32), ("bfloat16", 16), ("bfloat16", 32)]
"""(dtype of the base, rows per micro-batch)."""
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
            micro_batch_tokens=MICRO_BATCH_TOKENS, engine="transformers", model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32"},
        )
    )  # fmt: skip
    kinds = {"single": Single, "voting": Voting, "eval_opt": EvalOpt}
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    trainer = MultiRoleGRPOTrainer(model, kinds[workflow](), right, args, Dataset.from_list(rows), peft_config=lora)
    trainer.create_optimizer_and_scheduler(10)
    trainer.model.train()
    return trainer


def roll_out(trainer) -> tuple[list, float, int]:
    """Roll out an iteration; return its episodes, CPU-seconds and number of sampled tokens."""
    rows = training_rows(trainer)
    inputs = [rows[i] for i in range(N_PROBLEMS) for _ in range(N_EPISODES)]
    started = time.process_time()
    episodes = trainer._generate_and_score_completions(inputs)
    seconds = time.process_time() - started
    rest(trainer)
    return episodes, seconds, sum(len(turn.completion_ids) for episode in episodes for turn in episode.turns)


def record(workflow: str, model: str, path: str) -> dict:
    """Roll out an iteration and store its turns."""
    with tempfile.TemporaryDirectory() as folder:
        episodes, seconds, _ = roll_out(make_trainer(workflow, model, folder, bf16=True))
    turns = [
        {"problem": e.problem.id, "index": e.index, "reward": e.reward.value, "advantage": e.advantage}
        | {"turns": [vars(turn) for turn in e.turns]}
        for e in episodes
    ]
    Path(path).write_text(json.dumps(turns))
    return {"rollout": seconds}


def read_episodes(path: str) -> list:
    """Read the episodes that `record` has stored."""
    from multirole import Answer, Episode, Problem, Reward, Turn

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
    """Set every adapter's B to the random values of these measurements."""
    randomize_adapters(model, 0.01, seed=1)


def update(workflow: str, model: str, path: str, bf16: bool) -> dict:
    """Time a rollout, and one update on stored rows, in CPU-seconds; runs in either checkout."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workflow, model, folder, bf16)
        _, seconds, n_tokens = roll_out(trainer)
        perturb(trainer.peft_model)
        rows = trainer.prepare_rows(read_episodes(path))
        started = time.process_time()
        steps, _ = trainer.update(trainer.model, rows)
        return {
            "update": time.process_time() - started, "rollout": seconds, "sampled": n_tokens, "norm": steps[0].grad_norm
        }  # fmt: skip


SHARES = {
    "products of the layers": ("aten::mm", "aten::addmm"),
    "products and softmax of attention": ("aten::bmm", "aten::_softmax", "aten::_softmax_backward_data"),
    "gathering and scattering of packed rows": ("aten::index_select", "aten::scatter_add_"),
    "SiLU": ("aten::silu", "aten::silu_backward"),
    "copies, casts and concatenations": ("aten::copy_", "aten::cat", "aten::fill_"),
}
"""Part of an update -> its torch operators; all other operators are norms, RoPE, elementwise products and Python."""
HEAD = "head, softmax over the vocabulary included"
"""The part of all operators inside of `VocabularyHead`."""


def rollout_profile(workflow: str, model: str) -> dict:
    """Return each part's share of the engine's CPU time in one rollout of this checkout; nested calls count for their part."""
    from multirole_cpu import engine as transformers_engine
    from multirole_cpu import kv_cache, packed_products, qwen3, sampling_head

    engine = transformers_engine.TransformersEngine
    parts: list[tuple[str, object, str]] = [
        ("prompts", engine, "_prefill_spans"), ("decoding, products with the base", packed_products, "product"),
        ("decoding, products with adapters", qwen3, "_low_rank"), ("decoding, attention", kv_cache.Pool, "attend"),
        *(("decoding, head", kind, "logits") for kind in sampling_head.SAMPLING_HEADS.values()),
        ("decoding, sampling", transformers_engine, "sample"),
    ]  # fmt: skip
    seconds, active = dict.fromkeys([*(name for name, *_ in parts), "all"], 0.0), [""]

    def timed_part(name: str, function: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            if active[0]:
                return function(*args, **named)
            started, active[0] = time.thread_time(), name if name != "all" else ""
            try:
                return function(*args, **named)
            finally:
                seconds[name] += time.thread_time() - started
                active[0] = ""

        return call

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name, owner, attribute in [*parts, ("all", engine, "step")]:
            stack.enter_context(patch.object(owner, attribute, timed_part(name, getattr(owner, attribute))))
        roll_out(make_trainer(workflow, model, folder, bf16=True))
    total = seconds.pop("all")
    shares = {name: value / total for name, value in seconds.items()}
    return shares | {"decoding, norms, RoPE, SiLU, Python": 1 - sum(shares.values())}


def profile(workflow: str, model: str, path: str) -> dict:
    """Return each part's share of the wall time that torch's operators take in one update of this checkout."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record_operators

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workflow, model, folder, bf16=True)
        perturb(trainer.peft_model)
        rows = trainer.prepare_rows(read_episodes(path))
        with record_operators(activities=[ProfilerActivity.CPU]) as recorded:
            trainer.update(trainer.model, rows)
    part_of = {name: part for part, names in SHARES.items() for name in names}
    rest_of_update = "norms, RoPE, products of elements and all else"
    seconds = dict.fromkeys([*SHARES, HEAD, rest_of_update], 0.0)
    for event in recorded.events():
        ancestor = event
        while ancestor.cpu_parent is not None and ancestor.name != "VocabularyHead":
            ancestor = ancestor.cpu_parent
        part = HEAD if ancestor.name == "VocabularyHead" else part_of.get(event.name, rest_of_update)
        seconds[part] += event.self_cpu_time_total
    return {part: value / sum(seconds.values()) for part, value in seconds.items()}


def stock(model: str, path: str, dtype: str, n_rows: str, head: str = "as it is") -> dict:
    """Time stock TRL's generation, and its loss, gradient and optimizer step on the stored rows, in CPU-seconds; `head` may be "mended"."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from multirole.update.rows import Row, collate

    with tempfile.TemporaryDirectory() as folder:
        lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
        peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)), lora)
        if head == "mended":
            peft_model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        args = GRPOConfig(
            **options(folder, per_device_train_batch_size=N_PROBLEMS * N_EPISODES, bf16=True, loss_type="grpo")
        )
        rows = [Row(e, turn, "", e.advantage) for e in read_episodes(path) for turn in e.turns]
        prompts = [{"prompt": tokenizer.decode(row.turn.prompt_ids)} for row in rows]
        trainer = GRPOTrainer(
            model=peft_model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
            processing_class=tokenizer, train_dataset=Dataset.from_list(prompts),
        )  # fmt: skip
        trainer.create_optimizer()
        trainer.model.train()
        started = time.process_time()
        sampled = trainer._generate_and_score_completions(prompts)
        seconds = time.process_time() - started
        perturb(trainer.model)
        whole = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
        size = int(n_rows)
        trainer.current_gradient_accumulation_steps = len(rows) // size
        started = time.process_time()
        for start in range(0, len(rows), size):
            part = {name: tensor[start : start + size] for name, tensor in whole.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, part)
            trainer.accelerator.backward(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0))
        trainer.optimizer.step()
        return {
            "update": time.process_time() - started, "rollout": seconds, "sampled": int(sampled["completion_mask"].sum()), "norm": norm
        }  # fmt: skip


def floor(model: str, path: str) -> dict:
    """Count tokens, and time their matrix products."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from multirole.update.passes.prefix_tree import block_lengths, in_tree_order
    from multirole.update.rows import Row

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
    best = min(seconds_of(lambda: torch.nn.functional.linear(x, w)) for _ in range(50))
    return {
        "rows": len(rows), "tokens": sum(row.length for row in rows), "unique": unique(rows), "completion": completions(rows),
        "live_rows": len(live), "tflop": flop / 1e12, "floor": flop / (2 * 2048 * 576 * 1536 / best),
    }  # fmt: skip


def iteration(run: dict, n_tokens: int) -> float:
    """Return the CPU-seconds of a run's update and of its rollout, scaled to `n_tokens` sampled tokens."""
    return run["update"] + run["rollout"] * n_tokens / run["sampled"]


def ratios(pairs: list[dict], against: str, n_tokens: int) -> dict[str, dict[str, float]]:
    """Return the spreads of the ratios of updates, of rollouts per token, and of iterations: `against` over this checkout."""
    measures = {
        "update": lambda run: run["update"], "rollout": lambda run: run["rollout"] / run["sampled"],
        "iteration": lambda run: iteration(run, n_tokens),
    }  # fmt: skip
    return {
        name: spread([value(pair[against]) / value(pair["this"]) for pair in pairs]) for name, value in measures.items()
    }


def table(result: dict[str, dict]) -> str:
    """Return the page's tables, those of each processor and model under their names."""
    return "\n\n".join(f"**{machine}**\n\n{table_of(measured)}" for machine, measured in result.items())


def table_of(result: dict) -> str:
    """Return the tables of one processor and model."""
    lines = [
        "| workflow, against | rows | tokens, unique | update: floor, s | update: this, s | iteration: this, s | update | rollout, per token | iteration | pairs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workflow, measured in result["workflows"].items():
        counted = measured["floor"]
        n_tokens = counted["completion"]
        for against, name in (
            ("other", result["other"]),
            ("stock", "stock TRL"),
            ("mended", "stock TRL with its head mended"),
        ):
            pairs = [pair for pair in measured["pairs"] if against in pair]
            if not pairs:
                continue
            this = [pair["this"] for pair in pairs]
            seconds = [
                statistics.median(run["update"] for run in this),
                statistics.median(iteration(run, n_tokens) for run in this),
            ]
            if against != "other":
                name += f" ({measured['best_stock'][0]} base, {measured['best_stock'][1]} rows)"
            spans = " | ".join(shown(value) for value in ratios(pairs, against, n_tokens).values())
            lines.append(
                f"| {workflow}, {name} | {counted['rows']} | {counted['tokens']:,}, {counted['unique']:,} | {counted['floor']:.1f} | "
                f"{seconds[0]:.1f} | {seconds[1]:.1f} | {spans} | {len(pairs)} |"
            )
    for key, phase in (("profile", "update"), ("rollout_profile", "rollout")):
        profiles = {name: measured[key] for name, measured in result["workflows"].items() if key in measured}
        if profiles:
            lines += ["", f"| share of the {phase}'s time | {' | '.join(profiles)} |", "| --- |" + " --- |" * len(profiles)]  # fmt: skip
            for part in next(iter(profiles.values())):
                lines.append(f"| {part} | {' | '.join(f'{shares[part]:.0%}' for shares in profiles.values())} |")
    return "\n".join(lines)


def commit_of(checkout: Path) -> str:
    """Return the short hash of a checkout's commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--scale", help="a scale whose base is on this machine")
    base.add_argument("--model", help="a folder with a base")
    parser.add_argument("--other-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--workflows", nargs="+", default=WORKFLOWS)
    parser.add_argument("--rows", type=Path, help="a folder in which the rows are stored, or have been")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_name, *rest = args.one
        measures = (record, update, stock, floor, profile, rollout_profile)
        work = {measure.__name__: measure for measure in measures}[measure_name]
        if measure_name == "update":
            rest[-1] = rest[-1] == "1"
        print(json.dumps(work(*rest)))
        return
    folder = args.model or str(base_of(args.scale))
    other = f"{commit_of(args.other)}, {args.other_dtype}"
    result: dict = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    place = f"{processor()}, {args.scale or Path(folder).name}"
    of_machine = result.get(place, {})
    if of_machine.get("other") != other:
        of_machine = result[place] = {"other": other, "workflows": {}}
    with tempfile.TemporaryDirectory() as temporary:
        stored = args.rows or Path(temporary)
        stored.mkdir(parents=True, exist_ok=True)
        for workflow in args.workflows:
            path = str(stored / f"{workflow}.json")

            def run(*work: str, checkout: Path = ROOT) -> dict:
                return alone(__file__, str(args.other), "--model", folder, "--one", *work, checkout=checkout)

            if not Path(path).exists():
                run("record", workflow, folder, path)
            measured = of_machine["workflows"].setdefault(workflow, {"floor": run("floor", folder, path), "pairs": []})
            if workflow == "single" and "best_stock" not in measured:
                trials = {setting: run("stock", folder, path, setting[0], str(setting[1])) for setting in STOCK}
                n_tokens = measured["floor"]["completion"]
                measured["best_stock"] = min(trials, key=lambda setting: iteration(trials[setting], n_tokens))
                measured["stock_trials"] = [[*setting, values] for setting, values in trials.items()]
            measured["profile"] = run("profile", workflow, folder, path)
            measured["rollout_profile"] = run("rollout_profile", workflow, folder)
            if args.out:
                write("bench_update", args.out, result, table(result), "speed_update")
            for _ in range(args.pairs):
                pair = {
                    "other": run(
                        "update", workflow, folder, path, str(int(args.other_dtype == "bfloat16")), checkout=args.other
                    ),
                    "this": run("update", workflow, folder, path, "1"),
                    "commit": commit_of(ROOT),
                }
                if workflow == "single":
                    best = list(map(str, measured["best_stock"]))
                    pair["stock"] = run("stock", folder, path, *best)
                    pair["mended"] = run("stock", folder, path, *best, "mended")
                measured["pairs"].append(pair)
                print(workflow, json.dumps(pair), flush=True)
                if args.out:
                    write("bench_update", args.out, result, table(result), "speed_update")
    print(table(result))


if __name__ == "__main__":
    main()
