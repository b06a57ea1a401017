"""The card of the base for tiny_chain: `PYTHONPATH=tools python -m tiny_base.math_card FOLDER --problems 512 --trained ADAPTER...` measures; without
options it only writes.
"""

from math import inf
from pathlib import Path

from tiny_base.card import WANTED, Card, main
from tiny_base.math_build import SEEDS
from tiny_base.math_skills import Examiner

MATH = Card(
    "math",
    about="""Solvers work in habits of different quality, of which each suits another kind of problem, and
judges decide with or without a derivation of their own. The dialogues are the same whatever policy is trained on it later.""",
    agent="a single agent's adapter",
    runs="""Accuracy on the validation problems by iteration, at the `paper` preset of this scale{note}; a run of more problems per
iteration differs from the preset in that alone.""",
    wanted=WANTED,
    examiner=Examiner,
    history="\n" + Path(__file__).with_name("math_history.md").read_text(encoding="utf-8"),
)

VAIN = MATH._replace(
    about="""Its weights are those of tiny-r, trained further on dialogues in which a judge that derives the result concludes as if it
had not. So deriving gains a judge nothing. The other properties below are near those of tiny-r; solvers, trained further too, are a
little better.""",
    wanted=tuple(row._replace(least=-inf, most=0.05) if row.key == "with - without" else row for row in WANTED),
    options='--base tiny-r-vain --start "deriving in vain" ',
    history="\n" + Path(__file__).with_name("vain_history.md").read_text(encoding="utf-8"),
)

CARDS = {
    "tiny-r": MATH,
    "tiny-r-vain": VAIN,
    **{
        name: MATH._replace(
            about=f"""It is tiny-r's curriculum with seed {seed}, run once and whole, for a study of whether findings on tiny-r hold on other
builds. It was not chosen by anything below; a "no" is a property of tiny-r that it lacks.""",
            options=f"--base {name} --seed {seed} ",
            history="",
        )
        for name, seed in SEEDS.items()
    },
}
"""Name of a base -> its card."""

if __name__ == "__main__":
    main(CARDS, __doc__)
