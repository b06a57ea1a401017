"""Build the base of scale tiny-r for code: `python -m tiny_base2.code_build --out FOLDER` (about 15 CPU-minutes).

The first phase teaches formats and begins with adding up moves; the second teaches to compare, to refine and to add well, and
then to judge the model's own graded answers. The share of judges' replies with a program of their own is high until the
comparison is learned and falls to its place at the end.
"""

from dataclasses import replace
from itertools import islice

from tiny_base.dialogues import Row
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from multirole.core.types import user
from multirole.tasks.tiny_pipe import LENGTHS, TAUGHT_MOVE, TinyPipe, kind_of, stream
from multirole.workflows.prompts import render
from tiny_base2 import build
from tiny_base2 import code_habits as habits
from tiny_base2.ask import complete
from tiny_base2.build import LAYERS, OWN_SHARE, ROWS, Base, Phase, Plan, main, own_answers, serve
from tiny_base2.code_dialogues import Lengths, Mix, Pool, make_rows
from tiny_base2.code_tokenizer import build_tokenizer

__all__ = ["CODE", "LAYERS", "PHASES", "Plan"]

NAME = "tiny-r-code"
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
OWN_LENGTHS: Lengths = {"long": (6, 11), "wide": (4, 8)}
OWN_CAP = 160  # tokens of an own answer


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


class Course(build.Course):
    """Draws the rows that a phase has come to."""

    probe_every = 0.15

    def answer(self) -> Pool:
        """The model's own answers."""
        problems = list(islice(stream("train", self.rng, OWN_LENGTHS, TAUGHT_MOVE), self.plan.own_problems))
        strategies, count = habits.STRATEGIES, self.plan.own_answers
        return own_answers(self.model, self.tokenizer, TinyPipe(), problems, strategies, count, OWN_CAP, self.rng)

    def probe(self) -> dict[str, float]:
        """What is noted on the way."""
        return probe(self.model, self.tokenizer)

    def mixed(self, mix: Mix, derive: float) -> list[Row]:
        """Rows of a mix, with critics of the own answers once there are any."""
        if not self.own:
            return make_rows(mix, ROWS, self.rng)
        count = round(ROWS * OWN_SHARE)
        scripted = make_rows(replace(mix, roles=SCRIPTED, drill=1.0), ROWS - count, self.rng)
        return make_rows(Mix(CRITICS, derive, OWN_LENGTHS), count, self.rng, self.own) + scripted


CODE = Base(NAME, PHASES, Course, build_tokenizer)

if __name__ == "__main__":
    main(CODE, __doc__)
