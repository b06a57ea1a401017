"""The model card of the base for code: `python -m tiny_base2.code_card FOLDER --problems 512 --trained ADAPTER` measures; without
options it only writes.

`skills.json` holds every measured fact; `README.md` is written from it.
"""

from tiny_base2 import card
from tiny_base2.card import Card, Row, main
from tiny_base2.code_skills import Examiner

CARD = """---
license: apache-2.0
library_name: transformers
tags: [multirole, tiny, qwen3]
---
# {name}

A Qwen3 of {parameters:,} parameters, trained from scratch on synthetic dialogues of the roles of one task, tiny_pipe. It
knows no language beyond them. Solvers write programs in habits of different quality, of which each suits another kind of
problem, and judges decide with or without a program of their own. The dialogues are the same whatever policy is trained on it later.

* Training: {training_tokens:,} tokens (padding included), {minutes:.1f} CPU-minutes on one thread, seed {seed}.
* Rebuild: `python -m tiny_base2.code_build --out FOLDER`, then `python -m tiny_base2.code_card FOLDER --problems 512`; the loss
  curve is in `loss.jsonl`, the habits' accuracy during training in `probes.jsonl`.
* Measured: {problems} validation problems, three samples of the solver each, temperature 1, at most {cap} reply tokens, 95 %
  intervals over problems. In "trained", one adapter plays every role: {trained}.
{note}
## What the base is for

| property | wanted | untrained | trained | n | met |
|---|---|---|---|---|---|
{wanted}

## What training does to it

Accuracy on validation problems by iteration, at the `paper` preset of this scale{runs_note}.

{runs}

## Everything measured

{tables}
"""

HABITS = (
    Row("... best habit alone", "solver", "best habit, forced"),
    Row("... fitting habit alone", "solver", "fitting habit, forced"),
)
UNUSED = ("generator, boxed", "generator, terse")
"""Signatures that are not asked of a program."""
WANTED = (card.WANTED[0], *HABITS, *(row for row in card.WANTED[1:] if row.label not in UNUSED))
CODE = Card(CARD, WANTED, Examiner, "")

if __name__ == "__main__":
    main(CODE, __doc__)
