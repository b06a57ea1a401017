"""Compare the CPU-seconds of this checkout with those of another one, cell by cell, in interleaved pairs.

    git worktree add /tmp/before 9153f33
    python benchmarks/bench_commits.py /tmp/before [--pairs 5] [--out results/bench/commits_9153f33.json]

Each measurement is a separate process with one thread, on the first problems of a cell of `tiny-r`: `start` until the trainer is built,
`rollout` and `update` of one iteration (the second of two, after the warm-up). It uses only the library's public names, and takes
model, prompts and problems from this checkout, so that both train the same cell. The untrained base has almost no group with equal
rewards, while the grid's runs have many; so the advantages of as many problems are set to 0 as there are such groups in the
committed runs of that cell. Both checkouts train on the same rows: the script checks that the sampled tokens are equal.
It prints, and with `--out` writes, minimum, median and maximum of the ratios other / this.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from measuring import ROOT, TINY, alone, markdown, rest, shown, spread, training_rows, write

CELLS = ["voting sp math", "voting ip math", "eval_opt sp math", "eval_opt ip math", "orch_workers sp math",
         "orch_workers ip math", "single sp math"]  # fmt: skip
PROMPTS = ROOT / "src" / "multirole_study" / "tasks" / "prompts" / "tiny_chain"
N_PROBLEMS, N_EPISODES, LENGTHS = 8, 8, (6 * 272, 272)


def measure(workflow: str, policy: str, problems: str, share: float) -> dict:
    """Measure one iteration in this process; runs in either checkout."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from multirole import (
        EvalOpt,
        MultiRoleGRPOConfig,
        MultiRoleGRPOTrainer,
        OrchWorkers,
        RoleDiagnostics,
        Single,
        Voting,
    )

    def right(prompts: list, completions: list, reference: list, **_: object) -> list[float]:
        return [float(f"boxed{{{value}}}" in text) for text, value in zip(completions, reference, strict=True)]

    kinds = {"single": Single, "eval_opt": EvalOpt, "voting": Voting, "orch_workers": OrchWorkers}
    with tempfile.TemporaryDirectory() as folder:
        trainer = MultiRoleGRPOTrainer(
            str(TINY),
            kinds[workflow](prompts=str(PROMPTS)),
            right,
            MultiRoleGRPOConfig(
                folder, policy=policy, generation_batch_size=N_PROBLEMS * N_EPISODES, num_generations=N_EPISODES, learning_rate=2e-3,
                max_prompt_tokens=LENGTHS[0], max_completion_length=LENGTHS[1], micro_batch_tokens=1024, max_steps=60,
                epsilon_high=0.28, delta=3.0, bf16=False, gradient_checkpointing=False, report_to="none", use_cpu=True,
            ),
            Dataset.from_list(json.loads(Path(problems).read_text())),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
            callbacks=[RoleDiagnostics()],
        )  # fmt: skip
        trainer.create_optimizer_and_scheduler(60)
        trainer.model.train()
        seconds = {"start": time.process_time()}
        weights = {name: tensor.clone() for name, tensor in trainer.peft_model.state_dict().items()}
        for _ in range(2):
            trainer.peft_model.load_state_dict(weights)
            trainer.optimizer.state.clear()
            rows = training_rows(trainer)
            inputs = [rows[i] for i in range(N_PROBLEMS) for _ in range(N_EPISODES)]
            started = time.process_time()
            episodes = trainer._generate_and_score_completions(inputs)
            rest(trainer)
            seconds["rollout"] = time.process_time() - started
            rows = trainer.prepare_rows(episodes)
            ids = list(dict.fromkeys(row.episode.problem.id for row in rows))
            silent = set(sorted(ids)[: round(share * len(ids))])
            for row in rows:
                row.advantage *= row.episode.problem.id not in silent
            started = time.process_time()
            steps, _ = trainer.update(trainer.model, rows)
            seconds["update"] = time.process_time() - started
    assert torch.get_num_threads() == 1
    return seconds | {"tokens": sum(len(row.turn.completion_ids) for row in rows), "norm": steps[0].grad_norm}


def measure_in(checkout: Path, cell: str, problems: str, share: float) -> dict:
    """Run `measure` in a process of a checkout."""
    workflow, policy, _ = cell.split()
    return alone(__file__, str(checkout), "--one", workflow, policy, problems, str(share), checkout=checkout)


def write_problems(path: Path) -> None:
    """Write the first training problems of the embedded arithmetic as rows."""
    from multirole_study.tasks.tiny_chain import TinyChain

    problems = TinyChain().problems("train", 64)
    rows = [{"prompt": p.question, "id": p.id, "reference": str(p.reference)} for p in problems]
    path.write_text(json.dumps(rows))


def silent_shares() -> dict[str, float]:
    """Return the mean fraction of groups with equal rewards in the committed grid runs of each cell."""
    import pandas as pd

    runs = pd.read_parquet(ROOT / "results/tiny-r/runs.parquet")
    metrics = pd.read_parquet(ROOT / "results/tiny-r/metrics.parquet", columns=["run", "zero_variance_groups"])
    means = metrics.groupby("run", observed=True)["zero_variance_groups"].mean()
    shares: dict[str, list[float]] = {}
    for _, row in runs[runs["run"].isin(means.index)].iterrows():
        shares.setdefault(f"{row['workflow']} {row['policy']} {row['task']}", []).append(float(means[row["run"]]))
    return {cell: statistics.fmean(values) for cell, values in shares.items()}


def table(result: dict[str, dict]) -> str:
    """Return a table in docs/speed.md, which has one for each of these files in results/bench."""
    rows = []
    for cell, ratios in result.items():
        spans = [shown(ratios[phase]) for phase in ("update", "rollout", "start")]
        rows.append([cell, f"{ratios['silent_share']:.0%}", *spans, ratios["pairs"]])
    return markdown("cell | silent rows | update | rollout | start | pairs", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        *cell, share = args.one
        print(json.dumps(measure(*cell, float(share))))
        return
    shares, result = silent_shares(), {}
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "problems.json"
        write_problems(problems)
        for cell in args.cells:
            pairs = [
                [measure_in(checkout, cell, str(problems), shares[cell]) for checkout in (args.other, ROOT)]
                for _ in range(args.pairs)
            ]
            assert len({run["tokens"] for pair in pairs for run in pair}) == 1, (
                "the two checkouts sampled different tokens"
            )
            assert all(abs(a["norm"] - b["norm"]) <= 1e-3 * a["norm"] for a, b in pairs), "the gradients differ"
            result[cell] = {"silent_share": shares[cell], "pairs": args.pairs}
            for phase in ("start", "rollout", "update"):
                ratios = [a[phase] / b[phase] for a, b in pairs]
                result[cell][phase] = spread(ratios) | {"seconds": statistics.median(b[phase] for _, b in pairs)}
            spans = "   ".join(f"{phase} {shown(result[cell][phase])}" for phase in ("start", "rollout", "update"))
            print(f"{cell:<22} {shares[cell]:4.0%} silent   other / this: {spans}", flush=True)
    write("bench_commits", args.out, result, table(result), of=args.out.name if args.out else "")


if __name__ == "__main__":
    main()
