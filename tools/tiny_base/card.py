"""Write model cards: `skills.json` has every measured fact of a base, and `README.md` is generated from it."""

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

from multirole_study.paper.output import markdown
from tiny_base.ask import serve
from tiny_base.skills import Examiner, Fact

Facts = dict[str, dict[str, Fact]]
TEXT = """---
license: apache-2.0
library_name: transformers
tags: [multirole, tiny, qwen3]
---
# {name}

A Qwen3 of {parameters:,} parameters, trained from scratch on synthetic dialogues of the roles of one task, {task}. It
knows no language beyond them. {about}

* Training: {training_tokens:,} tokens (padding included), {minutes:.1f} CPU-minutes on one thread, seed {seed}.
* Rebuild: `PYTHONPATH=tools python -m tiny_base.{module}_build {options}--out FOLDER`, then `PYTHONPATH=tools python -m tiny_base.{module}_card FOLDER --problems 512`; the loss
  curve is in `loss.jsonl`, the habits' accuracy during training in `probes.jsonl`.
* Measured: {problems} validation problems, three samples of the solver each, temperature 1, at most {cap} reply tokens, 95 %
  intervals over problems. In "trained", {agent} plays every role: {trained}.
{note}
## What the base is for

{wanted}

## What training does to it

{runs}

## Everything measured

{tables}
{history}"""


class Property(NamedTuple):
    """A property of the base, with the bounds for the untrained base, and for the trained one if they differ."""

    label: str
    part: str
    key: str
    least: float | None = None
    most: float | None = None
    trained: tuple[float, float] | None = None

    def is_met(self, base: Facts, trained: Facts) -> bool | None:
        """Return whether the measured values are within the bounds; None without bounds, or if no trained agent was measured."""
        limits = [(base, (self.least, self.most))] * (self.least is not None)
        limits += [(trained, self.trained)] * bool(self.trained and trained)
        values = [(facts[self.part][self.key], bounds) for facts, bounds in limits]
        is_met = all(f["n"] > 0 and low <= f["value"] <= (high or inf) for f, (low, high) in values)
        return None if not limits or (is_met and self.trained and not trained) else is_met

    @property
    def wanted(self) -> str:
        """Format the bounds."""
        parts = [(self.least, self.most, "")] if self.least is not None else []
        parts += [(*self.trained, "trained ")] if self.trained else []
        return ", ".join(
            f"{subject}at most {high:g}"
            if low == -inf
            else f"{subject}{low:g} to {high:g}"
            if high
            else f"{subject}at least {low:g}"
            for low, high, subject in parts
        )


SHARE = (0.02, 0.98)
WANTED = (
    Property("single agent, accuracy", "solver", "accuracy", 0.25, 0.45, trained=(0.55, 0.75)),
    Property("pass@3 - pass@1", "solver", "pass@3 - pass@1", trained=(0.10, 1.0)),
    Property("aggregator on split sets, with a derivation", "aggregator", "with a derivation"),
    Property("... without", "aggregator", "without"),
    Property("... with - without", "aggregator", "with - without", 0.10),
    Property("... follows it where a candidate agrees", "aggregator", "selects what agrees with its derivation"),
    Property("aggregator derives", "aggregator", "derives", 0.05, 0.20),
    Property("evaluator, balanced accuracy, with a derivation", "evaluator", "with a derivation"),
    Property("... without", "evaluator", "without", 0.65),
    Property("... with - without", "evaluator", "with - without", 0.10),
    Property("... follows it", "evaluator", "says what follows from its derivation"),
    Property("evaluator derives", "evaluator", "derives", 0.05, 0.20),
    Property("refiner, repairs after a derivation - after an empty review", "refiner", "derivation - empty", 0.20),
    Property("... after the right line alone", "refiner", "right line - empty", 0.0),
    Property("worker, fitting - unfitting strategy", "worker", "fitting - unfitting", 0.10),
    Property("... on long problems", "worker", "fitting - unfitting, long", 0.10),
    Property("... on wide problems", "worker", "fitting - unfitting, wide", 0.10),
    Property("tokens of a right derivation / of a bare selection", "solver", "right derivation / bare selection", 10.0),
    Property("cap / p95 of right derivations", "solver", "cap / p95", 2.5, 20.0),
    *(
        Property(f"{role}, {sign}", "signatures", f"{role}, {sign}", *SHARE)
        for role, signs in (
            ("generator", ("boxed", "terse", "hedging", "code fence")),
            ("evaluator", ("terse", "hedging", "code fence", "Correct")),
            ("aggregator", ("terse", "hedging", "code fence")),
        )
        for sign in signs
    ),
)


