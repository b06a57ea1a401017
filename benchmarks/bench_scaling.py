"""Measure how CPU-seconds and memory of an iteration grow with roles, group size, completion length and episodes.

    python benchmarks/bench_scaling.py [--repeats 3] --out results/bench/scaling

The workflow has R roles that answer in parallel, on the embedded model (0.45M parameters) with one thread. Each point is a separate
process, and points alternate. The defaults are 4 roles under Shared-Policy, 64 episodes in groups of 8, and 256 rows of exactly 24
completion tokens; each curve varies one of them. The curve over roles keeps the number of rows, and so of tokens: more roles, fewer episodes.
A shared adapter then takes an optimizer step per role (`updates="per_batch"`), as many as isolated adapters together; with
`updates="one"` it takes a single step. Writes medians as JSON and one figure.
"""

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

from measuring import TINY, alone

from multirole_study.labels import POLICY_COLOURS

HERE = Path(__file__).resolve()
USUAL = {"roles": 4, "policy": "sp", "updates": "per_batch", "episodes": 64, "group": 8, "tokens": 24}
LINES = {
    ("sp", "per_batch"): ("SP", POLICY_COLOURS["sp"], "o"),
    ("sp", "one"): ("SP, one step", "#111111", "^"),
    ("ip", "per_batch"): ("IP", POLICY_COLOURS["ip"], "s"),
}
"""(policy, updates) -> label, colour and marker."""
CURVES = {
    "roles": [
        {"roles": r, "episodes": 256 // r, "policy": p, "updates": u} for p, u in LINES for r in (1, 2, 4, 8, 16)
    ],
    "group": [{"group": g} for g in (4, 8, 16, 32, 64)],
    "tokens": [{"tokens": t} for t in (12, 24, 48, 96, 192)],
    "episodes": [{"episodes": e} for e in (16, 32, 64, 128, 256)],
}
LABELS = {
    "roles": "roles (256 rows in all)",
    "group": "episodes per group (64 in all)",
    "tokens": "completion tokens per row",
    "episodes": "episodes per iteration",
}


def measure(roles: int, policy: str, updates: str, episodes: int, group: int, tokens: int) -> dict:
    """Return the CPU-seconds of the second iteration, and the peak resident set in MiB."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from multirole import Answer, MultiRoleGRPOConfig, MultiRoleGRPOTrainer
    from multirole_cpu.engine import TransformersEngine

    torch.set_num_threads(1)

    class SideBySide:
        """Workflow in which every role answers the same question."""

        name = "side_by_side"

        def __init__(self) -> None:
            self.roles = {f"role{i}": 1 for i in range(roles)}

        async def run(self, problem, call):
            prompt = [{"role": "user", "content": problem.question}]
            return Answer((await asyncio.gather(*(call(role, prompt) for role in self.roles)))[0].text)

    questions = [f"Compute left to right: {i % 17} +{i % 9 + 1} *2 -{i % 7 + 1}" for i in range(max(64, episodes))]
    trainer = MultiRoleGRPOTrainer(
        model=str(TINY),
        workflow=SideBySide(),
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=MultiRoleGRPOConfig(
            tempfile.mkdtemp(), policy=policy, updates=updates, per_device_train_batch_size=episodes, num_generations=group,
            loss_type="grpo", max_completion_length=tokens, learning_rate=1e-4, bf16=False, gradient_checkpointing=False, report_to="none",
            max_steps=10,
        ),
        train_dataset=Dataset.from_dict({"prompt": questions}),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
        engine=TransformersEngine(-1, max_rows=256),  # no reply ends before its limit
    )  # fmt: skip
    trainer.create_optimizer_and_scheduler(10)
    trainer.model.train()
    for _ in range(2):
        inputs = [trainer.train_rows[i] for i in range(episodes // group) for _ in range(group)]
        marks = [time.process_time()]
        episodes_played = trainer._generate_and_score_completions(inputs)
        trainer.player.rest()
        marks.append(time.process_time())
        trainer.update(trainer.model, trainer.prepare_rows(episodes_played))
        marks.append(time.process_time())
        trainer.state.global_step += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rollout": marks[1] - marks[0], "update": marks[2] - marks[1], "peak_mebibytes": peak}


def measure_alone(point: dict) -> dict:
    """Measure a point in a separate process."""
    return alone(str(HERE), "--measure", json.dumps(USUAL | point))


def plot(points: list[dict], path: Path) -> None:
    """Plot time in the upper row and memory in the lower one, with a column per curve."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(CURVES), figsize=(10, 4.8), sharey="row", layout="constrained")
    for column, (name, label) in enumerate(LABELS.items()):
        for (policy, updates), (who, colour, marker) in LINES.items():
            line = [p for p in points if (p["curve"], p["policy"], p["updates"]) == (name, policy, updates)]
            if not line:
                continue
            x = [p[name] for p in line]
            for quantity, style in (("update", "-"), ("rollout", ":")):
                axes[0, column].plot(
                    x, [p[quantity] for p in line], style, marker=marker, color=colour, label=f"{quantity}, {who}"
                )
            axes[1, column].plot(x, [p["peak_mebibytes"] for p in line], "-", marker=marker, color=colour, label=who)
        for row in axes[:, column]:
            row.set_xscale("log", base=2)
            row.set_xticks(x, x)
            row.minorticks_off()
            row.margins(x=0.08)
            row.spines[["top", "right"]].set_visible(False)
        axes[1, column].set_xlabel(label)
    for row, quantity_of_row in zip(axes, ("update", "peak_mebibytes"), strict=True):
        row[0].set_ylim(0, 1.12 * max(point[quantity_of_row] for point in points))
    axes[0, 0].set_ylabel("CPU-seconds per iteration")
    axes[1, 0].set_ylabel("peak resident set, MiB")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    repeats = points[0]["repeats"]
    about = f"miniature (0.45M), one thread; each point is the median of {repeats} processes"
    figure.supxlabel(about, x=0.99, ha="right", fontsize=8, color="0.35")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write, without an ending")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--redraw", action="store_true", help="draw the JSON file of --out again and measure nothing")
    args = parser.parse_args()
    if args.redraw:
        plot(json.loads(args.out.with_suffix(".json").read_text(encoding="utf-8")), args.out.with_suffix(".png"))
        return
    if args.measure:
        print(json.dumps(measure(**args.measure)))
        return
    todo = [{"curve": name} | USUAL | point for name, points in CURVES.items() for point in points]
    measured: list[list[dict]] = [[] for _ in todo]
    for _ in range(args.repeats):
        for point, results in zip(todo, measured, strict=True):
            results.append(measure_alone({k: v for k, v in point.items() if k != "curve"}))
    points = [
        point | {k: statistics.median(result[k] for result in results) for k in results[0]} | {"repeats": args.repeats}
        for point, results in zip(todo, measured, strict=True)
    ]
    for point in points:
        print(*(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in point.items()))
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(points, indent=1) + "\n")
        plot(points, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
