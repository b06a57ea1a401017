"""Find lines of a committed table by the values of their columns."""

from typing import TypeVar

import pandas as pd

T = TypeVar("T")


def matching(rows: pd.DataFrame, table: str, columns: dict[str, object]) -> pd.DataFrame:
    """Return the rows whose columns have these values (or one of the values in a list); ValueError, which names `table`, if a value has none."""
    wanted = {column: value if isinstance(value, (list, tuple)) else [value] for column, value in columns.items()}
    for column, values in wanted.items():
        rows = rows[rows[column].isin(values)]
    absent = {column: set(values) - set(rows[column]) for column, values in wanted.items()}
    if any(absent.values()):
        raise ValueError(f"The table {table!r} has no line with {columns}.")
    return rows


def only(matches: list[T], table: str, columns: dict[str, object]) -> T:
    """Return the one line that was found; ValueError, which names `table`, if there are more."""
    if len(matches) > 1:
        raise ValueError(f"The table {table!r} has {len(matches)} lines with {columns}. Name more of its columns.")
    return matches[0]