def read(folder: Path) -> dict[str, Any]:
    """Read the facts of a base."""
    return json.loads((folder / "skills.json").read_text(encoding="utf-8"))


def note(folder: Path, **facts: Any) -> None:
    """Add or replace facts of a base."""
    text = json.dumps(read(folder) | facts, indent=1)
    (folder / "skills.json").write_text(f"{text}\n", encoding="utf-8")


def cell(fact: Fact | None) -> str:
    """Format a fact with its interval."""
    if fact is None or not fact["n"]:
        return "-"
    digits = 1 if fact["value"] > 2 else 3
    return " ".join([f"{fact['value']:.{digits}f}", f"[{fact['low']:.{digits}f}, {fact['high']:.{digits}f}]"])


def read_run(folder: Path) -> dict[str, Any]:
    """Read the result of one finished run."""
    outcomes = pd.read_parquet(folder / "eval.parquet").groupby("step")["correct"]
    return {
        "name": folder.name,
        "per_iteration": json.loads((folder / "config.json").read_text(encoding="utf-8"))["n_problems"],
        "problems": int(outcomes.size().iloc[0]),
        "cpu_s": round(float(pd.read_parquet(folder / "metrics.parquet")["cpu_seconds"].sum())),
        "accuracy": {str(step): round(float(value), 4) for step, value in outcomes.mean().items()},
    }


def run_table(runs: list[dict[str, Any]]) -> str:
    """Format a table with a line per run."""
    if not runs:
        return ""
    steps = list(runs[0]["accuracy"])
    rows = [
        [run["name"], run["per_iteration"], f"{run['cpu_s'] / 60:.1f}", *(f"{run['accuracy'][s]:.3f}" for s in steps)]
        for run in runs
    ]
    return markdown(["run", "problems per iteration", "CPU-minutes", *steps], rows, "---")


class Card(NamedTuple):
    """The parts of a card that depend on the base: words for `TEXT`, the table of properties, and the examiner."""

    module: str
    """The prefix of its modules' names."""
    about: str
    agent: str
    """The agent that was measured as "trained"."""
    runs: str
    """The caption of the table of runs."""
    wanted: tuple[Property, ...]
    examiner: type[Examiner]
    history: str = ""
    options: str = ""
    """Options of the build, with a space behind them."""


def wanted_table(facts: dict[str, Any], card: Card) -> str:
    """Format a table with a line per property of the base: bounds and measured values."""
    base, trained = facts["untrained"], facts.get("trained", {})
    words = {None: "", True: "yes", False: "no"}
    rows = []
    for row in card.wanted:
        fact, after = base[row.part][row.key], trained.get(row.part, {}).get(row.key)
        is_met = words[row.is_met(base, trained)]
        rows.append([row.label, row.wanted, cell(fact), cell(after), fact["n"], is_met])
    return markdown(["property", "wanted", "untrained", "trained", "n", "met"], rows, "---")


def part_table(part: str, untrained: dict[str, Fact], trained: dict[str, Fact]) -> str:
    """Format a table with a line per measured fact of one part."""
    rows = [[key, cell(fact), cell(trained.get(key)), fact["n"]] for key, fact in untrained.items()]
    return markdown([part, "untrained", "trained", "n"], rows, "---")


