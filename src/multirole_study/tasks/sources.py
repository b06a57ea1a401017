"""Load the rows of the paper's tasks from pinned files of the Hugging Face Hub or user-supplied files.

The split equals `datasets.Dataset.train_test_split(test_size=..., seed=42)`. Every pinned file is checked against its
SHA-256, so that a run on different data is never mistaken for a run on the paper's data. The authors pin nothing; the
revisions and checksums in `math.py` and `code.py` were published by a follow-up project (MaoMaoLYJ/ASPECT), and the
files were not downloaded when this was written.

`data` is a user-supplied file in the same schema. Files are read directly and not through `datasets`, which has one type
per column and would turn the answers 3 and 2.5 into "3.0" and "2.5".
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from multirole.types import Problem
from multirole_study.hub import hub_errors
from multirole_study.tasks.splits import check_split

SPLIT_SEED = 42
MAX_BROKEN_SHARE = 0.01
"""Broken rows are dropped and counted; a larger share of them is an error."""
SUFFIXES = (".parquet", ".jsonl")
_SURROGATE = re.compile("[\ud800-\udfff]")

Row = dict[str, Any]
Loaded = tuple[dict[str, list[Problem]], dict[str, object]]
"""The problems by split, and their description for the record of a run."""


class DataError(ValueError):
    """The rows are missing or invalid. Nothing was trained or scored."""


class BadRow(ValueError):
    """A row cannot be converted to a problem; the message is the reason to count, such as "no_tests"."""


@dataclass(frozen=True)
class Source:
    """One version of a public dataset.

    `files` are (path in the repository, SHA-256) in the order of their rows, `to_problem` raises BadRow, and `n_test`
    maps the number of rows to the number of validation rows.
    """

    repo: str
    revision: str
    files: tuple[tuple[str, str], ...]
    to_problem: Callable[[Row], Problem]
    n_test: Callable[[int], int]
    columns: tuple[str, ...]
    download_gb: float
    """GB (10^9 bytes) of the files on the Hub, rounded up."""
    note: str = ""

    def load(self, data: str | Path | None) -> Loaded:
        """Find, verify, read and split the rows; the two most recent results are cached. Raises DataError."""
        paths = self._download() if data is None else [file_of_rows(data)]
        return _read(self, tuple((path, path.stat().st_mtime_ns) for path in paths), data is None)

    def _download(self) -> list[Path]:
        import huggingface_hub  # 0.3 s, needed here only

        names = [name for name, _ in self.files]
        try:
            return [
                Path(huggingface_hub.hf_hub_download(self.repo, name, repo_type="dataset", revision=self.revision))
                for name in names
            ]
        except hub_errors() as error:
            raise DataError(
                f"The files of {self.repo} at revision {self.revision} are not in the cache "
                f"{huggingface_hub.constants.HF_HUB_CACHE} and could not be fetched ({error}). Fill it where there is a "
                f"connection: `hf download {self.repo} {' '.join(names)} --repo-type dataset --revision {self.revision}`."
            ) from error


@dataclass(frozen=True)
class Published:
    """Base class of tasks with published rows; a user-supplied file `data` replaces them."""

    data: str | Path | None = None
    source: ClassVar[Source]

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of "train" or "validation", or all of them, in the split's order."""
        check_split(split)
        return take(self.source.load(self.data)[0][split], split, count)

    def describe(self) -> dict[str, object]:
        """Return repository, revision, checksums, and counts of used and dropped rows."""
        return self.source.load(self.data)[1]


def take(problems: list[Problem], split: str, count: int | None) -> list[Problem]:
    """Return the first `count` problems of a split, or all of them."""
    if count is not None and not 0 < count <= len(problems):
        raise DataError(
            f"The {split} split holds {len(problems)} problems, got count={count}. Write 1 <= count <= {len(problems)}, "
            f"or None for all of them. In a cell this is `n_{split}`."
        )
    return problems[:count]


def question_id(task: str, question: str) -> str:
    """Return an id such as math/0123456789ab, which depends only on task and question."""
    return f"{task}/{hashlib.sha1(question.encode(), usedforsecurity=False).hexdigest()[:12]}"


