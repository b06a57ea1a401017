"""Write the card of scale qwen-0.5b into docs/bases.md: what the untrained base can do on the scale's tasks.

    export OMP_NUM_THREADS=1
    python tools/qwen_card.py sample math --out card/math.jsonl     # 128 problems of validation, 4 replies each; continues after a stop
    python tools/qwen_card.py sample code --out card/code.jsonl
    python tools/qwen_card.py write card

A single agent samples with the scale's prompt, temperature and dtype. Each reply is written to the file when it ends. Replies have at most `CAP` tokens. A reply's seed does
not depend on the cap, so the first N tokens of a reply are what a cap of N would have given: `write` scores every reply at several caps.

`write` makes docs/qwen.json from the two files, and the tables of the page from that. The cap of a task at this scale follows from a rule: the smallest one that keeps `SHARE`
of the accuracy at `CAP`. `write` also works before all replies are sampled, on the problems so far.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "benchmarks")]  # loaded by tests as well

from smollm2_card import mean_interval, page_with

from multirole.types import Problem, user
from multirole.workflows.prompts import render
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.presets import QWEN
from multirole_study.paper.output import markdown

PAGE, FACTS = ROOT / "docs" / "bases.md", ROOT / "docs" / "qwen.json"
CAP, CAPS, SHARE = 384, {"math": (128, 192, 256, 320, 384), "code": (96, 128, 192, 384)}, 0.95
N_PROBLEMS, N_SAMPLES, MAX_ROWS = 128, 4, 32
WANTED = {"accuracy": (0.20, 0.50), "one of four right - accuracy": (0.15, 1.0)}
"""Fact -> the bounds for programs, so that there is something to choose from and room to learn."""


def cell_of(task: str) -> Cell:
    """Return the single agent's cell of "math" or "code"."""
    return Cell("single", "sp", task, QWEN)


# ---- sampling


