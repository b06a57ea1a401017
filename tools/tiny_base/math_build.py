"""Build the base for tiny_chain: `PYTHONPATH=tools python -m tiny_base.math_build --out FOLDER` (15 to 30 CPU-minutes).

First come the formats and all roles' ways of working, then arithmetic, which is learned where most rows are solvers', then
judging. Judges read the model's own graded answers, and compare given derivations with what was claimed. The share of judges'
replies with a derivation is high until the comparison is learned and falls to its place at the end.
"""

from dataclasses import replace

from multirole_study.tasks.tiny_chain import stream
from tiny_base.build import Base, Phase, main
from tiny_base.dialogues import Lengths, Mix
from tiny_base.math_dialogues import MathScript
from tiny_base.math_skills import Examiner
from tiny_base.math_tokenizer import build_tokenizer

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
DRILL = {"generator": 50, "worker": 32, "refiner": 8, "evaluator": 5, "aggregator": 5}
OWN_LENGTHS: Lengths = {"long": (5, 8), "wide": (3, 5)}
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
        own_lengths=OWN_LENGTHS,
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
        own_lengths=OWN_LENGTHS,
        rare_from=0.84,
    ),
    Phase(
        "deriving rarely",
        300_000,
        1.5e-3,
        ((0.00, Mix(COPY, 0.65, {"long": (3, 9), "wide": (2, 6)})),),
        own=(0.0,),
        own_lengths=OWN_LENGTHS,
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


def scripted(mix: Mix, derive: float) -> Mix:
    """Return the mix of the rows that quote none of the model's own answers."""
    return replace(mix, roles=SCRIPTED, derive=derive)


MATH = Base(
    "tiny-r",
    PHASES,
    build_tokenizer,
    Examiner.task,
    stream,
    MathScript,
    scripted,
    cap=Examiner.cap,
    openings={"direct": lambda problem: "=", "split": lambda problem: ">", "any": lambda problem: ""},
    probed=64,
    probe_every=0.1,
)

VAIN = replace(
    MATH,
    name="tiny-r-vain",
    phases=(
        *PHASES,
        Phase(
            "deriving in vain",
            500_000,
            1.2e-3,
            ((0.00, Mix(COPY, 0.65, {"long": (4, 10), "wide": (3, 7)}, vain=1.0)),),
            own=(0.0,),
            own_lengths={"long": (6, 10), "wide": (4, 7)},
            rare_from=0.35,
        ),
    ),
)
"""A base whose judges gain little by deriving: they conclude as if they had not. All else is tiny-r's."""

SEEDS = {f"tiny-r-seed{seed}": seed for seed in (1, 2)}
"""Name -> seed of more builds of tiny-r's curriculum, each with other initial weights and other dialogues."""
BASES = {base.name: base for base in (MATH, VAIN, *(replace(MATH, name=name) for name in SEEDS))}

if __name__ == "__main__":
    main(BASES, __doc__)
