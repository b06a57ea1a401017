"""Build the base of scale tiny-r: `python -m tiny_base2.build --out FOLDER` (about 15 CPU-minutes).

Every phase is a training with a rate of its own that falls to nothing: first the formats and all roles' ways of working, then
arithmetic, which is learned where most rows are solvers', then judging. Judges read the model's own graded answers, and compare
given derivations with what was claimed. The share of judges' replies with a derivation is high until the comparison is learned and
falls to its place at the end.
"""

import argparse
import json
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from tiny_base.dialogues import Row
from tiny_base.train import build_model, train
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from multirole.core.types import Problem, user
from multirole.engines.transformers_engine import TransformersEngine
from multirole.tasks.tiny_chain import LENGTHS, Kind, TinyChain, kind_of, stream
from multirole.tasks.tiny_pipe import TinyPipe
from multirole.workflows.prompts import render
from tiny_base2 import habits
from tiny_base2.ask import complete
from tiny_base2.dialogues import Draft, Mix, Own, make_rows, pooled
from tiny_base2.skills import CAP, LONGEST
from tiny_base2.tokenizer import build_tokenizer

log = logging.getLogger(__name__)

LAYERS = 4
MICRO_BATCHES = 2
ROWS = 512  # drawn at a time
SOLVERS = {"generator": 60, "worker": 40}
EVERYONE = {
    "generator": 18, "refiner": 12, "evaluator": 24, "aggregator": 24, "orchestrator": 2, "worker": 12, "synthesizer": 8,
}  # fmt: skip
SCRIPTED = {"generator": 34, "refiner": 34, "orchestrator": 4, "worker": 22, "synthesizer": 6}
LESSON = {
    "generator": 10, "refiner": 22, "evaluator": 32, "aggregator": 26, "orchestrator": 1, "worker": 7, "synthesizer": 2,
}  # fmt: skip
COMPARE = {"generator": 10, "refiner": 26, "evaluator": 26, "aggregator": 30, "worker": 8}
COPY = {"generator": 14, "refiner": 30, "evaluator": 10, "aggregator": 34, "worker": 12}
OWN = {"evaluator": 48, "aggregator": 48, "synthesizer": 4}
DRILL = {"generator": 50, "worker": 32, "refiner": 8, "evaluator": 5, "aggregator": 5}
OWN_SHARE = 0.5
"""Share of rows in which a critic reads own answers, once there are any."""
DERIVE_OWN, DERIVE_RARE = 0.60, 0.11
"""Share of derivations in judges' replies to own answers: at first, and at the end."""


@dataclass(frozen=True)
class Phase:
    """One training with its own learning-rate schedule, which falls over `tokens` but is followed `until` a fraction of it.

    `stages` are the mixes of scripted rows with the fraction from which each holds; the model answers problems itself at the
    fractions `own`, of `own_lengths` operations; derivations become rare at `rare_from`.
    """

    name: str
    tokens: int
    lr: float
    stages: tuple[tuple[float, Mix], ...]
    until: float = 1.0
    own: tuple[float, ...] = ()
    own_lengths: dict[Kind, tuple[int, int]] = field(default_factory=lambda: {"long": (5, 8), "wide": (3, 5)})
    rare_from: float = 1.0


