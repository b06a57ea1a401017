"""Build the base of scale tiny-r for code: `python -m tiny_base2.code_build --out FOLDER` (about 15 CPU-minutes).

The first phase teaches formats and begins with adding up moves; the second teaches to compare, to refine and to add well, and
then to judge the model's own graded answers. The share of judges' replies with a program of their own is high until the
comparison is learned and falls to its place at the end.
"""

import argparse
import json
import logging
import random
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from tiny_base.dialogues import Row
from tiny_base.train import MAX_LENGTH, build_model, train
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from multirole.core.types import Problem, user
from multirole.engines.transformers_engine import TransformersEngine
from multirole.tasks.tiny_pipe import LENGTHS, TinyPipe, kind_of, stream
from multirole.workflows.prompts import render
from tiny_base2 import code_habits as habits
from tiny_base2.ask import complete
from tiny_base2.code_dialogues import Draft, Lengths, Mix, Own, Pool, make_rows
from tiny_base2.code_tokenizer import build_tokenizer

log = logging.getLogger(__name__)

NAME = "tiny-r-code"
LAYERS = 4
MICRO_BATCHES = 2
ROWS = 512  # drawn at a time
SOLVERS = {"generator": 60, "worker": 40}
DRILL = {"generator": 34, "worker": 20, "refiner": 12, "evaluator": 16, "aggregator": 18}
EVERYONE = {
    "generator": 20, "refiner": 18, "evaluator": 18, "aggregator": 26, "orchestrator": 2, "worker": 13, "synthesizer": 3,
}  # fmt: skip
COMPARE = {"generator": 18, "refiner": 10, "evaluator": 38, "aggregator": 24, "worker": 10}
SCRIPTED = {
    "generator": 24, "refiner": 30, "evaluator": 12, "aggregator": 14, "orchestrator": 2, "worker": 16, "synthesizer": 2,
}  # fmt: skip
CRITICS = {"evaluator": 48, "aggregator": 48, "synthesizer": 4}
OWN_SHARE = 0.5
"""Share of rows in which a critic reads own answers, once there are any."""
OWN_LENGTHS: Lengths = {"long": (6, 11), "wide": (4, 8)}
DERIVE_OWN, DERIVE_RARE = 0.60, 0.11
"""Share of programs in judges' replies to own answers: at first, and at the end."""


@dataclass(frozen=True)
class Phase:
    """One training with its own learning-rate schedule, which falls over `tokens` but is followed `until` a fraction of it.

    `stages` are the mixes of scripted rows with the fraction from which each holds; the model answers problems itself at the
    fractions `own`; programs become rare in judges' replies at `rare_from`.
    """

    name: str
    tokens: int
    lr: float
    stages: tuple[tuple[float, Mix], ...]
    until: float = 1.0
    own: tuple[float, ...] = ()
    rare_from: float = 1.0


PHASES = (
    Phase(
        "first",
        5_000_000,
        5e-3,
        (
            (0.00, Mix(SOLVERS, 0.0, {"long": (1, 3), "wide": (1, 2)})),
            (0.08, Mix(DRILL, 0.75, {"long": (1, 5), "wide": (1, 3)}, short=0.9, drill=0.8)),
            (0.25, Mix(EVERYONE, 0.75, {"long": (2, 8), "wide": (2, 5)}, short=0.6, drill=0.7)),
            (0.50, Mix(EVERYONE, 0.75, {"long": (3, 9), "wide": (2, 6)}, short=0.25, drill=0.5)),
        ),
        until=0.6,
    ),
    Phase(
        "second",
        2_600_000,
        4e-3,
        (
            (0.00, Mix(COMPARE, 0.75, {"long": (2, 6), "wide": (2, 4)}, short=0.95, drill=0.95)),
            (0.15, Mix(EVERYONE, 0.75, {"long": (3, 9), "wide": (2, 6)}, short=0.6, drill=0.75)),
            (0.45, Mix(EVERYONE, 0.75, {"long": (3, 10), "wide": (2, 7)}, short=0.3, drill=0.6)),
        ),
        own=(0.66, 0.84),
        rare_from=0.92,
    ),
    Phase(
        "third",
        900_000,
        2.5e-3,
        ((0.00, Mix(EVERYONE, 0.75, {"long": (4, 11), "wide": (3, 8)}, short=0.2, drill=0.6)),),
        own=(0.0, 0.55),
        rare_from=0.7,
    ),
)


@dataclass(frozen=True)
class Plan:
    """What a build does besides its phases; `share` scales their tokens."""

    share: float = 1.0
    own_problems: int = 300
    own_answers: int = 8  # per problem
    seed: int = 0


