"""Build a base; `math_build` and `code_build` define the curricula and are the commands.

Every phase is a training with its own learning rate that decays to zero. Its mix of rows changes over time; at some points
the model answers train problems itself, and after that judges also read these graded answers.
"""

import argparse
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from multirole.types import Problem, user
from multirole.workflows.prompts import render
from multirole_study.tasks.tiny_chain import TinyChain
from multirole_study.tasks.tiny_pipe import TinyPipe
from tiny_base.ask import complete, serve
from tiny_base.dialogues import Lengths, Mix, Pool, Row, Script, make_rows
from tiny_base.habits import Draft
from tiny_base.train import build_model, load_losses, train

ROWS = 512  # sampled at a time
OWN = {"evaluator": 48, "aggregator": 48, "synthesizer": 4}
OWN_SHARE = 0.5
"""Fraction of rows in which a critic reads the model's own answers, once there are any."""
DERIVE_OWN, DERIVE_RARE = 0.60, 0.11
"""Fraction of judges' replies to the model's own answers that have a derivation: at first, and from `rare_from` on."""


@dataclass(frozen=True)
class Phase:
    """One training with its own learning-rate schedule, which falls over `tokens` but is followed `until` a fraction of it.

    `stages` are the mixes of scripted rows with the fraction from which each holds; the model answers problems itself at the
    fractions `own`, on problems of `own_lengths` operations; derivations become rare at `rare_from`.
    """

    name: str
    tokens: int
    lr: float
    stages: tuple[tuple[float, Mix], ...]
    until: float = 1.0
    own: tuple[float, ...] = ()
    own_lengths: Lengths = field(default_factory=dict)
    rare_from: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Settings of a build besides its phases. `share` scales the phases' tokens and the number of problems that the model answers."""

    share: float = 1.0
    own_problems: int = 300
    own_answers: int = 8  # per problem
    seed: int = 0

    def scaled(self, problems: int) -> int:
        """Scale a number of problems by `share`, to at least 16."""
        return max(min(16, problems), round(problems * self.share))


@dataclass(frozen=True)
class Base:
    """The base to build: name, curriculum, and the classes that write, sample and answer its rows."""

    name: str
    phases: tuple[Phase, ...]
    make_tokenizer: Callable[[], PreTrainedTokenizerFast]
    task: TinyChain | TinyPipe
    stream: Callable[[str, random.Random, Lengths], Iterator[Problem]]
    script: type[Script]
    scripted: Callable[[Mix, float], Mix]
    """Maps a stage's mix and the current fraction of derivations to the mix of the rows that quote none of the model's own answers."""
    cap: int
    """Largest number of tokens of the model's own answers."""
    openings: Mapping[str, Callable[[Problem], str]]
    """Name of a probe -> the forced beginning of its answers."""
    probed: int
    """Number of validation problems of a probe."""
    probe_every: float
    """Fraction of a phase between two probes."""


