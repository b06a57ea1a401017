"""Say what became of each claim of the paper, in one word per model, from committed verdicts.

`at_a_glance.yaml` maps the paper's tables, figures and claims to lines of `results/*/tables/*.csv` and explains its entries.
`write` puts the table of all lines into docs/at_a_glance.md and the short one into README.md, between two comments.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from scipy.stats import t

from multirole_study.compare.corrections import holm
from multirole_study.compare.rules import ALPHA
from multirole_study.experiment.storage import write_text
from multirole_study.paper.lines import matching
from multirole_study.paper.output import markdown

MAPPING = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WORD_OF = {verdict: word for word, verdicts in MAPPING["words"].items() for verdict in verdicts}
COLUMNS: dict[str, dict[str, str]] = MAPPING["columns"]
POST_HOC = "†"
PAGE = Path("docs/at_a_glance.md")
START, END = "<!-- at a glance: `multirole paper` writes the table -->", "<!-- end of the table -->"


class Cell(NamedTuple):
    """What one model's runs say of a claim."""

    word: str
    n_agree: int
    """Number of verdicts with this word."""
    n_verdicts: int
    is_post_hoc: bool
    """Whether the rules were written after the runs."""

    def __str__(self) -> str:
        count = f" ({self.n_agree} of {self.n_verdicts})" if self.n_agree < self.n_verdicts else ""
        return f"{self.word}{POST_HOC if self.is_post_hoc else ''}{count}"


def cell(line: Mapping[str, Any], column: str, results: Path) -> Cell:
    """Return a line's cell in a column.

    Raises:
        ValueError: if the table has no such line, or a verdict that `words` does not list.
    """
    source = line.get(column, line)
    if "word" in source:
        return Cell(source["word"], 1, 1, is_post_hoc=False)
    if "table" in source:
        rows = matching(pd.read_csv(results / source["table"]), source["table"], source["where"])
        rows = rows.drop_duplicates(source["each"])
        if source.get("holm"):
            rows = after_holm(rows)
    else:
        rows = verdicts_of_claim(line, column, results)
    if unknown := set(rows["verdict"]) - set(WORD_OF):
        raise ValueError(f"at_a_glance.yaml has no word for the verdicts {sorted(unknown)} of {line['claim']!r}.")
    words = [WORD_OF[verdict] for verdict in rows["verdict"]]
    word, n_agree = word_of_most(words)
    is_post_hoc = (
        word not in ("untested", "not testable") and "rule" in rows and (rows["rule"] == "looked at afterwards").all()
    )
    return Cell(word, n_agree, len(words), bool(is_post_hoc))


def verdicts_of_claim(line: Mapping[str, Any], column: str, results: Path) -> pd.DataFrame:
    """Return a line for each policy of a claim in the column's regime; a vacuous verdict becomes "vacuous". None if the regime was not run."""
    table = pd.read_csv(results / COLUMNS[column]["scale"] / "tables/claims.csv")
    rows = table[(table["claim"] == line["rule"]) & (table["regime"] == COLUMNS[column]["regime"])]
    rows = rows.drop_duplicates("policy")
    if "policies" in line:
        rows = rows[rows["policy"].isin(line["policies"])]
    return rows.assign(verdict=rows["verdict"].where(rows["vacuous"].isna(), "vacuous"))


def after_holm(rows: pd.DataFrame) -> pd.DataFrame:
    """Return verdicts on differences, undecided where Holm's correction over all of them leaves p, that of the 95 % t interval over seeds, at 5 % or above."""
    degrees = rows["seeds"] - 1
    error = (rows["high"] - rows["low"]) / 2 / t.ppf(1 - ALPHA / 2, degrees)
    p = holm(2 * t.sf(rows["value"].abs() / error, degrees))
    return rows.assign(verdict=rows["verdict"].where(p < ALPHA, "undecided"))


def word_of_most(words: list[str]) -> tuple[str, int]:
    """Return the word of more than half of some verdicts, otherwise "undecided", and how many have it; "untested" if there is no verdict."""
    if not words:
        return "untested", 0
    word, count = Counter(words).most_common(1)[0]
    return (word, count) if 2 * count > len(words) else ("undecided", words.count("undecided"))


def link(text: str, target: str, page: Path, results: Path) -> str:
    """Return a Markdown link from a page to a file, which is given relative to `results`."""
    return f"[{text}]({Path(os.path.relpath(results / target, page.parent)).as_posix()})"


def linked_cells(line: Mapping[str, Any], page: Path, results: Path) -> list[str]:
    """Return a line's cells, each with a link to where its verdicts are shown."""
    if "word" in line:
        return [line["word"]] * len(COLUMNS)
    default = {name: f"{column['scale']}/tables/claims.md" for name, column in COLUMNS.items()}
    see = line.get("see", default)
    targets = dict.fromkeys(COLUMNS, see) if isinstance(see, str) else see
    remarks = {column: f" ({remark})" for column, remark in line.get("remark", {}).items()}
    texts = {column: f"{cell(line, column, results)}{remarks.get(column, '')}" for column in COLUMNS}
    return [link(texts[column], targets[column], page, results) for column in COLUMNS]


def table_of_page(page: Path, results: Path) -> str:
    """Return the table of all lines as Markdown, with links from `page`."""
    rows = [
        [
            line["paper"],
            line["claim"],
            *linked_cells(line, page, results),
            ", ".join(link(Path(target).stem, target, page, results) for target in line["ours"]),
            line.get("note", ""),
        ]
        for line in MAPPING["lines"]
    ]
    return markdown(
        ["the paper", "what it says", *(column["title"] for column in COLUMNS.values()), "ours", "note"], rows
    )


def table_of_readme(page: Path, results: Path) -> str:
    """Return the table of the lines that have a text for README as Markdown, with links from `page`."""
    lines = [line for line in MAPPING["lines"] if "readme" in line]
    rows = [[line["readme"], *linked_cells(line, page, results)] for line in lines]
    return markdown(["the paper's claim", *(column["readme"] for column in COLUMNS.values())], rows)


def filled(text: str, table: str) -> str:
    """Return a page with `table` between its two comments; ValueError if it does not have them once."""
    parts = re.split(f"({re.escape(START)}\n|\n{re.escape(END)})", text)
    if len(parts) != 5:
        raise ValueError(f"A page for the table needs the line {START} and the line {END}, once each.")
    return "".join([*parts[:2], table, *parts[3:]])


def write(root: Path) -> None:
    """Write both tables into the pages of a checkout."""
    for name, table in {PAGE: table_of_page, Path("README.md"): table_of_readme}.items():
        page = root / name
        write_text(page, filled(page.read_text(encoding="utf-8"), table(page, root / "results")))
