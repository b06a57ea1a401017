"""The model card: `python -m tiny_base2.card FOLDER --problems 512 --trained ADAPTER` measures; without options it only writes.

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
from tiny_base2.skills import CAP, Examiner, Fact

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
  intervals over problems. In "trained", one adapter plays every role: {trained}.
{note}
## What the base is for

| property | wanted | untrained | trained | n |
|---|---|---|---|---|
{wanted}

## Everything measured

{tables}
"""

WANTED = (
    ("single agent, accuracy", ".25-.45, trained .55-.75", "solver", "accuracy"),
    ("pass@3 - pass@1", "trained +.10", "solver", "pass@3 - pass@1"),
    ("aggregator on split sets, with a derivation", "", "aggregator", "with a derivation"),
    ("... without", "", "aggregator", "without"),
    ("... with - without", "+.10", "aggregator", "with - without"),
    ("aggregator derives", ".05-.20", "aggregator", "derives"),
    ("evaluator, balanced accuracy, with a derivation", "", "evaluator", "with a derivation"),
    ("... without", ".65", "evaluator", "without"),
    ("... with - without", "+.10", "evaluator", "with - without"),
    ("evaluator derives", ".05-.20", "evaluator", "derives"),
    ("refiner, repairs after a derivation - after an empty review", "+.20", "refiner", "derivation - empty"),
    ("... after the right line alone - after an empty review", "above 0", "refiner", "right line - empty"),
    ("worker, fitting - unfitting strategy", "+.10", "worker", "fitting - unfitting"),
    ("... on long problems", "+.10", "worker", "fitting - unfitting, long"),
    ("... on wide problems", "+.10", "worker", "fitting - unfitting, wide"),
    ("tokens of a right derivation", "10 to 1", "solver", "tokens of right derivations"),
    ("tokens of a bare selection", "", "aggregator", "tokens of a bare selection"),
    ("p95 of the longest useful text (cap 160)", "64", "solver", "p95 of right derivations"),
    ("generator boxed", ".02-.98", "signatures", "generator, boxed"),
    ("generator terse", ".02-.98", "signatures", "generator, terse"),
    ("generator hedging", ".02-.98", "signatures", "generator, hedging"),
    ("generator code fence", ".02-.98", "signatures", "generator, code fence"),
    ("evaluator derives", ".02-.98", "signatures", "evaluator, derives"),
    ("evaluator hedging", ".02-.98", "signatures", "evaluator, hedging"),
    ("evaluator code fence", ".02-.98", "signatures", "evaluator, code fence"),
    ("evaluator's verdict Correct", ".02-.98", "signatures", "evaluator, Correct"),
    ("aggregator hedging", ".02-.98", "signatures", "aggregator, hedging"),
    ("aggregator code fence", ".02-.98", "signatures", "aggregator, code fence"),
)


def cell(fact: Fact | None) -> str:
    """A fact with its interval."""
    if fact is None or not fact["n"]:
        return "-"
    digits = 1 if fact["value"] > 2 else 3
    return " ".join([f"{fact['value']:.{digits}f}", f"[{fact['low']:.{digits}f}, {fact['high']:.{digits}f}]"])


def write_card(folder: Path) -> None:
    """Write `folder/README.md` from `folder/skills.json`."""
    facts = json.loads((folder / "skills.json").read_text(encoding="utf-8"))
    base, trained = facts["untrained"], facts.get("trained", {})
    wanted = [
        f"| {label} | {target} | {cell(base[part].get(key))} | {cell(trained.get(part, {}).get(key))} "
        f"| {base[part].get(key, {'n': 0})['n']} |"
        for label, target, part, key in WANTED
    ]
    tables = []
    for part, found in base.items():
        rows = [
            f"| {key} | {cell(f)} | {cell(trained.get(part, {}).get(key))} | {f['n']} |" for key, f in found.items()
        ]
        tables.append("\n".join([f"| {part} | untrained | trained | n |", "|---|---|---|---|", *rows]))
    text = CARD.format(
        **facts | {"trained": facts.get("trained_is", "none yet"), "note": facts.get("note", "")},
        seed=facts["plan"]["seed"], minutes=facts["training_cpu_s"] / 60, cap=CAP,
        wanted="\n".join(wanted), tables="\n\n".join(tables),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def measure(folder: Path, problems: int, adapter: Path | None = None) -> dict[str, dict[str, Fact]]:
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
    return facts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a base that tiny_base2.build made")
    parser.add_argument("--problems", type=int, help="measure the base on so many validation problems")
    parser.add_argument(
        "--trained", type=Path, help="measure a run's adapter too, such as RUN/adapters/step_00030/shared"
    )
    parser.add_argument("--trained-is", default="", help="what that adapter was trained on, for the card")
    options = parser.parse_args()
    path = options.folder / "skills.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    if options.problems:
        facts |= {"problems": options.problems, "untrained": measure(options.folder, options.problems)}
    if options.trained:
        facts |= {
            "trained": measure(options.folder, facts["problems"], options.trained),
            "trained_is": options.trained_is,
        }
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_card(options.folder)


if __name__ == "__main__":
    main()
