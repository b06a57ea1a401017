"""The card of the base for tiny_pipe: `PYTHONPATH=tools python -m tiny_base.code_card FOLDER --problems 512 --trained ADAPTER...` measures; without
options it only writes.
"""

from tiny_base.card import WANTED, Card, Property, main
from tiny_base.code_skills import Examiner

HABITS = (
    Property("... best habit alone", "solver", "best habit, forced"),
    Property("... fitting habit alone", "solver", "fitting habit, forced"),
)
UNUSED = ("generator, boxed", "generator, terse")
"""Signatures that are not asked of a program."""
CODE = Card(
    "code",
    about="""Solvers write programs in habits of different quality, of which each suits another kind of
problem, and judges decide with or without a program of their own. The dialogues are the same whatever policy is trained on it later.""",
    agent="one adapter",
    runs="Accuracy on validation problems by iteration, at the `paper` preset of this scale{note}.",
    wanted=(WANTED[0], *HABITS, *(row for row in WANTED[1:] if row.label not in UNUSED)),
    examiner=Examiner,
)

if __name__ == "__main__":
    main({"tiny-r-code": CODE}, __doc__)
