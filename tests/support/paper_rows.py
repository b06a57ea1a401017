"""Rows in the schemas of the paper's datasets, written for the tests, and functions that write others."""

import hashlib
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

DAPO = Path(__file__).parents[1] / "data" / "dapo_rows.jsonl"
DEEPCODER = Path(__file__).parents[1] / "data" / "deepcoder_rows.jsonl"


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def many(n: int, **changes: dict[int, object]) -> list[dict]:
    """Return n valid math rows; `prompt={3: ""}` replaces the prompt of row 3."""
    rows = [{"prompt": f"What is {i}+1?", "solution": str(i + 1)} for i in range(n)]
    for column, replaced in changes.items():
        for number, value in replaced.items():
            rows[number] = rows[number] | {column: value}
    return rows


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