def write_card(folder: Path, card: Card) -> None:
    """Write `folder/README.md` from `folder/skills.json`."""
    facts = read(folder)
    trained, runs = facts.get("trained", {}), facts.get("runs", [])
    tables = [part_table(part, untrained, trained.get(part, {})) for part, untrained in facts["untrained"].items()]
    text = TEXT.format(
        name=facts["name"], parameters=facts["parameters"], training_tokens=facts["training_tokens"], problems=facts["problems"],
        task=card.examiner.task.name, cap=card.examiner.cap, module=card.module, options=card.options, about=card.about, agent=card.agent,
        minutes=facts["training_cpu_s"] / 60, seed=facts["plan"]["seed"],
        trained=facts.get("trained_is", "none yet"), note=facts.get("note", ""), wanted=wanted_table(facts, card),
        runs=card.runs.format(note="" if runs else " (none yet)") + f"\n\n{run_table(runs)}",
        tables="\n\n".join(tables), history=card.history,
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def measure(folder: Path, problems: int, adapter: Path | None, examiner: type[Examiner]) -> Facts:
    """Measure the facts of a base, or of a base with a merged adapter."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    engine = serve(model, tokenizer)
    facts = examiner(engine, tokenizer, problems).examine()
    engine.close()
    solver, bare = facts["solver"], facts["aggregator"]["tokens of a bare selection"]
    cap = Fact(value=examiner.cap, low=examiner.cap, high=examiner.cap, n=1)
    solver["right derivation / bare selection"] = divided(solver["tokens of right derivations"], bare)
    solver["cap / p95"] = divided(cap, solver["p95 of right derivations"])
    return facts


def examine(folder: Path, problems: int, card: Card) -> dict[str, Any]:
    """Measure a base, record the facts, write its card, and return all facts."""
    note(folder, problems=problems, untrained=measure(folder, problems, None, card.examiner))
    write_card(folder, card)
    return read(folder)


def average(facts_by_agent: list[Facts]) -> Facts:
    """Average the facts of several agents: values and bounds of the intervals."""

    def mean(facts: list[Fact]) -> Fact:
        value, low, high = (round(fmean(f[key] for f in facts), 4) for key in ("value", "low", "high"))
        return Fact(value=value, low=low, high=high, n=min(f["n"] for f in facts))

    return {
        part: {key: mean([facts[part][key] for facts in facts_by_agent]) for key in facts_by_agent[0][part]}
        for part in facts_by_agent[0]
    }


def divided(fact: Fact, by: Fact) -> Fact:
    """Divide a fact by the value of another; n is 0 if the other was not measured."""
    if not by["n"]:
        return Fact(value=0.0, low=0.0, high=0.0, n=0)
    value, low, high = (fact[key] / by["value"] for key in ("value", "low", "high"))
    return Fact(value=value, low=low, high=high, n=fact["n"])


def main(cards: dict[str, Card], description: str | None) -> None:
    """Run the command line; `cards` has the card of every base by its name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a base that was built")
    parser.add_argument("--problems", type=int, help="measure the base on so many validation problems")
    parser.add_argument(
        "--trained", type=Path, nargs="+", help="measure runs' adapters too, such as RUN/adapters/step_00060/shared"
    )
    parser.add_argument("--runs", type=Path, nargs="+", help="finished runs of this scale, for the card")
    parser.add_argument("--trained-is", default="", help="what those adapters were trained on, for the card")
    options = parser.parse_args()
    card = cards[read(options.folder)["name"]]
    if options.problems:
        examine(options.folder, options.problems, card)
    if options.trained:
        problems = read(options.folder)["problems"]
        agents = [measure(options.folder, problems, adapter, card.examiner) for adapter in options.trained]
        note(options.folder, trained=average(agents), agents=agents, trained_is=options.trained_is)
    if options.runs:
        note(options.folder, runs=[read_run(folder) for folder in options.runs])
    write_card(options.folder, card)
