"""Look up the numbers that a page says in the committed tables, as tests/data/numbers_of_pages.yaml lists them."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from scipy import stats

ROOT = Path(__file__).parents[2]
LISTED: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    (ROOT / "tests/data/numbers_of_pages.yaml").read_text(encoding="utf-8")
)
NUMBER = re.compile(r"[−+]?\d+(?:,\d{3})*(?:\.\d+)?")


def rows_of(source: dict[str, Any]) -> pd.DataFrame:
    """Return the lines of the table that a source names, in its order."""
    rows = pd.read_csv(ROOT / "results" / source["table"])
    for column, values in source["where"].items():
        rows = rows[rows[column].isin(values if isinstance(values, list) else [values])]
    assert len(rows), f"{source['table']} has no line with {source['where']}"
    return rows


def seed_interval(numbers: pd.Series) -> list[float]:
    """Return the mean of numbers by seed and its 95 % t interval."""
    low, high = stats.t.interval(0.95, len(numbers) - 1, numbers.mean(), stats.sem(numbers))
    return [numbers.mean(), low, high]


def looked_up(source: dict[str, Any]) -> list[float]:
    """Return the numbers of a source, in the units of the page."""
    rows, take = rows_of(source), source.get("take", "interval")
    columns = source.get("columns", ["value", "low", "high"])
    if "verdict" in source:
        assert set(rows["verdict"]) == {source["verdict"]}, source["says"]
    sign = source.get("sign", 1)
    if take == "interval":
        (numbers,) = rows[columns].to_numpy().tolist()
    elif take == "range":
        numbers = sorted(sign * rows[columns[0]])[:: len(rows) - 1]
        sign = 1
    elif take == "sums":
        column, values = list(source["where"].items())[-1]
        numbers = [rows.loc[rows[column] == value, "value"].sum() for value in values]
    elif take == "means":
        means = sorted(sign * rows.groupby(source["by"])["value"].mean())
        numbers, sign = [means[0], means[-1]], 1
    else:
        assert take == "seeds", take
        numbers = seed_interval(rows.groupby("seed")["value"].mean())
    if sign < 0:
        numbers = [-numbers[0], *(-number for number in reversed(numbers[1:]))]
    return [source.get("times", 100) * number for number in numbers]


def said(text: str) -> list[tuple[float, int]]:
    """Return each number in a text with its decimals."""
    texts = [number.replace("−", "-").replace(",", "") for number in NUMBER.findall(text)]
    return [(float(number), len(number.partition(".")[2])) for number in texts]


def check(page: str) -> None:
    """Assert that a page says every number listed for it, and that each is the table's."""
    text = re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
    for source in LISTED[page]:
        assert source["says"] in text, f"{page} does not say {source['says']!r}"
        expected = looked_up(source)
        numbers = said(source["says"])
        assert len(numbers) == len(expected), source["says"]
        for (number, decimals), value in zip(numbers, expected, strict=True):
            assert number == round(value, decimals), f"{page}: {source['says']!r}, the table has {expected}"


def unlisted(page: str, section: str, constants: list[str]) -> list[str]:
    """Return the numbers in a section of a page that neither a listed text nor a constant holds; links do not count."""
    text = re.sub(r"\s+", " ", re.sub(r"\]\((?:[^()]|\([^)]*\))*\)", "]", section))
    for known in [*(source["says"] for source in LISTED[page]), *constants]:
        text = text.replace(known, "")
    return NUMBER.findall(re.sub(r"[A-Za-z]\w*-?\d\w*", "", text))
