"""Compare the gradient of an update in bfloat16 with that in float32, on a pretrained model: ours, and that of stock TRL's setting.

    python benchmarks/bench_gradient.py --model FOLDER --rows FOLDER [--out results/bench/gradient.json]

The rows are those that `bench_update.py --rows` stores, with an adapter whose B is not zero. One process with one thread for each setting computes the
gradient of all rows' loss at the same weights, twice: with these weights' own log-probs in float32 as the old ones, so that all ratios are near 1, as
in an iteration's first optimizer step; and with those of the sampler, whose adapter had B = 0, so that many tokens are near the clip range. The settings:

- `float32`: base, adapter and arithmetic. The reference.
- `this`: what this library computes by default in bfloat16 (`half_decoder`, shared prompts).
- `autocast, bfloat16 base` and `autocast, float32 base`: torch's autocast over PEFT's forward pass and padded rows, as in stock TRL with
  `bf16=True`. The library's own passes are switched off for them.

The table has the cosine with the reference, the distance over the reference's norm, and the mean and largest difference of a completion
token's log-prob in nats. The cosine between the reference's gradients of the first and of the second half of the problems shows how much
sampling moves the gradient.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from bench_update import make_trainer, perturb, read_episodes
from measuring import alone, write
from torch import Tensor

SETTINGS = {
    "float32": (False, None), "this": (True, None), "autocast, bfloat16 base": (True, torch.bfloat16),
    "autocast, float32 base": (True, torch.float32),
}  # fmt: skip
"""Name -> (bf16 is on, dtype of the base under plain autocast)."""


OLD = ("these weights", "the sampler")
"""The sources of the old log-probs."""


def compute(workflow: str, model: str, rows_folder: str, setting: str, path: str, reference: str) -> dict:
    """Store the gradient of each half of the problems by `OLD`, and the completion tokens' log-probs; `reference` is the file of float32."""
    is_half, plain = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workflow, model, folder, is_half)
        perturb(trainer.peft_model)
        if plain is not None:
            trainer.passes.can_merge_adapters = trainer.passes.can_share_prompts = False
            for name, parameter in trainer.peft_model.named_parameters():
                if "lora_" not in name:
                    parameter.data = parameter.data.to(plain)
        rows = trainer.prepare_rows(read_episodes(str(Path(rows_folder) / f"{workflow}.json")))
        problems = sorted({row.episode.problem.id for row in rows})
        first = set(problems[: len(problems) // 2])
        halves = [[r for r in rows if (r.episode.problem.id in first) is is_first] for is_first in (True, False)]
        trainer.model.train()
        of_sampler = [gradient_of(trainer, half, len(rows)) for half in halves]
        logprobs = trainer.logprobs_of(rows)
        old = logprobs if setting == "float32" else torch.load(reference)["logprobs"]
        for row, values in zip(rows, old, strict=True):
            row.turn.logprobs = values.tolist()
        gradients = {OLD[0]: [gradient_of(trainer, half, len(rows)) for half in halves], OLD[1]: of_sampler}
    torch.save({"gradients": gradients, "logprobs": logprobs}, path)
    return {"rows": len(rows)}


def gradient_of(trainer, rows: list, n_rows: int) -> Tensor:
    """Return the gradient of the rows' part of the loss of `n_rows` rows, over all adapters, as one float64 vector."""
    trainer.optimizer.zero_grad()
    parts = []
    for adapter in sorted({row.adapter for row in rows}):
        params, _ = trainer.compute_gradient(trainer.model, adapter, [r for r in rows if r.adapter == adapter], n_rows)
        parts += [p.grad.flatten().double() for p in params]
    return torch.cat(parts)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two vectors."""
    return torch.nn.functional.cosine_similarity(a, b, 0).item()


def compare(stored: dict[str, dict]) -> dict:
    """Return the values of one workflow in the table."""
    reference = stored["float32"]
    right = torch.cat(reference["logprobs"])
    result: dict = {"halves": {old: cosine(*reference["gradients"][old]) for old in OLD}, "settings": {}}
    for name, values in stored.items():
        gaps = (torch.cat(values["logprobs"]) - right).abs()
        by_old = {}
        for old in OLD:
            gradient, whole = sum(values["gradients"][old]), sum(reference["gradients"][old])
            distance = (gradient - whole).norm() / whole.norm()
            by_old[old] = {"cosine": cosine(gradient, whole), "distance": distance.item()}
        result["settings"][name] = {"gap_mean": gaps.mean().item(), "gap_max": gaps.max().item(), "old": by_old}
    return result


def table(result: dict) -> str:
    """Return the rows of the table in docs/speed_update.md."""
    lines = [
        "| workflow, rows | old log-probs of | gradient in | cosine with float32 | distance | log-prob of a token: mean, largest gap | halves of the problems: cosine |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workflow, measured in result.items():
        for old in OLD:
            for name, values in measured["settings"].items():
                if name != "float32":
                    by_old = values["old"][old]
                    lines.append(
                        f"| {workflow}, {measured['rows']} | {old} | {name} | {by_old['cosine']:.3f} | {by_old['distance']:.3f} | "
                        f"{values['gap_mean']:.4f}, {values['gap_max']:.2f} | {measured['halves'][old]:.3f} |"
                    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help="the folder of `bench_update.py --rows`")
    parser.add_argument("--workflows", nargs="+", default=["single", "voting"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=4, metavar=("WORKFLOW", "SETTING", "PATH", "REFERENCE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        workflow, setting, path, reference = args.one
        print(json.dumps(compute(workflow, args.model, args.rows, setting, path, reference)))
        return
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for workflow in args.workflows:
            stored, n_rows, reference = {}, 0, f"{folder}/{workflow}-float32.pt"
            for setting in SETTINGS:
                path = f"{folder}/{workflow}-{setting}.pt"
                options = ["--model", args.model, "--rows", args.rows, "--one", workflow, setting, path, reference]
                n_rows = alone(__file__, *options)["rows"]
                stored[setting] = torch.load(path)
            result[workflow] = {"rows": n_rows} | compare(stored)
            print(workflow, json.dumps(result[workflow]), flush=True)
    print(table(result))
    write("bench_gradient", args.out, result, table(result), "speed_update")


if __name__ == "__main__":
    main()