def serve(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> TransformersEngine:
    """An engine over the model's present weights."""
    engine = TransformersEngine(eos_id=tokenizer.eos_token_id, max_length=MAX_LENGTH)
    engine.publish(model, version=0)
    return engine


def own_answers(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, rng: random.Random) -> Pool:
    """The model's graded answers to train problems: some to the plain question, one under each strategy."""
    task, engine = TinyPipe(), serve(model, tokenizer)
    problems = list(islice(stream("train", rng, OWN_LENGTHS), plan.own_problems))
    places, asks = [], []
    for problem in problems:
        plain = render(problem.task, "generator", question=problem.question)
        for strategy in [""] * plan.own_answers + list(habits.STRATEGIES):
            worker = render(problem.task, "worker", question=problem.question, strategy=strategy)
            places.append((problem, strategy))
            asks.append([user(worker if strategy else plain)])
    replies = complete(engine, tokenizer, asks, seed=rng.randrange(10**6))
    engine.close()
    rewards = task.score([problem for problem, _ in places], list(replies))
    own: dict[str, dict[str, list[Draft]]] = {}
    for (problem, strategy), reply, reward in zip(places, replies, rewards, strict=True):
        own.setdefault(problem.id, {}).setdefault(strategy, []).append(Draft(str(reply), bool(reward.is_correct)))
    graded: list[tuple[Problem, Own]] = [(problem, own[problem.id]) for problem in problems]
    return graded


def probe(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int = 40) -> dict[str, float]:
    """Accuracy of the working habits on validation problems, by kind: the best one's foretells where training will end."""
    task, engine = TinyPipe(), serve(model, tokenizer)
    problems = task.problems("validation", count)
    asks = [[user(render(p.task, "generator", question=p.question))] for p in problems]
    found = {}
    for name in (*habits.MARKS, "any"):
        starts = ["" if name == "any" else habits.begin(p, name) for p in problems]
        rewards = task.score(problems, list(complete(engine, tokenizer, asks, starts)))
        for kind in LENGTHS:
            right = [r.is_correct for p, r in zip(problems, rewards, strict=True) if kind_of(p.question) == kind]
            found[f"{name}/{kind}"] = round(sum(right) / len(right), 3)
    engine.close()
    return found


class Course:
    """Draws the rows that a phase has come to."""

    def __init__(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, phase: Phase, out: Path
    ) -> None:
        self.model, self.tokenizer, self.plan, self.phase, self.out = model, tokenizer, plan, phase, out
        self.rng = random.Random(f"{phase.name}/{plan.seed}")
        self.done, self.probed, self.pools = 0.0, 0.0, 0
        self.own: Pool = []

    def watch(self, done: float) -> None:
        """Note the progress; probe every 15 % of it."""
        self.done = done
        if done >= self.probed + 0.15:
            self.probed = done
            with open(self.out / "probes.jsonl", "a", encoding="utf-8") as file:
                place = {"phase": self.phase.name, "done": round(done, 3)}
                file.write(json.dumps(place | probe(self.model, self.tokenizer)) + "\n")

    def draw(self) -> list[Row]:
        """The next rows."""
        if self.pools < sum(self.done >= start for start in self.phase.own):
            self.own = own_answers(self.model, self.tokenizer, self.plan, self.rng)
            self.model.train()
            self.pools += 1
        mix = [mix for start, mix in self.phase.stages if self.done >= start][-1]
        if not self.own:
            return make_rows(mix, ROWS, self.rng)
        count = round(ROWS * OWN_SHARE)
        critics = Mix(CRITICS, DERIVE_OWN if self.done < self.phase.rare_from else DERIVE_RARE, OWN_LENGTHS)
        scripted = make_rows(replace(mix, roles=SCRIPTED, drill=1.0), ROWS - count, self.rng)
        return make_rows(critics, count, self.rng, self.own) + scripted


def build(plan: Plan, out: Path, start: str) -> None:
    """Train, and note what was done in `skills.json`; `tiny_base2.code_card` measures and writes the card.

    `start` is the phase to begin with: the first, from random weights, or a later one, from the weights in `out`.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    names = [phase.name for phase in PHASES]
    if start == names[0]:
        for name in ("loss.jsonl", "probes.jsonl"):
            (out / name).unlink(missing_ok=True)
        model = build_model(tokenizer, plan.seed, LAYERS)
    else:
        model = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    for phase in PHASES[names.index(start) :]:
        course, budget = Course(model, tokenizer, plan, phase, out), round(phase.tokens * plan.share)
        train(
            model, tokenizer, course.draw, budget, phase.lr, out, phase.name, plan.seed,
            MICRO_BATCHES, course.watch, phase.until,
        )  # fmt: skip
    note(model, plan, out)


def note(model: Qwen3ForCausalLM, plan: Plan, out: Path) -> None:
    """Begin `skills.json` with what was trained."""
    steps = [json.loads(line) for line in (out / "loss.jsonl").read_text(encoding="utf-8").splitlines()]
    last = {step["phase"]: step for step in steps}.values()
    facts = {
        "name": NAME,
        "plan": asdict(plan),
        "parameters": model.num_parameters(),
        "training_tokens": sum(step["tokens"] for step in last),
        "training_cpu_s": round(sum(step["cpu_s"] for step in last)),
    }
    (out / "skills.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the plan's budgets; 0.01 for a smoke run")
    parser.add_argument(
        "--start", choices=[phase.name for phase in PHASES], default=PHASES[0].name, help="the phase to go on with"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    build(Plan(share=options.share), options.out, options.start)


if __name__ == "__main__":
    main()
