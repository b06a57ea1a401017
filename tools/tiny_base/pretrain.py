"""Build an embedded base: `python -m tiny_base.pretrain --out FOLDER` (15 CPU-minutes).

Phase 1 teaches every role from scripted dialogues. Phase 2 lets the model answer train problems, has the task grade the
answers, and continues on dialogues in which critics read those own answers and reply with the truth.
"""

import argparse
import json
import logging
import random
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from multirole.engines.transformers_engine import TransformersEngine
from tiny_base.card import write_card
from tiny_base.dialogues import AUTHORS, Row, make_rows, pooled, synthetic
from tiny_base.skills import measure, own_answers
from tiny_base.tokenizer import build_tokenizer
from tiny_base.train import MAX_LENGTH, ROWS_PER_POOL, build_model, train

log = logging.getLogger(__name__)

PHASE_1 = {
    "generator": 24, "refiner": 8, "evaluator": 26, "aggregator": 20, "orchestrator": 2, "worker": 9, "synthesizer": 9,
}  # fmt: skip
PHASE_2 = {"generator": 45, "refiner": 15, "evaluator": 5, "aggregator": 5, "orchestrator": 5, "worker": 25}
PHASE_2_OWN = {"evaluator": 43, "aggregator": 43, "synthesizer": 14}
MIX = ("tiny_math", "tiny_math", "tiny_math", "tiny_code", "tiny_code")
"""Tasks of the dialogues: arithmetic takes longer to learn."""
OWN_SHARE = 0.65
"""Share of phase-2 rows in which a critic reads own answers."""


@dataclass(frozen=True)
class Plan:
    """What a build does. Budgets are tokens seen, padding included."""

    dialogue_tokens: int = 8_000_000
    critic_tokens: int = 6_000_000
    lr: float = 5e-3
    critic_lr: float = 2.5e-3
    own_problems: int = 2000  # per task
    own_answers: int = 8  # per problem
    measured: int = 512  # validation problems per task
    seed: int = 0

    def scaled(self, share: float) -> "Plan":
        """The same plan with a share of its budgets, at least enough for one record and one problem."""
        amounts = ("dialogue_tokens", "critic_tokens", "own_problems", "measured")
        return replace(self, **{name: max(8, round(vars(self)[name] * share)) for name in amounts})


def learn_dialogues(plan: Plan, out: Path) -> None:
    """Phase 1: a model learns scripted dialogues of every role from scratch."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, plan.seed)
    rng = random.Random(f"dialogues/{plan.seed}")
    sources = [synthetic(task, rng) for task in MIX]

    def draw_rows() -> list[Row]:
        return make_rows(PHASE_1, ROWS_PER_POOL, rng, sources)

    train(model, tokenizer, draw_rows, plan.dialogue_tokens, plan.lr, out, phase="dialogues", seed=plan.seed)


def learn_criticism(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, out: Path) -> None:
    """Phase 2: critics of the model's own answers, mixed with scripted dialogues."""
    rng = random.Random(f"criticism/{plan.seed}")
    engine = serve(model, tokenizer)
    own = {}
    for name, author in AUTHORS.items():
        problems = list(islice(author.stream("train", rng), plan.own_problems))
        own[name] = pooled(own_answers(problems, plan.own_answers, engine, tokenizer, plan.seed), rng)
        log.info("answered %d problems of %s", len(problems), name)
    engine.close()
    scripted, quoted = [synthetic(task, rng) for task in MIX], [own[task] for task in MIX]

    def draw_rows() -> list[Row]:
        count = round(ROWS_PER_POOL * OWN_SHARE)
        return make_rows(PHASE_2_OWN, count, rng, quoted) + make_rows(PHASE_2, ROWS_PER_POOL - count, rng, scripted)

    train(model, tokenizer, draw_rows, plan.critic_tokens, plan.critic_lr, out, phase="criticism", seed=plan.seed)


def serve(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> TransformersEngine:
    """An engine over the model's present weights."""
    engine = TransformersEngine(eos_id=tokenizer.eos_token_id, max_length=MAX_LENGTH)
    engine.publish(model, version=0)
    return engine


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, out: Path) -> None:
    """Measure every role on validation problems; write `skills.json` and, from it, the model card."""
    engine = serve(model, tokenizer)
    skills = {task: measure(task, plan.measured, engine, tokenizer, plan.seed) for task in AUTHORS}
    engine.close()
    steps = [json.loads(line) for line in (out / "loss.jsonl").read_text(encoding="utf-8").splitlines()]
    last = {step["phase"]: step for step in steps}
    facts = {
        "plan": asdict(plan),
        "parameters": model.num_parameters(),
        "training_tokens": sum(step["tokens"] for step in last.values()),
        "training_cpu_s": round(sum(step["cpu_s"] for step in last.values())),
        "temperature": 1.0,
        "validation_problems": plan.measured,
        "skills": skills,
    }
    (out / "skills.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_card(out)


def build(plan: Plan, out: Path) -> None:
    """Both phases and the report. A finished phase 1 in `out/dialogues` is not repeated."""
    torch.set_num_threads(1)
    start, first = time.monotonic(), out / "dialogues"
    if not (first / "DONE").exists():
        (first / "loss.jsonl").unlink(missing_ok=True)
        learn_dialogues(plan, first)
        (first / "DONE").touch()
    tokenizer = build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    out.joinpath("loss.jsonl").write_bytes(first.joinpath("loss.jsonl").read_bytes())
    learn_criticism(model, tokenizer, plan, out)
    report(model, tokenizer, plan, out)
    log.info("built %s in %.0f s", out, time.monotonic() - start)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the plan's budgets; 0.01 for a smoke run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    build(Plan().scaled(options.share), options.out)


if __name__ == "__main__":
    main()