class Course:
    """Samples the training rows of a phase as it progresses."""

    def __init__(
        self,
        base: Base,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        plan: Plan,
        phase: Phase,
        out: Path,
    ) -> None:
        self.base, self.model, self.tokenizer = base, model, tokenizer
        self.plan, self.phase, self.out = plan, phase, out
        self.rng = random.Random(f"{phase.name}/{plan.seed}")
        self.done, self.probed, self.pools = 0.0, 0.0, 0
        self.own: Pool = []

    def watch(self, done: float) -> None:
        """Record the progress, and probe the model from time to time."""
        self.done = done
        if done >= self.probed + self.base.probe_every:
            self.probed = done
            with open(self.out / "probes.jsonl", "a", encoding="utf-8") as file:
                place = {"phase": self.phase.name, "done": round(done, 3)}
                file.write(json.dumps(place | self.probe()) + "\n")

    def draw(self) -> list[Row]:
        """Sample the next rows, with critics of the model's answers once there are any."""
        base = self.base
        if self.pools < sum(self.done >= start for start in self.phase.own):
            self.own = self.answer()
            self.model.train()
            self.pools += 1
        mix = [mix for start, mix in self.phase.stages if self.done >= start][-1]
        if not self.own:
            return make_rows(base.script, mix, ROWS, self.rng)
        derive = DERIVE_OWN if self.done < self.phase.rare_from else DERIVE_RARE
        count = round(ROWS * OWN_SHARE)
        scripted = make_rows(base.script, base.scripted(mix, derive), ROWS - count, self.rng)
        critics = Mix(OWN, derive, self.phase.own_lengths, vain=mix.vain)
        return make_rows(base.script, critics, count, self.rng, self.own) + scripted

    def answer(self) -> Pool:
        """Return the model's graded answers to train problems: several to each plain question, and one under each strategy."""
        count = self.plan.scaled(self.plan.own_problems)
        problems = list(islice(self.base.stream("train", self.rng, self.phase.own_lengths), count))
        places, asks = [], []
        for problem in problems:
            plain = render(problem.task, "generator", question=problem.question)
            for strategy in [""] * self.plan.own_answers + list(self.base.script.critics.habits.STRATEGIES):
                worker = render(problem.task, "worker", question=problem.question, strategy=strategy)
                places.append((problem, strategy))
                asks.append([user(worker if strategy else plain)])
        engine = serve(self.model, self.tokenizer)
        replies = complete(engine, self.tokenizer, asks, "", self.base.cap, self.rng.randrange(10**6))
        engine.close()
        rewards = self.base.task.score([problem for problem, _ in places], list(replies))
        answers: dict[str, dict[str, list[Draft]]] = {}
        for (problem, strategy), reply, reward in zip(places, replies, rewards, strict=True):
            answers.setdefault(problem.id, {}).setdefault(strategy, []).append(
                Draft(str(reply), bool(reward.is_correct))
            )
        return [(problem, answers[problem.id]) for problem in problems]

    def probe(self) -> dict[str, float]:
        """Measure validation accuracy by kind, of free answers and in the working habits; it predicts the accuracy after training."""
        habits, engine = self.base.script.critics.habits, serve(self.model, self.tokenizer)
        problems = self.base.task.problems("validation", self.plan.scaled(self.base.probed))
        fits = [habits.fitting(problem) for problem in problems]
        asks = [[user(render(p.task, "generator", question=p.question))] for p in problems]
        facts = {}
        for name, opening in self.base.openings.items():
            starts = [opening(problem) for problem in problems]
            rewards = self.base.task.score(
                problems, list(complete(engine, self.tokenizer, asks, starts, self.base.cap, 0))
            )
            for kind, fitting in habits.FITTING.items():
                right = [reward.is_correct for reward, fit in zip(rewards, fits, strict=True) if fit == fitting]
                facts[f"{name}/{kind}"] = round(sum(right) / len(right), 3)
        engine.close()
        return facts


def build(base: Base, plan: Plan, out: Path, start: str | None = None) -> None:
    """Train, and begin `skills.json` with the settings; `math_card` and `code_card` measure and write the card.

    `start` is the phase to begin with: the first, from random weights, or a later one, from the weights in `out`.
    """
    if out == Path():
        raise ValueError(
            "`out` is empty, so the base would be written into the working directory. Pass the folder of the new base."
        )
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = base.make_tokenizer()
    names = [phase.name for phase in base.phases]
    first = names.index(start) if start else 0
    if first == 0:
        for name in ("loss.jsonl", "probes.jsonl"):
            (out / name).unlink(missing_ok=True)
        model = build_model(tokenizer, plan.seed)
    else:
        model = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    for phase in base.phases[first:]:
        course, budget = Course(base, model, tokenizer, plan, phase, out), round(phase.tokens * plan.share)
        train(model, tokenizer, course.draw, budget, phase.lr, out, phase.name, plan.seed, course.watch, phase.until)
    last = {step["phase"]: step for step in load_losses(out)}.values()
    facts = {
        "name": base.name,
        "plan": asdict(plan),
        "parameters": model.num_parameters(),
        "training_tokens": sum(step["tokens"] for step in last),
        "training_cpu_s": round(sum(step["cpu_s"] for step in last)),
    }
    (out / "skills.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main(bases: dict[str, Base], description: str | None) -> None:
    """Run the command line; the first base is the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the plan's budgets; 0.01 for a smoke run")
    parser.add_argument("--base", choices=bases, default=next(iter(bases)), help="the curriculum")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and dialogues; 0 but for the bases that are named after theirs"
    )
    parser.add_argument(
        "--start", help="the phase to begin with; one after the first continues from the weights in --out"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    base = bases[options.base]
    names = [phase.name for phase in base.phases]
    if options.start not in (None, *names):
        parser.error(f"--start {options.start!r} is no phase of {options.base}. Its phases are: {', '.join(names)}.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    build(base, Plan(share=options.share, seed=options.seed), options.out, options.start)
