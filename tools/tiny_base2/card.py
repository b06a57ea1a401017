"""The model card: `python -m tiny_base2.card FOLDER --problems 512 --trained ADAPTER...` measures; without options it only writes.

`skills.json` holds every measured fact; `README.md` is written from it and from `history.md`.
"""

import argparse
import json
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from multirole.engines.transformers_engine import TransformersEngine
from tiny_base2.skills import LONGEST, Examiner, Fact

Facts = dict[str, dict[str, Fact]]
CARD = """---
license: apache-2.0
library_name: transformers
tags: [multirole, tiny, qwen3]
---
# {name}

A Qwen3 of {parameters:,} parameters, trained from scratch on synthetic dialogues of the roles of one task, tiny_chain. It
knows no language beyond them. Solvers work in habits of different quality, of which each suits another kind of problem, and
judges decide with or without a derivation of their own. The dialogues are the same whatever policy is trained on it later.

* Training: {training_tokens:,} tokens (padding included), {minutes:.1f} CPU-minutes on one thread, seed {seed}.
* Rebuild: `python -m tiny_base2.build --out FOLDER`, then `python -m tiny_base2.card FOLDER --problems 512`; the loss curve is
  in `loss.jsonl`, the habits' accuracy during training in `probes.jsonl`.
* Measured: {problems} validation problems, three samples of the solver each, temperature 1, at most {cap} reply tokens, 95 %
  intervals over problems. In "trained", a single agent's adapter plays every role: {trained}.

## What the base is for

| property | wanted | untrained | trained | n | met |
|---|---|---|---|---|---|
{wanted}

## What training does to it

Accuracy on the validation problems by iteration, at the `paper` preset of this scale{runs_note}; a run of more problems per
iteration differs from the preset in that alone.

{runs}

## Everything measured

{tables}

{history}"""
HISTORY = Path(__file__).with_name("history.md")


class Row(NamedTuple):
    """A property of the base: what is wanted of the untrained one, and of the trained one if it differs from that."""

    label: str
    part: str
    key: str
    least: float | None = None
    most: float | None = None
    trained: tuple[float, float] | None = None

    def is_met(self, base: Facts, trained: Facts) -> bool | None:
        """Whether the measured values are in the bounds; None where nothing is wanted, or no trained agent was measured."""
        wanted = [(base, (self.least, self.most))] * (self.least is not None)
        wanted += [(trained, self.trained)] * bool(self.trained and trained)
        values = [(found[self.part][self.key], bounds) for found, bounds in wanted]
        is_met = all(f["n"] > 0 and low <= f["value"] <= (high or inf) for f, (low, high) in values)
        return None if not wanted or (is_met and self.trained and not trained) else is_met

    @property
    def wanted(self) -> str:
        """The bounds in words."""
        parts = [(self.least, self.most, "")] if self.least is not None else []
        parts += [(*self.trained, "trained ")] if self.trained else []
        return ", ".join(f"{who}{low:g} to {high:g}" if high else f"{who}at least {low:g}" for low, high, who in parts)


SHARE = (0.02, 0.98)
WANTED = (
    Row("single agent, accuracy", "solver", "accuracy", 0.25, 0.45, trained=(0.55, 0.75)),
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
            ("generator", ("boxed", "terse", "hedging", "code fence")),
            ("evaluator", ("terse", "hedging", "code fence", "Correct")),
            ("aggregator", ("terse", "hedging", "code fence")),
        )
        for sign in signs
    ),
)


def cell(fact: Fact | None) -> str:
    """A fact with its interval."""
    if fact is None or not fact["n"]:
        return "-"
    digits = 1 if fact["value"] > 2 else 3
    return " ".join([f"{fact['value']:.{digits}f}", f"[{fact['low']:.{digits}f}, {fact['high']:.{digits}f}]"])


def read_run(folder: Path) -> dict[str, Any]:
    """What became of one finished run."""
    outcomes = pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"]
    return {
        "name": folder.name,
        "per_iteration": json.loads((folder / "config.json").read_text(encoding="utf-8"))["n_problems"],
        "problems": int(outcomes.size().iloc[0]),
        "cpu_s": round(float(pd.read_parquet(folder / "metrics.parquet")["cpu_seconds"].sum())),
        "accuracy": {str(step): round(float(value), 4) for step, value in outcomes.mean().items()},
    }