PHASES = (
    Phase(
        "formats",
        5_000_000,
        5e-3,
        (
            (0.00, Mix(SOLVERS, 0.0, {"long": (1, 3), "wide": (1, 2)})),
            (0.25, Mix(EVERYONE, 0.7, {"long": (1, 4), "wide": (1, 3)})),
            (0.45, Mix(EVERYONE, 0.65, {"long": (2, 9), "wide": (2, 6)})),
        ),
        until=0.58,
    ),
    Phase(
        "arithmetic",
        2_300_000,
        4e-3,
        (
            (0.00, Mix(DRILL, 0.7, {"long": (1, 6), "wide": (1, 4)})),
            (0.45, Mix(EVERYONE, 0.65, {"long": (2, 9), "wide": (2, 6)})),
        ),
    ),
    Phase(
        "judging",
        2_400_000,
        4e-3,
        (
            (0.00, Mix(LESSON, 0.7, {"long": (2, 5), "wide": (1, 3)}, short=0.7)),
            (0.30, Mix(LESSON, 0.7, {"long": (2, 8), "wide": (2, 5)}, short=0.3)),
        ),
        own=(0.50, 0.78),
        rare_from=0.84,
    ),
    Phase(
        "comparing",
        1_600_000,
        3e-3,
        (
            (0.00, Mix(COMPARE, 0.75, {"long": (2, 5), "wide": (1, 3)}, short=0.8, drill=0.7)),
            (0.35, Mix(COMPARE, 0.75, {"long": (2, 8), "wide": (2, 5)}, short=0.4, drill=0.5)),
        ),
        until=0.71,
    ),
    Phase(
        "reading whole drafts",
        1_000_000,
        3e-3,
        (
            (0.00, Mix(COPY, 0.8, {"long": (2, 6), "wide": (2, 4)}, short=0.6, drill=0.7)),
            (0.25, Mix(COPY, 0.8, {"long": (3, 8), "wide": (2, 5)}, short=0.2, drill=0.6)),
        ),
        own=(0.45, 0.72),
        rare_from=0.84,
    ),
    Phase(
        "deriving rarely",
        300_000,
        1.5e-3,
        ((0.00, Mix(COPY, 0.65, {"long": (3, 9), "wide": (2, 6)})),),
        own=(0.0,),
        rare_from=0.0,
    ),
    Phase(
        "longer problems",
        500_000,
        1.2e-3,
        ((0.00, Mix(COPY, 0.65, {"long": (4, 10), "wide": (3, 7)})),),
        own=(0.0,),
        own_lengths={"long": (6, 10), "wide": (4, 7)},
        rare_from=0.35,
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
    engine = TransformersEngine(eos_id=tokenizer.eos_token_id, max_length=LONGEST)
    engine.publish(model, version=0)
    return engine


def own_answers(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TinyChain | TinyPipe,
    problems: list[Problem],
    strategies: Iterable[str],
    count: int,
    max_tokens: int,
    rng: random.Random,
) -> list[tuple[Problem, Own]]:
    """The model's graded answers to train problems: `count` to the plain question of each, one under each strategy."""
    engine = serve(model, tokenizer)
    places, asks = [], []
    for problem in problems:
        plain = render(problem.task, "generator", question=problem.question)
        for strategy in [""] * count + list(strategies):
            worker = render(problem.task, "worker", question=problem.question, strategy=strategy)
            places.append((problem, strategy))
            asks.append([user(worker if strategy else plain)])
    replies = complete(engine, tokenizer, asks, max_tokens=max_tokens, seed=rng.randrange(10**6))
    engine.close()
    rewards = task.score([problem for problem, _ in places], list(replies))
    own: dict[str, dict[str, list[Draft]]] = {}
    for (problem, strategy), reply, reward in zip(places, replies, rewards, strict=True):
        own.setdefault(problem.id, {}).setdefault(strategy, []).append(Draft(str(reply), bool(reward.is_correct)))
    return [(problem, own[problem.id]) for problem in problems]


def probe(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int = 64) -> dict[str, float]:
    """Accuracy of the two working habits on validation problems, by kind: it foretells where training will end."""
    task, engine = TinyChain(), serve(model, tokenizer)
    problems = task.problems("validation", count)
    asks = [[user(render(p.task, "generator", question=p.question))] for p in problems]
    found = {}
    for mark, name in (("=", "direct"), (">", "split"), ("", "any")):
        rewards = task.score(problems, list(complete(engine, tokenizer, asks, mark, CAP)))
        for kind in LENGTHS:
            right = [r.is_correct for p, r in zip(problems, rewards, strict=True) if kind_of(p.question) == kind]
            found[f"{name}/{kind}"] = round(sum(right) / len(right), 3)
    engine.close()
    return found


class Course:
    """Draws the rows that a phase has come to. A base for another task overrides `answer`, `probe` and `mixed`."""

    probe_every = 0.1

    def __init__(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, phase: Phase, out: Path
    ) -> None:
        self.model, self.tokenizer, self.plan, self.phase, self.out = model, tokenizer, plan, phase, out
        self.rng = random.Random(f"{phase.name}/{plan.seed}")
        self.done, self.probed, self.pools = 0.0, 0.0, 0
        self.own: list[tuple[Problem, Own]] = []

    def watch(self, done: float) -> None:
        """Note the progress; probe now and then."""
        self.done = done
        if done >= self.probed + self.probe_every:
            self.probed = done
            with open(self.out / "probes.jsonl", "a", encoding="utf-8") as file:
                place = {"phase": self.phase.name, "done": round(done, 3)}
                file.write(json.dumps(place | self.probe()) + "\n")

    def draw(self) -> list[Row]:
        """The next rows."""
        if self.pools < sum(self.done >= start for start in self.phase.own):
            self.own = self.answer()
            self.model.train()
            self.pools += 1
        mix = [mix for start, mix in self.phase.stages if self.done >= start][-1]
        return self.mixed(mix, DERIVE_OWN if self.done < self.phase.rare_from else DERIVE_RARE)

    def answer(self) -> list[tuple[Problem, Own]]:
        """The model's own answers."""
        problems = list(islice(stream("train", self.rng, self.phase.own_lengths), self.plan.own_problems))
        strategies, count = habits.STRATEGIES, self.plan.own_answers
        return own_answers(self.model, self.tokenizer, TinyChain(), problems, strategies, count, CAP, self.rng)

    def probe(self) -> dict[str, float]:
        """What is noted on the way."""
        return probe(self.model, self.tokenizer)

    def mixed(self, mix: Mix, derive: float) -> list[Row]:
        """Rows of a mix, with critics of the own answers once there are any."""
        if not self.own:
            return make_rows(mix, ROWS, self.rng)
        count = round(ROWS * OWN_SHARE)
        critics = Mix(OWN, derive, self.phase.own_lengths)
        scripted = make_rows(replace(mix, roles=SCRIPTED, derive=derive), ROWS - count, self.rng)
        return make_rows(critics, count, self.rng, pooled(self.own, self.rng)) + scripted


@dataclass(frozen=True)
class Base:
    """What is built: its name, its curriculum, and who reads and draws its rows."""

    name: str
    phases: tuple[Phase, ...]
    course: type[Course]
    make_tokenizer: Callable[[], PreTrainedTokenizerFast]


MATH = Base("tiny-r", PHASES, Course, build_tokenizer)


def build(plan: Plan, out: Path, start: str, base: Base = MATH) -> None:
    """Train, and note what was done in `skills.json`; `tiny_base2.card` measures and writes the card.

    `start` is the phase to begin with: the first, from random weights, or a later one, from the weights in `out`.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = base.make_tokenizer()
    names = [phase.name for phase in base.phases]
    if start == names[0]:
        for name in ("loss.jsonl", "probes.jsonl"):
            (out / name).unlink(missing_ok=True)
        tokenizer.model_max_length = LONGEST
        model = build_model(tokenizer, plan.seed, LAYERS, LONGEST)
    else:
        model = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    for phase in base.phases[names.index(start) :]:
        course, budget = base.course(model, tokenizer, plan, phase, out), round(phase.tokens * plan.share)
        train(
            model, tokenizer, course.draw, budget, phase.lr, out, phase.name, plan.seed,
            MICRO_BATCHES, course.watch, phase.until,
        )  # fmt: skip
    note(model, plan, out, base.name)


def note(model: Qwen3ForCausalLM, plan: Plan, out: Path, name: str) -> None:
    """Begin `skills.json` with what was trained."""
    steps = [json.loads(line) for line in (out / "loss.jsonl").read_text(encoding="utf-8").splitlines()]
    last = {step["phase"]: step for step in steps}.values()
    facts = {
        "name": name,
        "plan": asdict(plan),
        "parameters": model.num_parameters(),
        "training_tokens": sum(step["tokens"] for step in last),
        "training_cpu_s": round(sum(step["cpu_s"] for step in last)),
    }
    (out / "skills.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main(base: Base, description: str | None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the plan's budgets; 0.01 for a smoke run")
    parser.add_argument(
        "--start",
        choices=[phase.name for phase in base.phases],
        default=base.phases[0].name,
        help="the phase to go on with",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    build(Plan(share=options.share), options.out, options.start, base)


if __name__ == "__main__":
    main(MATH, __doc__)
