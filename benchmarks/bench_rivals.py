"""Compare this library with alternatives on the same work, in CPU-seconds of one thread.

    python benchmarks/bench_rivals.py [NAME ...] [--pairs 5] [--out results/bench/rivals.json]

- `trl update N`: TRL's `GRPOTrainer` with micro-batches of N rows, and ours: one optimizer step on the same 64 single-agent rows of
  an iteration.
- `trl iteration N`: the same two trainers, whole iterations with generation, per completion token (TRL generates with
  `transformers` here; both sample 64 episodes of 8 problems).
- `generate`, `vllm`: `transformers`' `generate` and `vllm.LLM.generate` (CPU build), and our engine, with the requests of a Voting
  rollout's first stage all at once, per completion token.
- `comlrl`: one Voting problem through CoMLRL's MAGRPO, and one iteration of ours under IP, with the same model, ranks and
  lengths. CoMLRL rolls out trees: every agent replies in every turn, and each of 8 roots has 8 second turns. So the ratio is given per
  root episode, per leaf, per sequence and per completion token.

Each measurement is a separate process; rival and ours alternate. A ratio rival / ours above 1 means that ours needs less time. CoMLRL is
installed into a separate environment under `--environment`, on top of this one's packages. With `--out`, the table of
docs/speed.md is written, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from measuring import alone, markdown, seconds_of, spread, write

HERE = Path(__file__).resolve()
SIZES = {"n_train": 256, "n_validation": 8}
"""Of the cells: by default 8 problems of 8 episodes are in an iteration."""
COMLRL = ["comlrl==1.4.3", "wandb==0.22.3", "protobuf==6.33.1"]
RIVALS = {
    "trl update 16": ("update", "trl_update 16"),
    "trl update 32": ("update", "trl_update 32"),
    "trl update 64": ("update", "trl_update 64"),
    "trl iteration 32": ("iteration", "trl_iteration 32"),
    "trl iteration 64": ("iteration", "trl_iteration 64"),
    "generate": ("engine", "generate"),
    "vllm": ("engine", "vllm"),
    "comlrl": ("voting", "comlrl"),
}
"""Name -> (our measurement, the rival's measurement)."""


# ---- measurements, each in a separate process: a dict with "seconds" and the amount of work


def make(workflow: str, policy: str = "sp"):
    """Return a cell, its trainer on 256 problems, and the inputs of the first iteration."""
    from bench import inputs, trainer_of

    from multirole_study.experiment.cell import Cell

    cell = Cell(workflow, policy, "math", **SIZES)
    trainer = trainer_of(cell, tempfile.mkdtemp())
    return cell, trainer, inputs(trainer)


def rows_of_single():
    """Return the cell, its trainer, and the rows of the first iteration, each of which has a gradient."""
    cell, trainer, batch = make("single")
    rows = trainer.prepare_rows(trainer._generate_and_score_completions(batch))
    for row in rows:
        row.advantage = row.advantage or 0.1
    return cell, trainer, rows


def timed(work, repeats: int = 3) -> float:
    """Return the CPU-seconds of one call, after a warm-up call."""
    work()
    return sum(seconds_of(work) for _ in range(repeats)) / repeats


def update() -> dict:
    """Time our optimizer step on the first iteration's rows."""
    _, trainer, rows = rows_of_single()
    return {"seconds": timed(lambda: trainer.update(trainer.model, rows)), "rows": len(rows)}


def stock(cell, model, tokenizer, rows, micro: int):
    """Build TRL's trainer with the cell's settings."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    n = cell.n_problems * cell.num_generations
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=GRPOConfig(
            tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=n // micro,
            num_generations=cell.num_generations, max_completion_length=cell.max_completion_length, loss_type="grpo", beta=0.0,
            learning_rate=0.0, max_steps=4, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
            logging_steps=1000, use_cpu=True, disable_tqdm=True,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip


def trl_update(micro: int) -> dict:
    """Time the same step in stock TRL, which pads the generation batch to its longest prompt and completion."""
    import torch
    from bench import stock_update

    from multirole.update.rows import collate
    from multirole_study.experiment.cell_trainer import load_model

    cell, _, rows = rows_of_single()
    model, tokenizer = load_model(cell)
    stock_trainer = stock(cell, model, tokenizer, [{"prompt": "a"}], micro)
    stock_trainer.create_optimizer()
    stock_trainer.current_gradient_accumulation_steps = len(rows) // micro
    whole = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
    real = sum(int(whole[name].sum()) for name in ("prompt_mask", "completion_mask"))
    size = sum(whole[name].numel() for name in ("prompt_mask", "completion_mask"))
    seconds = timed(lambda: stock_update(stock_trainer, whole, micro, len(rows)))
    return {"seconds": seconds, "rows": len(rows), "padding": 1 - real / size}


def iteration() -> dict:
    """Time whole iterations of ours, with rollout, scoring and update, at a learning rate of 0."""
    return iterations_of("single", "sp")


def voting() -> dict:
    """Time whole iterations of Voting with an adapter per role."""
    return iterations_of("voting", "ip")


def iterations_of(workflow: str, policy: str) -> dict:
    _, trainer, batch = make(workflow, policy)
    tokens, episodes, sequences = [], [], []
    prepare = trainer.prepare_rows

    def count(played):
        rows = prepare(played)
        tokens.append(sum(len(row.turn.completion_ids) for row in rows))
        episodes.append(len(played))
        sequences.append(len(rows))
        for row in rows:  # otherwise TRL would compute gradients of rows that ours skips
            row.advantage = row.advantage or 0.1
        return rows

    trainer.prepare_rows = count
    trainer.adapter_learning_rate = lambda adapter: 0.0

    def work() -> None:
        trainer.training_step(trainer.model, [dict(row) for row in batch])
        trainer.state.global_step += 1

    seconds = timed(work)
    n = len(tokens) - 1
    return {"seconds": seconds, "tokens": sum(tokens[1:]) / n, "roots": episodes[0], "leaves": episodes[0],
            "sequences": sum(sequences[1:]) / n}  # fmt: skip


def trl_iteration(micro: int) -> dict:
    """Time whole iterations of TRL's `train`, from the second to the last."""
    from transformers import TrainerCallback

    from multirole_study.experiment.cell_trainer import load_model

    cell, trainer, _ = make("single")
    model, tokenizer = load_model(cell)
    trainer.args.num_generations = 1  # each problem's prompt, as the workflow writes it
    first = trainer.play([(problem, 0) for problem in trainer.problems[: 4 * cell.n_problems]], 0)
    rows = [{"prompt": tokenizer.decode(episode.turns[0].prompt_ids)} for episode in first]
    stock_trainer = stock(cell, model, tokenizer, rows, micro)
    marks, tokens = [], []
    score = stock_trainer._generate_and_score_completions

    def count(inputs):
        scored = score(inputs)
        tokens.append(int(scored["completion_mask"].sum()))
        return scored

    stock_trainer._generate_and_score_completions = count

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            marks.append(time.process_time())

    stock_trainer.add_callback(Clock())
    stock_trainer.train()
    n = len(marks) - 1
    return {"seconds": (marks[-1] - marks[0]) / n, "tokens": sum(tokens[1:]) / n}


def requests_of_voting():
    """Return the trainer, and the requests of the voters of one iteration."""
    _, trainer, _ = make("voting")
    requests, add = [], trainer.engine.add
    trainer.engine.add = lambda key, request: (requests.append(request), add(key, request))[1]
    trainer.play([(p, i) for p in trainer.problems[:16] for i in range(8)], 0)
    trainer.engine.add = add
    return trainer, requests[:384]


def engine() -> dict:
    """Time our engine on all requests at once."""
    from bench_engine import run_engine

    trainer, requests = requests_of_voting()
    rows, tokens = [(request.prompt_ids, request.max_tokens) for request in requests], []
    seconds = timed(lambda: tokens.append(run_engine(trainer.engine, rows, [requests[0].adapter])))
    return {"seconds": seconds, "tokens": tokens[-1]}


def generate() -> dict:
    """Time `transformers`' `generate` of the merged model, with all rows in one left-padded call."""
    from bench_engine import run_generate

    trainer, requests = requests_of_voting()
    model, tokenizer = trainer.peft_model.merge_and_unload().eval(), trainer.processing_class
    rows, tokens = [(request.prompt_ids, request.max_tokens) for request in requests], []
    ends = tokenizer.eos_token_id, tokenizer.pad_token_id
    seconds = timed(lambda: tokens.append(run_generate(model, rows, *ends)))
    return {"seconds": seconds, "tokens": tokens[-1]}


def vllm() -> dict:
    """Time `vllm.LLM.generate` with one LoRA adapter, used as its documentation shows."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from multirole_study.experiment.base_models import locate
    from multirole_study.experiment.cell import Cell

    trainer, requests = requests_of_voting()
    folder = tempfile.mkdtemp()
    trainer.peft_model.save_pretrained(folder)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(locate(Cell("voting", "sp"))), dtype="float32", enable_lora=True, max_lora_rank=16, max_model_len=1024, max_num_seqs=384,
        disable_log_stats=True, gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    adapter = LoRARequest("shared", 1, str(Path(folder, "shared")))
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    settings = [SamplingParams(temperature=1.0, max_tokens=request.max_tokens, logprobs=0) for request in requests]
    tokens = []

    def work() -> None:
        outputs = llm.generate(prompts, settings, use_tqdm=False, lora_request=adapter)
        tokens.append(sum(len(output.outputs[0].token_ids) for output in outputs))

    return {"seconds": timed(work), "tokens": tokens[-1]}


def comlrl() -> dict:
    """Time one problem through CoMLRL: three voters, then an aggregator that reads them in the second turn."""
    import torch
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from multirole_study.experiment.base_models import locate
    from multirole_study.experiment.cell import Cell

    cell = Cell("voting", "ip", **SIZES)
    path, task = locate(cell), cell.make_task()
    tokenizer = AutoTokenizer.from_pretrained(path)
    problems = task.problems("train", 8)
    lora = LoraConfig(r=cell.lora_r, lora_alpha=cell.lora_alpha, target_modules="all-linear")
    agents = [get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora) for _ in range(4)]

    def chat(text: str) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )

    def transition(prompt, agent_completions, **_):
        candidates = "\n".join(f"Solution {i}: {text}" for i, text in enumerate(agent_completions[:3], start=1))
        return [prompt] * 3 + [f"{prompt}\n{candidates}"]

    trainer = MAGRPOTrainer(
        agents=agents, num_agents=4, tokenizer=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [problem.question for problem in problems]}),
        reward_func=lambda *texts: [float(len(texts[-1][0]) % 2)],
        formatters=lambda row, external_prompts=None: chat(external_prompts or row["prompt"]),
        external_transition=transition, wandb_config=None,
        args=MAGRPOConfig(
            num_agents=4, num_generations=8, num_turns=2, max_new_tokens=cell.max_completion_length, temperature=1.0, top_p=1.0,
            top_k=None, agent_learning_rate=0.0, early_termination_threshold=None, eval_interval=0, rollout_buffer_size=8,
        ),
    )  # fmt: skip
    counted = {"tokens": 0, "sequences": 0}
    complete = trainer._generate_completions

    def count(*args, **kwargs):
        done = complete(*args, **kwargs)
        counted["tokens"] += sum(done["response_lens"])
        counted["sequences"] += len(done["response_lens"])
        return done

    trainer._generate_completions = count
    rows = [dict(row) for row in trainer.train_dataset]
    torch.manual_seed(0)
    trainer._train_step_returns(rows[0])
    counted.update(tokens=0, sequences=0)
    started = time.process_time()
    trainer._train_step_returns(rows[1])
    seconds = time.process_time() - started
    return {"seconds": seconds, "roots": 8, "leaves": 64, **counted}


# ---- pairs


def environment_with(packages: list[str], folder: Path) -> str:
    """Return the Python of an environment with these packages on top of this environment's."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        ours = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        (next(folder.glob("lib/python*")) / "site-packages" / "ours.pth").write_text(f"{ours}\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)
    return str(python)


def measure_alone(python: str, benchmark: str) -> dict:
    """Run a measurement in a separate process."""
    return alone(str(HERE), "--measure", *benchmark.split(), python=python)


def ratios(pairs: list[tuple[dict, dict]]) -> dict[str, dict]:
    """Return the ratios rival / ours per unit of work that both report."""
    (ours, theirs), ratios_by_unit = pairs[0], {}
    for unit in ("tokens", "sequences", "leaves", "roots", "rows"):
        if unit in ours and unit in theirs:
            values = [b["seconds"] / b[unit] / (a["seconds"] / a[unit]) for a, b in pairs]
            ratios_by_unit[f"per {unit[:-1].replace('leave', 'leaf')}"] = spread(values) | {"pairs": len(pairs)}
            if "padding" in theirs:
                ratios_by_unit["per row"]["padding of TRL's batch"] = theirs["padding"]
    return ratios_by_unit


NAMES = {
    "trl update": "TRL 1.16, one optimizer step on the same 64 single-agent rows, micro-batches of {}",
    "trl iteration": "TRL 1.16, whole iterations with generation, micro-batches of {}",
    "generate": "`generate` of transformers, 384 requests of voters",
    "vllm": "`vllm.LLM.generate` (CPU build, float32, compiled), the same requests",
    "comlrl": "CoMLRL 1.4.3 (MAGRPO), Voting with an adapter per role",
}


def table(result: dict[str, dict]) -> str:
    """Return the table in docs/speed.md."""
    rows = []
    for name, ratios in ((name, result[name]) for name in RIVALS if name in result):
        words, number = name.rsplit(" ", 1) if name[-1].isdigit() else (name, "")
        for unit, value in ratios.items():
            numbers = [f"{value[k]:.2f}" for k in ("median", "min", "max")]
            rows.append([NAMES[words].format(number), unit, *numbers, value["pairs"]])
    return markdown("against | unit | median | from | to | pairs", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all of {', '.join(RIVALS)}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir(), "comlrl-environment"))
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure, *numbers = args.measure
        import torch

        torch.set_num_threads(1)
        print(json.dumps(globals()[measure](*map(int, numbers))))
        return
    if unknown := set(args.names) - set(RIVALS):
        parser.error(f"{sorted(unknown)} are not rivals; choose from {list(RIVALS)}")
    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name in args.names or RIVALS:
        ours, theirs = RIVALS[name]
        python = environment_with(COMLRL, args.environment) if theirs == "comlrl" else sys.executable
        measured = ratios(
            [(measure_alone(sys.executable, ours), measure_alone(python, theirs)) for _ in range(args.pairs)]
        )
        result[name] = measured
        for unit, value in measured.items():
            print(f"{name:18} {unit:12} {value['median']:6.2f}  [{value['min']:.2f}, {value['max']:.2f}]", flush=True)
        write("bench_rivals", args.out, result, table(result))


if __name__ == "__main__":
    main()