def sample(task: str, split: str, n_problems: int, n_samples: int, out: Path) -> None:
    """Append the replies that `out` lacks, as JSON lines; its first line says how they are sampled."""
    import torch
    from measuring import processor
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from multirole.chat.templates import chat_template
    from multirole.engines.protocol import Request
    from multirole_cpu.engine import TransformersEngine
    from multirole_study.experiment.base_models import describe, locate
    from multirole_study.experiment.hardware import dtype_of

    cell = cell_of(task)
    problems = cell.make_task().problems(split, n_problems)
    how = {
        "task": task, "split": split, "cap": CAP, "temperature": cell.temperature, "dtype": dtype_of(cell), "base": describe(cell),
        "dataset": cell.make_task().describe(), "processor": processor(),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        out.write_text(json.dumps(how) + "\n", encoding="utf-8")
    recorded, rows = read(out)
    if recorded != how:
        raise SystemExit(f"{out} was sampled as {recorded}, and now it would be {how}. Write to another file.")
    whole = out.with_suffix(".whole")  # without a line that a killed process left
    whole.write_text("".join(json.dumps(row) + "\n" for row in (how, *rows)), encoding="utf-8")
    whole.replace(out)
    done = {(row["problem"], row["sample"]) for row in rows}
    tokenizer = AutoTokenizer.from_pretrained(locate(cell))
    model = AutoModelForCausalLM.from_pretrained(locate(cell), dtype=getattr(torch, how["dtype"]))
    requests = {}
    for problem in problems:
        text = render(problem.task, "generator", question=problem.question)
        prompt = chat_template(tokenizer, [user(text)])
        for i in range(n_samples):
            if (problem.id, i) not in done:
                seed = int.from_bytes(hashlib.sha256(f"{problem.id}/{i}".encode()).digest()[:4], "big")
                requests[len(requests)] = (problem.id, i, Request(prompt, None, seed, CAP, cell.temperature))
    longest = CAP + max((len(request.prompt_ids) for *_, request in requests.values()), default=0)
    engine = TransformersEngine(tokenizer.eos_token_id, max_rows=MAX_ROWS, max_length=longest)
    engine.publish(model, 0)
    for key, (*_, request) in requests.items():
        engine.add(key, request)
    clock, n_tokens, start = time.process_time(), 0, time.process_time()
    with out.open("a", encoding="utf-8") as file:
        while engine.running:
            for key, completion in engine.step():
                name, i, request = requests[key]
                used, clock = time.process_time() - clock, time.process_time()
                n_tokens += len(completion.token_ids)
                row = {
                    "problem": name, "sample": i, "prompt_tokens": len(request.prompt_ids), "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason, "cpu_seconds": round(used, 3),
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
                file.flush()
    print(f"{len(requests)} replies, {n_tokens} tokens, {n_tokens / max(clock - start, 1e-9):.0f} per CPU-second")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read how a file was sampled, and its replies. A line that a killed process left unfinished is dropped."""
    how, *lines = path.read_text(encoding="utf-8").split("\n")
    return json.loads(how), [json.loads(line) for line in lines if line.endswith("}")]


# ---- scoring


def scored(path: Path, caps: tuple[int, ...]) -> Iterator[pd.DataFrame]:
    """Score the replies of a file at each cap; one row per reply, in the file's order."""
    from transformers import AutoTokenizer

    from multirole_study.experiment.base_models import locate

    how, rows = read(path)
    cell = cell_of(how["task"])
    task, tokenizer = cell.make_task(), AutoTokenizer.from_pretrained(locate(cell))
    problems: dict[str, Problem] = {problem.id: problem for problem in task.problems(how["split"], cell.n_train)}
    frame = pd.DataFrame(rows)
    for cap in caps:
        texts = [tokenizer.decode(ids[:cap], skip_special_tokens=True) for ids in frame["token_ids"]]
        rewards = task.score([problems[name] for name in frame["problem"]], texts)
        n_tokens = frame["token_ids"].map(len)
        yield pd.DataFrame({
            "problem": frame["problem"], "text": texts, "cap": cap, "correct": [float(r.is_correct) for r in rewards],
            "reward": [r.value for r in rewards], "reason": [r.reason for r in rewards], "tokens": n_tokens.clip(upper=cap),
            "is_cut": ((n_tokens > cap) | (frame["finish_reason"] == "length")).astype(float),
            "has_answer": [float(task.extract(text) is not None) for text in texts],
        })  # fmt: skip


def facts_at_a_cap(replies: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Measure the replies of one cap; intervals are over problems."""
    by_problem = replies.groupby("problem")
    accuracy, any_right = by_problem["correct"].mean(), by_problem["correct"].any().astype(float)
    facts = {"accuracy": accuracy, "one of four right": any_right, "one of four right - accuracy": any_right - accuracy}
    names = {"reward": "mean reward", "has_answer": "in the asked form", "tokens": "tokens of a reply", "is_cut": "cut off at the cap"}  # fmt: skip
    facts |= {label: by_problem[name].mean() for name, label in names.items()}
    return {name: mean_interval(values) for name, values in facts.items()}


def sampled_problems(order: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems before the first one, in the order of sampling, that lacks a reply.

    Of the later ones only the short replies have ended, so they would bias what is measured of a file that is still written.
    """
    n_replies = Counter(row["problem"] for row in rows)
    return list(takewhile(lambda name: n_replies[name] >= N_SAMPLES, order))


def measure(path: Path) -> dict[str, Any]:
    """Measure a file of replies at every cap of its task."""
    how, rows = read(path)
    order = [problem.id for problem in cell_of(how["task"]).make_task().problems(how["split"], N_PROBLEMS)]
    names = sampled_problems(order, rows)
    caps = {
        str(replies["cap"][0]): facts_at_a_cap(replies[replies["problem"].isin(names)])
        for replies in scored(path, CAPS[how["task"]])
    }
    n_tokens, seconds = sum(len(row["token_ids"]) for row in rows), sum(row["cpu_seconds"] for row in rows)
    return how | {"replies_per_problem": N_SAMPLES, "tokens_per_cpu_second": round(n_tokens / seconds), "caps": caps}


def shortest_cap(caps: dict[str, dict[str, dict[str, float]]]) -> int:
    """Return the smallest cap that keeps `SHARE` of the accuracy at the largest."""
    accuracy = {int(cap): facts["accuracy"]["value"] for cap, facts in caps.items()}
    return min(cap for cap in accuracy if accuracy[cap] >= SHARE * accuracy[max(accuracy)])


# ---- the page


def written(card: dict[str, Any]) -> str:
    """Format the tables of the page: a task's caps side by side."""
    lines = []
    for name, facts in card.items():
        caps, chosen = facts["caps"], shortest_cap(facts["caps"])
        first = next(iter(caps.values()))
        about = (
            f"`{name}`: {first['accuracy']['n']} problems of {facts['split']}, {facts['replies_per_problem']} replies each, temperature {facts['temperature']}, "
            f"{facts['base']['name']}; computed in {facts['dtype']} on {facts['processor']}, {facts['tokens_per_cpu_second']} tokens per CPU-second."
        )
        titles = ["cap in tokens", *(f"**{cap}**" if int(cap) == chosen else cap for cap in caps)]
        rows = [[fact, *(_cell(at_cap[fact]) for at_cap in caps.values())] for fact in first]
        lines += [about, "", markdown(titles, rows, "---"), ""]
    return "\n".join(lines[:-1])


def _cell(fact: dict[str, float]) -> str:
    digits = 0 if fact["value"] > 2 else 3
    value, low, high = (f"{fact[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def main() -> None:
    """Sample, or write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sampling = commands.add_parser("sample")
    sampling.add_argument("task", choices=("math", "code"))
    sampling.add_argument("--split", default="validation", choices=("train", "validation"))
    sampling.add_argument("--problems", type=int, default=N_PROBLEMS)
    sampling.add_argument("--samples", type=int, default=N_SAMPLES)
    sampling.add_argument("--out", type=Path, required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "sample":
        sample(args.task, args.split, args.problems, args.samples, args.out)
        return
    card = {path.stem: measure(path) for path in (args.folder / "math.jsonl", args.folder / "code.jsonl")}
    FACTS.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), written(card)), encoding="utf-8")


if __name__ == "__main__":
    main()
