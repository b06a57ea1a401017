"""CPU-seconds of this checkout against those of another one, cell by cell, in interleaved pairs.

    git worktree add /tmp/before 9153f33
    python benchmarks/bench_commits.py /tmp/before [--pairs 5] [--out results/bench/commits.json]

Each measurement is a process of its own, one thread, on the first problems of a cell: `start` until the trainer stands,
`rollout` and `update` of one iteration (the second of two, so that nothing is warmed up for the first time). The untrained base
has hardly a group whose rewards are all equal, and the grid's runs have many; so the advantages of the first problems are set to
0, as many as such groups were in the committed runs of that cell. Both checkouts train on the same rows: the sampled tokens are
equal, which is checked. Prints, and with `--out` writes, minimum, median and maximum of the ratios other / this.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from measuring import alone, shown, spread, write

CELLS = ["voting sp math", "voting ip math", "eval_opt sp math", "eval_opt ip math", "orch_workers sp math",
         "orch_workers ip math", "single sp math"]  # fmt: skip
HERE = Path(__file__).resolve().parents[1]


def measure(workflow: str, policy: str, task: str, share: float) -> dict:
    """Times of one iteration in this process; runs in either checkout."""
    import tempfile

    import torch

    from multirole.experiment.cell import Cell
    from multirole.experiment.trainer import make_trainer

    cell = Cell(workflow, policy, task, n_train=64, n_validation=8)
    problems = cell.make_task().problems("train", 64)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cell, folder, problems=(problems, problems[:8]))
        trainer.create_optimizer_and_scheduler(cell.iterations)
        trainer.model.train()
        found = {"start": time.process_time()}
        weights = {name: tensor.clone() for name, tensor in trainer.peft_model.state_dict().items()}
        for _ in range(2):
            trainer.peft_model.load_state_dict(weights)
            trainer.optimizer.state.clear()
            inputs = [trainer.train_dataset[i] for i in range(cell.n_problems) for _ in range(cell.n_episodes)]
            started = time.process_time()
            episodes = trainer._generate_and_score_completions(inputs)
            trainer._rest_engine()
            found["rollout"] = time.process_time() - started
            rows = trainer.prepare_rows(episodes)
            ids = list(dict.fromkeys(row.episode.problem.id for row in rows))
            silent = set(sorted(ids)[: round(share * len(ids))])
            for row in rows:
                row.advantage *= row.episode.problem.id not in silent
            started = time.process_time()
            steps, _ = trainer.update(trainer.model, rows)
            found["update"] = time.process_time() - started
    assert torch.get_num_threads() == 1
    return found | {"tokens": sum(len(row.turn.completion_ids) for row in rows), "norm": steps[0].grad_norm}


def one(checkout: Path, cell: str, share: float) -> dict:
    """`measure` in a process of a checkout."""
    return alone(__file__, str(checkout), "--cell", cell, "--share", str(share), checkout=checkout)


def silent_shares() -> dict[str, float]:
    """The mean share of groups with equal rewards in the committed grid runs of each cell."""
    import pandas as pd

    runs = pd.read_parquet(HERE / "results/tiny-r/runs.parquet")
    metrics = pd.read_parquet(HERE / "results/tiny-r/metrics.parquet", columns=["run", "zero_variance_groups"])
    means = metrics.groupby("run", observed=True)["zero_variance_groups"].mean()
    shares: dict[str, list[float]] = {}
    for _, row in runs[runs["run"].isin(means.index)].iterrows():
        shares.setdefault(f"{row['workflow']} {row['policy']} {row['task']}", []).append(float(means[row["run"]]))
    return {cell: statistics.fmean(values) for cell, values in shares.items()}


def table(result: dict[str, dict]) -> str:
    """The rows of docs/speed.md."""
    lines = ["| cell | silent rows | update | rollout | start | pairs |", "| --- | --- | --- | --- | --- | --- |"]
    for cell, found in result.items():
        spans = " | ".join(shown(found[what]) for what in ("update", "rollout", "start"))
        lines.append(f"| {cell} | {found['silent_share']:.0%} | {spans} | {found['pairs']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure(*args.cell.split(), args.share)))
        return
    shares, result = silent_shares(), json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for cell in args.cells:
        pairs = [(one(args.other, cell, shares[cell]), one(HERE, cell, shares[cell])) for _ in range(args.pairs)]
        assert len({run["tokens"] for pair in pairs for run in pair}) == 1, "the two checkouts sampled different tokens"
        assert max(abs(a["norm"] - b["norm"]) / a["norm"] for a, b in pairs) < 1e-3, "the gradients differ"
        result[cell] = {"silent_share": shares[cell], "pairs": args.pairs}
        for what in ("start", "rollout", "update"):
            ratios = [a[what] / b[what] for a, b in pairs]
            result[cell][what] = spread(ratios) | {"seconds": statistics.median(b[what] for _, b in pairs)}
        spans = "   ".join(f"{what} {shown(result[cell][what])}" for what in ("start", "rollout", "update"))
        print(f"{cell:<22} {shares[cell]:4.0%} silent   other / this: {spans}", flush=True)
        write("bench_commits", args.out, result, table(result))


if __name__ == "__main__":
    main()
