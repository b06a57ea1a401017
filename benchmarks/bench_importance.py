"""Measure importance weights on SmolLM2-135M: the gap between sampler and trainer by engine and dtype, and what correcting it changes.

    python benchmarks/bench_importance.py --runs runs/importance --step train-on train-off gap-transformers-bfloat16 ...
    python benchmarks/bench_importance.py --runs runs/importance --out results/bench/importance.json

Everything below was committed before the first of these runs.

Training: the cell of `PARAMETERS` twice, with TRL's default correction (`sequence_mask`, weights above 3 become 0) and without it, in
bfloat16 on the transformers engine. The second run measures the weights and multiplies by 1. Compared are training accuracy,
validation accuracy, and the distance of the final adapters to each other in units of the distance that they moved. One seed: no
difference of accuracy is decided by it, whatever it is.

Gap: episodes of `N_PROBLEMS` training problems, sampled by an engine with adapters that are `NOISE` away from none (the order that 16
iterations at the rate of 2e-4 move a weight), and the trainer's log-probs of the same tokens. By role: the gap |trainer - sampler| per token, TRL's weights of tokens and of sequences before they are
clipped, and the share of rows that the default masks. Gradient: that of all of a role's rows with planted advantages of +1 and -1 (by
the parity of the episode), once weighted and once not; their relative distance and cosine. In float32 every weight must be exactly 1
and both gradients bit-equal, or this program fails.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip

import pandas as pd
import torch
from measuring import randomize_adapters, write
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from multirole.callbacks import MultiRoleCallback
from multirole.update.importance import Correction
from multirole.update.rows import Row, collate, episode_rows
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import CellTrainer, load_model, make_trainer
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.run_folder import adapters_folder, folder_of, is_done

PARAMETERS = {
    "workflow": "voting", "policy": "ip", "task": "math", "scale": "smollm2", "seed": 0, "old_logprobs": "recomputed", "max_steps": 4,
    "n_problems": 2, "num_generations": 8, "n_validation": 16, "eval_steps": 4, "save_steps": 1,
}  # fmt: skip
N_PROBLEMS, N_EPISODES = 6, 2
NOISE = 0.003
"""Standard deviation of the weights of LoRA's B, which begin at 0."""
GAPS = (("transformers", "bfloat16"), ("vllm", "bfloat16"), ("transformers", "float32"), ("vllm", "float32"))
STEPS = ["train-on", "train-off", *("-".join(("gap", *gap)) for gap in GAPS)]


