"""Build the base for tiny_pipe: `PYTHONPATH=tools python -m tiny_base.code_build --out FOLDER` (about 15 CPU-minutes).

The first phase teaches formats and begins with adding up moves; the second teaches to compare, to refine and to add well, and
then to judge the model's own graded answers. The share of judges' replies with a program of their own is high until the
comparison is learned and falls to its place at the end.
"""

from dataclasses import replace
from functools import partial

from tiny_base import code_habits as habits
from tiny_base.build import Base, Phase, main
from tiny_base.code_dialogues import CodeScript, taught
from tiny_base.code_skills import Examiner
from tiny_base.code_tokenizer import build_tokenizer
from tiny_base.dialogues import Lengths, Mix

SOLVERS = {"generator": 60, "worker": 40}
DRILL = {"generator": 34, "worker": 20, "refiner": 12, "evaluator": 16, "aggregator": 18}
EVERYONE = {
    "generator": 20, "refiner": 18, "evaluator": 18, "aggregator": 26, "orchestrator": 2, "worker": 13, "synthesizer": 3,
}  # fmt: skip
COMPARE = {"generator": 18, "refiner": 10, "evaluator": 38, "aggregator": 24, "worker": 10}
SCRIPTED = {
    "generator": 24, "refiner": 30, "evaluator": 12, "aggregator": 14, "orchestrator": 2, "worker": 16, "synthesizer": 2,
}  # fmt: skip
OWN_LENGTHS: Lengths = {"long": (6, 11), "wide": (4, 8)}
OWN_CAP = 160
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
        own_lengths=OWN_LENGTHS,
        rare_from=0.92,
    ),
    Phase(
        "third",
        900_000,
        2.5e-3,
        ((0.00, Mix(EVERYONE, 0.75, {"long": (4, 11), "wide": (3, 8)}, short=0.2, drill=0.6)),),
        own=(0.0, 0.55),
        own_lengths=OWN_LENGTHS,
        rare_from=0.7,
    ),
)


def scripted(mix: Mix, derive: float) -> Mix:
    """Return the mix of the rows that quote none of the model's own answers; in all of them judges' derivations are given."""
    return replace(mix, roles=SCRIPTED, drill=1.0)


CODE = Base(
    "tiny-r-code",
    PHASES,
    build_tokenizer,
    Examiner.task,
    taught,
    CodeScript,
    scripted,
    cap=OWN_CAP,
    openings={habit: partial(habits.begin, habit=habit) for habit in habits.MARKS} | {"any": lambda problem: ""},
    probed=40,
    probe_every=0.15,
)

if __name__ == "__main__":
    main({CODE.name: CODE}, __doc__)
