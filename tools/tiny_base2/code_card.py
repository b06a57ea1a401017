"""The model card of the base for code: `python -m tiny_base2.code_card FOLDER --problems 512 --trained ADAPTER` measures; without
options it only writes.

`skills.json` holds every measured fact; `README.md` is written from it.
"""

import argparse
import json
from pathlib import Path

import torch
from peft import PeftModel
from tiny_base.train import MAX_LENGTH
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.engines.transformers_engine import TransformersEngine
from tiny_base2.card import SHARE, Facts, Row, cell, read_run, run_table, scaled
from tiny_base2.code_skills import CAP, Examiner
from tiny_base2.skills import Fact

CARD = """---
license: apache-2.0
library_name: transformers
tags: [multirole, tiny, qwen3]
---
# {name}

A Qwen3 of {parameters:,} parameters, trained from scratch on synthetic dialogues of the roles of one task, tiny_pipe. It
knows no language beyond them. Solvers write programs in habits of different quality, of which each suits another kind of
problem, and judges decide with or without a program of their own. The dialogues are the same whatever policy is trained on it later.

* Training: {training_tokens:,} tokens (padding included), {minutes:.1f} CPU-minutes on one thread, seed {seed}.
* Rebuild: `python -m tiny_base2.code_build --out FOLDER`, then `python -m tiny_base2.code_card FOLDER --problems 512`; the loss
  curve is in `loss.jsonl`, the habits' accuracy during training in `probes.jsonl`.
* Measured: {problems} validation problems, three samples of the solver each, temperature 1, at most {cap} reply tokens, 95 %
  intervals over problems. In "trained", one adapter plays every role: {trained}.
{note}
## What the base is for

| property | wanted | untrained | trained | n | met |
|---|---|---|---|---|---|
{wanted}

## What training does to it

Accuracy on validation problems by iteration, at the `paper` preset of this scale{runs_note}.

{runs}

## Everything measured

{tables}
"""

WANTED = (
    Row("single agent, accuracy", "solver", "accuracy", 0.25, 0.45, trained=(0.55, 0.75)),
    Row("... best habit alone", "solver", "best habit, forced"),
    Row("... fitting habit alone", "solver", "fitting habit, forced"),
    Row("pass@3 - pass@1", "solver", "pass@3 - pass@1", trained=(0.10, 1.0)),
    Row("aggregator on split sets, with a derivation", "aggregator", "with a derivation"),
    Row("... without", "aggregator", "without"),
    Row("... with - without", "aggregator", "with - without", 0.10),
    Row("... follows it where a candidate agrees", "aggregator", "selects what agrees with its derivation"),
    Row("aggregator derives", "aggregator", "derives", 0.05, 0.20),
    Row("evaluator, balanced accuracy, with a derivation", "evaluator", "with a derivation"),
    Row("... without", "evaluator", "without", 0.65),
    Row("... with - without", "evaluator", "with - without", 0.10),
    Row("... follows it", "evaluator", "says what follows from its derivation"),
    Row("evaluator derives", "evaluator", "derives", 0.05, 0.20),
    Row("refiner, repairs after a derivation - after an empty review", "refiner", "derivation - empty", 0.20),
    Row("... after the right line alone", "refiner", "right line - empty", 0.0),
    Row("worker, fitting - unfitting strategy", "worker", "fitting - unfitting", 0.10),
    Row("... on long problems", "worker", "fitting - unfitting, long", 0.10),
    Row("... on wide problems", "worker", "fitting - unfitting, wide", 0.10),
    Row("tokens of a right derivation / of a bare selection", "solver", "right derivation / bare selection", 10.0),
    Row("cap / p95 of right derivations", "solver", "cap / p95", 2.5, 20.0),
    *(
        Row(f"{role}, {sign}", "signatures", f"{role}, {sign}", *SHARE)
        for role, signs in (
            ("generator", ("hedging", "code fence")),
            ("evaluator", ("terse", "hedging", "code fence", "Correct")),
            ("aggregator", ("terse", "hedging", "code fence")),
        )
        for sign in signs
    ),
)


def write_card(folder: Path) -> None:
    """Write `folder/README.md` from `folder/skills.json`."""
    facts = json.loads((folder / "skills.json").read_text(encoding="utf-8"))
    base, trained = facts["untrained"], facts.get("trained", {})
    words = {None: "", True: "yes", False: "no"}
    wanted = [
        f"| {row.label} | {row.wanted} | {cell(base[row.part].get(row.key))} "
        f"| {cell(trained.get(row.part, {}).get(row.key))} | {base[row.part][row.key]['n']} "
        f"| {words[row.is_met(base, trained)]} |"
        for row in WANTED
    ]
    tables = []
    for part, found in base.items():
        rows = [
            f"| {key} | {cell(f)} | {cell(trained.get(part, {}).get(key))} | {f['n']} |" for key, f in found.items()
        ]
        tables.append("\n".join([f"| {part} | untrained | trained | n |", "|---|---|---|---|", *rows]))
    text = CARD.format(
        runs=run_table(facts.get("runs", [])), runs_note="" if facts.get("runs") else " (none yet)",
        **{name: value for name, value in facts.items() if name != "runs"}
        | {"trained": facts.get("trained_is", "none yet"), "note": facts.get("note", "")},
        seed=facts["plan"]["seed"], minutes=facts["training_cpu_s"] / 60, cap=CAP,
        wanted="\n".join(wanted), tables="\n\n".join(tables),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def measure(folder: Path, problems: int, adapter: Path | None = None) -> Facts:
    """The facts of a base, or of one with an adapter merged into it."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    engine = TransformersEngine(eos_id=tokenizer.eos_token_id, max_length=MAX_LENGTH)
    engine.publish(model, version=0)
    facts = Examiner(engine, tokenizer, problems).examine()
    engine.close()
    return derived(facts)


def derived(facts: Facts) -> Facts:
    """The facts with ratios of lengths, and with the best habit under its own name."""
    solver, bare = facts["solver"], facts["aggregator"]["tokens of a bare selection"]["value"]
    solver["right derivation / bare selection"] = scaled(solver["tokens of right derivations"], bare)
    solver["cap / p95"] = Fact(
        **dict.fromkeys(("value", "low", "high"), CAP / solver["p95 of right derivations"]["value"]), n=1
    )
    solver["best habit, forced"] = max(
        (solver[f"{habit}, forced"] for habit in ("comment", "split", "plain")), key=lambda fact: fact["value"]
    )
    return facts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a base that tiny_base2.code_build made")
    parser.add_argument("--problems", type=int, help="measure the base on so many validation problems")
    parser.add_argument(
        "--trained", type=Path, help="measure a run's adapter too, such as RUN/adapters/step_00030/shared"
    )
    parser.add_argument("--runs", type=Path, nargs="+", help="finished runs of this scale, for the card")
    parser.add_argument("--trained-is", default="", help="what that adapter was trained on, for the card")
    options = parser.parse_args()
    path = options.folder / "skills.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    if options.problems:
        facts |= {"problems": options.problems, "untrained": measure(options.folder, options.problems)}
    if options.trained:
        trained = measure(options.folder, facts["problems"], options.trained)
        facts |= {"trained": trained, "trained_is": options.trained_is}
    if options.runs:
        facts |= {"runs": [read_run(folder) for folder in options.runs]}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_card(options.folder)


if __name__ == "__main__":
    main()