def text_of(row: Row, column: str, reason: str) -> str:
    """Return a column that must hold text. Raises BadRow(reason) if it is missing, empty or not text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(reason)
    if fault := fault_of(value):
        raise BadRow(fault)
    return value


def broken_part(value: object) -> tuple[str, object] | None:
    """Return (fault, part) for the first invalid part of a value at any depth; None if the value is valid.

    The faults are "not_finite" (NaN or infinity, which pandas writes for missing numbers) and "half_a_character" (half a
    surrogate pair, which remains of a truncated emoji and cannot be encoded).
    """
    if isinstance(value, str):
        return ("half_a_character", value) if _SURROGATE.search(value) else None
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (np.ndarray, np.generic)):
        return broken_part(value.tolist())
    if isinstance(value, (list, tuple)):
        return next((broken for part in value if (broken := broken_part(part))), None)
    is_finite = not isinstance(value, (float, Decimal)) or math.isfinite(value)
    return None if is_finite else ("not_finite", value)


def fault_of(value: object) -> str | None:
    """Return the fault that `broken_part` finds in a value, or None."""
    broken = broken_part(value)
    return broken and broken[0]


def file_of_rows(data: str | Path) -> Path:
    """Return the path of a file of rows. Raises DataError if it does not exist or has an unsupported suffix."""
    path = Path(data).expanduser()
    if path.suffix not in SUFFIXES or not path.is_file():
        message = f"Rows must be a file ({', '.join(SUFFIXES)}), got {str(path)!r}"
        if not path.exists():
            message += f", which does not exist. In your script's folder it is Path(__file__).parent / {path.name!r}"
        raise DataError(f"{message}.")
    return path


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .parquet or .jsonl file. Raises DataError."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # 0.3 s, needed here only

            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    yield from batch.to_pylist()
            return
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not `splitlines`: U+2028 may stand inside a string
        rows = json.loads("[" + ",\n".join(filter(str.strip, lines)) + "]")  # one list, so that errors name the line
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read, because it is not UTF-8: {error}. Save it as UTF-8.") from error
    except (ValueError, RecursionError) as error:  # JSON and pyarrow.ArrowInvalid
        raise DataError(f"{path} cannot be read: {error}. Write or download the file again.") from error
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} must hold one JSON object per line.")
    yield from rows


def broken_value(value: object) -> str | None:
    """Describe the fault of a row's value in words; None if it is valid."""
    match broken_part(value):
        case ("half_a_character", str(text)):
            half = _SURROGATE.search(text)
            return f"half a character ({half and half[0]!r}), which is not Unicode text"
        case ("not_finite", number):
            return f"{number}, which is not a number to train or score with"
    return None


@lru_cache(maxsize=2)  # both splits come from one reading
def _read(source: Source, stamped_paths: tuple[tuple[Path, int], ...], is_pinned: bool) -> Loaded:
    """Read and split the rows of files, which are given with their modification times (for the cache)."""
    paths = [path for path, _ in stamped_paths]
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    pinned = [sha for _, sha in source.files]
    if is_pinned and digests != pinned:
        raise DataError(
            f"The files of {source.repo} at revision {source.revision} have the SHA-256 {digests}, pinned are "
            f"{pinned}. Delete the damaged ones from {paths[0].parent} and run again, or use other rows: -p data FILE."
        )
    outcomes: list[Problem | str] = []
    for row in (row for path in paths for row in read_rows(path)):
        try:
            if fault := fault_of([row.get(column) for column in source.columns]):
                raise BadRow(fault)
            outcomes.append(source.to_problem(row))
        except BadRow as error:
            outcomes.append(str(error))
    order = np.random.default_rng(SPLIT_SEED).permutation(len(outcomes)).tolist()  # as `datasets` draws it
    n_test = source.n_test(len(outcomes))
    splits: dict[str, list[Problem]] = {"train": [], "validation": []}
    seen, skipped, broken = Counter[str](), Counter[str](), list[str]()
    for position, number in enumerate(order):
        problem = outcomes[number]
        if isinstance(problem, str):
            skipped[problem] += 1
            broken.append(f"row {number}: {problem}")
            continue
        seen[problem.id] += 1
        if seen[problem.id] > 1 and not is_pinned:  # validation comes first: its questions are never trained on
            skipped["duplicate"] += 1
            continue
        if seen[problem.id] > 1:  # a pinned source keeps the paper's counts, also of questions that are in both splits
            problem = replace(problem, id=f"{problem.id}-{seen[problem.id]}")
        splits["validation" if position < n_test else "train"].append(problem)
    counts = {split: len(problems) for split, problems in splits.items()}
    if len(broken) > MAX_BROKEN_SHARE * len(outcomes) or not all(counts.values()):
        raise DataError(
            f"{', '.join(map(str, paths))}: of {len(outcomes)} rows, {counts} can be used; {dict(skipped)} were dropped "
            f"({', '.join(broken[:3])}). At most {MAX_BROKEN_SHARE:.0%} of the rows may be broken, and each split needs one "
            f"problem; write the columns {list(source.columns)} in every row."
        )
    names = [name for name, _ in source.files] if is_pinned else [path.name for path in paths]
    return splits, {
        "repo": source.repo if is_pinned else None,
        "revision": source.revision if is_pinned else None,
        "note": source.note if is_pinned else "the user's own rows",
        "is_pinned": is_pinned,
        "files": dict(zip(names, digests, strict=True)),
        "rows": len(outcomes),
        **counts,
        "skipped": dict(sorted(skipped.items())),
    }