def run_table(runs: list[dict[str, Any]]) -> str:
    """A line per run."""
    if not runs:
        return ""
    steps = list(runs[0]["accuracy"])
    lines = [
        "| run | problems per iteration | CPU-minutes | " + " | ".join(steps) + " |",
        "|---" * (len(steps) + 3) + "|",
    ]
    for run in runs:
        values = " | ".join(f"{run['accuracy'][step]:.3f}" for step in steps)
        lines.append(f"| {run['name']} | {run['per_iteration']} | {run['cpu_s'] / 60:.1f} | {values} |")
    return "\n".join(lines)


class Card(NamedTuple):
    """A base's card: its text, the rows of its table, who measures, and the last section."""

    text: str
    wanted: tuple[Row, ...]
    examiner: type[Examiner]
    history: str


MATH = Card(CARD, WANTED, Examiner, HISTORY.read_text(encoding="utf-8"))


def write_card(folder: Path, card: Card = MATH) -> None:
    """Write `folder/README.md` from `folder/skills.json`."""
    facts = json.loads((folder / "skills.json").read_text(encoding="utf-8"))
    base, trained = facts["untrained"], facts.get("trained", {})
    words = {None: "", True: "yes", False: "no"}
    wanted = [
        f"| {row.label} | {row.wanted} | {cell(base[row.part].get(row.key))} "
        f"| {cell(trained.get(row.part, {}).get(row.key))} | {base[row.part][row.key]['n']} "
        f"| {words[row.is_met(base, trained)]} |"
        for row in card.wanted
    ]
    tables = []
    for part, found in base.items():
        rows = [
            f"| {key} | {cell(f)} | {cell(trained.get(part, {}).get(key))} | {f['n']} |" for key, f in found.items()
        ]
        tables.append("\n".join([f"| {part} | untrained | trained | n |", "|---|---|---|---|", *rows]))
    text = card.text.format(
        runs=run_table(facts.get("runs", [])), runs_note="" if facts.get("runs") else " (none yet)",
        **{name: value for name, value in facts.items() if name != "runs"}
        | {"trained": facts.get("trained_is", "none yet"), "note": facts.get("note", "")},
        seed=facts["plan"]["seed"], minutes=facts["training_cpu_s"] / 60, cap=card.examiner.cap,
        wanted="\n".join(wanted), tables="\n\n".join(tables), history=card.history,
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def measure(folder: Path, problems: int, adapter: Path | None = None, examiner: type[Examiner] = Examiner) -> Facts:
    """The facts of a base, or of one with an adapter merged into it."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    engine = TransformersEngine(eos_id=tokenizer.eos_token_id, max_length=LONGEST)
    engine.publish(model, version=0)
    facts = examiner(engine, tokenizer, problems).examine()
    engine.close()
    solver, bare = facts["solver"], facts["aggregator"]["tokens of a bare selection"]["value"]
    solver["right derivation / bare selection"] = scaled(solver["tokens of right derivations"], bare)
    solver["cap / p95"] = Fact(
        **dict.fromkeys(("value", "low", "high"), examiner.cap / solver["p95 of right derivations"]["value"]), n=1
    )
    return facts


def average(found: list[Facts]) -> Facts:
    """The facts of several agents: means over agents of the values and of their intervals' bounds."""

    def mean(facts: list[Fact]) -> Fact:
        value, low, high = (round(fmean(f[key] for f in facts), 4) for key in ("value", "low", "high"))
        return Fact(value=value, low=low, high=high, n=min(f["n"] for f in facts))

    return {part: {key: mean([facts[part][key] for facts in found]) for key in found[0][part]} for part in found[0]}


def scaled(fact: Fact, by: float) -> Fact:
    """A fact divided by a number."""
    return Fact(value=fact["value"] / by, low=fact["low"] / by, high=fact["high"] / by, n=fact["n"])


def main(card: Card, description: str | None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a base that was built")
    parser.add_argument("--problems", type=int, help="measure the base on so many validation problems")
    parser.add_argument(
        "--trained", type=Path, nargs="+", help="measure runs' adapters too, such as RUN/adapters/step_00060/shared"
    )
    parser.add_argument("--runs", type=Path, nargs="+", help="finished runs of this scale, for the card")
    parser.add_argument("--trained-is", default="", help="what those adapters were trained on, for the card")
    options = parser.parse_args()
    path = options.folder / "skills.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    if options.problems:
        facts |= {
            "problems": options.problems,
            "untrained": measure(options.folder, options.problems, None, card.examiner),
        }
    if options.trained:
        agents = [measure(options.folder, facts["problems"], adapter, card.examiner) for adapter in options.trained]
        facts |= {"trained": average(agents), "agents": agents, "trained_is": options.trained_is}
    if options.runs:
        facts |= {"runs": [read_run(folder) for folder in options.runs]}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_card(options.folder, card)


if __name__ == "__main__":
    main(MATH, __doc__)
