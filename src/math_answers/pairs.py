"""Read the graded pairs: `pairs.csv`, or a file with its columns.

Columns: `answer`, `reference`, `expected` ("yes" or "no": is the answer right?), `verdict` (that of `grade`), `math_verify` ("yes" or "no":
does math-verify accept it?), `kind`, `source` (the issue that reported the pair, "kind of" an issue for a variation of its pair, or "own" for a
pair that was written for this package) and `note`. Only the first three columns are required.
"""

import csv
from pathlib import Path
from typing import NamedTuple

PAIRS = Path(__file__).with_name("pairs.csv")


class Pair(NamedTuple):
    """One row of a file of pairs."""

    answer: str
    reference: str
    expected: str
    verdict: str = ""
    math_verify: str = ""
    kind: str = ""
    source: str = ""
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the answer equals the reference."""
        return self.expected == "yes"


def read_pairs(path: Path = PAIRS) -> list[Pair]:
    """Return the rows of a file. Raises ValueError for an unknown column, a missing one, or another `expected` than yes and no."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = set(reader.fieldnames or ())
        if not set(Pair._fields[:3]) <= names <= set(Pair._fields):
            raise ValueError(
                f"{path} must have the columns {list(Pair._fields[:3])} and may have {list(Pair._fields[3:])}, got {sorted(names)}."
            )
        pairs = [Pair(**row) for row in reader]
    if wrong := [pair for pair in pairs if pair.expected not in ("yes", "no")]:
        raise ValueError(f"`expected` must be 'yes' or 'no', got {wrong[0].expected!r} for {wrong[0][:2]} in {path}.")
    return pairs


def write_pairs(pairs: list[Pair], path: Path = PAIRS) -> None:
    """Write a file of pairs."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Pair._fields)
        writer.writerows(pairs)