class MeasuredOnly(Correction):
    """Computes the weights for the log and gives the loss weights of 1."""

    def add_weights(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        measured = super().add_weights(batch)
        batch["importance_sampling_ratio"] = torch.ones_like(measured[0])
        return measured


class Uncorrected(MultiRoleCallback):
    """Switches the correction of a run off, and goes on logging it."""

    def on_rollout_end(self, trainer: CellTrainer, episodes: list) -> None:
        trainer.correction = MeasuredOnly(*vars(trainer.correction).values())


def cell_of(engine: str = "transformers", dtype: str = "bfloat16") -> Cell:
    """Return the cell, for one engine and dtype."""
    return Cell(**PARAMETERS, engine=engine, dtype=dtype)


def train(runs: Path, is_on: bool) -> dict:
    """Train the cell, or go on; return what the table says of the run."""
    cell, results = cell_of(), runs / ("on" if is_on else "off")
    folder = folder_of(cell, results)
    if not is_done(folder):
        run_cell(cell, Launch(results_dir=str(results)), [] if is_on else [Uncorrected()])
    metrics, roles = (pd.read_parquet(folder / f"{name}.parquet") for name in ("metrics", "roles"))
    accuracy = pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"].mean()
    means = roles.groupby("role")[["sampler_gap", "importance_weight", "importance_clipped"]].mean()
    return {
        "training_accuracy": metrics["accuracy"].tolist(), "validation_accuracy": accuracy.tolist(),
        "cpu_seconds": metrics["cpu_seconds"].tolist(), "roles": means.to_dict("index"),
    }  # fmt: skip


def adapters_of(runs: Path, arm: str, step: int) -> Path:
    """Return the folder of a run's adapters after `step` iterations."""
    return adapters_folder(folder_of(cell_of(), runs / arm), step)


def distances(runs: Path) -> dict[str, float]:
    """Map each adapter to the distance between both runs' final weights over the distance that the first run moved."""
    model, result = load_model(cell_of())[0], {}
    for name in sorted(model.peft_config):
        on, off = (
            load_file(adapters_of(runs, arm, PARAMETERS["max_steps"]) / name / "adapter_model.safetensors")
            for arm in ("on", "off")
        )
        start = get_peft_model_state_dict(model, adapter_name=name)
        result[name] = distance(on, off) / distance(on, start)
    return result


def distance(tensors: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the Euclidean distance of two adapters' weights."""
    return math.sqrt(sum((tensors[name].double() - other[name].double()).square().sum().item() for name in tensors))


def gap(runs: Path, engine: str, dtype: str) -> dict:
    """Sample with an engine, and compare its log-probs with the trainer's."""
    cell = cell_of(engine, dtype)
    trainer = make_trainer(cell, str(runs / "gap"), Launch(vllm_max_num_seqs=64))
    try:
        randomize_adapters(trainer.peft_model, NOISE, seed=0)
        problems, started = trainer.problems[:N_PROBLEMS], time.process_time()
        episodes = trainer.play([(problem, i) for problem in problems for i in range(N_EPISODES)], 10**6)
        sampling = time.process_time() - started
    finally:
        trainer.engine.close()
    for episode in episodes:
        episode.advantage = 1.0 - 2.0 * (episode.index % 2)
    rows = episode_rows(episodes, trainer.policy, False)
    trainer.create_optimizer()
    for callback in trainer.multirole_callbacks:  # they follow an iteration, and here is none
        trainer.remove_callback(callback)
    n_tokens = sum(len(row.turn.completion_ids) for row in rows)
    return {
        "engine": engine, "dtype": dtype, "rows": len(rows), "tokens": n_tokens, "sampling_cpu_seconds": sampling,
        "roles": {role: role_gap(trainer, [row for row in rows if row.turn.role == role]) for role in trainer.policy},
    }  # fmt: skip


def role_gap(trainer: CellTrainer, rows: list[Row]) -> dict[str, float]:
    """Compute the measures of one role's rows, of which an adapter has no others."""
    correction = trainer.correction
    old = torch.nn.utils.rnn.pad_sequence(trainer.logprobs_of(rows), True)  # (N, C)
    batch = collate(rows, 0, torch.device("cpu"), "recomputed")
    sampled, mask = batch["sampling_per_token_logps"], batch["completion_mask"]
    gaps = ((old - sampled).abs() * mask)[mask.bool()]
    by_token = Correction("token_mask", None, None).weigh(old, sampled, mask)[0][mask.bool()]
    weights, by_sequence = correction.weigh(old, sampled, mask)
    gradients = []
    for trainer.correction in (correction, None):
        trainer.optimizer.zero_grad()
        trainer.model.train()
        params, _ = trainer.compute_gradient(trainer.model, rows[0].adapter, rows, len(rows))
        gradients.append(torch.cat([p.grad.flatten() for p in params]).double())
    trainer.correction = correction
    weighted, plain = gradients
    measures = {
        "rows": len(rows), "tokens": len(gaps), "gap_mean": gaps.mean().item(), "gap_p99": gaps.quantile(0.99).item(),
        "gap_max": gaps.max().item(), "token_weight_mean": by_token.mean().item(), "token_weight_min": by_token.min().item(),
        "token_weight_max": by_token.max().item(), "sequence_weight_mean": by_sequence.mean().item(),
        "sequence_weight_min": by_sequence.min().item(), "sequence_weight_max": by_sequence.max().item(),
        "masked_rows": (weights == 0).double().mean().item(),
        "gradient_distance": ((weighted - plain).norm() / plain.norm()).item(),
        "gradient_cosine": torch.nn.functional.cosine_similarity(weighted, plain, 0).item(),
    }  # fmt: skip
    if trainer.passes.is_float32 and not ((weights == 1).all() and torch.equal(weighted, plain)):
        raise RuntimeError(f"In float32 all weights must be 1 and both gradients equal; got {measures}.")
    return measures


def gap_table(gaps: list[dict]) -> list[str]:
    """Return the lines of the table of gaps."""
    lines = [
        "| engine | base | tokens per CPU-s | role | tokens | gap, mean (nats) | gap, 99 % | gap, largest | weight of a token | weight of a sequence | rows masked | gradient: distance, cosine |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for entry in gaps:
        speed = f"{entry['tokens'] / entry['sampling_cpu_seconds']:.0f}"
        for role, m in entry["roles"].items():
            weights = (
                f"{m[f'{unit}_weight_mean']:.4f} [{m[f'{unit}_weight_min']:.2f}, {m[f'{unit}_weight_max']:.2f}]"
                for unit in ("token", "sequence")
            )
            cells = [
                entry["engine"], entry["dtype"], speed, role, m["tokens"], *(f"{m[f'gap_{name}']:.2g}" for name in ("mean", "p99", "max")),
                *weights, f"{100 * m['masked_rows']:.1f} %", f"{m['gradient_distance']:.3f}, {m['gradient_cosine']:.4f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def run_table(arms: dict[str, dict], apart: dict[str, float]) -> list[str]:
    """Return the lines of the table of both runs, and of their distance."""
    lines = [
        "",
        "| correction | training accuracy, all iterations | validation accuracy, before and after | CPU-s per iteration | gap, mean: generator, aggregator | rows masked: generator, aggregator |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for arm, run in arms.items():
        roles, n = [run["roles"][role] for role in ("generator", "aggregator")], len(run["training_accuracy"])
        cells = [
            arm, f"{100 * sum(run['training_accuracy']) / n:.1f} %", " to ".join(f"{100 * value:.1f} %" for value in run["validation_accuracy"]),
            f"{sum(run['cpu_seconds'][1:]) / (n - 1):.1f}", ", ".join(f"{role['sampler_gap']:.4f}" for role in roles),
            ", ".join(f"{100 * role['importance_clipped']:.1f} %" for role in roles),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    text = ", ".join(f"{name} {value:.2f}" for name, value in apart.items())
    return [*lines, "", f"Distance between the final weights of both runs, over the distance that the first one moved: {text}."]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/importance"))
    parser.add_argument("--step", nargs="+", choices=STEPS, default=[], help="what to run; finished steps are kept")
    parser.add_argument("--out", type=Path, help="the JSON file of all steps; the table goes to docs/smollm2_study.md")
    options = parser.parse_args()
    for step in options.step:
        path = options.runs / f"{step}.json"
        if path.exists():
            continue
        kind, *more = step.split("-")
        measured = train(options.runs, more == ["on"]) if kind == "train" else gap(options.runs, *more)
        path.write_text(json.dumps(measured, indent=1) + "\n")
        print(step, json.dumps(measured), flush=True)
    done = {step: json.loads(path.read_text()) for step in STEPS if (path := options.runs / f"{step}.json").exists()}
    if options.out:
        arms = {arm: done[f"train-{arm}"] for arm in ("on", "off") if f"train-{arm}" in done}
        gaps = [done[step] for step in done if step.startswith("gap")]
        result, lines = {"parameters": PARAMETERS, "noise": NOISE, "gaps": gaps, **arms}, gap_table(gaps)
        if len(arms) == 2:
            result["distance"] = distances(options.runs)
            lines += run_table(arms, result["distance"])
        write("bench_importance", options.out, result, "\n".join(lines), page="smollm2_study")


if __name__ == "__main__":
    main()
